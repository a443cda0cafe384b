// y = x @ w.T of a quantized weight, decoded inside the product: never written to memory as a whole.
//
// Three ways: int8 by int8 in integers (native_integer.h); few rows of x (native_few.h); and else, here, panels of rows
// of w are decoded into cache, exactly as `dequantize` does, and a tile of 6 rows of w x 16 rows of x is accumulated in
// registers. Each output is computed from its own two rows in an order that depends on K and the way only: not on M, N,
// threads.

#include <atomic>
#include <vector>

#include "native_few.h"
#include "native_integer.h"

namespace {

constexpr int TILE_W = 6;                  // rows of w of a tile
constexpr int TILE_X = 16;                 // rows of x of a tile
constexpr int DEPTH = 256;                 // k's of a panel that is decoded at once
constexpr int PANEL = 48;                  // rows of w of a panel
constexpr int64_t BLOCK_BYTES = 32 << 20;  // of x, decoded
constexpr int BLOCK_TILES = 32;            // tiles of x that share a decoded panel
constexpr int64_t SERIAL = 1 << 16;        // as in native.py

// ---- many rows of x

// A tile of 16 rows of x, transposed: (k, 16), rows that are not there being zeros.
void pack_tile(const Activation& x, const Shape& s, int64_t row, float* to) {
    float part[TILE_X][DEPTH];
    int64_t rows = s.m - row < TILE_X ? s.m - row : TILE_X;
    for (int64_t begin = 0; begin < s.k; begin += DEPTH) {
        int64_t depth = s.k - begin < DEPTH ? s.k - begin : DEPTH;
        for (int64_t m = 0; m < TILE_X; m++) {
            if (m < rows)
                read_row(x, s.k, row + m, begin, begin + depth, part[m]);
            else
                std::memset(part[m], 0, sizeof(part[m]));
        }
        for (int64_t c = 0; c < depth; c++)
            for (int m = 0; m < TILE_X; m++) to[(begin + c) * TILE_X + m] = part[m][c];
    }
}

// sums (6, 16) += w (6, depth) of rows DEPTH apart @ x (depth, 16)
void multiply_tile(const float* w, const float* x, int64_t depth, float* sums) {
    f32x8 sum[TILE_W][2];
    UNROLL for (int r = 0; r < TILE_W; r++) {
        UNROLL for (int h = 0; h < 2; h++)
            sum[r][h] = load8(sums + r * TILE_X + 8 * h);
    }
    for (int64_t c = 0; c < depth; c++) {
        f32x8 low = load8(x + c * TILE_X), high = load8(x + c * TILE_X + 8);
        UNROLL for (int r = 0; r < TILE_W; r++) {
            float one = w[r * DEPTH + c];
            sum[r][0] += one * low;
            sum[r][1] += one * high;
        }
    }
    UNROLL for (int r = 0; r < TILE_W; r++) {
        UNROLL for (int h = 0; h < 2; h++)
            store8(sums + r * TILE_X + 8 * h, sum[r][h]);
    }
}

// Rows of w from `top` on by the tiles of x from `first` to `last`.
template <class RowType> class PanelTask {
  public:
    PanelTask(const Parts& w, const Format& format, const Shape& s, int64_t top, int64_t first, int64_t last)
        : s_(s),
          top_(top),
          rows_(s.n - top < PANEL ? s.n - top : PANEL),
          first_(first),
          last_(last),
          panel_(PANEL * DEPTH),
          sums_((last - first) * PANEL * TILE_X),
          w_(w),
          format_(format) {}

    bool run(const float* x, int64_t block_row, const Output& out) {
        if (!panel_.data || !sums_.data) return false;
        std::memset(sums_.data, 0, size_t((last_ - first_) * PANEL * TILE_X) * 4);
        int64_t slabs = ceil_div(rows_, TILE_W);
        for (int64_t begin = 0; begin < s_.k; begin += DEPTH) {
            int64_t depth = s_.k - begin < DEPTH ? s_.k - begin : DEPTH;
            decode(begin, depth, slabs);
            for (int64_t t = first_; t < last_; t++)
                for (int64_t slab = 0; slab < slabs; slab++)
                    multiply_tile(panel_.data + slab * TILE_W * DEPTH, x + (t * s_.k + begin) * TILE_X, depth,
                                  sums_.data + ((t - first_) * PANEL + slab * TILE_W) * TILE_X);
        }
        write(block_row, out);
        return true;
    }

  private:
    const Shape& s_;
    int64_t top_, rows_, first_, last_;
    Buffer panel_, sums_;
    const Parts& w_;
    const Format& format_;

    void decode(int64_t begin, int64_t depth, int64_t slabs) {
        for (int64_t r = 0; r < slabs * TILE_W; r++) {
            float* to = panel_.data + r * DEPTH;
            if (r >= rows_) {
                std::memset(to, 0, DEPTH * 4);
                continue;
            }
            RowType row(w_, format_, s_.k, top_ + r);
            row.decode(begin / UNIT, (begin + depth + UNIT - 1) / UNIT, to);
        }
    }

    void write(int64_t block_row, const Output& out) {
        float line[PANEL];
        for (int64_t t = first_; t < last_; t++) {
            const float* sums = sums_.data + (t - first_) * PANEL * TILE_X;
            for (int64_t m = 0; m < TILE_X && block_row + t * TILE_X + m < s_.m; m++) {
                for (int64_t r = 0; r < rows_; r++) line[r] = sums[r * TILE_X + m];
                write_row(out, block_row + t * TILE_X + m, top_, rows_, line);
            }
        }
    }
};

bool product_many(const Activation& x, const Parts& w, const Format& format, const Shape& s, const Output& out,
                  int threads) {
    int64_t tile_bytes = s.k * TILE_X * 4, panels = ceil_div(s.n, PANEL), tiles_in_all = ceil_div(s.m, TILE_X);
    int64_t block = BLOCK_BYTES / (tile_bytes + 1) + 1;
    if (block > BLOCK_TILES) block = BLOCK_TILES;
    if (block > tiles_in_all) block = tiles_in_all;
    Buffer packed(block * tile_bytes / 4);
    if (!packed.data) return false;
    bool done = true;
    for (int64_t start = 0; start < tiles_in_all; start += block) {
        int64_t tiles = tiles_in_all - start < block ? tiles_in_all - start : block;
        parallel_for(tiles, 1, threads,
                     [&](int64_t t) { pack_tile(x, s, (start + t) * TILE_X, packed.data + t * s.k * TILE_X); });
        // Where w has too few panels for all threads, they share one by the rows of x.
        int64_t cuts = 1;
        while (panels * cuts < 2 * threads && cuts < tiles) cuts *= 2;
        int64_t share = ceil_div(tiles, cuts);
        with_format(format, [&](auto kind) {
            parallel_for(panels * cuts, 1, threads, [&](int64_t task) {
                int64_t first = task % cuts * share, last = first + share < tiles ? first + share : tiles;
                if (first >= last) return;
                PanelTask<typename decltype(kind)::row> panel(w, format, s, task / cuts * PANEL, first, last);
                if (!panel.run(packed.data, start * TILE_X, out)) done = false;
            });
        });
    }
    return done;
}

bool product(const Activation& x, const Parts& w, const Format& format, const Shape& s, const Output& out,
             int threads) {
    if (integer_product_supports(x, w, format, s)) return integer_product(x, w, format, s, out, threads);
    return (s.m <= FEW ? few_rows_product : product_many)(x, w, format, s, out, threads);
}

bool knows(const Activation& x, const Format& format) {
    return with_format(format, [](auto) {}) && (!x.parts.codes || with_format(x.format, [](auto) {}));
}

// ---- matrices one after the other

// The parts of matrix `index` of those (rows, k) that lie one after the other.
Parts matrix_at(const Parts& all, const Format& f, int64_t rows, int64_t k, int64_t index) {
    int64_t scales = (f.group_rows ? ceil_div(rows, f.group_rows) : 1) * scale_columns(f, k);
    int64_t coarse = (f.coarse == COARSE_TENSOR ? 1 : rows) * coarse_columns(f, k);
    int64_t size = f.scale == SCALE_F32 ? 4 : 1;
    return {all.codes + index * rows * code_bytes(f, k), (uint8_t*)all.scale + index * scales * size,
            f.coarse ? all.coarse + index * coarse : nullptr};
}

const void* element(const void* data, int32_t dtype, int64_t index) {
    return (const uint8_t*)data + index * (dtype == FLOAT32 ? 4 : 2);
}

// y from a row and a column on.
Output columns_from(const Output& out, int64_t row, int64_t column) {
    Output moved = out;
    moved.data = (void*)element(out.data, out.dtype, row * out.stride + column);
    return moved;
}

// x from a row on.
Activation rows_from(const Activation& x, int64_t k, int64_t row) {
    Activation rows = x;
    if (!x.parts.codes) {
        rows.data = element(x.data, x.dtype, row * x.stride);
        return rows;
    }
    Parts moved = matrix_at(x.parts, x.format, 1, k, row);
    // What belongs to the whole tensor stays where it is.
    rows.parts.codes = moved.codes;
    if (x.format.group_rows) rows.parts.scale = moved.scale;
    if (x.format.coarse != COARSE_TENSOR) rows.parts.coarse = moved.coarse;
    return rows;
}

}  // namespace

// Decodes (rows, k) to `dtype`. Returns 0, or 1 for a format it does not know.
extern "C" int olq_decode(void* codes, void* scale, float* coarse, const Format* format, int64_t rows, int64_t k,
                          void* to, int dtype, int threads) {
    Activation x{nullptr, FLOAT32, 0, {(uint8_t*)codes, scale, coarse}, *format};
    Output out{to, dtype, k, nullptr, 0, nullptr, 0, 0};
    bool known = with_format(*format, [](auto) {});
    if (!known) return 1;
    parallel_for(rows, 16, threads, [&](int64_t row) {
        float part[DEPTH];
        for (int64_t begin = 0; begin < k; begin += DEPTH) {
            int64_t end = begin + DEPTH < k ? begin + DEPTH : k;
            read_row(x, k, row, begin, end, part);
            write_row(out, row, begin, end - begin, part);
        }
    });
    return 0;
}

// y (m, n). Returns 0, 1 for a format it does not know, 2 if there is no memory.
extern "C" int olq_product(const Activation* x, const Parts* w, const Format* format, const Output* out, int64_t m,
                           int64_t n, int64_t k, int threads) {
    if (!knows(*x, *format)) return 1;
    return product(*x, *w, *format, {m, n, k}, *out, threads) ? 0 : 2;
}

// The products of ragged segments: rows of x from offsets[e] to offsets[e + 1] with the matrices (n, k) of expert e, of
// which there are `shards` one after the other, as their columns of y are. Bias: (experts, shards x n). Returns what
// olq_product does. Threads take one matrix after the other, or share each where one has much of the work.
extern "C" int olq_grouped_product(const Activation* x, const Parts* w, const Format* format, const Output* out,
                                   const int64_t* offsets, int64_t experts, int64_t shards, int64_t n, int64_t k,
                                   int threads) {
    if (!knows(*x, *format)) return 1;
    std::vector<int64_t> hit;
    int64_t rows = 0, most = 0;
    for (int64_t e = 0; e < experts; e++) {
        int64_t m = offsets[e + 1] - offsets[e];
        if (m <= 0) continue;
        hit.push_back(e);
        rows += m;
        most = m > most ? m : most;
    }
    int64_t work = n * k / 4;
    if (rows * shards * work < SERIAL) threads = 1;
    int64_t matrices = int64_t(hit.size()) * shards;
    bool apart = most * 2 * threads <= rows * shards;
    std::atomic<bool> done{true};
    parallel_for(matrices, 1, apart ? threads : 1, [&](int64_t i) {
        int64_t e = hit[size_t(i / shards)], start = offsets[e], m = offsets[e + 1] - start;
        int64_t matrix = e * shards + i % shards;
        Output columns = columns_from(*out, start, i % shards * n);
        if (out->bias) columns.bias = element(out->bias, out->bias_dtype, matrix * n);
        int shared = apart || m * work < SERIAL ? 1 : threads;
        if (!product(rows_from(*x, k, start), matrix_at(*w, *format, n, k, matrix), *format, {m, n, k}, columns, shared))
            done = false;
    });
    return done ? 0 : 2;
}

// The sizes of the structures, for the caller to compare with its own.
extern "C" int64_t olq_sizes() {
    return int64_t(sizeof(Format)) | int64_t(sizeof(Activation)) << 16 | int64_t(sizeof(Output)) << 32;
}
