"""What a call does with the weights of a model, found without data and without a trace in the model or in Dynamo."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from olq_fx.errors import PlanError
from olq_fx.passes.capture import linear_uses


class Model(nn.Module):
    """Functional uses in two graphs, a tie to an embedding, attention, state that a call leaves behind."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(8, 8), nn.Linear(8, 8, bias=False)
        self.head.weight = self.embedding.weight
        self.attention = nn.MultiheadAttention(8, 2)
        self.first, self.second = nn.Parameter(torch.randn(8, 6)), nn.Parameter(torch.randn(8, 6))

    def forward(self, tokens: Tensor, *, twice: bool = False) -> Tensor:
        x = self.attention(*[self.embedding(tokens)] * 3)[0]
        x = x @ self.first
        self.cache = x
        torch._dynamo.graph_break()
        x = F.linear(x, self.second)
        return self.head(x + x if twice else x)


TOKENS = torch.zeros(3, 2, dtype=torch.int64)


def test_uses_of_all_graphs_are_found():
    found = {candidate.path: candidate for candidate in linear_uses(Model(), (TOKENS,), {"twice": True})}
    assert {path: (c.shape, c.transposed) for path, c in found.items() if not c.left_alone} == {
        "attention.in_proj_weight": ((24, 8), False),
        "attention.out_proj.weight": ((8, 8), False),
        "first": ((6, 8), True),
        "second": ((8, 6), False),
    }
    tied = found["embedding.weight"]
    assert tied.names == ("embedding.weight", "head.weight")
    assert tied.use_known
    assert tied.left_alone == "used by torch.nn.functional.embedding, which is no linear layer"


def test_model_is_left_as_it_was(unchanged):
    model = Model()
    with unchanged(model):
        linear_uses(model, (TOKENS,))
    assert not hasattr(model, "cache")


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_no_data_is_needed(device: str):
    model = Model().to(device)
    found = linear_uses(model, (TOKENS.to(device),))
    assert {candidate.device.type for candidate in found} == {device}


def test_compilations_of_the_user_notice_nothing():
    model = Model()
    linear_uses(model, (TOKENS,))
    shapes: list[torch.Size] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Tensor]):
        shapes.extend(value.shape for value in example_inputs if isinstance(value, Tensor))
        return gm.forward

    with torch.no_grad():
        torch.compile(model, backend=backend)(torch.zeros(5, 2, dtype=torch.int64))
    assert all(isinstance(extent, int) for shape in shapes for extent in shape)


def test_what_needs_data_is_an_error():
    class NeedsData(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            torch._dynamo.graph_break()
            return self.layer(x) if x.sum() > 0 else x

    with pytest.raises(PlanError, match=r"NeedsData cannot be traced without data .*use olq_fx\.backend"):
        linear_uses(NeedsData(), (torch.ones(2, 4),))


def test_use_in_two_orientations_is_blocked():
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            x = x @ self.w
            torch._dynamo.graph_break()
            return x @ self.w.T

    (found,) = linear_uses(Both(), (torch.ones(2, 4),))
    assert "both as (N, K) and as (K, N)" in found.blocked
