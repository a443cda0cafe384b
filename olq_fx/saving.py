"""`save`: a converted model as plain safetensors and a manifest, in a directory that is there as a whole or not at all.

    olq_fx.save(model, "out")
    olq_fx.restoring.restore_(model_on_meta, "out")

A model of transformers or diffusers gets its config.json too. Where compressed-tensors has every format of the model,
that says so in the library's words, and `from_pretrained` reads the directory.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from olq_fx.compressed_tensors_form import Form, form_of
from olq_fx.configuration import QuantizationConfig
from olq_fx.errors import ConfigurationTypeError, PendingWeightError, SavedModelError, SaveError, shown
from olq_fx.manifest import MANIFEST, Manifest, SavedFile, is_saved, read_manifest
from olq_fx.saved_contents import Contents, contents_of
from olq_fx.shards import Shard, bytes_from, index_of, lay_out
from olq_fx.stored_weights import StoredWeight, described
from olq_fx.tables import size_of
from olq_fx.tensor_files import Entry, write_file
from olq_fx.version import __version__
from olq_fx.whole_directories import adding, replacing, write_text

SHARD_SIZE = "5GB"
"""How large a file becomes if nothing else is said."""

BUFFERS = "olq_fx_buffers.safetensors"
"""The file with the buffers that a state dict leaves out."""

CONFIG = "config.json"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """What was saved.

    Attributes:
        directory: where.
        files: the names of all files, those of tensors first.
        nbytes: bytes of the files of tensors.
        weights: how many converted weights there are.
        differences: what a reader of compressed-tensors would miss or do otherwise; empty if it gives the same.
        readable: whether compressed-tensors reads it.
    """

    directory: Path
    files: tuple[str, ...]
    nbytes: int
    weights: int
    differences: tuple[str, ...]
    readable: bool

    def __str__(self) -> str:
        """A line, and one for each difference."""
        head = f"{self.directory}: {self.weights} converted weights, {size_of(self.nbytes)} in {len(self.files)} files"
        return "\n".join([head, *self.differences])


def save(
    model: nn.Module,
    directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str = SHARD_SIZE,
    config: object = None,
    source: str | None = None,
) -> Saved:
    """Save a converted model.

    The directory is written beside its place and put there at the end: it never is there half. A saved model that is
    there is replaced, and stays as it is when saving fails; files in it that are none of its own go along.

    Args:
        model: with all its data.
        directory: the new directory, or one of a saved model.
        max_shard_size: bytes of a file, or a text such as "5GB".
        config: the configuration that the model was converted with, in any form, to be kept in the manifest.
        source: what it was converted from, to be kept in the manifest.

    Returns:
        What was saved, and what compressed-tensors cannot read of it.

    Raises:
        SaveError: the place is taken by something else, the disk is full, something cannot be saved; nothing has
            changed.
        PendingWeightError: the model is not loaded wholly.
        ConfigurationError, ConfigurationTypeError: an argument has no meaning.
    """
    return _save(model, directory, replacing, max_shard_size, config, source)


def save_beside_others(model: nn.Module, directory: Path, source: str | None) -> Saved:
    """`save`, but where another process was faster its directory stays."""
    return _save(model, directory, adding, SHARD_SIZE, None, source)


def _save(
    model: nn.Module,
    directory: str | os.PathLike[str],
    place: Callable[[Path], Any],
    max_shard_size: int | str,
    config: object,
    source: str | None,
) -> Saved:
    if not isinstance(model, nn.Module):
        raise ConfigurationTypeError(f"a model is a torch.nn.Module, not {type(model).__name__}")
    if not isinstance(directory, (str, os.PathLike)):
        raise ConfigurationTypeError(f"a directory is a path, not {shown(directory)}")
    target = Path(os.path.realpath(os.fspath(directory)))
    limit = bytes_from(max_shard_size)
    asked = None if config is None else QuantizationConfig.parse(config).to_dict()
    model = getattr(model, "_orig_mod", model)
    contents = contents_of(model)
    if contents.waiting:
        raise PendingWeightError(
            f"{len(contents.waiting)} tensors have no data yet: {', '.join(contents.waiting)}; load them before saving"
        )
    check_place(target)
    with place(target) as new:
        writing = Writing(model, contents, new, stem_of(model), limit, asked, source)
        for shard in writing.shards:
            writing.write(shard, _in_memory(shard.entries, contents.values))
        saved = writing.finish()
        keep_others(target, new)
    return dataclasses.replace(saved, directory=target)


class Writing:
    """A saved model that is being written into a directory, file by file.

    Attributes:
        shards: the files of tensors that are to be written, in any order.
    """

    def __init__(
        self,
        model: nn.Module,
        contents: Contents,
        directory: Path,
        stem: str,
        limit: int,
        config: dict[str, Any] | None,
        source: str | None,
    ) -> None:
        """Lay out the files; nothing is written yet.

        Args:
            model: whose contents these are; it may be on meta.
            contents: what is written.
            directory: where, an empty one.
            stem: how the files of tensors are called.
            limit: bytes of a file.
            config, source: for the manifest.
        """
        self._model, self._contents, self._directory, self._stem = model, contents, directory, stem
        self._config, self._source = config, source
        self.shards = lay_out([group.entries for group in contents.groups], limit, stem)
        self._about = described(StoredWeight(w.names, w.spec, w.trainable) for w in contents.weights)
        self._files: dict[str, SavedFile] = {}
        self._checksums: dict[str, int] = {}

    def write(self, shard: Shard, values: Iterable[tuple[str, Tensor]]) -> tuple[SavedFile, dict[str, int]]:
        """Write a file of tensors.

        Args:
            shard: one of `shards`.
            values: its tensors, in any order.

        Returns:
            What was written, for `take`.
        """
        checksums = write_file(self._directory / shard.name, shard.entries, values, self._about)
        written = SavedFile.of(self._directory / shard.name), checksums
        self.take(*written)
        return written

    def take(self, file: SavedFile, checksums: Mapping[str, int]) -> None:
        """Count a file as written."""
        self._files[file.name] = file
        self._checksums.update(checksums)

    def finish(self) -> Saved:
        """Write what is said of the tensors; the manifest comes last."""
        others = []
        if len(self.shards) > 1:
            others.append(f"{self._stem}.safetensors.index.json")
            write_text(self._directory / others[0], index_of(self.shards))
        buffers = self._contents.buffers
        if buffers:
            entries = [Entry(name, tuple(value.shape), value.dtype) for name, value in buffers.items()]
            self._checksums |= write_file(self._directory / BUFFERS, entries, buffers.items())
            self._files[BUFFERS] = SavedFile.of(self._directory / BUFFERS)
        form = form_of(self._model, self._contents.weights)
        about = _model_config(self._model, form, self._config)
        if about is not None:
            others.append(CONFIG)
            write_text(self._directory / CONFIG, json.dumps(about, indent=2))
        manifest = self._manifest(form, others)
        write_text(self._directory / MANIFEST, manifest.to_json())
        return Saved(
            directory=self._directory,
            files=(*(file.name for file in manifest.files), *others, MANIFEST),
            nbytes=sum(file.nbytes for file in manifest.files),
            weights=len(manifest.weights),
            differences=form.differences,
            readable=form.config is not None,
        )

    def _manifest(self, form: Form, others: Sequence[str]) -> Manifest:
        """What is said of the files, whatever the order in which they were written."""
        order = [*(shard.name for shard in self.shards), BUFFERS]
        names = [*(entry.name for shard in self.shards for entry in shard.entries), *self._contents.buffers]
        return Manifest(
            weights=self._contents.weights,
            files=tuple(self._files[name] for name in order if name in self._files),
            checksums={name: self._checksums[name] for name in names},
            ties=self._contents.ties,
            buffers=tuple(self._contents.buffers),
            config=self._config,
            source=self._source,
            others=tuple(others),
            differences=form.differences,
            version=__version__,
        )


def _in_memory(entries: Iterable[Entry], values: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for entry in entries:
        yield entry.name, values[entry.name]


def stem_of(model: nn.Module) -> str:
    """How the library that a model is of calls its files."""
    return "diffusion_pytorch_model" if _is_of_diffusers(model) else "model"


def _is_of_diffusers(model: nn.Module) -> bool:
    return hasattr(model, "save_config") and hasattr(model, "to_json_string")


def _model_config(model: nn.Module, form: Form, config: dict[str, Any] | None) -> dict[str, Any] | None:
    """What `config.json` says of a model of transformers or diffusers; None of others."""
    untyped: Any = model
    about: dict[str, Any]
    if _is_of_diffusers(model):
        about = json.loads(untyped.to_json_string())
    elif hasattr(model, "save_pretrained") and hasattr(getattr(model, "config", None), "to_json_string"):
        about = json.loads(untyped.config.to_json_string())
        about["architectures"] = [type(model).__name__]
    else:
        return None
    about.pop("quantization_config", None)
    if form.config is not None:
        about["quantization_config"] = form.config
    elif form.differences:
        about["quantization_config"] = {"quant_method": "olq_fx", **(config or {"quantization": "none"})}
    return about


def check_place(directory: Path) -> None:
    """Refuse to replace what is no saved model.

    Raises:
        SaveError: something else is there.
    """
    if directory.is_dir():
        if not is_saved(directory) and any(directory.iterdir()):
            raise SaveError(f"{directory} is there and no saved model: it is not replaced. Give a new directory")
    elif directory.exists():
        raise SaveError(f"{directory} is a file; give a directory")


def keep_others(old: Path, new: Path) -> None:
    """Bring what others have put into a saved model (a tokenizer, say) into the one that takes its place."""
    import shutil

    if not is_saved(old):
        return
    try:
        manifest = read_manifest(old)
        own = {MANIFEST, *(file.name for file in manifest.files), *manifest.others}
    except SavedModelError:
        own = {MANIFEST}
    for entry in old.iterdir():
        kept = new / entry.name
        if entry.name in own or kept.exists() or entry.name.endswith((".safetensors", ".safetensors.index.json")):
            continue
        try:
            if entry.is_dir() and not entry.is_symlink():
                shutil.copytree(entry, kept, symlinks=True)
            else:
                shutil.copy2(entry, kept, follow_symlinks=False)
        except OSError as error:
            raise SaveError(f"{entry} cannot be copied: {error.strerror or error}") from error
