"""`olq-fx kernels`: what the layers of a model cost at best on a GPU, in one configuration or in every scheme."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import torch

from olq_fx.cli_answers import Answer
from olq_fx.cli_models import source_of
from olq_fx.configuration import QuantizationConfig
from olq_fx.cost_model import Architecture, Cost, original_cost, quantized_cost
from olq_fx.errors import ConfigurationError, PlanError, shown
from olq_fx.folding import fold
from olq_fx.plan import Plan, plan_for
from olq_fx.schemes import SCHEMES, Slot
from olq_fx.tables import size_of, table_of

ORIGINAL = "bfloat16"
BASIS = (
    "times are lower bounds from published ceilings (a roofline), not measurements: launches, decoding, scaling and "
    "promotion are not counted"
)
_QUANTIZATION = {
    False: "activations are quantized by a kernel of their own, for each layer by itself",
    True: "activations arrive as codes from the kernel before (--fused)",
}
_COLUMNS: Mapping[str, Literal["left", "right"]] = {
    "weight": "left",
    "count": "right",
    "shape": "left",
    "M": "right",
    "formats": "left",
    "instruction": "left",
    "moved": "right",
    "quantizing": "right",
    "GFLOP": "right",
    "us": "right",
    "bound": "left",
    "times as fast": "right",
    "winner": "left",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """Equal linear layers: their paths for people, how many, (N, K), and what each configuration makes of them.

    A configuration that leaves them alone has None.
    """

    text: str
    count: int
    n: int
    k: int
    slots: Mapping[str, Slot | None]


@dataclasses.dataclass(frozen=True, slots=True)
class Compared:
    """The costs of one layer with M rows, by configuration, that of the original first."""

    layer: Layer
    m: int
    costs: Mapping[str, Cost]

    @property
    def winner(self) -> str:
        """The fastest; the first of equal ones, so the original rather than what gains nothing."""
        return min(self.costs, key=lambda name: self.costs[name].seconds)

    def speedup(self, name: str) -> float:
        """How many times as fast as the original; 1 where neither does anything."""
        seconds = self.costs[name].seconds
        return self.costs[ORIGINAL].seconds / seconds if seconds else 1.0

    def to_dict(self) -> dict[str, Any]:
        """In plain JSON values."""
        return {
            "m": self.m,
            "winner": self.winner,
            "costs": {
                name: {
                    "instruction": cost.instruction.name,
                    "bytes": cost.bytes,
                    "quantization_bytes": cost.quantization_bytes,
                    "operations": cost.operations,
                    "seconds": cost.seconds,
                    "bound": cost.bound,
                    "speedup": self.speedup(name),
                }
                for name, cost in self.costs.items()
            },
        }


def kernels(
    model: str,
    config: QuantizationConfig | None,
    *,
    architecture: Architecture,
    rows: Sequence[int],
    fused: bool,
    strict: bool,
    dtype: torch.dtype | None,
    meta: bool,
) -> Answer:
    """The costs of every linear layer that would be quantized.

    Args:
        model: a folder or `module:callable`.
        config: what is asked for; None compares every scheme.
        architecture: whose ceilings.
        rows: numbers M of rows of activations.
        fused: whether quantization of activations is part of the kernel before.
        strict: whether a pattern that matches nothing is an error.
        dtype: of the model; None for its own. The original is taken for bfloat16 all the same.
        meta: build it without memory.

    Raises:
        PlanError: there is no layer to look at.
    """
    source = source_of(model)
    built = source.on_meta(dtype) if meta else source.load(dtype, None)
    configs: dict[str, object] = {"configured": config} if config is not None else {name: name for name in SCHEMES}
    plans = {name: plan_for(one, built, strict=strict) for name, one in configs.items()}
    layers, apart = layers_of(plans), _apart(plans)
    if not layers:
        raise PlanError(f"no linear layer would be quantized: there is nothing to compare{apart and '; ' + apart}")
    found = [compare(layer, m, architecture, fused) for layer in layers for m in rows]
    notes = [apart] if apart else []
    return Answer(_data(found, architecture, fused) | {"notes": notes}, _text(found, architecture, fused, notes))


def _apart(plans: Mapping[str, Plan]) -> str:
    """What to say of experts in one tensor that a plan quantizes, or ""."""
    paths = {row.path for plan in plans.values() for row in plan.quantized if len(row.shape) == 3}
    if not paths:
        return ""
    return f"{len(paths)} weights of experts in one tensor are not in this table: what they cost depends on the routing"


def layers_of(plans: Mapping[str, Plan]) -> list[Layer]:
    """The linear layers that one of the plans quantizes, equal ones together. Stacked experts are not among them."""
    slots: dict[str, dict[str, Slot | None]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, plan in plans.items():
        for row in plan.rows:
            if row.kind != "embedding" and len(row.shape) == 2:
                shapes[row.path] = row.shape
                slots.setdefault(row.path, dict.fromkeys(plans))[name] = row.slot
    paths = [path for path, by_plan in slots.items() if any(by_plan.values())]
    keys = [(shapes[path], tuple(slots[path].items())) for path in paths]
    found = []
    for one in fold(paths, keys):
        first = paths[one.members[0]]
        n, k = shapes[first]
        found.append(Layer(one.text, len(one.members), n, k, slots[first]))
    return found


def compare(layer: Layer, m: int, architecture: Architecture, fused: bool) -> Compared:
    """The costs of a layer with M rows. One that a configuration leaves alone costs what the original does."""
    original = original_cost(m, layer.n, layer.k, architecture)
    costs = {ORIGINAL: original}
    for name, slot in layer.slots.items():
        costs[name] = original if slot is None else quantized_cost(slot, m, layer.n, layer.k, architecture, fused=fused)
    return Compared(layer, m, costs)


def totals(found: Sequence[Compared]) -> dict[int, dict[str, float]]:
    """Seconds of all layers together, by M and by configuration."""
    sums: dict[int, dict[str, float]] = {}
    for one in found:
        of_rows = sums.setdefault(one.m, dict.fromkeys(one.costs, 0.0))
        for name, cost in one.costs.items():
            of_rows[name] += one.layer.count * cost.seconds
    return sums


def rows_from(text: str) -> tuple[int, ...]:
    """The numbers of rows that `--m` names.

    Raises:
        ConfigurationError: it is no list of positive integers.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and 0 < int(part) < 1 << 31 for part in parts):
        raise ConfigurationError(f"--m takes positive numbers of rows with commas between, not {shown(text)}")
    return tuple(dict.fromkeys(map(int, parts)))


def _data(found: Sequence[Compared], architecture: Architecture, fused: bool) -> dict[str, Any]:
    layers: dict[str, dict[str, Any]] = {}
    for one in found:
        layer = one.layer
        slots = {name: slot and dataclasses.asdict(slot) for name, slot in layer.slots.items()}
        entry = {"path": layer.text, "count": layer.count, "shape": [layer.n, layer.k], "slots": slots, "rows": []}
        layers.setdefault(layer.text, entry)["rows"].append(one.to_dict())
    ceilings = {"bandwidth": architecture.bandwidth, "rates": dict(architecture.rates)}
    return {
        "architecture": {
            "name": architecture.name,
            "capability": architecture.capability,
            "device": architecture.device,
            **ceilings,
            "source": architecture.source,
        },
        "basis": BASIS,
        "fused": fused,
        "layers": list(layers.values()),
        "totals": [
            {"m": m, "seconds": seconds, "winner": min(seconds, key=seconds.__getitem__)}
            for m, seconds in totals(found).items()
        ],
    }


def _text(found: Sequence[Compared], architecture: Architecture, fused: bool, notes: Sequence[str]) -> str:
    table = table_of(_COLUMNS, [cells for one in found for cells in _cells(one)])
    lines = [table, architecture.ceilings, f"source: {architecture.source}", f"{BASIS}; {_QUANTIZATION[fused]}", *notes]
    for m, seconds in totals(found).items():
        best = min(seconds, key=seconds.__getitem__)
        gain = seconds[ORIGINAL] / seconds[best] if seconds[best] else 1.0
        lines.append(f"all layers with M = {m}: expected winner {best}, {gain:.2f} times as fast as {ORIGINAL}")
    return "\n".join(lines)


def _cells(one: Compared) -> Iterator[tuple[str, ...]]:
    layer = one.layer
    for name, cost in one.costs.items():
        slot = layer.slots.get(name)
        label = f"{slot.weight} / {slot.activation or 'none'}" if slot and name == "configured" else name
        if slot is None and name != ORIGINAL:
            continue
        yield (
            layer.text,
            str(layer.count) if layer.count > 1 else "",
            f"{layer.n} x {layer.k}",
            str(one.m),
            label,
            cost.instruction.name,
            size_of(cost.bytes),
            size_of(cost.quantization_bytes) if cost.quantization_bytes else "",
            _number(cost.operations / 1e9),
            _number(1e6 * cost.seconds),
            cost.bound,
            f"{one.speedup(name):.2f}",
            "winner" if name == one.winner else "",
        )


def _number(value: float) -> str:
    """Four digits at least, and no exponent where the number is large."""
    return f"{value:.4g}" if value < 1e4 else f"{value:.0f}"
