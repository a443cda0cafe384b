"""The passes in their order, and the runner that times, dumps and verifies each.

    run(gm, context, dump_dir=None) -> tuple[PassRecord, ...]

Passes know nothing of one another. A new one is a file, a line here and a test.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor
from torch.fx import GraphModule

from olq_fx.passes.annotate import Annotate
from olq_fx.passes.base import Context, Pass, Reject
from olq_fx.passes.canonicalize import Canonicalize
from olq_fx.passes.clean_up import CleanUp
from olq_fx.passes.dumps import Dumps, difference, operators_of
from olq_fx.passes.fuse_experts import FuseExperts
from olq_fx.passes.fuse_quantize import FuseQuantize
from olq_fx.passes.fuse_residual import FuseResidual
from olq_fx.passes.fxtools import value_of
from olq_fx.passes.hold_experts import HoldExperts
from olq_fx.passes.merge_products import MergeProducts
from olq_fx.passes.open_attention import OpenAttention
from olq_fx.passes.share_quantization import ShareQuantization
from olq_fx.passes.swap import Swap

PASSES: tuple[Callable[[Context], Pass], ...] = (
    OpenAttention,  # first: what it opens contains linear layers
    Canonicalize,  # so that all that follow know one form of linear layer
    Annotate,  # before canonical nodes are gone; their labels go on to what replaces them
    Swap,  # from here on there are quantized operators
    HoldExperts,  # anywhere: no other pass looks at them
    ShareQuantization,  # before fusion moves products away from the quantization of their input
    FuseResidual,  # after sharing: it looks at products only
    CleanUp,  # last: drops what the others left over
)
"""What runs, in this order; each entry says why it stands there."""

LATE_PASSES: tuple[Callable[[], Pass], ...] = (
    FuseExperts,  # before the next, which would make a kernel of what is between two products of experts
    FuseQuantize,  # before the next: a product in the kernel of a quantization is no kernel of its own
    MergeProducts,  # what is left of products
)
"""What runs on the graph of aten operators that AOTAutograd makes, where what is pointwise is one kind of node."""


@dataclasses.dataclass(frozen=True, slots=True)
class PassRecord:
    """What the runner saw of one pass.

    Attributes:
        name: of the pass.
        changed: how many places it changed.
        rejects: what it refused.
        seconds: how long it took, verification excluded.
        operators: how many calls of each operator there are more (or fewer, if negative) than before.
        notes: lines for the user.
    """

    name: str
    changed: int
    rejects: tuple[Reject, ...]
    seconds: float
    operators: dict[str, int]
    notes: tuple[str, ...] = ()


def run(gm: GraphModule, context: Context, *, dump_dir: Path | None = None) -> tuple[PassRecord, ...]:
    """Run all passes on a graph, in place, and recompile it.

    Args:
        gm: a graph of torch functions with fake values in its meta.
        context: what the passes are told.
        dump_dir: a folder that gets the graph before the first and after each pass, numbered in their order; graphs
            hold names and shapes, never values.

    Raises:
        AssertionError: a pass left a malformed graph, or other results in shape or dtype.
    """
    records = _run_each(gm, [make(context) for make in PASSES], Dumps(dump_dir))
    gm.recompile()
    return records


def run_late(gm: GraphModule, dumps: Dumps | None = None, *, fuse: bool = True) -> tuple[PassRecord, ...]:
    """Run the late passes on a graph of aten operators, in place.

    Args:
        gm: the graph.
        dumps: gets the graph before the first and after each pass.
        fuse: whether kernels may be fused; else no late pass runs.

    Raises:
        AssertionError: a pass left a malformed graph, or other results in shape or dtype.
    """
    return _run_each(gm, [make() for make in LATE_PASSES] if fuse else [], dumps or Dumps(None))


def _run_each(gm: GraphModule, steps: Sequence[Pass], dumps: Dumps) -> tuple[PassRecord, ...]:
    dumps.begin(gm)
    records = []
    for step in steps:
        record = run_one(gm, step)
        dumps.add(gm, record.name, record.changed, record.operators, record.rejects)
        records.append(record)
    return tuple(records)


def run_one(gm: GraphModule, step: Pass) -> PassRecord:
    """Run one pass and verify the graph: well formed, results of the same shapes and dtypes."""
    operators, results = operators_of(gm), _results(gm)
    begin = time.perf_counter()
    outcome = step(gm)
    seconds = time.perf_counter() - begin
    gm.graph.lint()
    assert _results(gm) == results, f"{step.name} changed the results from {results} to {_results(gm)}"
    changes = difference(operators, operators_of(gm))
    return PassRecord(step.name, outcome.changed, outcome.rejects, seconds, changes, outcome.notes)


def _results(gm: GraphModule) -> list[tuple[object, ...]]:
    """Shape and dtype of everything that a graph returns."""
    found: list[tuple[object, ...]] = []
    for node in gm.graph.output_node().all_input_nodes:
        value = value_of(node)
        found.append((tuple(value.shape), value.dtype) if isinstance(value, Tensor) else (value,))
    return found
