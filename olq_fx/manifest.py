"""The manifest of a saved model: which files it has, and how each of its converted weights is stored and used.

    Manifest(...).to_json()                           what `save` writes
    read_manifest(directory) -> Manifest              held against its own digest, version and form
    check_files(directory, manifest)                  every file is there, as long as it was, and the same where sampled
    is_saved(directory) -> bool

A saved model is stale when its files are not those that were written with the manifest. That is asked of the name, the
size and some blocks of each file, so that 100 GB take a second; of every byte only where it is asked for
(`olq_fx.restoring`).
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from olq_fx.errors import OlqFxError, SavedModelError, nearest, shown
from olq_fx.tensor_files import digest_of
from olq_fx.weights import WeightSpec

MANIFEST = "olq_fx_manifest.json"
"""The name of the file; a directory that has one is a saved model."""

FORMAT_VERSION = 1
"""What is written and read; another number is refused. It grows when a directory of before means something else."""

_WRITER = "olq_fx"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavedWeight:
    """A converted weight of a saved model.

    Attributes:
        names: every path of the parameter.
        parts: the names of its tensors, in the order of the parts.
        spec: how it is stored and used.
        shape, stride, dtype: those that the tensor claims.
        trainable: whether the original required a gradient.
    """

    names: tuple[str, ...]
    parts: tuple[str, ...]
    spec: WeightSpec
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool

    @property
    def path(self) -> str:
        """What it is called."""
        return self.names[0]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        about = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        dtype = str(self.dtype).removeprefix("torch.")
        return about | {"spec": dataclasses.asdict(self.spec), "dtype": dtype}

    @staticmethod
    def from_dict(about: Mapping[str, Any]) -> "SavedWeight":
        """The inverse of `to_dict`; any error of Python where it is malformed."""
        spec = WeightSpec(**about["spec"])
        _ = spec.format  # an unknown one is an error here
        dtype = getattr(torch, about["dtype"])
        if not isinstance(dtype, torch.dtype):
            raise TypeError(about["dtype"])
        lists = {name: tuple(about[name]) for name in ("names", "parts", "shape", "stride")}
        return SavedWeight(spec=spec, dtype=dtype, trainable=bool(about["trainable"]), **lists)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavedFile:
    """A file of tensors: its name, its size and `digest_of` it."""

    name: str
    nbytes: int
    digest: str

    @staticmethod
    def of(path: Path) -> "SavedFile":
        """What a file is now."""
        return SavedFile(name=path.name, nbytes=path.stat().st_size, digest=digest_of(path))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a saved model is.

    Attributes:
        weights: its converted weights.
        files: the files with its tensors.
        checksums: of every byte of each tensor, by its name in the files.
        ties: other names of plain tensors, each with the name under which the tensor is in the files.
        buffers: the names of tensors that are buffers which `state_dict` leaves out; they are in a file of their own.
        config: the configuration, if it is known.
        source: what the model was converted from, if it is known.
        others: the names of the other files that were written.
        differences: what a reader of compressed-tensors would miss or do otherwise, in words.
        version: of the library that wrote it.
    """

    weights: tuple[SavedWeight, ...]
    files: tuple[SavedFile, ...]
    checksums: Mapping[str, int]
    ties: Mapping[str, str] = dataclasses.field(default_factory=dict)
    buffers: tuple[str, ...] = ()
    config: Mapping[str, Any] | None = None
    source: str | None = None
    others: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()
    version: str = ""

    def to_json(self) -> str:
        """The text of the file."""
        content = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        content |= {
            "weights": [weight.to_dict() for weight in self.weights],
            "files": [dataclasses.asdict(file) for file in self.files],
            "checksums": dict(self.checksums),
            "ties": dict(self.ties),
        }
        head = {"written_by": _WRITER, "format_version": FORMAT_VERSION}
        return json.dumps(head | content | {"digest": _digest(head | content)}, indent=1)


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def is_saved(directory: object) -> bool:
    """Whether a path is the directory of a saved model, sound or not."""
    return isinstance(directory, (str, os.PathLike)) and (Path(os.fspath(directory)) / MANIFEST).is_file()


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a saved model.

    Raises:
        SavedModelError: there is none, it is of others, of another version, or was changed.
    """
    path = directory / MANIFEST
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise SavedModelError(f"{directory} is no saved model: it has no {MANIFEST}") from None
    except OSError as error:
        raise SavedModelError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise SavedModelError(f"{path} is damaged: it is no JSON ({error})") from error
    if not isinstance(content, dict) or content.get("written_by") != _WRITER:
        raise SavedModelError(f"{path} is foreign: olq_fx.save has not written it")
    if content.get("format_version") != FORMAT_VERSION:
        raise SavedModelError(
            f"{path} has the format version {shown(content.get('format_version'))} (written by olq_fx "
            f"{content.get('version')}); this olq_fx reads {FORMAT_VERSION}: save the model again"
        )
    if content.pop("digest", None) != _digest(content):
        raise SavedModelError(f"{path} was changed after it was written: its digest is another one. Save again")
    return _parsed(path, content)


def _parsed(path: Path, content: dict[str, Any]) -> Manifest:
    """The manifest of JSON values.

    Raises:
        SavedModelError: a value is malformed, or names a file elsewhere.
    """
    try:
        known = {field.name for field in dataclasses.fields(Manifest)}
        values = {name: value for name, value in content.items() if name in known}
        values["weights"] = tuple(SavedWeight.from_dict(about) for about in content["weights"])
        values["files"] = tuple(SavedFile(**about) for about in content["files"])
        for name in ("buffers", "others", "differences"):
            values[name] = tuple(content[name])
        found = Manifest(**values)
    except (KeyError, TypeError, ValueError, AttributeError, OlqFxError) as error:
        raise SavedModelError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    for name in (*(file.name for file in found.files), *found.others):
        _check_name(path, name)
    return found


def _check_name(path: Path, name: object) -> None:
    """Refuse names that lead out of the directory.

    Raises:
        SavedModelError: it is such a name.
    """
    if not isinstance(name, str) or name in ("", ".", "..") or any(sign in name for sign in "/\\:\0"):
        raise SavedModelError(f"{path} names the file {shown(name)}, which is not in its directory: not opened")


def check_files(directory: Path, manifest: Manifest) -> None:
    """Hold the files of a saved model against its manifest.

    Raises:
        SavedModelError: one is missing, or is not what it was.
    """
    for file in manifest.files:
        path = directory / file.name
        try:
            found = SavedFile.of(path)
        except FileNotFoundError:
            near = nearest(file.name, [other.name for other in directory.iterdir()])
            raise SavedModelError(f"{directory} is not whole: {file.name} is not there; {near}") from None
        except OSError as error:
            raise SavedModelError(f"{path} cannot be read: {error.strerror or error}") from error
        if found.nbytes != file.nbytes:
            raise SavedModelError(
                f"{path} has {found.nbytes} bytes, {file.nbytes} were written: fetch or save it again"
            )
        if found.digest != file.digest:
            raise SavedModelError(
                f"{path} is stale: it is not the file that was written with {MANIFEST}. Save the model again"
            )
