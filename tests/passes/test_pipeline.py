"""The order of the passes, and what the runner does around each."""

import dataclasses
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from olq_fx.passes import pipeline
from olq_fx.passes.base import Context, PassResult, Reject
from olq_fx.passes.dumps import Dumps
from olq_fx.passes.fxtools import MADE, VALUE


class Block(nn.Module):
    """Something for every pass: attention, layers that share an input, a residual, a weight used through a view,
    experts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2)
        self.gate, self.up, self.down = nn.Linear(16, 32), nn.Linear(16, 32), nn.Linear(32, 16)
        self.w = nn.Parameter(torch.randn(16, 16))
        self.experts = nn.Parameter(torch.randn(3, 16, 16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(x, x, x, need_weights=False)[0] @ self.w.T
        x = torch.bmm(x, self.experts.mT)
        return x + self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


@pytest.fixture
def block(capture):
    torch.manual_seed(5)
    return capture(Block().eval(), torch.randn(3, 2, 16))


def test_each_pass_finds_work_and_none_when_run_again(block):
    context = block.context("mxfp8", "mxfp8")
    records = pipeline.run(block.gm, context)
    assert [record.name for record in records] == [make(context).name for make in pipeline.PASSES]
    assert all(record.changed for record in records), records
    text = str(block.gm.graph)
    assert [record.changed for record in pipeline.run(block.gm, context)] == [0] * len(records)
    assert str(block.gm.graph) == text


def test_final_graph_is_the_quantized_one(block):
    (before,) = block()
    context = block.context("mxfp8", "mxfp8")
    pipeline.run(block.gm, context)
    ops = torch.ops.olq_fx
    assert block.count(ops.quantized_linear.default) == 6
    assert block.count(ops.quantize.default) == 5
    assert block.count(torch.nn.functional.linear) == block.count("t") == 0
    planned = {weight.placeholder for weight in context.weights}
    assert planned.isdisjoint(node.name for node in block.nodes("placeholder"))
    (after,) = block(context)
    assert (after - before).norm() < 0.1 * before.norm()


@pytest.mark.parametrize("number", range(len(pipeline.PASSES)))
def test_each_pass_carries_meta_to_its_nodes(block, number: int):
    context = block.context("mxfp8", "mxfp8")
    for make in pipeline.PASSES[:number]:
        block.apply(make(context))
    before = set(block.gm.graph.nodes)
    block.apply(pipeline.PASSES[number](context))
    for node in set(block.gm.graph.nodes) - before:
        assert VALUE in node.meta, node
        if node.op != "placeholder":
            assert node.meta[MADE]
            assert node.meta["stack_trace"], node
            assert node.meta.get("nn_module_stack") or "self." in node.meta["stack_trace"], node


def test_values_in_meta_are_those_that_are_computed(block):
    context = block.context("int8_per_channel_static", "int8_per_token")
    pipeline.run(block.gm, context)

    class Check(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> object:
            result = super().run_node(n)
            if isinstance(result, Tensor) and VALUE in n.meta:
                fake = n.meta[VALUE]
                assert (tuple(fake.shape), fake.dtype) == (tuple(result.shape), result.dtype), n
            return result

    block.gm.forward = lambda *inputs: Check(block.gm).run(*inputs)
    block(context)


def test_dumps_are_numbered_and_hold_no_values(block, tmp_path: Path):
    pipeline.run(block.gm, block.context("mxfp8", "mxfp8"), dump_dir=tmp_path / "graphs")
    names = sorted(path.name for path in (tmp_path / "graphs").iterdir())
    assert names[0] == "00_before.txt"
    assert names[4] == "04_swap.txt"
    assert len(names) == len(pipeline.PASSES) + 1
    assert "quantized_linear" in (tmp_path / "graphs" / names[-1]).read_text()
    assert "quantized_linear" not in (tmp_path / "graphs" / names[0]).read_text()


def test_dumps_say_which_operators_there_are_more_and_fewer(block, tmp_path: Path):
    records = pipeline.run(block.gm, block.context("mxfp8", "mxfp8"), dump_dir=tmp_path)
    before, *after = (path.read_text().partition("\n\n")[0].splitlines() for path in sorted(tmp_path.iterdir()))
    assert before[0] == f"# before: {sum(int(line.split()[1]) for line in before[1:])} calls"
    for lines, record in zip(after, records, strict=True):
        assert lines[0] == f"# {record.name}: {record.changed} places changed"
        found = {line.split()[2]: int(line.split()[1]) for line in lines[1:] if line[2] == " "}
        assert found == record.operators


def test_dumps_hold_what_was_refused(block, tmp_path: Path):
    dumps = Dumps(tmp_path)
    dumps.add(block.gm, "nothing", 0, {}, [Reject("a.layer", "it is red")])
    [path] = tmp_path.iterdir()
    assert path.read_text().startswith("# nothing: 0 places changed\n# refused: a.layer: it is red\n\ngraph():")


def test_no_folder_no_dumps(block):
    dumps = Dumps(None)
    dumps.begin(block.gm)
    dumps.add(block.gm, "nothing", 0, {})
    assert not dumps


@dataclasses.dataclass(frozen=True)
class Broken:
    """A pass that changes what a graph returns."""

    name: ClassVar[str] = "broken"

    def __call__(self, gm: GraphModule) -> PassResult:
        output = gm.graph.output_node()
        (result,) = output.args[0]
        with gm.graph.inserting_before(output):
            half = gm.graph.call_method("half", (result,))
        half.meta[VALUE] = result.meta[VALUE].half()
        output.args = ((half,),)
        return PassResult(1)


def test_changed_results_are_caught(block):
    with pytest.raises(AssertionError, match="broken changed the results"):
        pipeline.run_one(block.gm, Broken())


def test_record_says_what_changed(block):
    context = block.context("mxfp8", "mxfp8")
    records = {record.name: record for record in pipeline.run(block.gm, context)}
    assert records["swap"].operators["olq_fx.quantized_linear.default"] == 6
    assert records["share_quantization"].operators["olq_fx.quantize.default"] == -1
    assert records["canonicalize"].seconds >= 0


def test_nothing_planned_changes_nothing(block):
    text = str(block.gm.graph)
    assert [record.changed for record in pipeline.run(block.gm, Context(()))] == [0] * len(pipeline.PASSES)
    assert str(block.gm.graph) == text


def test_random_and_writing_nodes_of_the_user_stay(capture):
    """Read or not: they draw numbers, or write."""
    layer = nn.Linear(16, 16)

    def function(x: Tensor) -> Tensor:
        torch.nn.functional.dropout(x, 0.5)
        x = x + 0
        x.add_(1)
        return layer(x)

    captured = capture(function, torch.randn(3, 16), weights=dict(layer.named_parameters()))
    pipeline.run(captured.gm, captured.context("mxfp8", "mxfp8"))
    assert captured.count(torch.nn.functional.dropout) == 1
    assert captured.count("add_") == 1
