"""Routing of pairs to experts by Triton kernels: the order, the tiles of segments, the sum over choices."""

import itertools

import pytest
import torch
from expert_samples import meta, segments_of
from hypothesis import given, settings
from hypothesis import strategies as st

from olq_fx.kernels import experts, triton_sorting
from olq_fx.kernels.experts import Segments
from olq_fx.testing import assert_kernel_code, assert_kernel_values

# One in the default run; the others, and the golden table of all kernels, with the slow tests.
CAPABILITIES = (90, *(pytest.param(other, marks=pytest.mark.slow) for other in (80, 89, 100, 120)))
LENGTHS = st.lists(st.sampled_from([0, 0, 1, 2, 15, 16, 17, 40]), min_size=1, max_size=9)


def routed(ids, experts):
    segments = triton_sorting.route(ids, experts)
    return segments.order, segments.offsets


def expected_route(ids, count):
    segments = experts.route(ids, count)
    return segments.order, segments.offsets


@given(
    tokens=st.integers(0, 150),
    top_k=st.integers(1, 4),
    count=st.sampled_from([1, 2, 3, 8, 30]),
    dtype=st.sampled_from([torch.int32, torch.int64]),
    beyond=st.sampled_from([0, 1, 5]),
    seed=st.integers(0, 99),
)
@settings(max_examples=40)
def test_the_order_is_the_stable_one(interpreter, tokens, top_k, count, dtype, beyond, seed):
    """`beyond`: some indices are the sentinel, or nobody's. 128 tokens are the most that one program sorts."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-min(beyond, 1), count + beyond, (tokens, top_k), generator=generator).to(dtype)
    assert_kernel_values(interpreter, routed, expected_route, ids, count)


def test_the_reference_orders_by_expert_and_then_by_pair():
    segments = experts.route(torch.tensor([[2, 0], [3, 2], [0, -1]]), 3)
    assert segments.offsets.tolist() == [0, 2, 2, 4]
    assert segments.order.tolist() == [1, 4, 0, 3, 2, 5]
    assert segments.top_k == 2


@pytest.mark.parametrize(("tokens", "top_k", "count"), [(700, 1, 5), (300, 2, 130), (1100, 4, 6)])
def test_many_chunks(interpreter, tokens, top_k, count):
    ids = torch.randint(0, count + 1, (tokens, top_k))
    ids[: tokens // 2] = count - 1
    assert_kernel_values(interpreter, routed, expected_route, ids, count)


def tiles(offsets, m, block_m, tail):
    table, calls = triton_sorting.table_calls(Segments(offsets), m, block_m, tail)
    for call in calls:
        call.run()
    return table


def expected_tiles(offsets, m, block_m, tail):
    found = []
    ends = [*offsets.tolist(), *([m] if tail else [])]
    for expert, (start, end) in enumerate(itertools.pairwise(ends)):
        found += [(expert, first, end) for first in range(start, end, block_m)]
    return found


@given(
    lengths=LENGTHS,
    rest=st.sampled_from([0, 3, 40]),
    block_m=st.sampled_from([16, 32]),
    tail=st.booleans(),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_the_table_has_every_tile_once(interpreter, lengths, rest, block_m, tail, dtype):
    offsets, m = segments_of(lengths, dtype=dtype).offsets, sum(lengths) + rest
    if m == 0:
        return
    found = interpreter.call(tiles, offsets, m, block_m, tail)
    wanted = expected_tiles(offsets, m, block_m, tail)
    assert [tuple(tile) for tile in found.T.tolist()[: len(wanted)]] == wanted
    assert (found[0, len(wanted) :] == -1).all()


@given(m=st.integers(1, 300), count=st.integers(1, 40), block_m=st.sampled_from([16, 64]), tail=st.booleans())
def test_no_routing_needs_more_tiles_than_there_are_and_one_needs_all(m, count, block_m, tail):
    segments = min(count + tail, m)
    lengths = [1] * (segments - 1) + [m - segments + 1]
    needed = sum(-(-length // block_m) for length in lengths)
    assert triton_sorting.tiles_of(m, count, block_m, tail) == needed


@given(wrong=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=9), m=st.integers(1, 100))
@settings(max_examples=20)
def test_offsets_that_are_none_lead_to_no_row_outside(interpreter, wrong, m):
    found = interpreter.call(tiles, torch.tensor(wrong), m, 16, True)
    used = found[:, found[0] >= 0]
    assert (used[1] >= 0).all()
    assert (used[2] <= m).all()


@given(
    tokens=st.integers(0, 9),
    top_k=st.integers(1, 4),
    n=st.sampled_from([1, 70, 600]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16, torch.float32]),
    seed=st.integers(0, 99),
)
@settings(max_examples=25)
def test_the_sum_over_choices_is_taken_in_order_and_skips_what_is_nobodys(interpreter, tokens, top_k, n, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, 5, (tokens, top_k), generator=generator)
    rows = torch.randn(tokens * top_k, n, generator=generator).to(dtype)
    rows[((ids < 0) | (ids >= 4)).reshape(-1)] = torch.nan
    weights = torch.rand(tokens, top_k, generator=generator)
    y = assert_kernel_values(interpreter, triton_sorting.combine, experts.combine, rows, ids, weights, 4)
    assert y.isfinite().all()
    assert y.dtype == dtype


@pytest.mark.parametrize("count", [8, 128, 256])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_code_stays_in_registers(capability, count):
    for tokens, top_k in ((1, 8), (64, 8), (4096, 8)):
        ids, m = meta((tokens, top_k), torch.int64), tokens * top_k
        segments = Segments(meta((count + 1,), torch.int32), meta((m,), torch.int32), top_k)
        out, weights = meta((tokens, 4096)), meta((tokens, top_k), torch.float32)
        calls = triton_sorting.route_calls(ids, segments)
        calls += triton_sorting.table_calls(segments, m, 16, True)[1]
        calls += triton_sorting.combine_calls(meta((m, 4096)), ids, weights, count, out)
        for call in calls:
            assert_kernel_code(call.kernel, call.args, call.constants, {capability: ""}, **call.options)
