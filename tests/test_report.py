"""The report: a status for every weight, shares of bytes, what was refused, and a check that is loud."""

import json

import pytest
import torch
from torch import nn

from olq_fx.errors import OlqFxWarning, PlanError
from olq_fx.plan import plan_for
from olq_fx.report import Refusal, Report


@pytest.fixture
def report() -> Report:
    model = nn.ModuleDict({name: nn.Linear(8, 8, bias=False) for name in ("a", "b", "c", "lm_head")})
    model["b"].weight.requires_grad_(False)
    model["twin"] = model["a"]
    return Report(plan_for({"quantization": "int8", "ignore": ["c"]}, model))


def test_it_starts_as_planned(report):
    assert report.pending == ("a.weight", "b.weight")
    assert report.left_alone == ("c.weight", "lm_head.weight")
    assert report.converted == report.already == report.frozen == ()
    assert report.share == report.share_of_parameters == 0


def test_marks_move_a_weight_under_any_of_its_names(report):
    report.mark("twin.weight", "converted")
    assert report.status("a.weight") == report.status("twin.weight") == "converted"
    assert report.converted == ("a.weight",)
    assert report.pending == ("b.weight",)
    assert report.share == 0.25
    assert [row.path for row in report.rows("converted")] == ["a.weight"]
    with pytest.raises(PlanError, match=r"'d\.weight'"):
        report.mark("d.weight", "converted")


def test_weights_that_were_trainable_are_frozen_and_that_is_said(report):
    for path in ("a.weight", "b.weight"):
        report.mark(path, "converted")
    assert report.frozen == ("a.weight",)
    assert "were trainable and are frozen now (1): a.weight" in str(report)


def test_shares_count_in_original_precision():
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)), nn.LayerNorm(8))
    report = Report(plan_for({"quantization": "mxfp4", "ignore": ["2"]}, model))
    for path in report.pending:
        report.mark(path, "converted")
    assert report.share == report.plan.share == 0.75
    assert report.share_of_parameters == report.plan.share_of_parameters == 0.75 * 1024 / 1088
    assert "quantized by now: 75.0% of the bytes of these weights, 70.6% of all parameters" in str(report)


def test_refusals_and_notes_are_kept_in_order_and_once(report):
    for _ in range(2):
        report.refuse("share_activations", "linear_1", "its input is written in place")
        report.refuse("fuse_residual", "add", "two readers")
        report.note("compiled by eager")
    assert report.refusals == [
        Refusal("share_activations", "linear_1", "its input is written in place"),
        Refusal("fuse_residual", "add", "two readers"),
    ]
    assert report.notes == ["compiled by eager"]
    lines = str(report).splitlines()
    assert lines[-3:] == [
        "refused: share_activations at linear_1: its input is written in place",
        "refused: fuse_residual at add: two readers",
        "note: compiled by eager",
    ]


def test_check_is_loud_about_what_is_pending(report):
    with pytest.raises(PlanError, match=r"without data yet: a\.weight, b\.weight"):
        report.check()
    for path in report.pending:
        report.mark(path, "converted")
    assert report.check() is report


def test_check_is_loud_about_patterns_without_effect():
    with pytest.warns(OlqFxWarning, match="matches nothing"):
        plan = plan_for({"quantization": "fp8", "ignore": ["typo"]}, nn.Sequential(nn.Linear(4, 4)), strict=False)
    report = Report(plan)
    report.mark("0.weight", "converted")
    with pytest.raises(PlanError, match="'typo' matches nothing"):
        report.check()
    assert "warning: ignore: the pattern 'typo' matches nothing" in str(report)


class Quantized(nn.Parameter):
    """What is known of a converted weight from below."""

    __olq_fx_quantized__ = True

    class spec:  # noqa: N801
        weight, activation, weight_rule, activation_rule, transposed = "mxfp8", "mxfp8", "ceil", "ceil", False


def test_a_second_run_says_that_there_was_nothing_to_do():
    model = nn.Sequential(nn.Linear(32, 4, bias=False))
    model[0].weight = Quantized(torch.zeros(4, 32), requires_grad=False)
    report = Report(plan_for("mxfp8", model))
    assert report.already == ("0.weight",)
    assert report.share == 1
    assert "nothing to do: the requested layers were quantized before" in str(report)
    assert report.check() is report


def test_json_is_strict_and_complete(report):
    report.mark("a.weight", "converted")
    report.refuse("swap", "mm", "dynamic weight")
    read = json.loads(report.to_json(), parse_constant=lambda token: pytest.fail(token))
    assert read == report.to_dict()
    assert {row["path"]: row["status"] for row in read["rows"]} == {
        "a.weight": "converted",
        "b.weight": "pending",
        "c.weight": "left alone",
        "lm_head.weight": "left alone",
    }
    assert (read["share"], read["frozen"]) == (0.25, ["a.weight"])
    assert read["refusals"] == [{"what": "swap", "where": "mm", "reason": "dynamic weight"}]


def test_the_table_has_every_weight_with_its_status(report):
    report.mark("a.weight", "converted")
    lines = str(report).splitlines()
    for path, status in {"a": "converted", "b": "pending", "c": "left alone", "lm_head": "left alone"}.items():
        assert any(line.strip().startswith(f"{path}.weight ") and status in line for line in lines)
    assert any("also twin.weight" in line for line in lines)
    assert "1 converted, 1 pending, 2 left alone; quantized by now: 25.0%" in str(report)


def test_a_report_of_nothing():
    report = Report(plan_for(None, nn.ReLU()))
    assert "no weights; quantized by now: 0.0%" in str(report)
    assert report.check() is report
    json.loads(report.to_json())
