// The steps of quantization, eight elements at a time: codes of quotients, maxima of groups, scales from maxima.
//
// olq_fx/elements.py and olq_fx/scales.py, bit by bit. To be compiled without contraction.

#pragma once

#include "native_format.h"
#include "native_simd.h"

constexpr float SCALE_FLOOR = 0x1p-126f;
constexpr float E4M3_MAX = 448.0f;
constexpr float NVFP4_RANGE = 2688.0f;

inline float largest_of(int32_t element) { return element == E4M3 ? E4M3_MAX : element == INT8 ? 127.0f : 6.0f; }

// ---- elements: eight quotients to eight codes

inline i32x8 e4m3_codes(f32x8 quotient) {
    const f32x8 limit = f32x8{} + E4M3_MAX;
    i32x8 size = (i32x8)min8(size_of(quotient), limit);
    i32x8 normal = ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - (120 << 3);
    // Below 2^-6 codes are multiples of 2^-9, which is the spacing of floats at 2^14.
    i32x8 subnormal = (i32x8)((f32x8)size + 0x1p14f) - 0x46800000;
    return (size < 0x3c800000 ? subnormal : normal) | ((i32x8)quotient >> 24 & 0x80);
}

// The magnitude of an e2m1 value, rounded, as float bits; `size` is at most 6.
inline f32x8 e2m1_round(f32x8 size) {
    i32x8 bits = (i32x8)size;
    f32x8 normal = (f32x8)((bits + 0x1fffff + (bits >> 22 & 1)) & ~0x3fffff);
    f32x8 subnormal = (size + 0x1p22f) - 0x1p22f;  // multiples of a half
    return bits < 0x3f800000 ? subnormal : normal;
}

inline f32x8 e2m1_size(f32x8 value) { return min8(size_of(value), f32x8{} + 6.0f); }

inline i32x8 e2m1_magnitudes(f32x8 quotient) {
    f32x8 size = e2m1_size(quotient);
    i32x8 bits = (i32x8)size;
    i32x8 normal = ((bits + 0x1fffff + (bits >> 22 & 1)) >> 22) - (126 << 1);
    i32x8 subnormal = (i32x8)(size + 0x1p22f) - 0x4a800000;
    return bits < 0x3f800000 ? subnormal : normal;
}

inline i32x8 e2m1_codes(f32x8 quotient) {
    i32x8 code = e2m1_magnitudes(quotient);
    return code | (code > 0 ? ((i32x8)quotient >> 28 & 8) : i32x8{});  // no negative zero
}

inline i32x8 int8_codes(f32x8 quotient) {
    const f32x8 limit = f32x8{} + 127.0f;
    f32x8 clamped = min8(quotient < -limit ? -limit : quotient, limit);
    return ((i32x8)(clamped + 0x1.8p23f) - 0x4b400000) & 0xff;
}

inline i32x8 codes_of(int element, f32x8 quotient) {
    return element == E4M3 ? e4m3_codes(quotient) : element == INT8 ? int8_codes(quotient) : e2m1_codes(quotient);
}

// Stores 32 codes as bytes, or two to a byte.
template <int element> inline void store_codes(uint8_t* to, const i32x8 (&code)[4]) {
#if defined(__AVX2__)
    __m256i low = _mm256_packs_epi32((__m256i)code[0], (__m256i)code[1]);
    __m256i high = _mm256_packs_epi32((__m256i)code[2], (__m256i)code[3]);
    __m256i bytes = _mm256_packus_epi16(low, high);
    bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    if (element == E2M1) {
        bytes = _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(0x1001));
        bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(bytes, bytes), 0x08);
        _mm_storeu_si128((__m128i*)to, _mm256_castsi256_si128(bytes));
    } else {
        _mm256_storeu_si256((__m256i*)to, bytes);
    }
#else
    for (int i = 0; i < UNIT; i += element == E2M1 ? 2 : 1) {
        int32_t one = code[i / 8][i % 8];
        if (element == E2M1)
            to[i / 2] = uint8_t(one | code[i / 8][i % 8 + 1] << 4);
        else
            to[i] = uint8_t(one);
    }
#endif
}

// ---- loading, maxima

// Up to 32 elements as floats, zeros after them.
template <class T> inline void load_unit(const T* from, int64_t count, f32x8 (&to)[4]) {
    if (count >= UNIT) {
        UNROLL for (int i = 0; i < 4; i++)
            to[i] = load8(from + 8 * i);
        return;
    }
    float padded[UNIT] = {};
    for (int64_t i = 0; i < count; i++) padded[i] = to_float(from[i]);
    UNROLL for (int i = 0; i < 4; i++)
        to[i] = load8(padded + 8 * i);
}

inline f32x8 finite_or_zero(f32x8 value) { return size_bits(value) < INF_BITS ? value : f32x8{}; }

// The largest magnitude as the bits of a float: for magnitudes the order of bits is the order of values, with Inf above
// all numbers and NaN above Inf, so that one integer maximum also says whether all are finite.
template <class T> inline int32_t amax_bits(const T* from, int64_t count, bool finite_only) {
    i32x8 largest = {};
    f32x8 value[4];
    for (int64_t i = 0; i < count; i += UNIT) {
        load_unit(from + i, count - i, value);
        UNROLL for (int j = 0; j < 4; j++) {
            if (finite_only) value[j] = finite_or_zero(value[j]);
            largest = max8(largest, size_bits(value[j]));
        }
    }
    return max_of(largest);
}

template <class T> inline int32_t amax_of_block(const T* from, int64_t rows, int64_t columns, int64_t stride) {
    int32_t largest = 0;
    for (int64_t r = 0; r < rows; r++) {
        int32_t found = amax_bits(from + r * stride, columns, false);
        largest = found > largest ? found : largest;
    }
    return largest;
}

// ---- scales

inline float float32_scale(int32_t amax, float largest) {
    if (amax >= INF_BITS) return bit_cast<float>(NAN_BITS);
    float quotient = bit_cast<float>(amax) / largest;
    return quotient < SCALE_FLOOR ? SCALE_FLOOR : quotient;
}

inline uint8_t e8m0_byte(int32_t exponent, int32_t amax) {
    return amax >= INF_BITS ? 255 : uint8_t(exponent < 1 ? 1 : exponent);
}

inline uint8_t e8m0_above(int32_t amax, float largest) {
    int32_t bits = bit_cast<int32_t>(bit_cast<float>(amax) / largest);
    return e8m0_byte((bits >> 23) + ((bits & 0x7fffff) != 0), amax);
}

// 1 / e8m0_value(byte) of a written byte (1 to 254), exact: multiplying by it is dividing by the scale.
inline float e8m0_inverse(uint8_t byte) { return byte == 254 ? 0x1p-127f : bit_cast<float>((254 - byte) << 23); }
