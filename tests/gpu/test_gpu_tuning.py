"""On a GPU: candidates are timed, what they compute is compared, and the table of it is followed."""

import pytest
import torch

from olq_fx import tuning
from olq_fx.kernels import triton_ops
from olq_fx.kernels.support import capability_of
from olq_fx.kernels.tuned_json import from_text, to_text
from olq_fx.kernels.tuned_problem import Problem
from olq_fx.kernels.tuned_tables import blocking_for, use_tuned
from olq_fx.tuning_measure import Stopwatch

pytestmark = pytest.mark.gpu

INT8 = {"activation": "int8_per_token", "weight": "int8_per_channel_static", "dtype": "bfloat16"}
MX = {"activation": "mxfp8", "weight": "mxfp8", "dtype": "bfloat16"}
PROBLEMS = [
    Problem(family="product", **INT8, m=16, n=1024, k=1024),  # type: ignore[arg-type]
    Problem(family="chain", **MX, m=64, n=512, k=512, chain="silu", gated="paired", output="mxfp8"),  # type: ignore[arg-type]
    Problem(family="grouped", **MX, m=64, n=512, k=512, experts=4),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.family)
def test_candidates_are_timed_and_the_table_is_followed(problem):
    capability, device = capability_of(None), torch.device("cuda", torch.cuda.current_device())
    with Stopwatch(rounds=3) as watch:
        found = tuning.tune([problem], capability, candidates=4, watch=watch, device=tuning.gpu_here(capability))
    [result] = found.results
    assert [one.dropped for one in result.tried if "does not run" in one.dropped] == []
    assert result.choice is not None
    assert result.choice.measured
    assert found.table.device == torch.cuda.get_device_name()
    with use_tuned(from_text(to_text(found.table), "the test")) as used:
        assert used.ignored == ()
        assert blocking_for(problem, capability, device) == result.choice.blocking


def test_a_tuned_product_is_the_product():
    problem = PROBLEMS[0]
    capability = capability_of(None)
    x = torch.randn(problem.m, problem.k, device="cuda", dtype=torch.bfloat16)
    weight = triton_ops.quantize(torch.randn(problem.n, problem.k, device="cuda"), problem.weight, "amax")
    given = (x, weight, problem.weight, problem.activation, "amax", None, None)
    plain = triton_ops.linear(*given)
    with use_tuned(tuning.tune([problem], capability, candidates=3).table):
        tuned, again = triton_ops.linear(*given), triton_ops.linear(*given)
    assert torch.equal(tuned, again)
    assert torch.equal(tuned, plain), "sums of int8 are exact in every order"
