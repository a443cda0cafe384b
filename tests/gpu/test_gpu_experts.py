"""On a GPU: the operators of experts give what they give on a CPU, within what sums in another order may change."""

import pytest
import torch
from expert_samples import stack_of

from olq_fx.formats import FORMATS
from olq_fx.schemes import SCHEMES

pytestmark = pytest.mark.gpu
OPS = torch.ops.olq_fx


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rows_of_experts(scheme):
    slot = SCHEMES[scheme].moe
    activation = slot.activation or ""
    rule = FORMATS[activation].activation_rule if activation else ""
    stack = stack_of(torch.randn(5, 96, 256).bfloat16(), slot.weight, torch.randn(5, 96).bfloat16())
    x, ids = torch.randn(300, 256).bfloat16(), torch.randint(-1, 6, (300,))
    ends = torch.tensor([7, 7, 200, 201, 290], dtype=torch.int32)
    for operator, where in ((OPS.grouped_linear, ends), (OPS.gathered_linear, ids)):
        arguments = (slot.weight, activation, rule)
        expected = operator(x, where, stack.parts, *arguments, stack.bias)
        parts = [part.cuda() for part in stack.parts]
        found = operator(x.cuda(), where.cuda(), parts, *arguments, stack.bias.cuda()).cpu()
        # The same codes: only the order of float32 sums differs, and with it one rounding to bf16.
        torch.testing.assert_close(
            found.float(), expected.float(), rtol=2**-7, atol=2**-8 * expected.abs().max().item()
        )
