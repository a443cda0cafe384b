"""MODEL on the command line: a local folder in Hugging Face's layout, or `module:callable`.

API:
    source_of(text) -> Folder | Factory
        .on_meta(dtype) -> nn.Module          without weights, hardly any memory
        .empty(dtype) -> nn.Module            of a folder: on meta, in all else as it is loaded
        .load(dtype, device) -> nn.Module     with weights, in evaluation mode
    call_named(text, what) -> Any             what `module:callable` returns
    named(text, what) -> Any                  the thing itself
    dtype_of(text), device_of(text)
"""

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from olq_fx.cli_answers import ModelError, paragraph
from olq_fx.errors import ConfigurationError, OlqFxError, nearest, shown
from olq_fx.optional_packages import load_transformers

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclasses.dataclass(frozen=True, slots=True)
class Factory:
    """A model that `module:callable` makes."""

    name: str

    def on_meta(self, dtype: torch.dtype | None) -> nn.Module:
        """Call it on the meta device."""
        with torch.device("meta"):
            return self._made(dtype, None, " (on the meta device; --no-meta builds it with memory)")

    def load(self, dtype: torch.dtype | None, device: torch.device | None) -> nn.Module:
        """Call it."""
        return self._made(dtype, device, "")

    def _made(self, dtype: torch.dtype | None, device: torch.device | None, hint: str) -> nn.Module:
        made = call_named(self.name, "MODEL", hint)
        if not isinstance(made, nn.Module):
            raise ConfigurationError(f"MODEL {self.name!r} gives {type(made).__name__}, not a torch.nn.Module")
        model: nn.Module = _failing("move MODEL", lambda: made.to(device=device, dtype=dtype))
        return model.eval()


@dataclasses.dataclass(frozen=True, slots=True)
class Folder:
    """A model in a local folder, which transformers reads; nothing is fetched."""

    path: Path

    def on_meta(self, dtype: torch.dtype | None, blocks: int | None = None) -> nn.Module:
        """Build its architecture on the meta device, or only so many of its repeated blocks; no weights are read.

        Raises:
            ConfigurationError: its configuration has no number of blocks, or fewer.
        """
        config, architecture = self._architecture()
        if blocks is not None:
            _shorten(config.get_text_config(), blocks)
        wanted = dtype or getattr(config, "dtype", None)
        with torch.device("meta"):
            model: nn.Module = _failing(f"build {self.path}", lambda: architecture(config))
        return model.to(wanted if isinstance(wanted, torch.dtype) else torch.float32).eval()

    def empty(self, dtype: torch.dtype | None) -> nn.Module:
        """Build it on the meta device as `load` has it: tied, and of buffers that it computes their own dtypes."""
        config, architecture = self._architecture()
        found = dtype or getattr(config, "dtype", None)
        wanted = found if isinstance(found, torch.dtype) else torch.float32
        config.dtype = wanted
        with torch.device("meta"), _default_dtype(wanted):
            model: Any = _failing(f"build {self.path}", lambda: architecture(config))
        model.tie_weights()
        computed = [
            (module, name, module._buffers[name])
            for module in model.modules()
            for name in module._non_persistent_buffers_set
        ]
        model.to(wanted)
        for module, name, buffer in computed:
            module._buffers[name] = buffer
        return model.eval()  # type: ignore[no-any-return]

    def load(self, dtype: torch.dtype | None, device: torch.device | None) -> nn.Module:
        """Load it with its weights."""
        _, architecture = self._architecture()
        model: nn.Module = _failing(
            f"load {self.path}",
            lambda: architecture.from_pretrained(self.path, dtype=dtype or "auto", local_files_only=True),
        )
        return model.to(device).eval()

    def tokenizer(self) -> Any:
        """Its tokenizer."""
        library = load_transformers()
        found = _failing(
            f"read the tokenizer of {self.path}",
            lambda: library.AutoTokenizer.from_pretrained(self.path, local_files_only=True),
        )
        # Without files transformers makes an empty one, which turns every text into nothing.
        if len(found) <= len(found.all_special_ids):
            raise ModelError(f"{str(self.path)!r} holds no tokenizer: transformers reads none but special tokens there")
        return found

    def _architecture(self) -> tuple[Any, Any]:
        """The parsed `config.json` and the class of transformers that it names."""
        library = load_transformers()
        config = _failing(
            f"read the configuration of {self.path}",
            lambda: library.AutoConfig.from_pretrained(self.path, local_files_only=True),
        )
        for name in getattr(config, "architectures", None) or ():
            found = getattr(library, name, None)
            if found is not None:
                return config, found
        raise ModelError(
            f"transformers {library.__version__} has no class for the architectures that {self.path / 'config.json'} "
            f"names: {shown(getattr(config, 'architectures', None))}; give MODEL as module:callable"
        )


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """What torch makes tensors of where nothing else is said."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _shorten(config: Any, blocks: int) -> None:
    """Let a configuration of transformers have this many blocks."""
    name = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    there = getattr(config, name, None)
    if not isinstance(there, int) or there < blocks:
        raise ConfigurationError(f"--blocks {blocks}: the model has {there or 'no number of'} blocks ({name})")
    setattr(config, name, blocks)
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:blocks]


def source_of(text: str) -> Folder | Factory:
    """What MODEL means.

    Raises:
        ConfigurationError: it is neither such a folder nor `module:callable`.
    """
    if os.path.isdir(text):
        path = Path(text)
        if (path / "config.json").is_file():
            return Folder(path)
        if (path / "model_index.json").is_file():
            raise ConfigurationError(
                f"MODEL {text!r} is a pipeline of several models: name the folder of one of them, or a module:callable"
            )
        raise ConfigurationError(f"MODEL {text!r} is a folder without config.json")
    module, colon, attribute = text.partition(":")
    if colon and _dotted_name(module) and _dotted_name(attribute):
        return Factory(text)
    what = "a file" if os.path.isfile(text) else "no folder here"
    raise ConfigurationError(
        f"MODEL {shown(text)} is {what}; give a local folder with config.json (nothing is downloaded), or "
        "module:callable, a function without arguments that returns a torch.nn.Module"
    )


def call_named(text: str, what: str, hint: str = "") -> Any:
    """What `module:callable` returns; a thing that is no function or class is returned itself.

    Raises:
        ConfigurationError: there is no such thing.
        ModelError: it, or the import of its module, failed.
    """
    found = named(text, what)
    if not (inspect.isroutine(found) or inspect.isclass(found)):
        return found
    with _from_here():
        return _failing(f"call {what} {text!r}{hint}", found)


def named(text: str, what: str) -> Any:
    """The thing that `module:callable` names; the current folder is searched for the module first.

    Raises:
        ConfigurationError: there is no such module, or nothing of that name in it.
        ModelError: its import failed.
    """
    name, colon, attribute = text.partition(":")
    if not (colon and _dotted_name(name) and _dotted_name(attribute)):
        raise ConfigurationError(f"{what} is written module:callable, not {shown(text)}")
    with _from_here():
        module = _imported(name, f"{what} {text!r}")
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            close = nearest(part, [known for known in dir(found) if not known.startswith("_")])
            raise ConfigurationError(f"{what} {text!r}: {name} has no {attribute!r}; {close}")
        found = getattr(found, part)
    return found


def _imported(name: str, what: str) -> Any:
    importlib.invalidate_caches()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise ConfigurationError(f"{what}: there is no module {error.name!r}") from None
        raise ModelError(f"cannot import {what}: {paragraph(error)}") from error
    except (Exception, SystemExit) as error:
        raise ModelError(f"cannot import {what}: {paragraph(error)}") from error


def _dotted_name(text: str) -> bool:
    return all(part.isidentifier() for part in text.split("."))


@contextlib.contextmanager
def _from_here() -> Iterator[None]:
    """The current folder comes first where modules are searched, as it does for `python -m`."""
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        if here in sys.path:
            sys.path.remove(here)


def _failing(what: str, action: Callable[[], Any]) -> Any:
    """Do something of others, whose errors become ours.

    Raises:
        ModelError: it failed; the message says at what.
    """
    try:
        return action()
    except OlqFxError:
        raise
    except (Exception, SystemExit) as error:
        raise ModelError(f"cannot {what}: {paragraph(error)}") from error


def dtype_of(text: str | None) -> torch.dtype | None:
    """The dtype of that name; None for `auto`: that of the checkpoint."""
    return None if text in (None, "auto") else DTYPES[text]


def device_of(text: str | None) -> torch.device | None:
    """The device of that name.

    Raises:
        ConfigurationError: there is none.
    """
    if text is None:
        return None
    try:
        device = torch.device(text)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0] if str(error) else ""
        raise ConfigurationError(f"--device {text!r} cannot be used: {reason}") from None
    if device.type == "meta":
        raise ConfigurationError("--device 'meta' holds no weights; `olq-fx plan` needs none")
    return device
