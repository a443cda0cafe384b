// Quantization on a CPU: olq_fx/numerics.py `quantize`, bit by bit, reading the source once (twice where a scale spans
// more than fits the cache). Compiled without contraction of multiplications and additions.

#include "native_elements.h"

namespace {

// ---- one divisor for many elements (float32 scales)

template <class T, int element> void encode_run(const T* from, int64_t count, float divisor, uint8_t* to) {
    if (!(divisor > 0.0f)) {
        std::memset(to, 0, size_t(count));
        return;
    }
    for (int64_t i = 0; i < count; i += UNIT) {
        f32x8 value[4];
        i32x8 code[4];
        load_unit(from + i, count - i, value);
        UNROLL for (int j = 0; j < 4; j++)
            code[j] = codes_of(element, value[j] / divisor);
        if (count - i >= UNIT) {
            store_codes<element>(to + i, code);
        } else {
            uint8_t last[UNIT];
            store_codes<element>(last, code);
            std::memcpy(to + i, last, size_t(count - i));
        }
    }
}

float scale_by_rule(int32_t amax, int element, int rule) {
    if (rule == RULE_POWER_OF_TWO) return e8m0_value(e8m0_above(amax, largest_of(element)));
    return float32_scale(amax, largest_of(element));
}

template <class T> struct Source {
    const T* data;
    int64_t rows, k, stride;
    const T* row(int64_t r) const { return data + r * stride; }
};

template <class T> int32_t amax_of_all(const Source<T>& x, bool finite_only, int threads) {
    int32_t largest = 0;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 16) reduction(max : largest) if (threads > 1)
    for (int64_t r = 0; r < x.rows; r++) {
        int32_t found = amax_bits(x.row(r), x.k, finite_only);
        largest = found > largest ? found : largest;
    }
    return largest;
}

// Groups of rows x columns with a float32 scale each.
template <class T, int element>
void encode_float32(const Source<T>& x, const Format& format, int rule, const Parts& parts, int threads) {
    int64_t height = format.group_rows ? format.group_rows : x.rows;
    int64_t width = format.group_columns ? format.group_columns : x.k;
    int64_t across = ceil_div(x.k, width);
    float* scales = (float*)parts.scale;
    bool whole = !format.group_rows;
    if (whole) scales[0] = scale_by_rule(amax_of_all(x, false, threads), element, rule);
    // A whole tensor is encoded by rows; else a task is a group, or the groups of one row.
    int64_t wide = !whole && height == 1 ? x.k : width, tall = whole ? 1 : height;
    int64_t tasks_across = ceil_div(x.k, wide);
    parallel_for(ceil_div(x.rows, tall) * tasks_across, height > 1 && !whole ? 1 : 8, threads, [&](int64_t task) {
        int64_t top = task / tasks_across * tall, left = task % tasks_across * wide;
        int64_t rows = x.rows - top < tall ? x.rows - top : tall;
        int64_t end = x.k - left < wide ? x.k : left + wide;
        for (int64_t c = left; c < end; c += width) {
            int64_t columns = end - c < width ? end - c : width;
            float* scale = whole ? scales : scales + top / height * across + c / width;
            if (!whole) *scale = scale_by_rule(amax_of_block(x.row(top) + c, rows, columns, x.stride), element, rule);
            for (int64_t r = top; r < top + rows; r++)
                encode_run<T, element>(x.row(r) + c, columns, *scale, parts.codes + r * x.k + c);
        }
    });
}

// ---- powers of two (e8m0), a group of 32 at a time

inline int32_t amax_of_unit(const f32x8 (&value)[4]) {
    return max_of(max8(max8(size_bits(value[0]), size_bits(value[1])), max8(size_bits(value[2]), size_bits(value[3]))));
}

int32_t mxfp4_exponent(int32_t amax, int rule) {
    int32_t exponent = (amax >> 23) - 2, mantissa = amax & 0x7fffff;
    if (rule == RULE_EVEN) return exponent + (mantissa >= 3 << 21);
    if (rule == RULE_CEIL) return exponent + (mantissa > 1 << 22);
    return exponent;
}

// Whether one exponent more than `exponent` has the smaller sum of squared errors.
inline bool one_above_is_better(const f32x8 (&value)[4], int32_t exponent, int32_t amax) {
    f32x8 at_floor[4], above[4];
    float inverse = e8m0_inverse(e8m0_byte(exponent, amax));
    UNROLL for (int j = 0; j < 4; j++) {
        f32x8 size = size_of(value[j] * inverse), half = size * 0.5f;
        f32x8 error = size - e2m1_round(min8(size, f32x8{} + 6.0f));
        f32x8 error_above = size - e2m1_round(min8(half, f32x8{} + 6.0f)) * 2.0f;
        at_floor[j] = error * error;
        above[j] = error_above * error_above;
    }
    float low = sum_by_halves((at_floor[0] + at_floor[2]) + (at_floor[1] + at_floor[3]));
    return sum_by_halves((above[0] + above[2]) + (above[1] + above[3])) < low;
}

template <int element> inline uint8_t e8m0_scale(const f32x8 (&value)[4], int rule) {
    int32_t amax = amax_of_unit(value);
    if (amax >= INF_BITS) return 255;
    if (element == E4M3) return e8m0_above(amax, E4M3_MAX);
    int32_t exponent = mxfp4_exponent(amax, rule);
    if (rule == RULE_MSE) exponent += one_above_is_better(value, exponent, amax);
    return e8m0_byte(exponent, amax);
}

template <int element> inline uint8_t encode_e8m0_unit(const f32x8 (&value)[4], int rule, uint8_t* to) {
    uint8_t byte = e8m0_scale<element>(value, rule);
    i32x8 code[4] = {};
    if (byte != 255) {
        float inverse = e8m0_inverse(byte);
        UNROLL for (int j = 0; j < 4; j++)
            code[j] = codes_of(element, value[j] * inverse);
    }
    store_codes<element>(to, code);
    return byte;
}

// Encodes one unit of a row, the last of which may be shorter.
template <int element, class Encode> inline void with_tail(uint8_t* to, int64_t left, const Encode& encode) {
    if (left >= UNIT) {
        encode(to);
        return;
    }
    uint8_t last[UNIT];
    encode(last);
    std::memcpy(to, last, size_t(element == E2M1 ? (left + 1) / 2 : left));
}

template <class T, int element>
void encode_e8m0(const Source<T>& x, const Format& format, int rule, const Parts& parts, int threads) {
    int64_t bytes = code_bytes(format, x.k), groups = ceil_div(x.k, UNIT);
    parallel_for(x.rows, 8, threads, [&](int64_t r) {
        uint8_t* scale = (uint8_t*)parts.scale + r * groups;
        for (int64_t g = 0; g < groups; g++) {
            f32x8 value[4];
            load_unit(x.row(r) + g * UNIT, x.k - g * UNIT, value);
            uint8_t* to = parts.codes + r * bytes + (element == E2M1 ? g * UNIT / 2 : g * UNIT);
            with_tail<element>(to, x.k - g * UNIT,
                               [&](uint8_t* out) { scale[g] = encode_e8m0_unit<element>(value, rule, out); });
        }
    });
}

template <class T>
void encode_dualscale(const Source<T>& x, const Format& format, int rule, const Parts& parts, int threads) {
    int64_t bytes = code_bytes(format, x.k), groups = ceil_div(x.k, UNIT), span = format.coarse_columns;
    int64_t spans = coarse_columns(format, x.k);
    parallel_for(x.rows, 8, threads, [&](int64_t r) {
        uint8_t* scale = (uint8_t*)parts.scale + r * groups;
        for (int64_t s = 0; s < spans; s++) {
            int64_t begin = s * span, end = begin + span < x.k ? begin + span : x.k;
            float coarse = float32_scale(amax_bits(x.row(r) + begin, end - begin, true), 6.0f);
            parts.coarse[r * spans + s] = coarse;
            for (int64_t c = begin; c < end; c += UNIT) {
                f32x8 value[4];
                load_unit(x.row(r) + c, x.k - c, value);
                UNROLL for (int j = 0; j < 4; j++)
                    value[j] = value[j] / coarse;
                with_tail<E2M1>(parts.codes + r * bytes + c / 2, x.k - c,
                                [&](uint8_t* out) { scale[c / UNIT] = encode_e8m0_unit<E2M1>(value, rule, out); });
            }
        }
    });
}

// ---- nvfp4: an e4m3 scale for each 16, eight of these blocks at a time

constexpr int BLOCK = 16;
constexpr int BLOCKS = 8;

struct Candidate {
    i32x8 code[2];
    float error;
};

inline f32x8 look_up(f32x8 table, i32x8 index) {
#if defined(__AVX2__)
    return (f32x8)_mm256_permutevar8x32_ps((__m256)table, (__m256i)index);
#else
    f32x8 found;
    for (int i = 0; i < 8; i++) found[i] = table[index[i]];
    return found;
#endif
}

inline f32x8 e4m3_values(i32x8 code) {
    i32x8 normal = (code << 20) + (120 << 23);
    f32x8 value = code < 8 ? __builtin_convertvector(code, f32x8) * 0x1p-9f : (f32x8)normal;
    return code == 0x7f ? (f32x8)(i32x8{} + NAN_BITS) : value;
}

// The codes of a block under a scale that decodes to `decoded`, and the sum of squared errors in units of 6 g.
inline Candidate try_scale(const float* block, const f32x8 (&scaled)[2], float decoded, float unit, bool with_error) {
    const f32x8 values = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    Candidate found{{}, 0.0f};
    float divisor = decoded * unit;
    f32x8 terms = with_error ? values * decoded / 6.0f : values, square[2];
    UNROLL for (int j = 0; j < 2; j++) {
        f32x8 quotient = load8(block + 8 * j) / divisor;
        i32x8 size = divisor > 0.0f ? e2m1_magnitudes(quotient) : i32x8{};
        found.code[j] = size | (size > 0 ? (i32x8)quotient >> 28 & 8 : i32x8{});
        f32x8 error = scaled[j] - look_up(terms, size);
        square[j] = error * error;
    }
    if (with_error) found.error = sum_by_halves(square[0] + square[1]);
    return found;
}

inline Candidate four_or_six(const float* block, float unit, float for_6, float for_4, bool* four) {
    f32x8 scaled[2];
    UNROLL for (int j = 0; j < 2; j++)
        scaled[j] = size_of(load8(block + 8 * j)) / (unit * 6.0f);
    Candidate six = try_scale(block, scaled, for_6, unit, true), other = try_scale(block, scaled, for_4, unit, true);
    *four = other.error < six.error;
    return *four ? other : six;
}

// Up to 8 blocks of 16 (`left` elements): their scales and, into `code`, their codes.
void encode_blocks(const float* value, int64_t left, float unit, int rule, uint8_t* scale, i32x8 (&code)[2 * BLOCKS]) {
    i32x8 amax;
    UNROLL for (int b = 0; b < BLOCKS; b++)
        amax[b] = max_of(max8(size_bits(load8(value + BLOCK * b)), size_bits(load8(value + BLOCK * b + 8))));
    const i32x8 nan = i32x8{} + 0x7f;
    f32x8 quotient = (f32x8)amax / (unit * 4.0f);
    i32x8 for_6 = amax >= INF_BITS ? nan : e4m3_codes((f32x8)amax / (unit * 6.0f));
    i32x8 for_4 = amax >= INF_BITS ? nan : e4m3_codes(quotient);
    f32x8 decoded_6 = e4m3_values(for_6), decoded_4 = e4m3_values(for_4);
    for (int b = 0; b < BLOCKS && b * BLOCK < left; b++) {
        const f32x8 unused[2] = {};
        bool four = false;
        Candidate found = rule == RULE_FOUR_OVER_SIX && quotient[b] <= E4M3_MAX
                              ? four_or_six(value + BLOCK * b, unit, decoded_6[b], decoded_4[b], &four)
                              : try_scale(value + BLOCK * b, unused, decoded_6[b], unit, false);
        scale[b] = uint8_t(four ? for_4[b] : for_6[b]);
        UNROLL for (int j = 0; j < 2; j++)
            code[2 * b + j] = found.code[j];
    }
}

template <class T>
void encode_nvfp4_row(const T* row, int64_t k, float unit, int rule, uint8_t* codes, uint8_t* scale) {
    for (int64_t begin = 0; begin < k; begin += BLOCK * BLOCKS) {
        float value[BLOCK * BLOCKS] = {};
        i32x8 code[2 * BLOCKS] = {};
        for (int64_t c = 0; c < BLOCK * BLOCKS && begin + c < k; c += UNIT) {
            f32x8 unit_values[4];
            load_unit(row + begin + c, k - begin - c, unit_values);
            UNROLL for (int j = 0; j < 4; j++)
                store8(value + c + 8 * j, unit_values[j]);
        }
        encode_blocks(value, k - begin, unit, rule, scale + begin / BLOCK, code);
        for (int64_t c = 0; c < BLOCK * BLOCKS && begin + c < k; c += UNIT) {
            const i32x8* of_unit = code + c / 8;
            with_tail<E2M1>(codes + (begin + c) / 2, k - begin - c, [&](uint8_t* out) {
                store_codes<E2M1>(out, {of_unit[0], of_unit[1], of_unit[2], of_unit[3]});
            });
        }
    }
}

template <class T>
void encode_nvfp4(const Source<T>& x, const Format& format, int rule, const Parts& parts, int threads) {
    int64_t bytes = code_bytes(format, x.k), groups = ceil_div(x.k, BLOCK);
    bool tensor = format.coarse == COARSE_TENSOR;
    float unit_of_all = 0.0f;
    if (tensor) {
        float reciprocal = NVFP4_RANGE / bit_cast<float>(amax_of_all(x, true, threads));
        parts.coarse[0] = bit_cast<int32_t>(reciprocal) < INF_BITS ? reciprocal : 1.0f;
        unit_of_all = 1.0f / parts.coarse[0];
    }
    parallel_for(x.rows, 8, threads, [&](int64_t r) {
        float unit = unit_of_all;
        if (!tensor) parts.coarse[r] = unit = float32_scale(amax_bits(x.row(r), x.k, true), NVFP4_RANGE);
        encode_nvfp4_row(x.row(r), x.k, unit, rule, parts.codes + r * bytes, (uint8_t*)parts.scale + r * groups);
    });
}

template <class T> bool encode(const Source<T>& x, const Format& format, int rule, const Parts& parts, int threads) {
    if (format.scale == SCALE_F32 && format.element == E4M3)
        encode_float32<T, E4M3>(x, format, rule, parts, threads);
    else if (format.scale == SCALE_F32 && format.element == INT8)
        encode_float32<T, INT8>(x, format, rule, parts, threads);
    else if (format.scale == SCALE_E8M0 && format.element == E4M3)
        encode_e8m0<T, E4M3>(x, format, rule, parts, threads);
    else if (format.scale == SCALE_E8M0 && format.element == E2M1 && format.coarse == NO_COARSE)
        encode_e8m0<T, E2M1>(x, format, rule, parts, threads);
    else if (format.scale == SCALE_E8M0 && format.element == E2M1)
        encode_dualscale(x, format, rule, parts, threads);
    else if (format.scale == SCALE_E4M3 && format.element == E2M1)
        encode_nvfp4(x, format, rule, parts, threads);
    else
        return false;
    return true;
}

}  // namespace

// Quantizes (rows, k) of `dtype` with `stride` elements from row to row. Returns 0, or 1 for a format it does not know.
extern "C" int olq_encode(const void* x, int dtype, int64_t rows, int64_t k, int64_t stride, const Format* format,
                          int rule, void* codes, void* scale, float* coarse, int threads) {
    Parts parts{(uint8_t*)codes, scale, coarse};
    bool known = false;
    if (dtype == FLOAT32)
        known = encode(Source<float>{(const float*)x, rows, k, stride}, *format, rule, parts, threads);
    if (dtype == BFLOAT16) known = encode(Source<bf16>{(const bf16*)x, rows, k, stride}, *format, rule, parts, threads);
    if (dtype == FLOAT16) known = encode(Source<f16>{(const f16*)x, rows, k, stride}, *format, rule, parts, threads);
    return known ? 0 : 1;
}
