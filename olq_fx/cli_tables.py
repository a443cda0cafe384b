"""`olq-fx schemes`, `olq-fx formats`, `olq-fx pairs`: what there is."""

from typing import Any, Literal

from olq_fx.cli_answers import Answer
from olq_fx.formats import FORMATS, Format
from olq_fx.numerics import quantized_bytes
from olq_fx.schemes import ALIASES, SCHEMES, Scheme, Slot, pairs
from olq_fx.tables import table_of

_SIZE = 4096
"""Bits of an element are those in a (4096, 4096) tensor."""


def schemes() -> Answer:
    """Every scheme: its names, its formats, the bits of a weight."""
    rows: list[dict[str, Any]] = [_scheme_row(scheme) for scheme in SCHEMES.values()]
    cells = [
        (
            row["name"],
            ", ".join(row["aliases"]),
            _slot_text(row["linear"]),
            _slot_text(row["moe"]),
            f"{row['bits']:.2f}",
        )
        for row in rows
    ]
    heads = ("scheme", "also", "linear: weight / activation", "moe: weight / activation", "bits a weight")
    return Answer(rows, table_of(dict.fromkeys(heads, "left"), cells))


def _scheme_row(scheme: Scheme) -> dict[str, object]:
    return {
        "name": scheme.name,
        "aliases": [alias for alias, name in ALIASES.items() if name == scheme.name],
        "linear": _slot(scheme.linear),
        "moe": _slot(scheme.moe),
        "bits": _bits(FORMATS[scheme.linear.weight]),
    }


def _slot(slot: Slot) -> dict[str, Any]:
    return {"weight": slot.weight, "activation": slot.activation}


def _slot_text(slot: dict[str, Any]) -> str:
    return f"{slot['weight']} / {slot['activation'] or 'none'}"


def _bits(format: Format) -> float:
    return 8 * quantized_bytes(format, _SIZE, _SIZE) / _SIZE**2


def formats() -> Answer:
    """Every format: its element, groups, scales, rules and uses."""
    rows = [
        {
            "name": format.name,
            "element": format.element,
            "group": list(format.group),
            "scale": format.scale,
            "coarse": None if format.coarse is None else list(format.coarse),
            "rules": list(format.rules),
            "weight": format.weight,
            "activation": format.activation,
            "default_activation": format.default_activation,
            "bits": _bits(format),
        }
        for format in FORMATS.values()
    ]
    cells = [_format_cells(format) for format in FORMATS.values()]
    heads = ("format", "element", "group", "scale", "second scale", "rules", "use", "default activation")
    return Answer(rows, table_of(dict.fromkeys(heads, "left"), cells))


def _format_cells(format: Format) -> tuple[str, ...]:
    used = [use for use, there in (("weight", format.weight), ("activation", format.activation)) if there]
    coarse = "" if format.coarse is None else _group(format.coarse)
    return (
        format.name,
        format.element,
        _group(format.group),
        format.scale,
        coarse,
        ", ".join(format.rules),
        ", ".join(used),
        format.default_activation or "",
    )


def _group(group: tuple[int | None, int | None]) -> str:
    return " x ".join("all" if extent is None else str(extent) for extent in group)


def format_pairs() -> Answer:
    """Every weight format with every activation format: all work; which is the default, and which schemes mean it."""
    found = pairs()
    rows = [
        _slot(pair.slot) | {"works": True, "default": pair.default, "schemes": list(pair.schemes)} for pair in found
    ]
    activations = list(dict.fromkeys(pair.slot.activation for pair in found))
    cells = []
    for weight in dict.fromkeys(pair.slot.weight for pair in found):
        own = {pair.slot.activation: pair for pair in found if pair.slot.weight == weight}
        cells.append((weight, *("default" if own[name].default else "yes" for name in activations)))
    heads: dict[str, Literal["left", "right"]] = {"weight": "left"}
    heads.update((f"with {name or 'none'}", "left") for name in activations)
    return Answer(rows, table_of(heads, cells))
