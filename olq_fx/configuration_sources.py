"""Where a configuration comes from: a name, a dictionary, JSON, YAML, a file. All of them become one flat dictionary.

API:
    read(source) -> dict[str, object]             canonical keys; aliases and nesting resolved, nothing interpreted
    merge(first, second, where) -> dict           both at once; a key in both with different values is an error
    text_of_file(path, what, largest) -> str      of a regular file that is not too large

Canonical keys are those of `QuantizationConfig`; which of them exist is not decided here.
"""

import json
import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from olq_fx.errors import ConfigurationError, ConfigurationTypeError, shown
from olq_fx.schemes import Slot, canonical

KEY_ALIASES = {
    "method": "quantization",
    "quant_method": "quantization",
    "scheme": "quantization",
    "ignored_layers": "ignore",
}
"""Other names of keys."""

LARGEST_FILE = 16 << 20
"""Bytes that a configuration file may have; a hundred thousand targets take less."""

NESTED = "quantization_config"
"""The key under which all others but `quantization` may lie as well."""

_SUFFIXES = (".json", ".yaml", ".yml")
_NAMED = frozenset({"quantization", "linear", "moe", "targets", "mxfp4_scale"})


def read(source: object) -> dict[str, object]:
    """The keys of a configuration in any of its forms: None, a name, a mapping, JSON text, the path of a file.

    Raises:
        ConfigurationError: a text is malformed, a file cannot be read, a key is given twice with different values.
        ConfigurationTypeError: `source` is of another type.
    """
    if source is None:
        return {"quantization": None}
    if isinstance(source, os.PathLike):
        return _read_content(_parse_file(Path(source)))
    if isinstance(source, str):
        return _read_text(source)
    if isinstance(source, Mapping):
        return _flatten(source)
    raise wrong_type(
        "a configuration is a scheme name, a dictionary, a JSON text, the path of a JSON or YAML file, "
        "a QuantizationConfig or None",
        source,
    )


def wrong_type(rule: str, value: object) -> ConfigurationTypeError:
    """The error that says a rule on types, and that `value` does not follow it."""
    return ConfigurationTypeError(f"{rule}, not {type(value).__name__}: {shown(value)}")


def merge(first: Mapping[str, object], second: Mapping[str, object], where: str) -> dict[str, object]:
    """The keys of both.

    A `quantization` of None says nothing, so that a function's default does not contradict a dictionary.

    Raises:
        ConfigurationError: a key is in both with different values; the message says `where`.
    """
    merged = dict(first)
    for key, value in second.items():
        if key not in merged or (key == "quantization" and merged[key] is None):
            merged[key] = value
        elif key == "quantization" and value is None:
            continue
        elif not _same(key, merged[key], value):
            raise ConfigurationError(
                f"{key!r} is given twice with different values {where}: {shown(merged[key])} and {shown(value)}"
            )
    return merged


def _read_text(text: str) -> dict[str, object]:
    """The keys of a string: JSON, else the path of a file, else a scheme name."""
    if text.lstrip()[:1] in ("{", "[", '"') or text.strip() == "null":
        return _read_content(_parse_json(text, "the JSON text"))
    if text.strip().lower().endswith(_SUFFIXES) or "/" in text or os.sep in text:
        return _read_content(_parse_file(Path(text.strip())))
    return {"quantization": text.strip()}


def _read_content(content: object) -> dict[str, object]:
    """The keys of what a text or a file contained, where another path has no meaning."""
    return {"quantization": content.strip()} if isinstance(content, str) else read(content)


def _flatten(mapping: Mapping[object, object]) -> dict[str, object]:
    """The keys of a dictionary, of its `quantization_config` too, under their canonical names."""
    keys = _canonical_keys(mapping)
    if NESTED not in keys:
        return keys
    nested = keys.pop(NESTED)
    if nested is None:
        return keys
    if isinstance(nested, Mapping) and NESTED in nested:
        raise ConfigurationError(f"{NESTED!r} lies within {NESTED!r}; write its keys in one of the two")
    inner = read(nested)
    return merge(keys, inner, f"(beside {NESTED!r} and within it)")


def _canonical_keys(mapping: Mapping[object, object]) -> dict[str, object]:
    """The keys of one level under their canonical names."""
    found: dict[str, object] = {}
    for key, value in mapping.items():
        if not isinstance(key, str):
            raise wrong_type("the keys of a configuration are strings", key)
        name = KEY_ALIASES.get(key, key)
        spelled = sorted(other for other in mapping if isinstance(other, str) and KEY_ALIASES.get(other, other) == name)
        found = merge(found, {name: value}, f"(as {' and '.join(map(repr, spelled))})")
    return found


def _same(key: str, first: object, second: object) -> bool:
    """Whether two values of a key mean the same; values too deep to compare do not."""
    try:
        return _comparable(key, first) == _comparable(key, second)
    except RecursionError:
        return False


def _comparable(key: str, value: object) -> object:
    """A form of `value` that is equal for equal meanings: spellings of names, a bare string for a list."""
    if isinstance(value, Slot):
        value = {"weight": value.weight, "activation": value.activation}
    if isinstance(value, Mapping):
        return {inner: _comparable(key, part) for inner, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_comparable("", part) for part in value]
    if isinstance(value, str):
        return canonical(value) if key in _NAMED else [value] if key else value
    return (type(value).__name__, value)


def _parse_file(path: Path) -> object:
    """What a JSON or YAML file contains."""
    text = text_of_file(path, f"the configuration file {str(path)!r}", LARGEST_FILE)
    if not any(line.strip() and not line.lstrip().startswith("#") for line in text.splitlines()):
        raise ConfigurationError(
            f"the configuration file {str(path)!r} is empty; to leave everything alone on purpose, write null in it"
        )
    if path.suffix.lower() == ".json":
        return _parse_json(text, f"the file {str(path)!r}")
    return _parse_yaml(text, f"the file {str(path)!r}")


def text_of_file(path: Path, what: str, largest: int) -> str:
    """The text of a regular file; devices, pipes and folders could give text without an end, or none.

    Args:
        path: of the file.
        what: to call it in messages.
        largest: how many bytes it may have.

    Raises:
        ConfigurationError: it cannot be read, is no regular file, is larger, or is not UTF-8.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigurationError(f"cannot read {what}: it is {_kind_of(path)}, not a regular file")
        with path.open("rb") as file:
            content = file.read(largest + 1)
        if len(content) > largest:
            size = max(path.stat().st_size, len(content))
            raise ConfigurationError(f"cannot read {what}: it has {size} bytes, more than the {largest} that are read")
        return content.decode("utf-8-sig")
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path, or bytes that are not UTF-8
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"cannot read {what}: {error}") from None


def _kind_of(path: Path) -> str:
    """What a path is that is no regular file."""
    if path.is_dir():
        return "a folder"
    return "a pipe" if path.is_fifo() else "a socket" if path.is_socket() else "a device"


def _parse_json(text: str, what: str) -> object:
    """JSON, where a key that stands twice is an error instead of the last one's victory."""
    try:
        return json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, what))
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"{what} is malformed JSON: {error}") from None


def _parse_yaml(text: str, what: str) -> object:
    """YAML of plain data; a key that stands twice is an error too."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Rejects repeated keys, which SafeLoader drops in silence."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
            own = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
            keys = [self.construct_object(key, deep=True) for key in own]
            _unique([(key, None) for key in keys], what)
            return super().construct_mapping(node, deep)

    try:
        content: object = yaml.load(text, Loader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"{what} is malformed YAML: {error}") from None
    return content


def _unique(pairs: Iterable[tuple[object, object]], what: str) -> dict[object, object]:
    """A dictionary of pairs whose keys differ."""
    found: dict[object, object] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigurationError(f"the key {shown(key)} stands twice in {what}")
        found[key] = value
    return found
