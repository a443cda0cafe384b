"""Stacks of experts' matrices are found by the products that use them, and the way in which they are stored is read."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.config as dynamo_config
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from olq_fx import torch_private
from olq_fx.passes import find_uses
from olq_fx.passes.capture import linear_uses
from olq_fx.passes.find_stacks import uses_of_stacks
from olq_fx.passes.stack_forms import read_stack_equation

E, N, K, M = 4, 16, 8, 5
X = torch.linspace(-1, 1, M * K).reshape(M, K).sin()
EACH = torch.linspace(-1, 1, E * 3 * K).reshape(E, 3, K).sin()
IDS = torch.tensor([3, 0, 1, 1, 2])
PAIRS = torch.stack([IDS, (IDS + 1) % E], 1)
OFFS = torch.tensor([1, 1, 3, 5], dtype=torch.int32)
ONE = torch.tensor(2)

HALF, EACH_HALF = X.bfloat16(), EACH.bfloat16()  # torch groups products in bfloat16 only where it compiles

# name -> what is done with a stack; the parameter's name says how it is stored: `w` is (E, N, K), `v` is (E, K, N).
GROUPED: dict[str, Callable[..., Tensor]] = {
    "grouped_mm": lambda w: F.grouped_mm(HALF, w.transpose(-2, -1), offs=OFFS),
    "_grouped_mm": lambda w: torch._grouped_mm(HALF, w.mT, OFFS),
    "grouped_mm of a stored (E, K, N)": lambda v: F.grouped_mm(HALF, v, offs=OFFS),
    "grouped_mm by keyword": lambda v: torch._grouped_mm(input=HALF, mat2=v, offs=OFFS),
    "grouped_mm of a batch": lambda v: F.grouped_mm(EACH_HALF, v),
    "aten": lambda v: torch.ops.aten._grouped_mm.default(HALF, v, OFFS),
    "grouped_mm of a copy": lambda w: F.grouped_mm(HALF, w.transpose(1, 2).contiguous(), offs=OFFS),
    "grouped_mm of a gate": lambda v: F.grouped_mm(HALF, v[..., : N // 2].contiguous(), offs=OFFS),
}
GATHERED: dict[str, Callable[..., Tensor]] = {
    "bmm, weight first": lambda w: torch.bmm(w[IDS], X.unsqueeze(-1)).squeeze(-1),
    "bmm": lambda v: torch.bmm(X.unsqueeze(1), v[IDS]).squeeze(1),
    "bmm of the transposed": lambda w: torch.bmm(X.unsqueeze(1), w[IDS].transpose(1, 2)),
    "transposed before": lambda w: X.unsqueeze(1) @ w.mT[IDS],
    "matmul": lambda w: torch.matmul(w[IDS], X[..., None]),
    "index_select": lambda w: torch.index_select(w, 0, IDS) @ X[..., None],
    "Tensor.index_select": lambda v: X[:, None] @ v.index_select(0, IDS),
    "einsum": lambda w: torch.einsum("ti,taoi->tao", X, w[PAIRS]),
    "einsum of a pair": lambda v: torch.einsum("ti,tio->to", X, v[PAIRS[:, 0]]),
    "einsum, down": lambda w: torch.einsum("tai,taoi->tao", X[:, None].expand(-1, 2, -1), w[PAIRS]),
    "pairs in one batch": lambda w: w[PAIRS].flatten(0, 1) @ X.repeat_interleave(2, 0)[..., None],
    "pairs from one batch": lambda w: torch.einsum("ti,taoi->tao", X, w[PAIRS.view(-1)].view(M, 2, N, K)),
    "as many as data says": lambda v: X[(rows := torch.where(IDS > 0)[0])][:, None] @ v[IDS[rows]],
    "of one expert for all": lambda w: X @ w[ONE].t(),
    "gate of the gathered": lambda w: torch.bmm(w[IDS, : N // 2], X.unsqueeze(-1)),
    "gate behind dots": lambda v: torch.bmm(X.unsqueeze(1), v[IDS, ..., ::2]),
    "gate of the gathered later": lambda w: torch.bmm(w[IDS].chunk(2, dim=1)[0], X.unsqueeze(-1)),
}
DENSE: dict[str, Callable[..., Tensor]] = {
    "bmm": lambda v: torch.bmm(EACH, v),
    "bmm, weight first": lambda w: torch.bmm(w, EACH.mT),
    "Tensor.bmm": lambda w: EACH.bmm(w.permute(0, 2, 1)),
    "matmul": lambda v: torch.matmul(EACH, v),
    "@": lambda w: EACH @ w.mT,
    "@ by broadcasting": lambda v: X @ v,
    "@ of a batch": lambda v: EACH[None] @ v,
    "@ of a vector": lambda w: w @ X[0],
    "vector @": lambda v: X[0] @ v,
    "baddbmm": lambda v: torch.baddbmm(torch.ones(E, 1, N), EACH, v),
    "Tensor.baddbmm": lambda w: torch.ones(E, 3, N).baddbmm(EACH, w.mT),
    "einsum": lambda v: torch.einsum("ebd,edf->ebf", EACH, v),
    "einsum, weight first": lambda w: torch.einsum("efd,ebd->ebf", w, EACH),
    "einsum, e in the weight": lambda v: torch.einsum("td,edf->tef", X, v),
    "einsum, e in the weight, of heads": lambda w: torch.einsum("bnd,efd->bnef", EACH, w),
    "einsum with an ellipsis": lambda v: torch.einsum("...d,edf->...ef", EACH, v),
    "einsum with ellipses": lambda w: torch.einsum("...md,...fd->...mf", EACH, w),
    "einsum without result": lambda v: torch.einsum("td,edf", X, v),
    "einsum of a list": lambda v: torch.einsum("ebd,edf->ebf", [EACH, v]),
    "tensordot": lambda v: torch.tensordot(X, v, ([1], [1])),
    "inner": lambda w: torch.inner(X, w),
    "detached": lambda v: EACH @ v.detach(),
    "same dtype": lambda v: EACH @ v.to(torch.float32),
    "cloned": lambda w: EACH @ w.mT.clone(),
}
SELECTED: dict[str, Callable[..., Tensor]] = {
    "linear": lambda w: F.linear(X, w[1]),
    "select": lambda w: F.linear(X, w.select(0, 1)),
    "matmul": lambda v: X @ v[-1] + torch.ones(N),
    "mm": lambda v: torch.mm(X, v[1]),
    "addmm": lambda v: torch.addmm(torch.ones(N), X, v[0]),
    "einsum": lambda w: torch.einsum("ti,oi->to", X, w[0]),
    "by a tensor": lambda w: F.linear(X, w[ONE]),
    "select by a tensor": lambda v: X @ v.index_select(0, ONE)[0],
    "unbound": lambda w: torch.cat([F.linear(X, each) for each in w.unbind(0)]),
    "iterated": lambda v: torch.cat([X @ each for each in v]),
    "in turn": lambda w: torch.cat([F.linear(X, w[e]) for e in IDS.tolist()]),
    "select by a number": lambda v: X @ v.select(0, int(IDS[0])),
    "hit by tokens": lambda w: torch.cat([F.linear(X[torch.where(e == IDS)[0]], w[e]) for e in range(E)]),
    "gate and up": lambda w: F.linear(X, w[1].chunk(2)[0]) * F.linear(X, w[1].chunk(2)[1]),
    "split": lambda w: F.linear(X, w[1].split([6, 10])[1]),
    "rows": lambda w: F.linear(X, w[1, 2:4]),
    "columns that are rows": lambda v: X @ v[1][:, 2:],
    "every other": lambda v: X @ v[1][:, ::2],
    "a batch of one": lambda v: EACH[:1] @ v[1:2],
}
SLICED: dict[str, Callable[..., Tensor]] = {
    "experts": lambda v: EACH[1:3] @ v[1:3],
    "gate": lambda w: EACH @ w[:, : N // 2].mT,
    "gate and up": lambda w: torch.cat([EACH @ each.mT for each in w.chunk(2, dim=1)], -1),
    "interleaved": lambda v: torch.cat([torch.bmm(EACH, v[..., ::2]), torch.bmm(EACH, v[..., 1::2])], -1),
    "narrowed": lambda v: torch.bmm(EACH, v.narrow(2, 1, 3)),
    "shards as an axis": lambda w: torch.einsum("ebd,esfd->ebsf", EACH, w.view(E, 2, N // 2, K)),
    "gathered": lambda v: X[:, None] @ v[1:][IDS.clamp(max=2)],
}
FORMS = {"grouped": GROUPED, "gathered": GATHERED, "dense": DENSE, "selected": SELECTED, "sliced": SLICED}


def stack_for(form: Callable[..., Tensor], kind: str) -> nn.Parameter:
    """A stack as a form takes it."""
    shape = (E, N, K) if form.__code__.co_varnames[0] == "w" else (E, K, N)
    values = torch.linspace(-1, 1, E * N * K).reshape(shape).cos()
    return nn.Parameter(values.bfloat16() if kind == "grouped" else values)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("kind", FORMS)
def test_forms_are_read(capture, kind: str, dynamic: bool):
    stacks = {name: stack_for(form, kind) for name, form in FORMS[kind].items()}
    with dynamo_config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        captured = capture(
            lambda: [form(stacks[name]) for name, form in FORMS[kind].items()], weights=stacks, dynamic=dynamic
        )
    found = {c.path: (c.kind, c.shape, c.transposed, c.left_alone) for c in find_uses.find_linear_uses(captured.gm)}
    expected = {name: ("moe", (E, N, K), stack.shape[2] == N, "") for name, stack in stacks.items()}
    assert found == expected
    uses = {captured.owners[each.weight.name].names[0]: each.products for each in find_uses.stack_uses(captured.gm)}
    assert {name: {use.transposed for use in each} for name, each in uses.items()} == {
        name: {transposed} for name, (_, _, transposed, _) in expected.items()
    }
    assert find_uses.weight_uses(captured.gm) == ()


@pytest.mark.parametrize(("e", "n", "k"), [(1, N, K), (E, 1, K), (E, N, 1), (1, 1, 1), (1, 1, K), (E, 1, 1)])
def test_axes_of_extent_one(capture, e: int, n: int, k: int):
    w, v = nn.Parameter(torch.ones(e, n, k)), nn.Parameter(torch.ones(e, k, n))
    x, ids = torch.ones(3, k), torch.zeros(3, dtype=torch.int64)

    def run() -> Any:
        return x @ w.mT, torch.einsum("td,edf->tef", x, v), x[:, None] @ w[ids].mT, F.linear(x, w[0]), x @ v[0]

    captured = capture(run, weights={"w": w, "v": v})
    found = {c.path: (c.shape, c.left_alone, c.blocked) for c in find_uses.find_linear_uses(captured.gm)}
    assert found == {"w": ((e, n, k), "", ""), "v": ((e, n, k), "", "")}


def test_no_tokens(capture):
    w, v = nn.Parameter(torch.ones(E, N, K)), nn.Parameter(torch.ones(E, K, N))
    x, ids = torch.ones(0, K), torch.zeros(0, dtype=torch.int64)
    captured = capture(
        lambda: (torch.bmm(w[ids], x[..., None]), x[:, None] @ v[ids], EACH[:, :0] @ v), weights={"w": w, "v": v}
    )
    found = {c.path: (c.shape, c.transposed, c.left_alone) for c in find_uses.find_linear_uses(captured.gm)}
    assert found == {"w": ((E, N, K), False, ""), "v": ((E, N, K), True, "")}


# name -> (what is done with w (E, N, K), a part of the reason)
MISSES: dict[str, tuple[Callable[..., Any], str]] = {
    "added": (lambda w: torch.ones(E, N, K) + w, "also used by operator.add, which is no product of experts"),
    "summed": (lambda w: w.sum(), "also used by Tensor.sum, which is no product of experts"),
    "convolved": (lambda w: F.conv1d(torch.ones(1, N, 9), w), "conv1d, which is no product of experts"),
    "scaled": (lambda w: EACH @ (w * 2).mT, "operator.mul"),
    "cast": (lambda w: EACH.double() @ w.to(torch.float64).mT, "Tensor.to"),
    "expanded": (lambda w: EACH @ w[:1].expand(E, -1, -1).mT, "Tensor.expand"),
    "written to": (lambda w: EACH @ w.detach().add_(1).mT, "Tensor.add_"),
    "gathered by a mask": (lambda w: EACH @ w[torch.ones(E, dtype=torch.bool)].mT, "operator.getitem"),
    "gathered rows": (lambda w: X @ w[0][IDS].mT, "operator.getitem"),
    "experts as rows": (lambda w: F.linear(X, w.flatten(0, 1)), "Tensor.flatten"),
    "reduction sliced": (lambda w: EACH[..., :4] @ w[..., :4].mT, "a slice along its reduction axis"),
    "reduction cut": (lambda w: torch.einsum("ebhd,enhd->ebn", EACH.view(E, 3, 2, 4), w.view(E, N, 2, 4)), "several"),
    "half of the cut": (lambda w: torch.einsum("ebd,enhd->ebnh", EACH[..., :4], w.view(E, N, 2, 4)), "cut along"),
    "experts summed": (lambda w: torch.einsum("ebd,end->bn", EACH, w), "sums over the experts"),
    "experts weighted": (lambda w: torch.einsum("te,end->tnd", torch.ones(M, E), w), "sums over the experts"),
    "features kept": (lambda w: torch.einsum("ebn,end->ebnd", torch.ones(E, 3, N), w), "over no axis"),
    "features of both": (lambda w: torch.einsum("end,end->en", torch.ones(E, N, K), w), "keeps an axis of both"),
    "features dropped": (lambda w: torch.einsum("ebd,end->eb", EACH, w), "drops an axis of an operand"),
    "rows dropped": (lambda w: torch.einsum("ebd,end->en", EACH, w), "drops an axis of an operand"),
    "an axis twice": (lambda w: torch.einsum("edd,end->en", torch.ones(E, K, K), w), "repeats an axis"),
    "three operands": (lambda w: torch.einsum("te,td,end->tn", torch.ones(M, E), X, w), "other than two operands"),
    "broadcast input": (lambda w: torch.einsum("td,end->ten", X[:, :1], w), "broadcast along the reduction axis"),
    "scaled product": (lambda w: torch.baddbmm(torch.ones(1), EACH, w.mT, alpha=2), "is scaled"),
    "added to a product": (lambda w: torch.baddbmm(w, torch.ones(E, N, 2), torch.ones(E, 2, K)), "added to a product"),
    "with itself": (lambda w: torch.einsum("end,emd->enm", w, w), "multiplied with itself"),
    "an input": (lambda w: F.linear(w, torch.ones(2, K)), "the input or the bias of a linear layer"),
    "grouped by features": (
        lambda w: F.grouped_mm(HALF, w.permute(1, 2, 0), offs=torch.arange(N, dtype=torch.int32)),
        "its groups are no experts",
    ),
    "grouped, an input": (lambda w: F.grouped_mm(w, HALF.new_ones(K, 16), offs=4 * OFFS), "the input or the offsets"),
    "grouped rows": (lambda w: F.grouped_mm(HALF.T, w[0].T[:5], offs=OFFS), "not of rows with a stack of matrices"),
    "mapped": (lambda w: torch.vmap(lambda x: x @ w.mT)(EACH[None]), "torch.vmap"),
}  # fmt: skip


def test_what_is_no_product_of_experts_has_its_reason(capture):
    dtypes = {name: torch.bfloat16 if name.startswith("grouped") else torch.float32 for name in MISSES}
    stacks = {name: nn.Parameter(torch.ones(E, N, K, dtype=dtype)) for name, dtype in dtypes.items()}
    captured = capture(lambda: [form(stacks[name]) for name, (form, _) in MISSES.items()], weights=stacks)
    inputs = captured.nodes("placeholder")
    transformed = torch_private.transformed_nodes(captured.gm.graph)
    found = {
        captured.owners[uses.weight.name].names[0]: uses
        for uses in uses_of_stacks((node for node in inputs if node.name in captured.owners), transformed)
    }
    reasons = {name: "; ".join(reject.reason for reject in found[name].others) for name in MISSES}
    assert {name: reasons[name] for name, (_, reason) in MISSES.items() if reason not in reasons[name]} == {}
    assert {name for name, uses in found.items() if uses.products} == set()
    assert find_uses.find_linear_uses(captured.gm) == ()


def test_product_and_another_use_is_left_alone_with_the_reason(capture):
    stack = nn.Parameter(torch.ones(E, N, K))
    captured = capture(lambda: (EACH @ stack.mT, stack.sum(), EACH[..., :2] @ stack[..., :2].mT), weights={"w": stack})
    (found,) = find_uses.find_linear_uses(captured.gm)
    assert (found.kind, found.shape, found.transposed, found.use_known) == ("moe", (E, N, K), False, True)
    assert found.left_alone == (
        "also used by Tensor.sum, which is no product of experts; "
        "it is used through a slice along its reduction axis (operator.matmul)"
    )
    assert found.blocked == ""


def test_both_orientations_are_blocked(capture):
    stack = nn.Parameter(torch.ones(E, K, K))
    captured = capture(lambda: (EACH @ stack.mT) @ stack, weights={"w": stack})
    (found,) = find_uses.find_linear_uses(captured.gm)
    assert "both as (N, K) and as (K, N)" in found.blocked


def test_product_of_two_weights_is_a_use_of_neither(capture):
    a, b, c = (nn.Parameter(torch.ones(E, *shape)) for shape in ((N, K), (K, N), (K, N)))
    matrix = nn.Parameter(torch.ones(2, K))
    captured = capture(
        lambda: (a @ b, matrix @ c, EACH @ c, EACH @ a.mT), weights={"a": a, "b": b, "c": c, "matrix": matrix}
    )
    found = {candidate.path: candidate for candidate in find_uses.find_linear_uses(captured.gm)}
    reason = "it is multiplied with another weight"
    assert {path: candidate.left_alone for path, candidate in found.items()} == {
        "a": reason,
        "c": reason,
        "matrix": reason,
    }
    assert not found["matrix"].use_known


def test_queries_that_are_learned_stay_the_input_of_their_layer(capture):
    queries, weight = nn.Parameter(torch.ones(1, 5, K)), nn.Parameter(torch.ones(N, K))
    captured = capture(
        lambda: (F.linear(queries, weight), queries @ weight.t()), weights={"queries": queries, "weight": weight}
    )
    (found,) = find_uses.find_linear_uses(captured.gm)
    assert (found.path, found.kind, found.left_alone) == ("weight", "linear", "")


def test_names_of_tied_stacks():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.ones(E, K, K))
            self.second, self.table = self.first, nn.Parameter(torch.ones(E, 3, K))

        def forward(self, x: Tensor) -> Tensor:
            x = torch.bmm(x + self.table, self.first)
            torch._dynamo.graph_break()
            return torch.bmm(x, self.second)

    (found,) = linear_uses(Block(), (EACH,))
    assert (found.names, found.kind, found.transposed) == (("first", "second"), "moe", True)
    assert (found.left_alone, found.blocked) == ("", "")


@st.composite
def equations(draw: st.DrawFn) -> tuple[str, str, bool]:
    """(an einsum of an input and a stack, the letters of the stored one in a view's order, whether it is (E, K, N))."""
    others = draw(st.sampled_from(["", "b", "bm"]))
    shared = draw(st.booleans())
    x = draw(st.permutations(["d", *others, *("e" if shared else "")]))
    weight = draw(st.permutations("efd"))
    out = draw(st.permutations(["e", "f", *others]))
    terms = ["".join(x), "".join(weight)]
    first = draw(st.booleans())
    equation = ",".join(terms if first else terms[::-1]) + "->" + "".join(out)
    return equation, "".join(weight), draw(st.booleans())


SIZES = {"e": 3, "f": 5, "d": 4, "b": 2, "m": 2}


def depends_on(equation: str, operands: list[Tensor], which: int, index: tuple[int, ...]) -> Tensor:
    """Which elements of the result one element of an operand has a part in."""
    one = torch.zeros_like(operands[which])
    one[index] = 1
    return torch.einsum(equation, *[one if n == which else each.abs() + 1 for n, each in enumerate(operands)]) != 0


@given(equations())
@settings(max_examples=60, deadline=None)
def test_reduction_axis_of_an_einsum_is_what_the_numbers_say(drawn: tuple[str, str, bool]):
    equation, viewed, transposed = drawn
    letters = "edf" if transposed else "efd"
    stack = torch.ones([SIZES[letter] for letter in letters])
    order = [letters.index(letter) for letter in viewed]
    terms = equation.split("->")[0].split(",")
    which = next(n for n, term in enumerate(terms) if "f" in term)
    x = torch.ones([SIZES[letter] for letter in terms[1 - which]])
    graph = torch.fx.Graph()
    w, other = graph.placeholder("w"), graph.placeholder("x")
    w.meta["example_value"], other.meta["example_value"] = stack, x
    view = graph.call_method("permute", (w, *order))
    view.meta["example_value"] = stack.permute(order)
    node = graph.call_function(torch.einsum, (equation, *((view, other) if which == 0 else (other, view))))
    operands = [stack.permute(order), x] if which == 0 else [x, stack.permute(order)]
    node.meta["example_value"] = torch.einsum(equation, *operands)
    (uses,) = uses_of_stacks([w])
    (use,) = uses.products

    def moved(axis: int) -> Tensor:
        index = [0, 0, 0]
        index[viewed.index(letters[axis])] = 1
        return depends_on(equation, operands, which, tuple(index))

    # Elements along the reduction axis have a part in the same results.
    unmoved = depends_on(equation, operands, which, (0, 0, 0))
    reduced = [axis for axis in (1, 2) if bool((moved(axis) == unmoved).all())]
    assert reduced == [1 if use.transposed else 2]


@pytest.mark.parametrize(
    ("equation", "ranks", "expected"),
    [
        ("td,edf->tef", (2, 3), (("t", "d"), ("e", "d", "f"), ("t", "e", "f"))),
        (" ...d , e d f -> ... e f ", (3, 3), ((-2, -1, "d"), ("e", "d", "f"), (-2, -1, "e", "f"))),
        ("...md,...df", (4, 3), ((-2, -1, "m", "d"), (-1, "d", "f"), (-2, -1, "f", "m"))),
        ("edf,ed", (3, 2), (("e", "d", "f"), ("e", "d"), ("f",))),
    ],
)
def test_equation_is_read(equation: str, ranks: tuple[int, int], expected: Any):
    assert read_stack_equation(equation, ranks) == expected
