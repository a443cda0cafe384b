"""What Inductor is offered of a fused kernel, and the text that it is made of."""

import pytest

from olq_fx import torch_templates
from olq_fx.kernels.blocking import Blocking
from olq_fx.kernels.template_operands import tile_choices
from olq_fx.kernels.template_sources import Side


def test_one_choice_is_offered_unless_inductor_may_measure(monkeypatch: pytest.MonkeyPatch):
    first = Blocking(64, 128, 128, num_warps=8, num_stages=3)
    monkeypatch.setattr(torch_templates, "wants_tuning", lambda: False)
    assert tile_choices(first) == [first]
    monkeypatch.setattr(torch_templates, "wants_tuning", lambda: True)
    found = tile_choices(first)
    assert found[0] == first
    assert len(found) == len(set(found)) == 18
    # What the text depends on is the same in all.
    assert {(tile.block_n, tile.block_k, tile.split_k, tile.swap) for tile in found} == {(128, 128, 1, False)}


def test_an_operand_names_the_scales_that_it_has():
    plain = Side("A", False, False, ("plain", "", 1, "", 1, 1))
    assert plain.arguments == ("A",)
    assert plain.pointers == "A, None, None"
    assert plain.strides == ['{{stride("A", 0)}}', "0", "0", "0", "0"]
    block = Side("B0", False, True, ("e4m3", "", 1, "k", 128, 128))
    assert block.arguments == ("B0", "B0_OUTER")
    assert block.pointers == "B0.to(tl.pointer_type(tl.uint8), bitcast=True), None, B0_OUTER"
    assert block.strides[3:] == ['{{stride("B0_OUTER", 0)}}', '{{stride("B0_OUTER", 1)}}']
