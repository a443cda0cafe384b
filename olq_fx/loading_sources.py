"""What `load_` can be given: a file, an index, a directory, a state dict, or an iterator of names and tensors.

    opened(source, model) -> Source

The one place where a kind of source is told from another. Of files only the headers are read here.
"""

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from torch import Tensor, nn

from olq_fx.errors import ConfigurationTypeError, LoadError, nearest, shown
from olq_fx.loading_stored import PICKLED, StoredTensor, pickled, stored_in

_INDEX = ".index.json"
_USUAL = ("model", "diffusion_pytorch_model")
"""How the files of a model are called that a directory may have others beside."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What is loaded.

    Attributes:
        label: what it is called in messages.
        tensors: all there are, in the order in which they are best read.
        arriving: names and tensors that are known only when they come; then `tensors` is empty.
        directory: where its files are; None if it lies in memory.
    """

    label: str
    tensors: tuple[StoredTensor, ...] = ()
    arriving: Iterator[Any] | None = None
    directory: Path | None = None


def opened(source: object, model: nn.Module) -> Source:
    """Tell what a source is, and read the headers of its files.

    Args:
        source: a `Source` is taken as it is.
        model: what it is for.

    Raises:
        LoadError: it is not there, damaged, or of a kind that is never read.
        ConfigurationTypeError: nothing of the kind can be loaded.
    """
    if isinstance(source, Source):
        return source
    if isinstance(source, (str, os.PathLike)):
        path = Path(os.fspath(source))
        directory = path if path.is_dir() else path.parent
        return Source(label=str(path), tensors=tuple(_of_path(path)), directory=directory)
    if isinstance(source, Mapping):
        return Source(label="the state dict", tensors=tuple(in_memory(name, value) for name, value in source.items()))
    if isinstance(source, Iterable) and not isinstance(source, (bytes, bytearray, Tensor, nn.Module)):
        return Source(label="the iterator", arriving=iter(source))
    advice = "; its state_dict() can" if isinstance(source, nn.Module) else ""
    raise ConfigurationTypeError(
        f"a {type(source).__name__} cannot be loaded{advice}: give a path, a state dict, or an iterator of "
        "(name, tensor)"
    )


def in_memory(name: object, value: object) -> StoredTensor:
    """A tensor that is there already.

    Raises:
        LoadError: it is no tensor, or on meta.
    """
    if not isinstance(name, str) or not isinstance(value, Tensor):
        raise LoadError(f"{shown(name)} is given {shown(type(value))}: a name and a tensor are needed")
    if value.is_meta:
        raise LoadError(f"'{name}' is on meta: it has no values that could be loaded")
    return StoredTensor(name=name, shape=tuple(value.shape), dtype=value.dtype, read=value.detach)


def _of_path(path: Path) -> list[StoredTensor]:
    if path.is_dir():
        return _of_directory(path)
    if not path.exists():
        raise LoadError(_absent(path))
    return _of_index(path) if path.name.endswith(".json") else stored_in(path)


def _absent(path: Path) -> str:
    if path.is_symlink():
        return f"{path} is a link to {path.readlink()}, which is not there"
    if path.parent.is_dir() and path.parent != Path():
        return f"there is no {path}: {nearest(path.name, (other.name for other in path.parent.iterdir()))}"
    return (
        f"there is no file or directory {path}; a model of the Hugging Face hub is fetched by "
        "huggingface_hub.snapshot_download, which gives its directory"
    )


def _of_directory(path: Path) -> list[StoredTensor]:
    """What a directory holds: of several candidates the one that Hugging Face's libraries would take."""
    names = sorted(entry.name for entry in path.iterdir())
    for usual in _USUAL:
        for name in (f"{usual}.safetensors", f"{usual}.safetensors{_INDEX}"):
            if name in names:
                return _of_path(path / name)
    indexes = [name for name in names if name.endswith(f".safetensors{_INDEX}")]
    if len(indexes) > 1:
        raise LoadError(f"{path} has several indexes, give one of them: {', '.join(indexes)}")
    if indexes:
        return _of_index(path / indexes[0])
    files = [path / name for name in names if name.endswith(".safetensors")]
    if files:
        return _of_files(files)
    for name in names:
        if name.endswith(PICKLED):
            raise pickled(path / name)
    below = [name for name in names if (path / name).is_dir() and any((path / name).glob("*.safetensors*"))]
    advice = f"; {', '.join(below)} have some: give one of these" if below else ""
    raise LoadError(f"{path} has no safetensors files{advice}")


def _of_index(path: Path) -> list[StoredTensor]:
    """The tensors of the files that an index names."""
    where = _weight_map(path)
    expected = Counter(where.values())
    for file, count in expected.items():
        if not (path.parent / file).is_file():
            raise LoadError(
                f"{path} names {file}, which is not there; {count} tensors would be in it, the first "
                f"'{next(name for name, given in where.items() if given == file)}'"
            )
    found = _of_files([path.parent / file for file in sorted(expected)])
    there = {(tensor.name, tensor.file) for tensor in found}
    for name, file in where.items():
        if (name, str(path.parent / file)) not in there:
            raise LoadError(f"{path} says that '{name}' is in {file}, and it is not")
    return found


def _weight_map(path: Path) -> dict[str, str]:
    """Names and files of an index. A file may be a link to anywhere, as in the hub's cache; its name stays inside."""
    try:
        where = json.loads(path.read_bytes())["weight_map"]
    except OSError as error:
        raise LoadError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise LoadError(f"{path} is no index of safetensors files: {type(error).__name__} {error}") from error
    if not isinstance(where, dict):
        raise LoadError(f"{path} is no index of safetensors files: its weight_map is {shown(where)}")
    for name, file in where.items():
        if not isinstance(file, str) or not file:
            raise LoadError(f"{path} says that '{name}' is in {shown(file)}, which is no file")
        if not _is_inside(file):
            raise LoadError(f"{path} says that '{name}' is in {shown(file)}, outside of its directory: not opened")
        if file.endswith(PICKLED):
            raise pickled(path.parent / file)
    return where


def _is_inside(file: str) -> bool:
    """Whether a relative path leads out of no directory, wherever it is read."""
    windows = PureWindowsPath(file)
    parts = (*PurePosixPath(file).parts, *windows.parts)
    return "\0" not in file and ".." not in parts and not windows.anchor and not PurePosixPath(file).is_absolute()


def _of_files(paths: list[Path]) -> list[StoredTensor]:
    """The tensors of several files, one file after the other."""
    found = [tensor for path in paths for tensor in stored_in(path)]
    first: dict[str, StoredTensor] = {}
    for tensor in found:
        other = first.setdefault(tensor.name, tensor)
        if other is not tensor:
            raise LoadError(f"'{tensor.name}' is in two files, {other.file} and {tensor.file}")
    return found
