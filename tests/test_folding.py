"""Rows of repeated blocks folded into one, exactly; and what two plans decide differently."""

import json

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import olq_fx
from olq_fx.folding import fold
from olq_fx.plan import COLUMNS, plan_for


def folded(paths: list[str], keys: list[str] | None = None) -> list[tuple[str, int]]:
    return [(one.text, len(one.members)) for one in fold(paths, keys or [""] * len(paths))]


def test_blocks_are_folded_with_their_numbers():
    assert folded(["a.0.b", "a.1.b", "a.2.b"]) == [("a.{0-2}.b", 3)]
    assert folded(["a.0.b", "a.0.c", "a.1.b", "a.1.c"]) == [("a.{0,1}.b", 2), ("a.{0,1}.c", 2)]
    assert folded(["a.0", "a.1", "a.3", "a.5", "a.6", "a.7"]) == [("a.{0,1,3,5-7}", 6)]
    assert folded(["a.7", "a.b", "7"]) == [("a.7", 1), ("a.b", 1), ("7", 1)]
    assert folded(["a2.x", "a3.x"]) == [("a2.x", 1), ("a3.x", 1)]
    assert folded(["a.0", "a.1", "a.2"], ["x", "y", "x"]) == [("a.{0,2}", 2), ("a.1", 1)]
    assert folded([]) == []


def test_only_whole_products_are_folded():
    paths = [f"l.{i}.e.{j}" for i in range(3) for j in range(4) if (i, j) != (1, 2)]
    assert folded(paths) == [("l.{0,2}.e.{0-3}", 8), ("l.1.e.{0,1,3}", 3)]


def test_long_lists_of_numbers_are_cut():
    assert folded([f"a.{n}" for n in range(0, 40, 2)]) == [("a.{0,2,4,6,8,10,...}", 20)]


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 2, st.sampled_from("xy")), unique_by=lambda item: item[:2]))
def test_every_row_is_in_one_fold_and_folds_are_products(rows):
    paths = [f"l.{i}.e.{j}.w" for i, j, _ in rows]
    found = fold(paths, [key for _, _, key in rows])
    assert sorted(index for one in found for index in one.members) == list(range(len(rows)))
    for one in found:
        chosen = [rows[index] for index in one.members]
        firsts, seconds = ({row[axis] for row in chosen} for axis in (0, 1))
        assert len(chosen) == len(firsts) * len(seconds)
        assert len({row[2] for row in chosen}) == 1


class Model(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"up": nn.Linear(64, 128), "down": nn.Linear(128, 64)}) for _ in range(blocks)
        )
        self.lm_head = nn.Linear(64, 64)


def test_the_table_of_a_plan_and_of_a_report_fold_and_need_not():
    model = Model(40)
    plan = plan_for({"quantization": "mxfp8", "ignore": ["layers.7.up"]}, model)
    text = str(plan)
    assert len(text.splitlines()) < 14
    for words in ("layers.{0-6,8-39}.up.weight", " 39 ", "layers.{0-39}.down.weight", " 40 ", "layers.7.up.weight"):
        assert words in text
    assert "1.2 MiB -> 321.8 KiB" in text
    assert len(plan.text(folded=False).splitlines()) > 80
    report = olq_fx.quantize_(model, "mxfp8")
    assert "layers.{0-39}.up.weight" in str(report)


def test_equal_plans_have_no_difference():
    plan = plan_for("fp8", Model(2))
    diff = olq_fx.diff_plans(plan, plan_for("FP8-per-tensor", Model(2)))
    assert not diff
    assert (diff.changed, diff.only_before, diff.only_after) == ((), (), ())
    assert str(diff).startswith("the plans decide the same; size of all weights: ")


def test_a_difference_names_what_changed_folded():
    before = plan_for({"quantization": "mxfp8", "ignore": ["layers.0.up"]}, Model(12))
    after = plan_for({"quantization": "mxfp4", "ignore": ["layers.0.up"], "include": ["lm_head"]}, Model(13))
    diff = olq_fx.diff_plans(before, after)
    assert len(diff.changed) == 24
    assert [row.path for row in diff.only_after] == ["layers.12.up.weight", "layers.12.down.weight"]
    assert diff.only_before == ()
    text = str(diff)
    for words in ("layers.{1-11}.up.weight", "mxfp8 / mxfp8", "mxfp4 / mxfp4, scales by mse", "not there", "lm_head"):
        assert words in text
    assert "leave: output embedding" in text
    assert diff.bytes_before == before.bytes_after
    read = json.loads(json.dumps(diff.to_dict(), allow_nan=False))
    assert [pair["after"]["path"] for pair in read["changed"]][-1] == "lm_head.weight"


def test_a_weight_of_two_names_is_one_in_a_difference():
    model = nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)})
    model["b"].weight = model["a"].weight
    one = plan_for("fp8", model)
    other = plan_for("fp8", nn.ModuleDict({"b": nn.Linear(8, 8)}))
    diff = olq_fx.diff_plans(one, other)
    assert [row.path for row in diff.only_before] == ["a.weight"]
    with torch.device("meta"):
        third = plan_for("int8", nn.ModuleDict({"a": nn.Linear(8, 8)}))
    assert [old.path for old, _ in olq_fx.diff_plans(one, third).changed] == ["a.weight"]


def test_a_row_alone_has_the_cells_of_the_table():
    row = plan_for("mxfp8", Model(1)).rows[0]
    assert row.cells("converted")[:6] == ("layers.0.up.weight", "", "linear", "128 x 64", "float32", "converted")
    assert len(row.cells("converted")) == len(COLUMNS)
