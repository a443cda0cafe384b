// native_few.h.
//
// The codes of a row of w are multiplied as they are, and the sums of groups scaled: far less work than scaling each
// weight. That takes ordinary scales and an ordinary row of x. A section of w (512 columns) or a row of x that is not
// is decoded as `dequantize` does instead, which is decided for each section and each row of x alone. So an output is
// computed from its own two rows in an order that depends on K only: not on M, N, threads.

#include "native_few.h"

#include <new>

#include "native_wide.h"

namespace {

constexpr int CHUNK = 16;                   // rows of w of a task
constexpr int X_BYTES = 16 << 10;           // of x that stay in the nearest cache while the rows of w pass
constexpr int STEP = X_BYTES / (UNIT * 4);  // units of one row of x that are that many bytes
static_assert(STEP / FEW % SECTION == 0, "whole sections, however many rows there are");

// Rows of x, padded with zeros to `units` whole units each.
struct FewRows {
    const float* data;
    const float* arranged;  // the same in the order of Codes
    int64_t units;
    bool ordinary;
};

// Units begin to end of w.
struct Range {
    int64_t begin, end;
};

// What is read of rows of w in a range: codes, and a scale for each span or two for each unit.
template <int together> struct Strips {
    const uint8_t* codes[together];
    float scales[together][STEP * 2];
};

// ---- the codes as they are

template <int rows> inline void add_scaled(const wide (&part)[rows], float scale, wide (&sum)[rows]) {
    UNROLL for (int m = 0; m < rows; m++)
        sum[m] += part[m] * scale;
}

// part (rows) += one unit of codes @ x. Where each half has a scale of its own, the first half goes to `sum`.
template <int element, bool halves, int rows> inline void add_unit(const uint8_t* codes, const float* x, int64_t row,
                                                                   const float* scales, wide (&part)[rows],
                                                                   wide (&sum)[rows], Seen& seen) {
    wide value[PARTS];
    Codes<element>::read(codes, value, seen);
    UNROLL for (int j = 0; j < PARTS; j++) {
        if (halves && j == PARTS / 2) {
            add_scaled(part, scales[0], sum);
            UNROLL for (int m = 0; m < rows; m++)
                part[m] = wide{};
        }
        UNROLL for (int m = 0; m < rows; m++)
            part[m] += value[j] * load_wide(x + m * row + LANES * j);
    }
}

// sums (together, rows) += strips of w @ x over a range. False if a code was NaN: the sums are as they were. `single`
// says that a span is one unit; `ahead` bytes from what is read is what will be read next.
template <int element, bool halves, bool single, int rows, int together>
inline bool dot_codes(const Strips<together>& w, const FewRows& x, Range at, int span, int64_t ahead, wide* sums) {
    constexpr int bytes = element == E2M1 ? UNIT / 2 : UNIT;
    wide sum[together][rows];
    Seen seen;
    UNROLL for (int t = 0; t < together; t++) {
        UNROLL for (int m = 0; m < rows; m++)
            sum[t][m] = sums[t * rows + m];
    }
    for (int64_t u = at.begin, group = 0; u < at.end; group++) {
        int64_t stop = single ? u + 1 : u + span < at.end ? u + span : at.end;
        wide part[together][rows] = {};
        for (; u < stop; u++) {
            UNROLL for (int t = 0; t < together; t++) {
                const uint8_t* codes = w.codes[t] + (u - at.begin) * bytes;
                __builtin_prefetch(codes + ahead);
                add_unit<element, halves, rows>(codes, x.arranged + u * UNIT, x.units * UNIT, w.scales[t] + 2 * group,
                                                part[t], sum[t], seen);
            }
        }
        UNROLL for (int t = 0; t < together; t++)
            add_scaled(part[t], w.scales[t][halves ? 2 * group + 1 : group], sum[t]);
    }
    if (seen.nan()) return false;
    UNROLL for (int t = 0; t < together; t++) {
        UNROLL for (int m = 0; m < rows; m++)
            sums[t * rows + m] = sum[t][m];
    }
    return true;
}

// The same of rows of w. False too if a scale is not ordinary.
template <int rows, int together, class RowType>
inline bool dot_fast(const RowType* w, const FewRows& x, Range at, wide* sums) {
    constexpr int element = RowType::ELEMENT;
    constexpr bool halves = RowType::HALVES;
    Strips<together> strips;
    bool all = true;
    for (int t = 0; t < together; t++) {
        float* to = strips.scales[t];
        for (int64_t u = at.begin; u < at.end; u += SECTION) {
            int64_t count = at.end - u < SECTION ? at.end - u : SECTION;
            all &= w[t].section_scales(u, count, Codes<element>::REBIAS, to);
            to += halves ? 2 * SECTION : SECTION / w[t].span();
        }
        strips.codes[t] = w[t].codes_of(at.begin);
    }
    if (!all) return false;
    int span = w[0].span();
    int64_t ahead = together * w[0].row_bytes();
    if (span == 1) return dot_codes<element, halves, true, rows, together>(strips, x, at, 1, ahead, sums);
    return dot_codes<element, false, false, rows, together>(strips, x, at, span, ahead, sums);
}

// ---- decoded weights

// sums (rows) += one row of w @ x over a range of at most a section, whatever it holds.
template <int rows, class RowType>
__attribute__((noinline)) void dot_decoded(const RowType& w, const FewRows& x, Range at, wide* sums) {
    alignas(32) float decoded[SECTION * UNIT];
    w.decode(at.begin, at.end, decoded);
    for (int m = 0; m < rows; m++) {
        f32x8 sum[4] = {};
        const float* other = x.data + (m * x.units + at.begin) * UNIT;
        for (int64_t c = 0; c < (at.end - at.begin) * UNIT; c += UNIT) {
            UNROLL for (int j = 0; j < 4; j++)
                sum[j] += load8(decoded + c + 8 * j) * load8(other + c + 8 * j);
        }
        sums[m] += widened((sum[0] + sum[1]) + (sum[2] + sum[3]));
    }
}

// The same, the codes as they are where everything is ordinary; `whole` is the end of the whole units of w.
template <int rows, class RowType>
void dot_section(const RowType& w, const FewRows& x, Range section, int64_t whole, wide* sums) {
    Range full{section.begin, section.end < whole ? section.end : whole};
    bool fast = x.ordinary && full.end > full.begin && dot_fast<rows, 1>(&w, x, full, sums);
    if (fast) section.begin = full.end;
    if (section.begin < section.end) dot_decoded<rows>(w, x, section, sums);
}

// ---- tasks

// sums (together, rows) += rows of w @ x over a range that begins with a section.
template <int rows, int together, class RowType>
inline void dot_rows(const RowType* w, const FewRows& x, Range at, int64_t k, wide* sums) {
    int64_t whole = at.end < k / UNIT ? at.end : k / UNIT;
    bool fast = x.ordinary && whole > at.begin && dot_fast<rows, together>(w, x, {at.begin, whole}, sums);
    if (fast && whole == at.end) return;
    for (int t = 0; t < together; t++) {
        for (int64_t u = fast ? whole : at.begin; u < at.end; u = u / SECTION * SECTION + SECTION) {
            int64_t end = u / SECTION * SECTION + SECTION;
            Range section{u, end < at.end ? end : at.end};
            dot_section<rows>(w[t], x, section, whole, sums + t * rows);
        }
    }
}

template <int rows, class RowType>
void few_rows_task(const Parts& w, const Format& format, const Shape& s, const FewRows& x, wide* sums, int64_t top) {
    // Independent chains of additions, enough to hide their latency.
    constexpr int together = rows == 1 ? 4 : rows <= 4 ? 2 : 1;
    int64_t count = s.n - top < CHUNK ? s.n - top : CHUNK;
    alignas(RowType) unsigned char storage[CHUNK * sizeof(RowType)];
    RowType* each = (RowType*)storage;
    // Rows beyond the last one of w are the last one again; what they give is dropped.
    for (int64_t r = 0; r < CHUNK; r++) new (each + r) RowType(w, format, s.k, top + (r < count ? r : count - 1));
    for (int64_t begin = 0; begin < x.units; begin += STEP / rows) {
        Range at{begin, begin + STEP / rows < x.units ? begin + STEP / rows : x.units};
        for (int64_t r = 0; r < count; r += together) dot_rows<rows, together>(each + r, x, at, s.k, sums + r * rows);
    }
}

// Rows of y from `first` on.
template <int rows, class RowType> void few_rows(const Parts& w, const Format& format, const Shape& s, const FewRows& x,
                                                 int64_t first, const Output& out, int threads) {
    int64_t tasks = ceil_div(s.n, CHUNK), grain = tasks / (threads * 8) + 1;
    parallel_for(tasks, grain, threads, [&](int64_t task) {
        wide sums[CHUNK * rows] = {};
        float line[CHUNK];
        int64_t top = task * CHUNK, count = s.n - top < CHUNK ? s.n - top : CHUNK;
        few_rows_task<rows, RowType>(w, format, s, x, sums, top);
        for (int64_t m = 0; m < rows && first + m < s.m; m++) {
            for (int64_t r = 0; r < count; r++) line[r] = sum_of(sums[r * rows + m]);
            write_row(out, first + m, top, count, line);
        }
    });
}

// ---- x

// Whether the products of a row with codes keep all their bits, and sums of them their range.
bool is_ordinary(const float* row, int64_t count) {
    bool all = true;
    for (int64_t i = 0; i < count; i++) {
        float size = magnitude(row[i]);
        all &= (size >= ORDINARY_LOW && size <= ORDINARY_HIGH) || size == 0.0f;
    }
    return all;
}

template <int element> void arrange(const float* from, int64_t count, float* to) {
    for (int64_t c = 0; c < count; c += UNIT)
        for (int i = 0; i < UNIT; i++) to[c + i] = from[c + Codes<element>::order(i)];
}

}  // namespace

bool few_rows_product(const Activation& x, const Parts& w, const Format& format, const Shape& s, const Output& out,
                      int threads) {
    int64_t padded = ceil_div(s.k, UNIT) * UNIT;
    int64_t rows = s.m <= 2 ? s.m : s.m <= 4 ? 4 : FEW;
    Buffer data(2 * rows * padded);
    if (!data.data) return false;
    float* arranged = data.data + rows * padded;
    bool ordinary[FEW], all = true;
    for (int64_t m = 0; m < s.m; m++) {
        read_row(x, s.k, m, 0, s.k, data.data + m * padded);
        all &= ordinary[m] = is_ordinary(data.data + m * padded, padded);
    }
    std::memset(data.data + s.m * padded, 0, size_t((rows - s.m) * padded) * 4);
    with_format(format, [&](auto kind) {
        using RowType = typename decltype(kind)::row;
        arrange<RowType::ELEMENT>(data.data, rows * padded, arranged);
        FewRows given{data.data, arranged, padded / UNIT, all};
        if (all) {
            (rows == 1   ? few_rows<1, RowType>
             : rows == 2 ? few_rows<2, RowType>
             : rows == 4 ? few_rows<4, RowType>
                         : few_rows<FEW, RowType>)(w, format, s, given, 0, out, threads);
            return;
        }
        for (int64_t m = 0; m < s.m; m++) {
            FewRows one{data.data + m * padded, arranged + m * padded, padded / UNIT, ordinary[m]};
            few_rows<1, RowType>(w, format, s, one, m, out, threads);
        }
    });
    return true;
}
