"""Options that several commands share, and the configuration that they mean.

`--quantization-config.moe.activation mxfp8` sets one key of the configuration. A value is JSON, else a plain string. A
key that ends in `+` adds to a list. What follows `targets.` is one pattern, dots and all.

API:
    ConfiguredCommand       a click command that takes dotted keys
    configured(function)    adds --quantization, --quantization-config, --strict
    config_of(context) -> QuantizationConfig
    dotted_keys(arguments) -> (dotted, rest)
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from olq_fx import configuration_sources as sources
from olq_fx.configuration import QuantizationConfig
from olq_fx.errors import ConfigurationError, shown

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
    if not (schemes or texts or dotted):
        raise ConfigurationError(
            "say what to quantize to: --quantization NAME (`olq-fx schemes` lists them) "
            "or --quantization-config JSON|FILE"
        )
    keys = sources.read(texts[0]) if texts else {}
    for path, value in dotted:
        _insert(keys, path, value)
    if schemes:
        keys = sources.merge({"quantization": schemes[0]}, keys, "(as --quantization and in the configuration)")
    return QuantizationConfig.parse(keys)


def _insert(keys: dict[str, Any], path: str, text: str) -> None:
    """Set one dotted key."""
    adds = path.endswith("+")
    *parents, last = _segments(path.removesuffix("+"))
    where: dict[str, Any] = keys
    for depth, parent in enumerate(parents):
        inner = where.setdefault(parent, {})
        if not isinstance(inner, dict):
            before = ".".join(parents[: depth + 1])
            raise ConfigurationError(f"{before} is {shown(inner)} already, so {path!r} cannot be set within it")
        where[parent] = where = dict(inner)
    value = _value(text)
    if last in _PATTERNS and not isinstance(value, (str, list, type(None))):
        value = text  # a layer may be called 0
    if adds:
        listed = where.get(last) or []
        where[last] = [*([listed] if isinstance(listed, str) else listed), value]
    elif last in where and where[last] != value:
        raise ConfigurationError(f"{path!r} is given twice with different values: {shown(where[last])}, {shown(value)}")
    else:
        where[last] = value


def _segments(path: str) -> list[str]:
    """The keys on the way; a pattern below `targets` is one, and so is the name of a component."""
    head, _, tail = path.partition(".")
    name = head.replace("-", "_")
    name = sources.KEY_ALIASES.get(name, name)
    if name == "targets" and tail:
        return [name, tail]
    if name == "components" and tail:
        component, _, rest = tail.partition(".")
        return [name, component, *(_segments(rest) if rest else ())]
    found = [name, *(tail.split(".") if tail else ())]
    if not all(found) or path.endswith("."):
        raise ConfigurationError(f"--quantization-config.{path}: a key is empty")
    return found


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
