// Products of int8 codes in integers: native_integer.h.

#include "native_integer.h"

#include <atomic>

#if defined(__AVX2__)

namespace {

constexpr int FEW = 8;     // rows of x that are multiplied with each row of w at once
constexpr int TILE_W = 6;  // else tiles of 6 rows of w x 16 rows of x
constexpr int TILE_X = 16;
constexpr int DEPTH = 512;  // k's of a panel of w that is widened at once
constexpr int PANEL = 48;   // rows of such a panel
constexpr int CHUNK = 16;   // rows of w of a task
constexpr int BLOCK_TILES = 32;
constexpr int64_t BLOCK_BYTES = 32 << 20;
constexpr int64_t LONGEST = 1 << 17;  // 2^17 products of 2^14 are 2^31

inline const float* scales(const Parts& parts) { return (const float*)parts.scale; }

bool by_row(const Format& f) {
    return f.element == INT8 && f.scale == SCALE_F32 && f.group_rows == 1 && !f.group_columns;
}

// Whether no product with these scales can leave the range of float32, where decoding would clamp it. NaN may.
bool ordinary(const float* scale, int64_t count) {
    bool all = true;
    for (int64_t i = 0; i < count; i++) all &= !(magnitude(scale[i]) > SAFE_SCALE);
    return all;
}

// sums -> y: both scales in double, one rounding to float32.
inline float scaled(int32_t sum, float x_scale, float w_scale) {
    return float(double(sum) * double(x_scale) * double(w_scale));
}

inline __m256i widened(const int8_t* codes) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)codes)); }

// `count` codes as 16 bits each, zeros up to `padded`.
void widen(const int8_t* from, int64_t count, int64_t padded, int16_t* to) {
    int64_t i = 0;
    for (; i + 16 <= count; i += 16) _mm256_storeu_si256((__m256i*)(to + i), widened(from + i));
    for (; i < count; i++) to[i] = from[i];
    for (; i < padded; i++) to[i] = 0;
}

class Words {
  public:
    explicit Words(int64_t count) : buffer_((count + 1) / 2), data((int16_t*)buffer_.data) {}

  private:
    Buffer buffer_;

  public:
    int16_t* const data;
};

// ---- few rows of x

inline int32_t sum_of(__m256i sum) {
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
}

// One row of w (k codes) with `rows` rows of x (padded words each).
template <int rows>
inline void dot(const int8_t* w, const int16_t* x, int64_t k, int64_t padded, int32_t (&sums)[rows]) {
    __m256i sum[rows];
    UNROLL for (int m = 0; m < rows; m++)
        sum[m] = _mm256_setzero_si256();
    for (int64_t c = 0; c + 16 <= k; c += 16) {
        __m256i codes = widened(w + c);
        UNROLL for (int m = 0; m < rows; m++) {
            __m256i other = _mm256_loadu_si256((const __m256i*)(x + m * padded + c));
            sum[m] = _mm256_add_epi32(sum[m], _mm256_madd_epi16(codes, other));
        }
    }
    UNROLL for (int m = 0; m < rows; m++) {
        sums[m] = sum_of(sum[m]);
        for (int64_t c = k / 16 * 16; c < k; c++) sums[m] += int32_t(w[c]) * x[m * padded + c];
    }
}

template <int rows> void few_rows(const Activation& x, const Parts& w, const Shape& s, const int16_t* wide,
                                  const Output& out, int threads) {
    int64_t padded = ceil_div(s.k, 16) * 16, tasks = ceil_div(s.n, CHUNK);
    parallel_for(tasks, tasks / (threads * 8) + 1, threads, [&](int64_t task) {
        int64_t top = task * CHUNK, count = s.n - top < CHUNK ? s.n - top : CHUNK;
        float lines[rows][CHUNK];
        for (int64_t r = 0; r < count; r++) {
            int32_t sums[rows];
            dot<rows>((const int8_t*)w.codes + (top + r) * s.k, wide, s.k, padded, sums);
            for (int64_t m = 0; m < s.m; m++) lines[m][r] = scaled(sums[m], scales(x.parts)[m], scales(w)[top + r]);
        }
        for (int64_t m = 0; m < s.m; m++) write_row(out, m, top, count, lines[m]);
    });
}

bool product_few(const Activation& x, const Parts& w, const Shape& s, const Output& out, int threads) {
    int64_t padded = ceil_div(s.k, 16) * 16, rows = s.m <= 2 ? s.m : s.m <= 4 ? 4 : FEW;
    Words wide(rows * padded);
    if (!wide.data) return false;
    for (int64_t m = 0; m < rows; m++)
        widen((const int8_t*)x.parts.codes + m * s.k, m < s.m ? s.k : 0, padded, wide.data + m * padded);
    (s.m == 1   ? few_rows<1>
     : s.m == 2 ? few_rows<2>
     : s.m <= 4 ? few_rows<4>
                : few_rows<FEW>)(x, w, s, wide.data, out, threads);
    return true;
}

// ---- many rows of x

// A tile of 16 rows of x in pairs of k: (pairs, 16, 2), rows and k's that are not there being zeros.
void pack_tile(const Activation& x, const Shape& s, int64_t row, int64_t pairs, int16_t* to) {
    int64_t rows = s.m - row < TILE_X ? s.m - row : TILE_X;
    const int8_t* codes = (const int8_t*)x.parts.codes + row * s.k;
    std::memset(to, 0, size_t(pairs * TILE_X * 4));
    for (int64_t m = 0; m < rows; m++)
        for (int64_t c = 0; c < s.k; c++) to[(c / 2 * TILE_X + m) * 2 + c % 2] = codes[m * s.k + c];
}

// sums (6, 16) += w (6, 2 pairs) of rows DEPTH apart @ x (pairs, 16, 2)
void multiply_tile(const int16_t* w, const int16_t* x, int64_t pairs, int32_t* sums) {
    __m256i sum[TILE_W][2];
    UNROLL for (int r = 0; r < TILE_W; r++) {
        UNROLL for (int h = 0; h < 2; h++)
            sum[r][h] = _mm256_loadu_si256((const __m256i*)(sums + r * TILE_X + 8 * h));
    }
    for (int64_t c = 0; c < pairs; c++) {
        __m256i low = _mm256_loadu_si256((const __m256i*)(x + c * 32)),
                high = _mm256_loadu_si256((const __m256i*)(x + c * 32 + 16));
        UNROLL for (int r = 0; r < TILE_W; r++) {
            int32_t pair;
            std::memcpy(&pair, w + r * DEPTH + 2 * c, 4);
            __m256i both = _mm256_set1_epi32(pair);
            sum[r][0] = _mm256_add_epi32(sum[r][0], _mm256_madd_epi16(both, low));
            sum[r][1] = _mm256_add_epi32(sum[r][1], _mm256_madd_epi16(both, high));
            // Keeps the compiler from doing all rows at once, which needs more registers than there are.
            asm volatile("" : "+x"(sum[r][0]), "+x"(sum[r][1]));
        }
    }
    UNROLL for (int r = 0; r < TILE_W; r++) {
        UNROLL for (int h = 0; h < 2; h++)
            _mm256_storeu_si256((__m256i*)(sums + r * TILE_X + 8 * h), sum[r][h]);
    }
}

struct Block {
    const int16_t* tiles;
    int64_t first_row, count, pairs;
};

// Rows of w from `top` on by tiles `first` to `last` of a block of x.
bool panel_task(const Activation& x, const Parts& w, const Shape& s, const Block& block, const Output& out, int64_t top,
                int64_t first, int64_t last) {
    Words panel(PANEL * DEPTH);
    Buffer memory((last - first) * PANEL * TILE_X);
    if (!panel.data || !memory.data) return false;
    int32_t* sums = (int32_t*)memory.data;
    std::memset(sums, 0, size_t((last - first) * PANEL * TILE_X) * 4);
    int64_t rows = s.n - top < PANEL ? s.n - top : PANEL, slabs = ceil_div(rows, TILE_W);
    for (int64_t begin = 0; begin < s.k; begin += DEPTH) {
        int64_t depth = s.k - begin < DEPTH ? s.k - begin : DEPTH;
        for (int64_t r = 0; r < slabs * TILE_W; r++)
            widen((const int8_t*)w.codes + (top + r) * s.k + begin, r < rows ? depth : 0, DEPTH,
                  panel.data + r * DEPTH);
        for (int64_t t = first; t < last; t++)
            for (int64_t slab = 0; slab < slabs; slab++)
                multiply_tile(panel.data + slab * TILE_W * DEPTH,
                              block.tiles + (t * block.pairs + begin / 2) * TILE_X * 2, (depth + 1) / 2,
                              sums + ((t - first) * PANEL + slab * TILE_W) * TILE_X);
    }
    for (int64_t t = first; t < last; t++) {
        for (int64_t m = 0; m < TILE_X && block.first_row + t * TILE_X + m < s.m; m++) {
            int64_t row = block.first_row + t * TILE_X + m;
            float line[PANEL];
            for (int64_t r = 0; r < rows; r++)
                line[r] =
                    scaled(sums[((t - first) * PANEL + r) * TILE_X + m], scales(x.parts)[row], scales(w)[top + r]);
            write_row(out, row, top, rows, line);
        }
    }
    return true;
}

bool product_many(const Activation& x, const Parts& w, const Shape& s, const Output& out, int threads) {
    int64_t pairs = (s.k + 1) / 2, panels = ceil_div(s.n, PANEL), in_all = ceil_div(s.m, TILE_X);
    int64_t block = BLOCK_BYTES / (pairs * TILE_X * 4) + 1;
    if (block > BLOCK_TILES) block = BLOCK_TILES;
    if (block > in_all) block = in_all;
    Words packed(block * pairs * TILE_X * 2);
    if (!packed.data) return false;
    std::atomic<bool> done{true};
    for (int64_t start = 0; start < in_all; start += block) {
        Block tiles{packed.data, start * TILE_X, in_all - start < block ? in_all - start : block, pairs};
        parallel_for(tiles.count, 1, threads, [&](int64_t t) {
            pack_tile(x, s, (start + t) * TILE_X, pairs, packed.data + t * pairs * TILE_X * 2);
        });
        int64_t cuts = 1;
        while (panels * cuts < 2 * threads && cuts < tiles.count) cuts *= 2;
        int64_t share = ceil_div(tiles.count, cuts);
        parallel_for(panels * cuts, 1, threads, [&](int64_t task) {
            int64_t first = task % cuts * share, last = first + share < tiles.count ? first + share : tiles.count;
            if (first < last && !panel_task(x, w, s, tiles, out, task / cuts * PANEL, first, last)) done = false;
        });
    }
    return done;
}

}  // namespace

bool integer_product_supports(const Activation& x, const Parts& w, const Format& format, const Shape& s) {
    return x.parts.codes && by_row(x.format) && by_row(format) && s.k >= 4 && s.k < LONGEST &&
           ordinary(scales(x.parts), s.m) && ordinary(scales(w), s.n);
}

bool integer_product(const Activation& x, const Parts& w, const Format&, const Shape& s, const Output& out,
                     int threads) {
    return (s.m <= FEW ? product_few : product_many)(x, w, s, out, threads);
}

#else

bool integer_product_supports(const Activation&, const Parts&, const Format&, const Shape&) { return false; }

bool integer_product(const Activation&, const Parts&, const Format&, const Shape&, const Output&, int) { return false; }

#endif
