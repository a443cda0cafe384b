"""Each way of writing a linear layer is read as one, and what is none is refused with its reason."""

import operator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from olq_fx.passes import canonical
from olq_fx.passes.canonicalize import Canonicalize
from olq_fx.passes.linear_forms import read_equation

N, K = 6, 8
ROWS_FIRST = torch.linspace(-1, 1, N * K).reshape(N, K).sin()
BIAS = torch.linspace(-1, 1, N)


def parameters() -> tuple[nn.Parameter, nn.Parameter, nn.Parameter]:
    """(N, K), (K, N), and a bias (N,)."""
    return nn.Parameter(ROWS_FIRST.clone()), nn.Parameter(ROWS_FIRST.t().contiguous()), nn.Parameter(BIAS.clone())


# name -> (what is done with x (2, 3, K), w (N, K), v (K, N), b (N,); which weight; whether it is stored as (K, N))
FORMS: dict[str, tuple[Any, str, bool]] = {
    "linear": (lambda x, w, v, b: F.linear(x, w, b), "w", False),
    "linear by keyword": (lambda x, w, v, b: F.linear(input=x, weight=w, bias=b), "w", False),
    "linear of a vector": (lambda x, w, v, b: F.linear(x[0, 0], w, b), "w", False),
    "@ T": (lambda x, w, v, b: x @ w.T, "w", False),
    "@ mT": (lambda x, w, v, b: x @ w.mT, "w", False),
    "@ t()": (lambda x, w, v, b: x @ w.t(), "w", False),
    "@ transpose": (lambda x, w, v, b: x @ w.transpose(0, 1), "w", False),
    "@ permute": (lambda x, w, v, b: x @ w.permute(1, 0), "w", False),
    "@ swapaxes": (lambda x, w, v, b: x @ w.swapaxes(0, 1), "w", False),
    "@": (lambda x, w, v, b: x @ v, "v", True),
    "matmul": (lambda x, w, v, b: torch.matmul(x, v), "v", True),
    "Tensor.matmul": (lambda x, w, v, b: x.matmul(v), "v", True),
    "mm": (lambda x, w, v, b: torch.mm(x[0], v), "v", True),
    "Tensor.mm": (lambda x, w, v, b: x[0].mm(v), "v", True),
    "addmm": (lambda x, w, v, b: torch.addmm(b, x[0], v), "v", True),
    "Tensor.addmm": (lambda x, w, v, b: b.addmm(x[0], v), "v", True),
    "Conv1D": (lambda x, w, v, b: torch.addmm(b, x.view(-1, K), v).view(2, 3, N), "v", True),
    "vector @": (lambda x, w, v, b: x[0, 0] @ v, "v", True),
    "mv": (lambda x, w, v, b: torch.mv(w, x[0, 0]), "w", False),
    "addmv": (lambda x, w, v, b: torch.addmv(b, w, x[0, 0]), "w", False),
    "weight @ columns": (lambda x, w, v, b: w @ x.mT, "w", False),
    "bmm": (lambda x, w, v, b: torch.bmm(x, v.unsqueeze(0).expand(2, -1, -1)), "v", True),
    "batched matmul": (lambda x, w, v, b: x @ v[None], "v", True),
    "inner": (lambda x, w, v, b: torch.inner(x, w), "w", False),
    "inner, weight first": (lambda x, w, v, b: torch.inner(w, x), "w", False),
    "tensordot": (lambda x, w, v, b: torch.tensordot(x, v, 1), "v", True),
    "tensordot by axes": (lambda x, w, v, b: torch.tensordot(x, w, ([2], [1])), "w", False),
    "tensordot, weight first": (lambda x, w, v, b: torch.tensordot(w, x, ([1], [2])), "w", False),
    "einsum": (lambda x, w, v, b: torch.einsum("bi,oi->bo", x[0], w), "w", False),
    "einsum, weight first": (lambda x, w, v, b: torch.einsum("oi,bsi->bso", w, x), "w", False),
    "einsum with ellipsis": (lambda x, w, v, b: torch.einsum("...i,io->...o", x, v), "v", True),
    "einsum to another order": (lambda x, w, v, b: torch.einsum("bsi,oi->bos", x, w), "w", False),
    "einsum without result": (lambda x, w, v, b: torch.einsum("bsi,oi", x, w), "w", False),
    "einsum of a list": (lambda x, w, v, b: torch.einsum("bsi,oi->bso", [x, w]), "w", False),
    "einsum of heads": (lambda x, w, v, b: torch.einsum("bsi,hdi->bhsd", x, w.view(2, 3, K)), "w", False),
    "rows": (lambda x, w, v, b: F.linear(x, w[2:5], b[2:5]), "w", False),
    "columns that are rows": (lambda x, w, v, b: x @ v[:, 1:4], "v", True),
    "one row": (lambda x, w, v, b: x @ w[1], "w", False),
    "reshaped and back": (lambda x, w, v, b: x @ v.view(2, K // 2, N).flatten(0, 1), "v", True),
    "copied transposed": (lambda x, w, v, b: x @ w.t().contiguous(), "w", False),
    "detached": (lambda x, w, v, b: F.linear(x, w.detach()), "w", False),
    "data": (lambda x, w, v, b: F.linear(x, w.data), "w", False),
    "cast": (lambda x, w, v, b: F.linear(x.double(), w.to(torch.float64)), "w", False),
    "half()": (lambda x, w, v, b: F.linear(x.half(), w.half()), "w", False),
    "type_as": (lambda x, w, v, b: F.linear(x.half(), w.type_as(x.half())), "w", False),
    "size asked for": (lambda x, w, v, b: (x @ v).view(6, v.size(1)), "v", True),
}


def case(form: Any, x: torch.Tensor) -> tuple[Any, dict[str, nn.Parameter]]:
    w, v, b = parameters()
    return (lambda x: form(x, w, v, b)), {"w": w, "v": v}


@pytest.fixture
def x() -> torch.Tensor:
    return torch.linspace(-2, 2, 2 * 3 * K).reshape(2, 3, K).cos()


@pytest.mark.parametrize("name", FORMS)
def test_form_is_read(capture, x: torch.Tensor, name: str):
    form, path, transposed = FORMS[name]
    function, weights = case(form, x)
    captured = capture(function, x, weights=weights)
    found = captured.weight(path)
    assert [reject.reason for reject in found.others] == []
    assert [use.matrix.transposed for use in found.linear] == [transposed]


@pytest.mark.parametrize("name", FORMS)
def test_canonical_form_computes_the_same(capture, x: torch.Tensor, name: str):
    form, _, _ = FORMS[name]
    function, weights = case(form, x)
    captured = capture(function, x, weights=weights)
    (before,) = captured()
    context = captured.context("int8_per_channel_static", "int8_per_token")
    assert captured.apply(Canonicalize(context)).changed == 1
    assert captured.count(canonical.linear) == 1
    (after,) = captured()
    assert (after.shape, after.dtype, after.is_contiguous()) == (before.shape, before.dtype, before.is_contiguous())
    tolerance = 2e-3 if before.dtype == torch.float16 else 1e-5
    torch.testing.assert_close(after, before, rtol=tolerance, atol=tolerance)
    assert captured.apply(Canonicalize(context)).changed == 0


# name -> (what is done, which weight, a part of the reason)
MISSES: dict[str, tuple[Any, str, str]] = {
    "scaled addmm": (lambda x, w, v, b: torch.addmm(b, x[0], v, alpha=2.0), "v", "scaled"),
    "addmm of a matrix": (lambda x, w, v, b: torch.addmm(x[0, :, :N], x[0], v), "v", "no bias of shape"),
    "with itself": (lambda x, w, v, b: x.sum() * (w @ w.T), "w", "another weight"),
    "with another weight": (lambda x, w, v, b: x[0, :, :1] * torch.mm(w, v)[0], "w", "another weight"),
    "reduction sliced": (lambda x, w, v, b: x[..., :4] @ v[:4], "v", "slice along its reduction axis"),
    "every other row": (lambda x, w, v, b: F.linear(x, w[::2]), "w", "another order"),
    "two axes summed": (lambda x, w, v, b: torch.einsum("bsi,oi->b", x[:, :N], w[:3]), "w", "drops one"),
    "batch kept": (lambda x, w, v, b: torch.einsum("osi,oi->os", x, w[:2]), "w", "several"),
    "three operands": (lambda x, w, v, b: torch.einsum("bsi,oi,o->bso", x, w, b), "w", "two operands"),
    "an axis twice": (lambda x, w, v, b: torch.einsum("ii,oi->oi", x[0, :1, :1].expand(K, K), w), "w", "repeats"),
    "used as a table": (lambda x, w, v, b: F.embedding(torch.tensor([1]), w) + x, "w", "functional.embedding"),
    "summed": (lambda x, w, v, b: x + w.sum(), "w", "Tensor.sum"),
    "scaled": (lambda x, w, v, b: F.linear(x, w * 2), "w", "operator.mul"),
    "joined": (lambda x, w, v, b: F.linear(x, torch.cat([w, w])), "w", "torch.cat"),
    "written to": (lambda x, w, v, b: F.linear(x, w.detach().add_(1)), "w", "Tensor.add_"),
    "an input": (lambda x, w, v, b: F.linear(w, x[0, :2]), "w", "input or the bias"),
    "an integer": (lambda x, w, v, b: x @ w.T.to(torch.int32).float(), "w", "Tensor.to"),
}


@pytest.mark.parametrize("name", MISSES)
def test_near_miss_is_refused_with_its_reason(capture, x: torch.Tensor, name: str):
    form, path, reason = MISSES[name]
    function, weights = case(form, x)
    captured = capture(function, x, weights=weights)
    found = captured.weight(path)
    assert found.linear == ()
    assert any(reason in reject.reason for reject in found.others), found.others
    before = str(captured.gm.graph)
    assert captured.apply(Canonicalize(captured.context("mxfp8", "mxfp8"))).changed == 0
    assert str(captured.gm.graph) == before


def test_use_beside_a_linear_one_is_told_apart(capture, x: torch.Tensor):
    w, _, _ = parameters()
    found = capture(lambda x: F.linear(x, w) + w.sum(), x, weights={"w": w}).weight("w")
    assert len(found.linear) == 1
    assert [reject.reason for reject in found.others] == ["used by Tensor.sum, which is no linear layer"]


def test_weight_in_a_region_of_its_own_is_refused(capture, x: torch.Tensor):
    w, _, _ = parameters()
    function = torch.utils.checkpoint.checkpoint
    captured = capture(lambda x: function(lambda y: F.linear(y, w), x, use_reentrant=False), x, weights={"w": w})
    assert captured.weight("w").linear == ()
    assert "checkpoint" in captured.weight("w").others[0].reason


@pytest.mark.parametrize(
    ("equation", "position", "rank", "read"),
    [
        ("bi,oi->bo", 1, 2, (("b", "i"), ("o", "i"), ("b", "o"))),
        ("oi, ...i -> ...o", 0, 3, ((0, 1, "i"), ("o", "i"), (0, 1, "o"))),
        ("bsi,oi", 1, 3, (("b", "s", "i"), ("o", "i"), ("b", "o", "s"))),
        ("bi,...i->b", 1, 2, "its einsum has an ellipsis in the weight"),
        ("bb,ob->o", 1, 2, "its einsum repeats an axis"),
    ],
)
def test_equations(equation: str, position: int, rank: int, read: Any):
    assert read_equation(equation, position, rank) == read


def test_in_place_matmul_is_a_product(capture, x: torch.Tensor):
    square = nn.Parameter(torch.eye(K))

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x + 0
        return operator.imatmul(y, square)

    assert len(capture(function, x, weights={"s": square}).weight("s").linear) == 1
