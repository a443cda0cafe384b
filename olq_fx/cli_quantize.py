"""`olq-fx quantize`: a checkpoint into a saved model, file by file.

The model is built on meta and planned there; so the files of the result are laid out before any weight is read. Of each
file the weights are read, converted, written and forgotten: memory grows with a file, not with the model. Files that
are finished when a run is interrupted are there for the next one.
"""

import dataclasses
import fnmatch
import os
import shutil
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from olq_fx.cached_models import key_of
from olq_fx.cli_answers import Answer
from olq_fx.cli_models import Factory, Folder, source_of
from olq_fx.configuration import QuantizationConfig
from olq_fx.errors import ConfigurationError, OlqFxWarning, SaveError
from olq_fx.loading_parts import Parts
from olq_fx.manifest import MANIFEST, is_saved
from olq_fx.progress import Bar, progress_bar
from olq_fx.quantize import quantize_
from olq_fx.saved_contents import Contents, contents_of
from olq_fx.saving import Saved, Writing, check_place, keep_others, stem_of
from olq_fx.shards import Shard, bytes_from
from olq_fx.unfinished import Journal
from olq_fx.whole_directories import resuming

_BESIDE = (
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
    "merges.txt",
    "*preprocessor_config.json",
    "processor_config.json",
    "special_tokens_map.json",
    "spiece.model",
    "*.tiktoken",
    "tokenizer*",
    "vocab*",
)
"""The files of a model that go along as they are."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeOptions:
    """How to convert: see the options of the command of the same names."""

    max_shard_size: str
    strict: bool
    progress: bool
    dtype: torch.dtype | None
    device: torch.device | None


def quantize(model: str, out: str, config: QuantizationConfig, options: QuantizeOptions) -> Answer:
    """Convert a checkpoint.

    Raises:
        ConfigurationError, PlanError: what was asked for has no meaning, or none for this model.
        LoadError, ConversionError: the checkpoint does not fit, is damaged, or has NaN.
        SaveError: the disk is full, say. What is finished of the result stays for the next run.
        ModelError: the model cannot be built.
    """
    begun = time.perf_counter()
    source, target = _folder(model), _place(out)
    limit = bytes_from(options.max_shard_size)
    built = source.empty(options.dtype)
    quantize_(built, config, strict=options.strict)
    parts = Parts(built, source.path, options.device)
    key = key_of(built, source.path, (limit, config.to_dict()))
    with progress_bar(options.progress) as bar, resuming(target) as new:
        journal = Journal(new, key)
        if journal.replaced:
            warnings.warn(
                f"for {target} an unfinished run of another model or configuration, or of another version, was left: "
                "it is removed",
                OlqFxWarning,
                stacklevel=2,
            )
        contents = contents_of(built)
        writing = Writing(built, contents, new, stem_of(built), limit, config.to_dict(), model)
        resumed = _write(built, contents, writing, parts, journal, bar)
        _copy_beside(source.path, new)
        saved = dataclasses.replace(writing.finish(), directory=target)
        keep_others(target, new)
        journal.close()
    return _answer(model, config, saved, len(writing.shards), resumed, time.perf_counter() - begun)


def _write(model: nn.Module, contents: Contents, writing: Writing, parts: Parts, journal: Journal, bar: Bar) -> int:
    """Write the files that are not finished; how many were."""
    bar.start("verify", len(writing.shards))
    waiting = []
    for shard in writing.shards:
        written = journal.finished(shard.name)
        if written is None:
            waiting.append(shard)
        else:
            writing.take(*written)
        bar.advance()
    path_of = {entry.name: group.path for group in contents.groups for entry in group.entries}
    bar.start("quantize", sum(parts.count(_paths(shard, path_of)) for shard in waiting))
    for shard in waiting:
        parts.load(_paths(shard, path_of), bar)
        there = model.state_dict()
        written = writing.write(shard, [(entry.name, there[entry.name]) for entry in shard.entries])
        del there
        journal.add(*written)
        parts.forget()
    return len(writing.shards) - len(waiting)


def _paths(shard: Shard, path_of: dict[str, str]) -> list[str]:
    """The parameters of which a file has tensors."""
    return list(dict.fromkeys(path_of[entry.name] for entry in shard.entries))


def _folder(model: str) -> Folder:
    """The folder that MODEL names.

    Raises:
        ConfigurationError: it is none with a checkpoint, or one that `save` has written.
    """
    source = source_of(model)
    if isinstance(source, Factory):
        raise ConfigurationError("`olq-fx quantize` needs a folder in Hugging Face's layout, with a checkpoint")
    if is_saved(source.path):
        raise ConfigurationError(f"MODEL {model!r} is quantized by olq_fx already: it has {MANIFEST}")
    return source


def _place(out: str) -> Path:
    """Where the result goes.

    Raises:
        ConfigurationError: something else is there.
    """
    target = Path(os.path.realpath(out))
    try:
        check_place(target)
    except SaveError as error:
        raise ConfigurationError(f"OUT: {error}") from error
    return target


def _copy_beside(model: Path, new: Path) -> None:
    """Bring the tokenizer of a model along, and how it generates.

    Raises:
        SaveError: the disk is full, say.
    """
    for file in sorted(model.iterdir()):
        if file.is_file() and any(fnmatch.fnmatch(file.name, pattern) for pattern in _BESIDE):
            try:
                shutil.copyfile(file, new / file.name)
            except OSError as error:
                raise SaveError(f"{file} cannot be copied: {error.strerror or error}") from error


def _answer(model: str, config: QuantizationConfig, saved: Saved, shards: int, resumed: int, seconds: float) -> Answer:
    data: dict[str, Any] = {
        "model": model,
        "config": config.to_dict(),
        "directory": str(saved.directory),
        "files": list(saved.files),
        "bytes": saved.nbytes,
        "weights": saved.weights,
        "shards": shards,
        "resumed_shards": resumed,
        "read_by_compressed_tensors": saved.readable,
        "differences": list(saved.differences),
        "seconds": seconds,
    }
    lines = [str(saved)]
    if resumed:
        lines.append(f"{resumed} of {shards} files of tensors were finished by a run before, and kept")
    return Answer(data, "\n".join([*lines, f"written in {seconds:.1f} s"]))
