"""Triton kernels around the products of experts: the order of pairs, the table of tiles, the sum over choices.

Everything stays on the device, and every grid follows from shapes alone: nothing waits for the host, and a CUDA graph
of it serves all routings. Only integers are counted, so that no order of programs shows.

- `count_experts`, `sum_counts`, `place_pairs`: a stable counting sort of (token, choice) pairs by expert, by chunks.
  Where there is one chunk, `place_pairs` counts itself and is the only kernel.
- `tile_table`: which tile of rows belongs to which expert.
- `combine`: the weighted sum of the products of each token.
"""

import triton
import triton.language as tl


@triton.jit
def _experts_of(ids, pairs, R, E):
    """The int32 expert of each pair: E for one that belongs to nobody here, E + 1 beyond the R pairs."""
    found = tl.load(ids + pairs, mask=pairs < R, other=0).to(tl.int64)
    mine = tl.where((found >= 0) & (found < E), found, E).to(tl.int32)
    return tl.where(pairs < R, mine, E + 1)


@triton.jit
def count_experts(ids, counts, R, E, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """`counts` (chunks, E + 1) int32: how many pairs of each chunk of BLOCK belong to each expert, and to nobody.

    BINS: a power of two, E + 2 at least.
    """
    chunk = tl.program_id(0)
    found = tl.histogram(_experts_of(ids, chunk * BLOCK + tl.arange(0, BLOCK), R, E), BINS)
    bins = tl.arange(0, BINS)
    tl.store(counts + chunk * (E + 1) + bins, found, mask=bins <= E)


@triton.jit
def sum_counts(counts, totals, chunks, E, BLOCK_C: tl.constexpr, BLOCK_E: tl.constexpr):
    """Each of `counts` becomes the sum of those of the chunks before; `totals` (E + 1,) the sum of all."""
    experts = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    before = tl.zeros((BLOCK_E,), dtype=tl.int32)
    for first in range(0, chunks, BLOCK_C):
        rows = first + tl.arange(0, BLOCK_C)
        at = rows[:, None] * (E + 1) + experts[None, :]
        inside = (rows[:, None] < chunks) & (experts[None, :] <= E)
        found = tl.load(counts + at, mask=inside, other=0)
        tl.store(counts + at, before[None, :] + tl.cumsum(found, axis=0) - found, mask=inside)
        before += tl.sum(found, axis=0)
    tl.store(totals + experts, before, mask=experts <= E)


@triton.jit
def place_pairs(
    ids, counts, totals, order, offsets, R, E, BINS: tl.constexpr, BLOCK: tl.constexpr, SLICE: tl.constexpr
):
    """`order` (R,) and `offsets` (E + 1,) from what `sum_counts` left; from `ids` alone where that is None."""
    chunk = tl.program_id(0)
    pairs = chunk * BLOCK + tl.arange(0, BLOCK)
    experts = _experts_of(ids, pairs, R, E)
    bins = tl.arange(0, BINS)
    sizes = tl.histogram(experts, BINS) if counts is None else tl.load(totals + bins, mask=bins <= E, other=0)
    starts = tl.cumsum(sizes, axis=0) - sizes
    if chunk == 0:
        tl.store(offsets + bins, starts, mask=bins <= E)
    at = tl.gather(starts, experts, 0)
    if counts is not None:
        at += tl.load(counts + chunk * (E + 1) + experts, mask=pairs < R, other=0)
    for first in range(0, BLOCK, SLICE):
        others = chunk * BLOCK + first + tl.arange(0, SLICE)
        same = _experts_of(ids, others, R, E)[None, :] == experts[:, None]
        at += tl.sum((same & (others[None, :] < pairs[:, None])).to(tl.int32), axis=1)
    tl.store(order + at, pairs, mask=pairs < R)


@triton.jit
def tile_table(
    offsets, table, M, E, tiles, TAIL: tl.constexpr, BLOCK_M: tl.constexpr, BINS: tl.constexpr, BLOCK_T: tl.constexpr
):
    """`table` (3, tiles) int32: the expert, the first row and the end of the segment of each tile of BLOCK_M rows.

    The expert of an entry that is not used is -1. TAIL: whether rows from `offsets[E]` to M have tiles, of expert E.
    Whatever `offsets` holds, no tile leaves the M rows. BINS: a power of two, E + 1 at least.
    """
    bins = tl.arange(0, BINS)
    start, end = _segment(offsets, bins, M, E)
    count = tl.where(bins < E + TAIL, tl.cdiv(tl.maximum(end - start, 0), BLOCK_M), 0)
    ends = tl.cumsum(count, axis=0)
    tile = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    before = ends[None, :] <= tile[:, None]
    expert = tl.sum(before.to(tl.int32), axis=1)
    first = tl.sum(tl.where(before, count[None, :], 0), axis=1)
    used = expert < E + TAIL
    start, end = _segment(offsets, tl.where(used, expert, 0), M, E)
    inside = tile < tiles
    tl.store(table + tile, tl.where(used, expert, -1), mask=inside)
    tl.store(table + tiles + tile, start + (tile - first) * BLOCK_M, mask=inside)
    tl.store(table + 2 * tiles + tile, end, mask=inside)


@triton.jit
def _segment(offsets, experts, M, E):
    """First row and end of the segments of experts; that of E, and of what is beyond, ends with the M rows."""
    start = tl.load(offsets + tl.minimum(experts, E)).to(tl.int32)
    end = tl.load(offsets + tl.minimum(experts + 1, E)).to(tl.int32)
    end = tl.where(experts < E, end, M)
    return tl.minimum(tl.maximum(start, 0), M), tl.minimum(tl.maximum(end, 0), M)


@triton.jit
def combine(
    rows, ids, weights, out, T, N, E, TOP_K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """`out` (T, N): the rows (T x TOP_K, N) of each token times its weights, added in order, rounded once."""
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        pairs = tokens * TOP_K + choice
        expert = tl.load(ids + pairs, mask=tokens < T, other=-1).to(tl.int64)
        mine = (expert >= 0) & (expert < E)
        weight = tl.load(weights + pairs, mask=mine, other=0.0)
        at = pairs.to(tl.int64)[:, None] * N + columns[None, :]
        value = tl.load(rows + at, mask=mine[:, None] & (columns[None, :] < N), other=0.0).to(tl.float32)
        total += value * weight[:, None]
    at = tokens.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=(tokens[:, None] < T) & (columns[None, :] < N))
