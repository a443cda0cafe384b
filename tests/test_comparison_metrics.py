"""The metrics against formulas of their own, in numpy; their limits; bounds; strict JSON."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from olq_fx.comparison_bounds import HIGHER, LOWER, failures_of, parse_bounds
from olq_fx.comparison_metrics import Difference, Metrics
from olq_fx.errors import ComparisonError, ConfigurationError, ConfigurationTypeError, OlqFxError

NUMBERS = ("cosine", "mae", "mse", "rmse", "max_abs", "relative_l2", "psnr_db", "sqnr_db")


def measured(reference: torch.Tensor, candidate: torch.Tensor, logits: bool = False) -> Metrics:
    difference = Difference()
    difference.add(reference, candidate, logits)
    return difference.metrics()


def by_numpy(reference: np.ndarray, candidate: np.ndarray) -> dict[str, float]:
    a, b = reference.astype(np.float64).ravel(), candidate.astype(np.float64).ravel()
    e = b - a
    with np.errstate(divide="ignore"):
        return {
            "cosine": a.dot(b) / np.linalg.norm(a) / np.linalg.norm(b),
            "mae": np.abs(e).mean(),
            "mse": np.square(e).mean(),
            "rmse": np.sqrt(np.square(e).mean()),
            "max_abs": np.abs(e).max(),
            "relative_l2": np.linalg.norm(e) / np.linalg.norm(a),
            "psnr_db": 10 * np.log10((a.max() - a.min()) ** 2 / np.square(e).mean()),
            "sqnr_db": 10 * np.log10(np.square(a).sum() / np.square(e).sum()),
        }


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1,), (7, 3), (2, 3, 4, 5), (1500, 1500)], ids=str)
def test_the_formulas(dtype: torch.dtype, shape: tuple[int, ...]):
    """The largest shape is summed in several pieces."""
    reference = torch.randn(shape).to(dtype) + 1
    candidate = (reference + 0.1 * torch.randn(shape)).to(dtype)
    found = measured(reference, candidate)
    expected = by_numpy(reference.double().numpy(), candidate.double().numpy())
    for name in NUMBERS:
        assert getattr(found, name) == pytest.approx(expected[name], rel=1e-9), name
    assert found.count == reference.numel()
    assert not found.exact


@given(
    st.lists(st.tuples(st.floats(-1e6, 1e6, width=32), st.floats(-1e6, 1e6, width=32)), min_size=2, max_size=30),
    st.integers(1, 29),
)
def test_pieces_add_up(pairs: list[tuple[float, float]], cut: int):
    """However the tensors are cut, and whether sums are added or merged."""
    reference, candidate = torch.tensor(pairs, dtype=torch.float64).unbind(1)
    first, second = Difference(), Difference()
    first.add(reference[:cut], candidate[:cut])
    second.add(reference[cut:], candidate[cut:])
    first.merge(second)
    whole, merged = measured(reference, candidate), first.metrics()
    for name in NUMBERS:
        assert getattr(merged, name) == pytest.approx(getattr(whole, name), rel=1e-9, abs=1e-12), name
    assert (merged.count, merged.exact) == (whole.count, whole.exact)


@given(st.lists(st.lists(st.floats(-50, 50, width=32), min_size=3, max_size=3), min_size=2, max_size=8))
def test_logits_by_the_formula(rows: list[list[float]]):
    reference = torch.tensor(rows, dtype=torch.float32)
    candidate = reference.flip(0) * 0.9
    p, q = (np.exp(x - x.max(-1, keepdims=True)) for x in (reference.double().numpy(), candidate.double().numpy()))
    p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    expected = (p * (np.log(p) - np.log(q))).sum(-1).mean()
    found = measured(reference, candidate, logits=True)
    assert found.kl == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert found.top1 == (reference.argmax(-1) == candidate.argmax(-1)).double().mean().item()
    assert measured(reference, candidate).kl is None


def test_a_class_that_both_exclude_counts_for_nothing():
    reference = torch.tensor([[1.0, 2.0, -math.inf]])
    found = measured(reference, reference + torch.tensor([[0.5, 0.0, 0.0]]), logits=True)
    shorter = measured(reference[:, :2], reference[:, :2] + torch.tensor([[0.5, 0.0]]), logits=True)
    assert found.kl == shorter.kl
    assert (found.max_abs, found.nonfinite) == (0.5, 1)
    assert found.mae == shorter.mae


@pytest.mark.parametrize(
    ("reference", "candidate", "expected"),
    [
        (
            [0.0, 0.0],
            [0.0, 0.0],
            {"cosine": 1, "relative_l2": 0, "psnr_db": math.inf, "sqnr_db": math.inf, "exact": True},
        ),
        ([0.0, 0.0], [1.0, 0.0], {"cosine": 0, "relative_l2": math.inf, "psnr_db": -math.inf, "sqnr_db": -math.inf}),
        ([1.0, 2.0], [0.0, 0.0], {"cosine": 0, "relative_l2": 1, "sqnr_db": 0, "exact": False}),
        ([1.0, 2.0], [1.0, 2.0], {"relative_l2": 0, "psnr_db": math.inf, "sqnr_db": math.inf, "exact": True}),
        ([3.0], [-3.0], {"cosine": -1, "max_abs": 6}),
        ([], [], {"count": 0, "mae": 0, "exact": True}),
        ([math.inf, 1.0], [math.inf, 1.0], {"nonfinite": 1, "mae": 0, "exact": True}),
        ([math.nan, 1.0], [math.nan, 2.0], {"nonfinite": 1, "mae": 1, "exact": False}),
    ],
    ids=str,
)
def test_limits(reference: list[float], candidate: list[float], expected: dict[str, float]):
    found = measured(torch.tensor(reference), torch.tensor(candidate))
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_value_that_only_one_of_them_lost_spoils_every_number(odd: float):
    found = measured(torch.tensor([1.0, 2.0]), torch.tensor([1.0, odd]), logits=True)
    assert all(math.isnan(getattr(found, name)) for name in NUMBERS)
    assert not found.exact
    assert set(found.to_dict().values()) >= {None, False, 2, 1}
    for bounds in ({"cosine": -1.0}, {"mae": 1e300}):
        assert failures_of(bounds, "x", {name: getattr(found, name) for name in NUMBERS})


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_without_a_finite_value_every_number_is_undefined(odd: float):
    """Two models that both return nothing but NaN are not found to be equal."""
    found = measured(torch.full((2, 3), odd), torch.full((2, 3), odd), logits=True)
    assert all(math.isnan(getattr(found, name)) for name in NUMBERS)
    assert (found.exact, found.nonfinite) == (False, 6)
    assert failures_of({"cosine": -1.0}, "x", {"cosine": found.cosine})


@pytest.mark.parametrize("pair", [([0.0], [1.0]), ([1.0], [1.0]), ([1.0], [math.nan])], ids=str)
def test_json_has_no_number_that_json_lacks(pair: tuple[list[float], list[float]]):
    text = json.dumps(measured(*map(torch.tensor, pair)).to_dict(), allow_nan=False)
    assert json.loads(text)["count"] == 1


def test_shapes_that_differ():
    with pytest.raises(ComparisonError, match=r"\(2,\) and \(3,\)"):
        measured(torch.zeros(2), torch.zeros(3))


# Bounds


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("psnr_db=20,cosine=0.98", {"psnr_db": 20.0, "cosine": 0.98}),
        (" KL = 1e-3 ", {"kl": 1e-3}),
        ("max-abs=2", {"max_abs": 2.0}),
        ("", {}),
        (None, {}),
        ({"mae": 1}, {"mae": 1.0}),
    ],
    ids=str,
)
def test_bounds(value, expected):
    assert parse_bounds(value) == expected


@pytest.mark.parametrize(
    ("value", "only", "said"),
    [
        ("psnr=20", None, "psnr_db"),
        ("psnr_db", None, "metric=number"),
        ("psnr_db=high", None, "finite number"),
        ("psnr_db=nan", None, "finite number"),
        ("cosine=inf", None, "finite number"),
        ("mae=1,mae=2", None, "twice"),
        ({"mae": True}, None, "finite number"),
        ("mae=1", HIGHER, "--fail-over"),
        ("cosine=1", LOWER, "--fail-under"),
    ],
    ids=str,
)
def test_bounds_without_a_meaning(value, only, said):
    with pytest.raises(ConfigurationError, match=said):
        parse_bounds(value, only)


@pytest.mark.parametrize("value", [3, ["mae=1"], {3: 1}], ids=str)
def test_bounds_of_another_type(value):
    with pytest.raises(ConfigurationTypeError, match="bounds"):
        parse_bounds(value)


@given(st.one_of(st.text(), st.dictionaries(st.text(), st.one_of(st.text(), st.floats(), st.none())), st.none()))
def test_any_bounds_are_bounds_or_an_error_of_ours(value: object):
    try:
        found = parse_bounds(value)
    except OlqFxError:
        return
    assert all(math.isfinite(number) for number in found.values())


def test_which_bounds_hold():
    values = {"cosine": 0.9, "mae": 2.0, "kl": None}
    assert failures_of({"cosine": 0.9, "mae": 2.0, "kl": 0.0, "rmse": 0.0}, "y", values) == []
    low, high = failures_of({"cosine": 0.91, "mae": 1.9}, "y", values)
    assert str(low) == "cosine of y is 0.9, under 0.91"
    assert str(high) == "mae of y is 2, over 1.9"
