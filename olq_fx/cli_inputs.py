"""What a model is run on: calls that a function gives, windows of a text, or random tokens.

API:
    calls_from(source, model, options) -> Inputs(calls, perplexity, note)
    first_call(source, model, inputs, shape) -> one call
    tokens_of_text(path, tokenizer, count) -> (1, T) tokens
    shape_from(text) -> (sequences, tokens)
"""

import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from olq_fx.cli_models import Factory, Folder, call_named
from olq_fx.comparison_runs import calls_of
from olq_fx.configuration_sources import text_of_file
from olq_fx.errors import ConfigurationError, shown

LARGEST_TEXT = 256 << 20
"""Bytes that a text may have: all of it is turned into tokens before the first ones are taken."""

_RANDOM = (2, 64)
"""Sequences and tokens of random inputs."""

_NO_INPUTS = (
    "say what to run the model on: --inputs module:callable, a function that returns one call (a tensor, a tuple of "
    "arguments, a dictionary of named ones) or a list of calls"
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InputOptions:
    """Where inputs come from: `module:callable`, or a text of which `tokens` are read in windows, `batch` at a time."""

    inputs: str | None
    text: str | None
    tokens: int
    window: int
    batch: int
    seed: int


@dataclasses.dataclass(frozen=True, slots=True)
class Inputs:
    """Calls of a model; the input whose perplexity is measured, or None; what to say of them, or ""."""

    calls: list[Any]
    perplexity: str | None
    note: str


def calls_from(source: Folder | Factory, model: nn.Module, options: InputOptions) -> Inputs:
    """The calls that the options ask for.

    Raises:
        ConfigurationError: there is nothing to run the model on, or the text cannot be read.
    """
    if options.inputs is not None and options.text is not None:
        raise ConfigurationError("--inputs and --text exclude each other")
    if options.inputs is not None:
        return Inputs(calls_of(call_named(options.inputs, "--inputs")), None, "")
    if isinstance(source, Factory):
        raise ConfigurationError(_NO_INPUTS)
    device = next(model.parameters()).device
    if options.text is None:
        ids = _random_tokens(model, options.seed, _RANDOM).to(device)
        return Inputs([_call(model, ids)], None, "inputs are random tokens; --text FILE takes a text")
    tokens = tokens_of_text(Path(options.text), source.tokenizer(), options.tokens).to(device)
    windows: Any = _windows(tokens, options.window)
    calls = [_call(model, part) for part in windows.split(options.batch)]
    can_generate = getattr(model, "can_generate", None)
    return Inputs(calls, "input_ids" if can_generate is not None and can_generate() else None, "")


def first_call(source: Folder | Factory, model: nn.Module, inputs: str | None, shape: tuple[int, int]) -> Any:
    """One call: the first that `inputs` (`module:callable`) gives, or random tokens of this shape, on the CPU.

    Raises:
        ConfigurationError: there is nothing to run the model on.
    """
    if inputs is not None:
        return calls_of(call_named(inputs, "--inputs"))[0]
    if isinstance(source, Factory):
        raise ConfigurationError(_NO_INPUTS)
    return _call(model, _random_tokens(model, 0, shape))


def shape_from(text: str) -> tuple[int, int]:
    """Sequences and their tokens, as `--tokens 1x128` gives them.

    Raises:
        ConfigurationError: it is not written so.
    """
    found = re.fullmatch(r"([1-9][0-9]{0,6})x([1-9][0-9]{0,6})", text.strip())
    if found is None:
        raise ConfigurationError(f"--tokens takes sequences x tokens of each, such as 1x128, not {shown(text)}")
    return int(found[1]), int(found[2])


def tokens_of_text(path: Path, tokenizer: Any, count: int) -> Tensor:
    """The first tokens of a text file, (1, T); of a JSON list of texts, joined by the end-of-text token.

    Raises:
        ConfigurationError: the file cannot be read, or has fewer than two tokens.
    """
    text = text_of_file(path, f"the text {str(path)!r}", LARGEST_TEXT)
    try:
        if path.suffix.lower() == ".json":
            texts = json.loads(text)
            if not (isinstance(texts, list) and all(isinstance(part, str) for part in texts)):
                raise ValueError("a JSON file of texts is a list of strings")
            text = (tokenizer.eos_token or "\n").join(texts)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"cannot read the text {str(path)!r}: {error}") from None
    ids: Tensor = tokenizer(text, return_tensors="pt").input_ids[:, :count]
    if ids.shape[1] < 2:
        raise ConfigurationError(f"the text {str(path)!r} has {ids.shape[1]} tokens; it needs two or more")
    return ids


def _windows(tokens: Tensor, window: int) -> Tensor:
    """(1, T) tokens as (windows, window), without what fills no window; a shorter text is one window."""
    length = tokens.shape[1]
    if length <= window:
        return tokens
    return tokens[0, : length // window * window].view(-1, window)


def _random_tokens(model: nn.Module, seed: int, shape: tuple[int, int]) -> Tensor:
    config: Any = getattr(model, "config", None)
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    size = getattr(text_config, "vocab_size", None)
    if "input_ids" not in inspect.signature(model.forward).parameters or not size:
        raise ConfigurationError("say what to run the model on: --inputs module:callable (it takes no tokens)")
    return torch.randint(0, size, shape, generator=torch.Generator().manual_seed(seed))


def _call(model: nn.Module, ids: Tensor) -> dict[str, Any]:
    """One call on tokens, without the cache of a decoder."""
    cached = "use_cache" in inspect.signature(model.forward).parameters
    return {"input_ids": ids} | ({"use_cache": False} if cached else {})
