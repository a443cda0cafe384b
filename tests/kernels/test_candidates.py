"""Candidates of a problem: each gives the right product, has the right shape for its instruction, and differs."""

import dataclasses
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from olq_fx import numerics, tuning_measure
from olq_fx.cost_model import SHARED_MEMORY
from olq_fx.formats import get_format
from olq_fx.kernels import reference, triton_candidates
from olq_fx.kernels.blocking import Blocking
from olq_fx.kernels.kernel_sources import FAMILIES
from olq_fx.kernels.triton_calls import run
from olq_fx.kernels.triton_candidates import (
    Work,
    candidates_of,
    estimate,
    first_guess,
    shared_memory,
    slow_or_wrong,
)
from olq_fx.kernels.tuned_launches import launches, random_operands
from olq_fx.kernels.tuned_problem import Problem, blocking_fault, bucket, scale_columns
from olq_fx.schemes import SCHEMES
from olq_fx.testing import assert_product_close, assert_same_bits

CAPABILITIES = (80, 89, 90, 100, 120)
TILED = [name for name, found in SCHEMES.items() if found.linear.activation in ("fp8_per_block_dynamic", "mxfp8")]


def problem(scheme="fp8_per_block", family="product", m=64, n=256, k=512, dtype="bfloat16", **more):
    slot = SCHEMES[scheme].linear
    if family == "chain":
        more = {"chain": "silu", "gated": "paired", "output": slot.activation, **more}
    if family == "grouped":
        more = {"experts": 3, **more}
    names = {"activation": slot.activation or "", "weight": slot.weight}
    return Problem(family=family, m=m, n=n, k=k, dtype=dtype, **names, **more)


def quantize(values, format):
    return list(reference.quantize(values, format, get_format(format).rules[0]))


def compute(asked, capability, blocking, seed):
    """What a blocking computes of random operands: in the interpreter's process."""
    operands = random_operands(asked, torch.device("cpu"), seed, quantize)
    for output in operands.outputs:
        output.view(torch.uint8).fill_(0xFF)
    run(launches(asked, operands, capability, blocking))
    return operands.outputs, operands.x, operands.weight


def order_of(blocking):
    """In which order a blocking adds, as far as the interpreter has one."""
    return blocking.split_k, blocking.block_k, blocking.form == "gemv"


def decoded(parts, format, k):
    return numerics.dequantize(tuple(parts), get_format(format), k) if format else parts[0].float()


@pytest.mark.parametrize("scheme", ["fp8_per_block", "fp8_per_channel", "int8", "mxfp4", "nvfp4_per_token", "mxfp8"])
@given(data=st.data())
@settings(max_examples=4)
def test_every_candidate_gives_the_product_and_one_order_of_sums_one_result(interpreter, scheme, data):
    """Equal `split_k` and `block_k` of one form say in which order sums are taken: what else differs changes no bit."""
    capability = data.draw(st.sampled_from(CAPABILITIES))
    sizes = {"m": data.draw(st.sampled_from([1, 16, 64])), "n": data.draw(st.integers(17, 130)), "k": 264}
    asked = problem(scheme, **sizes)
    listed = candidates_of(Work.of(asked, capability))
    chosen = data.draw(st.sampled_from(listed))
    alike = [one for one in listed if order_of(one) == order_of(chosen)]
    [y], x, weight = interpreter.call(compute, asked, capability, chosen, 1)
    parts = decoded(x, asked.activation, asked.k), decoded(weight, asked.weight, asked.k)
    assert_product_close(y, *parts)
    other = data.draw(st.sampled_from(alike))
    [again], _, _ = interpreter.call(compute, asked, capability, other, 1)
    assert_same_bits(again, y)


@pytest.mark.parametrize("family", ["chain", "grouped"])
@given(data=st.data())
@settings(max_examples=3)
def test_candidates_of_other_kernels_agree_with_the_first_guess(interpreter, family, data):
    asked = problem(data.draw(st.sampled_from(TILED)), family, m=16, n=128, k=256)
    first, *others = candidates_of(Work.of(asked, 90))
    chosen = data.draw(st.sampled_from([one for one in others if one.block_k == first.block_k]))
    expected, _, _ = interpreter.call(compute, asked, 90, first, 2)
    assert_same_bits(interpreter.call(compute, asked, 90, chosen, 2)[0], expected)


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_candidates_are_valid_many_and_led_by_the_first_guess(family, capability):
    for scheme in TILED if family == "chain" else ("fp8_per_channel", "int8", "mxfp4_weight_only", "nvfp4_per_token"):
        for m in (1, 64, 4096):
            work = Work.of(problem(scheme, family, m, 4096, 4096), capability)
            first, *others = candidates_of(work, 12)
            assert first == first_guess(work)
            assert len(others) >= 3
            assert len({first, *others}) == len(others) + 1
            for one in others:
                assert blocking_fault(work.problem, one) == ""
                assert shared_memory(work, one) <= SHARED_MEMORY[capability]
                assert estimate(work, one) > 0
            assert blocking_fault(work.problem, first) == ""


def test_few_candidates_are_of_different_tiles():
    listed = candidates_of(Work.of(problem(m=64, n=4096, k=4096), 90), 6)
    assert len({(one.block_m, one.block_n, one.swap) for one in listed}) >= 4


@pytest.mark.parametrize(
    ("scheme", "family", "change", "said"),
    [
        ("fp8_per_block", "product", {"block_k": 256}, "block_k is at most 128"),
        ("fp8_per_block", "product", {"block_m": 48}, "block_m is a power of two"),
        ("fp8_per_block", "product", {"block_m": 8}, "16 rows"),
        ("fp8_per_block", "product", {"num_warps": 0}, "num_warps is a number from 1 to 32, not 0"),
        ("fp8_per_block", "product", {"num_stages": 9}, "num_stages is a number from 1 to 8"),
        ("fp8_per_block", "product", {"split_k": 5}, "4 K-blocks for 5 programs"),
        ("fp8_per_block", "product", {"block_m": 16, "swap": False}, "has 16, not 64"),
        ("fp8_per_block", "product", {"block_n": 32, "swap": True}, "has 32, not 64"),
        ("fp8_per_block", "product", {"block_m": 64, "block_n": 256}, "accumulators a thread"),
        ("fp8_per_block", "product", {"form": "rows"}, "form is one of"),
        ("fp8_per_block", "product", {"form": "persistent", "swap": False, "split_k": 2}, "does not split the sum"),
        ("fp8_per_block", "product", {"form": "persistent", "swap": True}, "is not swapped"),
        ("fp8_per_block", "product", {"form": "gemv", "swap": False}, "is for one row"),
        ("fp8_per_block", "grouped", {"form": "persistent", "swap": False}, "grouped has no form 'persistent'"),
        ("fp8_per_block", "product", {"block_k": 16}, "takes 32 columns at a time"),
        ("fp8_per_block", "product", {"block_m": 128}, "tiles of 128 for 64 rows"),
        ("fp8_weight_only", "product", {"block_n": 256, "num_stages": 8, "num_warps": 32}, "bytes of shared memory"),
        ("mxfp4", "product", {"block_k": 16}, "a multiple of the 32 columns"),
        ("fp8_per_block", "grouped", {"split_k": 2}, "grouped does not split"),
        ("fp8_per_block", "chain", {"block_n": 64, "swap": False}, "a multiple of the 128 columns"),
        ("fp8_per_block", "chain", {"swap": True}, "a chain is not swapped"),
    ],
)
def test_what_is_no_candidate_is_said(scheme, family, change, said):
    work = Work.of(problem(scheme, family), 90)
    blocking = dataclasses.replace(Blocking(64, 64, 128, swap=family != "chain", num_warps=4), **change)
    assert said in slow_or_wrong(work, blocking)


def test_one_row_has_candidates_of_a_form_of_its_own():
    work, first = Work.of(problem("mxfp8", m=1, n=4096, k=8192), 90), Blocking(1, 4, 2048, num_warps=4, form="gemv")
    assert slow_or_wrong(work, first) == ""
    assert "numbers a thread" in slow_or_wrong(work, dataclasses.replace(first, block_n=16))
    assert blocking_fault(work.problem, dataclasses.replace(first, block_k=16)) == "block_k is a multiple of 32"
    with mock.patch.object(triton_candidates, "first_guess", return_value=first):
        listed = candidates_of(work)
    assert {one.form for one in listed} == {"gemv", "tiles"}
    alone = dataclasses.replace(first, block_n=1, block_k=512, num_warps=1)
    assert estimate(work, alone) > estimate(work, dataclasses.replace(first, block_n=1))


def test_many_rows_are_tried_in_both_forms_where_the_first_guess_is_persistent():
    work, first = Work.of(problem(m=4096, n=4096, k=4096), 90), Blocking(128, 128, 128, num_warps=8, form="persistent")
    with mock.patch.object(triton_candidates, "first_guess", return_value=first):
        listed = candidates_of(work)
    assert {one.form for one in listed} == {"persistent", "tiles"}
    assert not any(one.swap or one.split_k > 1 for one in listed if one.form == "persistent")


def test_columns_that_share_a_scale():
    assert scale_columns(get_format("fp8_per_block_dynamic")) == (0, 128)
    assert scale_columns(get_format("fp8_per_token")) == (0, 0)
    assert scale_columns(get_format("mxfp4_dualscale")) == (32, 512)
    assert scale_columns(get_format("nvfp4")) == (16, 0)


def test_rows_stand_in_buckets_of_powers_of_two():
    assert [bucket(m) for m in (1, 2, 3, 5, 64, 65, 4096)] == [1, 2, 4, 8, 64, 128, 4096]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_order_follows_what_there_is_to_do(family):
    """More of it takes longer, by every blocking that serves both."""
    small, large = (Work.of(problem("fp8_per_block", family, 64, 4096, k), 90) for k in (1024, 8192))
    shared = set(candidates_of(small)) & set(candidates_of(large))
    assert shared
    assert all(estimate(small, one) < estimate(large, one) for one in shared)


# Timing, but for the time: in the interpreter


class Clock:
    """Runs an entry once; every call takes a microsecond."""

    def prepare(self, entry):
        entry.make(0)()
        entry.make(1)()
        return lambda: 1e-6


def timed(asked, blocking, against, wrong):
    """`tuning_measure.time_candidate` without a GPU; `wrong` is a blocking that computes something else."""
    from olq_fx import tuning_measure as measure

    def launched(problem, operands, capability, cut):
        calls = launches(problem, operands, capability, cut)
        return calls[:-1] if cut == wrong else calls

    fakes = {"_device": lambda: torch.device("cpu"), "capability_of": lambda device: 90, "CudaTimer": Clock}
    with mock.patch.multiple(measure, **fakes, launches=launched):
        measure._copy.cache_clear()
        return measure.time_candidate(asked, blocking, against, 3), measure._copy.cache_info().currsize


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_timed_is_compared_with_the_first_guess(interpreter, family):
    asked = problem("mxfp8", family, m=16, n=64, k=128)
    first, *others = candidates_of(Work.of(asked, 90))
    assert interpreter.call(timed, asked, first, None, None) == (1e-6, 2)
    assert interpreter.call(timed, asked, others[0], first, None) == (1e-6, 2)
    with pytest.raises(ArithmeticError, match="away from those of the first guess"):
        interpreter.call(timed, asked, others[0], first, others[0])


def test_a_copy_is_counted_by_all_that_a_call_uses():
    whole = tuning_measure.touched(problem("fp8_per_channel", m=16, n=256, k=512))
    assert whole == 4 * 16 * 256 + 16 * 512 + 4 * 16 + 256 * 512 + 4 * 256
    assert tuning_measure.touched(problem("mxfp4", "grouped", m=16, n=256, k=512)) == (
        4 * 16 * 256 + 16 * (256 + 16) + 3 * 256 * (256 + 16)
    )
