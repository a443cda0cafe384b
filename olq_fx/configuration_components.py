"""The components of a pipeline, each with a configuration of its own: how they are named.

API:
    components_alone(given, known) -> bool     whether a dictionary is that of components: {"transformer": "fp8"}
    parse_prefix(value) -> str                 the path of a module, or `default`
    longest_prefix(path, known) -> str         the component that a path lies in
"""

import difflib
from collections.abc import Collection, Container, Mapping

from olq_fx.configuration_sources import wrong_type
from olq_fx.errors import ConfigurationError, shown
from olq_fx.patterns import REGEX_PREFIX

DEFAULT = "default"
"""The key for all that lies in no component."""

_TYPO = 0.8
"""How alike a key and a valid one are for the first to be a misspelling, not the name of a component."""


def components_alone(given: Mapping[str, object], known: Collection[str]) -> bool:
    """Whether a dictionary without any known key is that of components; a misspelt key makes it none."""
    parts = {key: value for key, value in given.items() if key != "quantization" or value is not None}
    return bool(parts) and all(
        key.strip()
        and not isinstance(value, (bool, int, float, list, tuple))
        and not difflib.get_close_matches(key.lower(), known, n=1, cutoff=_TYPO)
        for key, value in parts.items()
    )


def parse_prefix(value: object) -> str:
    """The prefix of a component: the path of a module."""
    if not isinstance(value, str):
        raise wrong_type("a prefix in components is a string", value)
    prefix = value.strip()
    if not all(prefix.split(".")) or set(prefix) & set("*?[") or prefix.startswith(REGEX_PREFIX):
        raise ConfigurationError(
            f"components: {shown(value)} is no path prefix; write a module's path as 'transformer' (patterns stand in "
            "ignore, include and targets)"
        )
    return prefix


def longest_prefix(path: str, known: Container[str]) -> str:
    """The longest of the known paths that `path` is, or lies in; "" if there is none.

    >>> longest_prefix("transformer.blocks.0", {"transformer"})
    'transformer'
    >>> longest_prefix("transformer_2.blocks.0", {"transformer"})
    ''
    """
    while path and path not in known:
        path = path.rpartition(".")[0]
    return path
