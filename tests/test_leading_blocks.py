"""Leading blocks in original precision: which lists are meant, how many blocks of them, and what opts one in."""

from typing import Any

import pytest
import torch
from torch import nn

import olq_fx
from olq_fx.errors import PlanError
from olq_fx.leading_blocks import Block, block_of
from olq_fx.plan import plan_for


def stack(**lists: int) -> nn.Module:
    """A model with lists of blocks of these names and lengths, and a layer outside."""
    with torch.device("meta"):
        model = nn.ModuleDict({"out": nn.Linear(64, 64)})
        for name, length in lists.items():
            model[name] = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(64, 64)}) for _ in range(length))
    return model


def left(config: object, model: nn.Module) -> dict[str, list[int]]:
    """The numbers of the blocks that are left alone, by list."""
    found: dict[str, list[int]] = {}
    for row in plan_for(config, model).rows:
        if row.decision == "leave":
            name, number, *_ = row.path.split(".")
            found.setdefault(name, []).append(int(number))
    return found


FIVE = [0, 1, 2, 3, 4]

CASES: list[tuple[Any, dict[str, int], dict[str, list[int]]]] = [
    # the default of mxfp4_dualscale
    ("mxfp4_dualscale", {"blocks": 11, "transformer_blocks": 60}, {"blocks": FIVE, "transformer_blocks": FIVE}),
    ("mxfp4_dualscale", {"blocks": 10}, {}),
    ("mxfp4_dualscale", {"layers": 60, "h": 60, "single_transformer_blocks": 60}, {}),
    ("mxfp4", {"blocks": 60}, {}),
    ({"linear": "mxfp4_dualscale"}, {"blocks": 11}, {"blocks": FIVE}),
    ({"linear": {"weight": "mxfp4_dualscale", "activation": "mxfp8"}}, {"blocks": 11}, {"blocks": FIVE}),
    ({"targets": {"*": "mxfp4_dualscale"}}, {"blocks": 11}, {"blocks": FIVE}),
    ({"targets": {"*": "mxfp4_dualscale", "blocks.1.up": "mxfp4_dualscale"}}, {"blocks": 11}, {"blocks": [0, 2, 3, 4]}),
    ({"quantization": "mxfp4_dualscale", "include": ["blocks.[12].*"]}, {"blocks": 11}, {"blocks": [0, 3, 4]}),
    ({"components": {"blocks": "mxfp4_dualscale", "default": "mxfp4"}}, {"blocks": 11, "transformer_blocks": 11},
     {"blocks": FIVE}),
    # a number of the user's
    ({"quantization": "mxfp4_dualscale", "num_bf16_fallback_layers": 0}, {"blocks": 60}, {}),
    ({"quantization": "mxfp4_dualscale", "num_bf16_fallback_layers": 2}, {"blocks": 60}, {"blocks": [0, 1]}),
    ({"quantization": "fp8", "num_bf16_fallback_layers": 2},
     {"blocks": 3, "layers": 3, "transformer_blocks": 3, "h": 3},
     {"blocks": [0, 1], "layers": [0, 1], "transformer_blocks": [0, 1], "h": [0, 1]}),
    ({"quantization": "fp8", "num_bf16_fallback_layers": 9}, {"blocks": 3}, {"blocks": [0, 1, 2]}),
    ({"quantization": "fp8", "num_bf16_fallback_layers": 2}, {"blocks": 3, "down_blocks": 3}, {"blocks": [0, 1]}),
]  # fmt: skip


@pytest.mark.parametrize(("config", "lists", "expected"), CASES, ids=str)
def test_the_first_blocks_keep_their_precision(config, lists, expected):
    assert left(config, stack(**lists)) == expected


def test_the_outermost_list_counts_and_its_length_is_its_largest_number_plus_one():
    paths = ["a.layers.0.blocks.7.w", "a.layers.3.w", "b.layers.1.w", "layers.x.w", "blocks", "h.2", "my_blocks.1.w"]
    first, last, other = Block("a.layers", 0, 4), Block("a.layers", 3, 4), Block("b.layers", 1, 2)
    assert block_of(paths) == [first, last, other, None, None, Block("h", 2, 3), None]


def test_the_reason_has_the_numbers():
    plan = plan_for("mxfp4_dualscale", stack(blocks=12))
    assert plan.lookup("blocks.4.up.weight").reason == (
        "one of the first 5 of 12 blocks in blocks, which keep their precision (the default of mxfp4_dualscale; "
        "num_bf16_fallback_layers changes it)"
    )
    assert "blocks.{0-4}.up.weight" in str(plan)
    skipped = plan_for({"targets": {"*": "fp8"}, "num_bf16_fallback_layers": 1}, stack(blocks=2))
    assert skipped.lookup("blocks.0.up.weight").reason == (
        "one of the first 1 of 2 blocks in blocks, which keep their precision (num_bf16_fallback_layers); only its "
        "exact path opts it in, not '*'"
    )


def test_a_number_without_any_list_is_an_error():
    with pytest.raises(PlanError) as caught:
        plan_for({"quantization": "fp8", "num_bf16_fallback_layers": 2}, stack(down_blocks=3))
    assert str(caught.value) == (
        "num_bf16_fallback_layers: there is no numbered list of blocks (blocks, h, layers, transformer_blocks) whose "
        "first ones it could keep"
    )
    assert plan_for({"quantization": "fp8", "num_bf16_fallback_layers": 0}, stack(down_blocks=3)).quantized


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.up(x))


class Blocks(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(count))
        self.out = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        y: torch.Tensor = self.out(x)
        return y


def test_both_routes_leave_the_same_blocks(routes):
    x = torch.randn(3, 16)
    found = {}
    for name, route in routes.items():
        torch.manual_seed(0)
        quantized = route(Blocks(4), {"blocks": {"quantization": "mxfp4"}, "default": "int8"}, x)
        reference = quantized.report.plan
        torch.manual_seed(0)
        quantized = route(Blocks(4), {"quantization": "mxfp4", "num_bf16_fallback_layers": 2}, x)
        found[name] = (quantized.report.left_alone, [row.slot for row in reference.rows])
    assert found["quantize_"] == found["backend"]
    assert found["backend"][0] == ("blocks.0.up.weight", "blocks.1.up.weight")


@pytest.mark.parametrize("named_root", [True, False])
def test_blocks_compiled_one_by_one_know_their_list_by_the_root(named_root):
    """Without `root=` each block is a root of its own: it has no path in a list, and that is an error, not silence."""
    torch.manual_seed(0)
    model, x = Blocks(4), torch.randn(3, 16)
    config = {"quantization": "mxfp4", "num_bf16_fallback_layers": 2}
    backend = olq_fx.backend(config, inner="eager", root=model if named_root else None)
    for block in model.blocks:
        block.compile(backend=backend)
    with torch.no_grad():
        if named_root:
            model(x)
            assert backend.report.left_alone == ("blocks.0.up.weight", "blocks.1.up.weight")
            assert [row.path for row in backend.report.plan.quantized] == [
                "blocks.2.up.weight", "blocks.3.up.weight", "out.weight",
            ]  # fmt: skip
        else:
            with pytest.raises(PlanError, match="no numbered list of blocks"):
                model(x)
