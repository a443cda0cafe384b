"""Tables of tuned blockings as files: strict JSON with a version, read as strictly as it is written.

API:
    save(table, path), load(path) -> TunedTable
    to_text(table) -> str, from_text(text, origin) -> TunedTable
    table_from(given) -> TunedTable             a table, or the path of one
    read_index() -> tuple[TunedTable, ...]      the shipped ones

A file of another version is an error. One that was made with another triton, or with other kernels, is read as far as
its head: `TunedTable.ignored` says so, and what it lists of those kernels is left out.
"""

import dataclasses
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

from olq_fx.errors import ConfigurationError, ConfigurationTypeError, shown
from olq_fx.kernels.blocking import Blocking
from olq_fx.kernels.kernel_sources import FAMILIES, Family
from olq_fx.kernels.tuned_problem import Problem
from olq_fx.kernels.tuned_tables import Choice, TunedTable

FORMAT = "olq_fx tuned blockings"
VERSION = 1
INDEX = "olq_fx index of tuned blockings"

_SHIPPED = Path(__file__).parent / "tuned"
_HEAD = {"format": str, "version": int, "device": str, "capability": int, "triton": str, "sources": dict}
_LARGEST = 1 << 26
"""Bytes of a file that is read; a table of ten thousand products is a tenth of it."""


def save(table: TunedTable, path: str | os.PathLike[str]) -> None:
    """Write a table; the file is there as a whole, or as it was.

    Raises:
        ConfigurationError: nothing can be written there.
    """
    target = Path(path)
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(to_text(table))
            os.chmod(name, 0o644)
            os.replace(name, target)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise ConfigurationError(f"{target}: no table can be written there: {error.strerror}") from None


def load(path: str | os.PathLike[str]) -> TunedTable:
    """Read a table.

    Raises:
        ConfigurationError: there is no file, or it is no table of this version.
    """
    source = Path(path)
    try:
        if not source.is_file():
            raise ConfigurationError(f"{source}: there is no file of that name")
        if source.stat().st_size > _LARGEST:
            raise ConfigurationError(f"{source}: longer than {_LARGEST} bytes, which no tuned table is")
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{source}: cannot be read: {error}") from None
    return from_text(text, str(source))


def table_from(given: object) -> TunedTable:
    """A table, or the one in a file.

    Raises:
        ConfigurationError: the file is no table.
        ConfigurationTypeError: it is neither a table nor a path.
    """
    if isinstance(given, TunedTable):
        return given
    if isinstance(given, (str, os.PathLike)):
        return load(given)
    raise ConfigurationTypeError(f"a tuned table is an olq_fx.TunedTable or the path of a file, not {shown(given)}")


def read_index() -> tuple[TunedTable, ...]:
    """The tables that come with the package, in the order of its index."""
    listed = _object(_parsed((_SHIPPED / "index.json").read_text(encoding="utf-8"), "the index"), "the index")
    _fields(listed, {"format": str, "version": int, "tables": list}, "the index")
    _known(listed, INDEX, "the index")
    return tuple(load(_SHIPPED / name) for name in listed["tables"])


def to_text(table: TunedTable) -> str:
    """A table as JSON, one line an entry."""
    head = {
        "format": FORMAT,
        "version": VERSION,
        "device": table.device,
        "capability": table.capability,
        "triton": table.triton,
        "sources": dict(table.sources),
    }
    lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
    entries = [
        "  " + json.dumps({**dataclasses.asdict(problem), **dataclasses.asdict(choice)}, allow_nan=False)
        for problem, choice in table.choices.items()
    ]
    listed = "[\n" + ",\n".join(entries) + "\n ]" if entries else "[]"
    return "{\n" + ",\n".join([*lines, f' "entries": {listed}']) + "\n}\n"


def from_text(text: str, origin: str) -> TunedTable:
    """The table that `to_text` wrote.

    Args:
        text: JSON.
        origin: where it came from, for messages.

    Raises:
        ConfigurationError: it is none.
    """
    data = _object(_parsed(text, origin), origin)
    _known(data, FORMAT, origin)
    _fields(data, {**_HEAD, "entries": list}, origin)
    sources = {_family(name, origin): value for name, value in data["sources"].items()}
    if not all(isinstance(value, str) for value in sources.values()):
        raise ConfigurationError(f"{origin}: sources are hashes by the names of kernels")
    head: dict[str, Any] = {name: data[name] for name in ("capability", "triton", "device")}
    empty = TunedTable(**head, sources=sources, choices={}, origin=origin)
    choices: dict[Problem, Choice] = {}
    for number, entry in enumerate(data["entries"]):
        where = f"{origin}: entry {number}"
        family = _family(_object(entry, where).get("family"), where)
        if empty.stale(family):
            continue
        problem, choice = _entry(entry, where)
        if problem in choices:
            raise ConfigurationError(f"{where}: the same problem stands there twice: {problem.title}")
        choices[problem] = choice
    return dataclasses.replace(empty, choices=choices)


def _entry(entry: Mapping[str, Any], where: str) -> tuple[Problem, Choice]:
    of_problem, of_choice = _types(Problem), {"measured": bool}
    blockings = {"blocking": dict, "first": dict}
    times = {"seconds": (int, float, type(None)), "first_seconds": (int, float, type(None))}
    _fields(entry, {**of_problem, **of_choice, **blockings, **times}, where)
    problem = Problem(**{name: entry[name] for name in of_problem})
    blocking, first = (_blocking(entry[name], f"{where}: {name}") for name in ("blocking", "first"))
    choice = Choice(blocking=blocking, first=first, **{name: entry[name] for name in (*of_choice, *times)})
    return problem, choice


def _blocking(values: Mapping[str, Any], where: str) -> Blocking:
    """A blocking; fields that it lacks are as they were before there were such."""
    optional = {field.name for field in dataclasses.fields(Blocking) if field.default is not dataclasses.MISSING}
    _fields(values, _types(Blocking), where, optional)
    return Blocking(**values)


def _types(kind: Any) -> dict[str, Any]:
    """The types of the fields of a dataclass, which are numbers, texts and flags."""
    known: dict[Any, type] = {bool: bool, int: int, str: str, Family: str}
    return {field.name: known[field.type] for field in dataclasses.fields(kind)}


def _fields(values: Mapping[str, Any], types: Mapping[str, Any], where: str, optional: Iterable[str] = ()) -> None:
    """Hold an object to its keys and to the types of their values."""
    unknown = sorted(set(values) - set(types))
    missing = sorted(set(types) - set(values) - set(optional))
    if unknown or missing:
        said = [f"{', '.join(map(repr, unknown))} is not known"] * bool(unknown)
        said += [f"{', '.join(map(repr, missing))} is missing"] * bool(missing)
        raise ConfigurationError(f"{where}: {' and '.join(said)}")
    for name, value in values.items():
        kinds = types[name] if isinstance(types[name], tuple) else (types[name],)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            wanted = " or ".join(kind.__name__.replace("NoneType", "null") for kind in kinds)
            raise ConfigurationError(f"{where}: {name} is of type {wanted}, not {shown(value)}")


def _known(values: Mapping[str, Any], format: str, where: str) -> None:
    """Hold a file to its kind and version, before anything else in it is looked at."""
    if values.get("format") != format:
        raise ConfigurationError(f"{where}: no file of the kind {format!r}, but {shown(values.get('format'))}")
    if type(values.get("version")) is not int or values["version"] != VERSION:
        raise ConfigurationError(f"{where}: version {shown(values.get('version'))} is not known here; valid: {VERSION}")


def _family(name: object, where: str) -> Family:
    if name not in FAMILIES:
        raise ConfigurationError(f"{where}: no kernel is called {shown(name)}; valid: {', '.join(FAMILIES)}")
    return cast(Family, name)


def _object(value: object, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigurationError(f"{where}: a JSON object is wanted, not {shown(value)}")
    return value


def _parsed(text: str, where: str) -> object:
    """Strict JSON: no key twice, no NaN.

    Raises:
        ConfigurationError: it is none.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError(f"a key stands twice among {', '.join(sorted({key for key, _ in pairs}))}")
        return found

    def refuse(name: str) -> float:
        raise ValueError(f"{name} is no number of JSON")

    try:
        parsed: object = json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{where}: malformed JSON: {error}") from None
    return parsed
