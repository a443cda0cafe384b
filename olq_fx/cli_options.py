"""Options that several commands share, and the configuration that they mean.

`--quantization-config.moe.activation mxfp8` sets one key of the configuration. A value is JSON, else a plain string. A
key that ends in `+` adds to a list. Dotted keys and those of a text are joined.

API:
    ConfiguredCommand       a click command that takes dotted keys
    configured(function)    adds --quantization, --quantization-config, --strict
    is_configured(context) -> bool      whether one of them is given
    config_of(context) -> QuantizationConfig
    dotted_keys(arguments) -> (dotted, rest)
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click

from olq_fx import configuration_sources as sources
from olq_fx.configuration import QuantizationConfig
from olq_fx.configuration_dotted import from_dotted
from olq_fx.errors import ConfigurationError, nearest, shown

F = TypeVar("F", bound=Callable[..., Any])
Dotted = tuple[str, str]

_DOTTED = re.compile(r"--quantization[-_]config\.([^=]*)(?:=(.*))?", re.DOTALL)
_META = "olq_fx.dotted"
_PATTERNS = ("ignore", "include")


class ConfiguredCommand(click.Command):
    """A command that takes dotted keys of the configuration among its options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take the dotted keys out before click reads the rest."""
        ctx.meta[_META], rest = dotted_keys(args)
        return super().parse_args(ctx, rest)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options, dotted keys among them."""
        super().format_options(ctx, formatter)
        with formatter.section("Dotted keys"):
            formatter.write_dl(
                [("--quantization-config.KEY VALUE", "One key, e.g. `--quantization-config.moe.activation mxfp8`.")]
            )


def dotted_keys(arguments: Sequence[str]) -> tuple[list[Dotted], list[str]]:
    """Split off `--quantization-config.KEY VALUE` and `--quantization-config.KEY=VALUE`.

    Raises:
        ConfigurationError: a key has no value.
    """
    found: list[Dotted] = []
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        match = _DOTTED.fullmatch(word)
        if word == "--":
            return found, [*rest, word, *words]
        if match is None:
            rest.append(word)
            continue
        value = match[2] if match[2] is not None else next(words, None)
        if value is None or (match[2] is None and value.startswith("--")):
            raise ConfigurationError(f"{word} needs a value")
        found.append((match[1], value))
    return found, rest


def configured(function: F) -> F:
    """Add the options that say what to quantize to."""
    for option in (
        click.option("--strict/--no-strict", default=True, help="Whether a pattern that matches nothing is an error."),
        click.option(
            "--quantization-config",
            "--quantization_config",
            "-c",
            "config_texts",
            metavar="JSON|FILE",
            multiple=True,
            help="Keys of the configuration: JSON text, or the path of a JSON or YAML file.",
        ),
        click.option(
            "--quantization",
            "-q",
            "schemes",
            metavar="NAME",
            multiple=True,
            help="A scheme; `olq-fx schemes` lists them.",
        ),
    ):
        function = option(function)
    return function


def is_configured(context: click.Context) -> bool:
    """Whether an option of a command says what to quantize to."""
    return bool(context.params["schemes"] or context.params["config_texts"] or context.meta[_META])


def config_of(context: click.Context) -> QuantizationConfig:
    """The configuration that the options of a command mean together.

    Raises:
        ConfigurationError, ConfigurationTypeError: see `QuantizationConfig.parse`; an option given twice; no option.
    """
    schemes, texts = context.params["schemes"], context.params["config_texts"]
    dotted: list[Dotted] = context.meta[_META]
    for name, given in (("--quantization", schemes), ("--quantization-config", texts)):
        if len(given) > 1:
            raise ConfigurationError(f"{name} is given {len(given)} times: {shown(list(given))}")
    if not is_configured(context):
        raise ConfigurationError(
            "say what to quantize to: --quantization NAME (`olq-fx schemes` lists them) "
            "or --quantization-config JSON|FILE"
        )
    keys = sources.read(texts[0]) if texts else {}
    whole = [(path, _given(path, value)) for path, value in dotted if not path.endswith("+")]
    keys = _joined(keys, sources.read(from_dotted(whole)), "") if whole else keys
    for path, value in dotted:
        if path.endswith("+"):
            _add(keys, path.removesuffix("+"), value)
    if schemes:
        keys = sources.merge({"quantization": schemes[0]}, keys, "(as --quantization and in the configuration)")
    return QuantizationConfig.parse(keys)


def _given(path: str, text: str) -> object:
    """The value of a key; text that is to be read as such stays what it was."""
    value = _value(text)
    if not path.startswith("targets.") and _last(path) in _PATTERNS and not isinstance(value, (str, list, type(None))):
        return [text]  # a layer may be called 0
    return text if isinstance(value, str) else value


def _last(path: str) -> str:
    name = path.rpartition(".")[2].replace("-", "_")
    return sources.KEY_ALIASES.get(name, name)


def _joined(first: Mapping[str, Any], second: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The keys of a text and of dotted keys; dictionaries are joined where they give different keys."""
    joined = dict(first)
    for key, value in second.items():
        path = f"{where}{key}"
        if key not in joined:
            joined[key] = value
        elif isinstance(joined[key], Mapping) and isinstance(value, Mapping):
            joined[key] = _joined(joined[key], value, f"{path}.")
        elif joined[key] != value:
            both = f"{shown(joined[key])} and {shown(value)}"
            raise ConfigurationError(f"{path!r} is given twice with different values: {both}")
    return joined


def _add(keys: dict[str, Any], path: str, text: str) -> None:
    """Add one pattern to a list."""
    name = _last(path)
    if "." in path or name not in _PATTERNS:
        raise ConfigurationError(f"--quantization-config.{path}+ adds to a list; {nearest(name, _PATTERNS)}")
    before = keys.get(name) or []
    value = _given(path, text)
    added = value if isinstance(value, list) else [text]
    keys[name] = [*([before] if isinstance(before, str) else before), *added]


def _value(text: str) -> Any:
    """JSON, else the text itself."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        repeated = [key for key, _ in pairs if [other for other, _ in pairs].count(key) > 1]
        if repeated:
            raise ConfigurationError(f"the key {shown(repeated[0])} stands twice in {shown(text)}")
        return dict(pairs)

    def constant(name: str) -> str:
        return name

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except ConfigurationError:
        raise
    except (ValueError, RecursionError):
        return text
