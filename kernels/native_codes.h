// The values of codes as float32, one by one and 32 at a time, not scaled yet.

#pragma once

#include "native_format.h"
#include "native_simd.h"

inline float e4m3_value(uint8_t code) {
    int32_t size = code & 0x7f;
    if (size == 0x7f) return bit_cast<float>(NAN_BITS);
    float value = size < 8 ? float(size) * 0x1p-9f : bit_cast<float>((size << 20) + (120 << 23));
    return code & 0x80 ? -value : value;
}

inline float e2m1_value(int code) {
    int size = code & 7;
    float value = size < 2 ? float(size) * 0.5f : bit_cast<float>((size << 22) + (126 << 23));
    return code & 8 ? -value : value;
}

// What `e4m3_values` gives times this is the value.
#if defined(__AVX2__) && defined(__F16C__)
constexpr float E4M3_REBIAS = 256.0f;
#else
constexpr float E4M3_REBIAS = 1.0f;
#endif

// Marks in `nan` that a code was NaN: then the values are wrong.
inline void e4m3_values(const uint8_t* codes, f32x8 (&to)[4], i32x8& nan) {
#if defined(__AVX2__) && defined(__F16C__)
    const __m256i mask = _mm256_set1_epi8(0x7f);
    __m256i all = _mm256_loadu_si256((const __m256i*)codes);
    nan |= (i32x8)_mm256_cmpeq_epi8(_mm256_and_si256(all, mask), mask);
    // As float16 the exponent is 8 too small, hence E4M3_REBIAS; the sign is moved past the bit in between.
    for (int half = 0; half < 2; half++) {
        __m128i bytes = half ? _mm256_extracti128_si256(all, 1) : _mm256_castsi256_si128(all);
        __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
        wide = _mm256_and_si256(wide, _mm256_set1_epi16(int16_t(0xbfff)));
        to[2 * half] = (f32x8)_mm256_cvtph_ps(_mm256_castsi256_si128(wide));
        to[2 * half + 1] = (f32x8)_mm256_cvtph_ps(_mm256_extracti128_si256(wide, 1));
    }
#else
    typedef uint8_t u8x8 __attribute__((vector_size(8)));
    UNROLL for (int j = 0; j < 4; j++) {
        u8x8 bytes;
        std::memcpy(&bytes, codes + 8 * j, 8);
        i32x8 code = __builtin_convertvector(bytes, i32x8), size = code & 0x7f;
        f32x8 normal = (f32x8)((size << 20) + (120 << 23));
        f32x8 subnormal = __builtin_convertvector(size, f32x8) * 0x1p-9f;
        to[j] = (f32x8)((i32x8)(size < 8 ? subnormal : normal) | (code & 0x80) << 24);
        nan |= size == 0x7f;
    }
#endif
}

inline void e2m1_values(const uint8_t* codes, f32x8 (&to)[4]) {
#if defined(__AVX2__) && defined(__F16C__)
    // The upper bytes of the values as float16; their lower bytes are 0.
    const __m128i upper =
        _mm_setr_epi8(0, 0x38, 0x3c, 0x3e, 0x40, 0x42, 0x44, 0x46, int8_t(0x80), int8_t(0xb8), int8_t(0xbc),
                      int8_t(0xbe), int8_t(0xc0), int8_t(0xc2), int8_t(0xc4), int8_t(0xc6));
    const __m128i mask = _mm_set1_epi8(15), zero = _mm_setzero_si128();
    __m128i packed = _mm_loadu_si128((const __m128i*)codes);
    __m128i even = _mm_shuffle_epi8(upper, _mm_and_si128(packed, mask));
    __m128i odd = _mm_shuffle_epi8(upper, _mm_and_si128(_mm_srli_epi16(packed, 4), mask));
    __m128i low = _mm_unpacklo_epi8(even, odd), high = _mm_unpackhi_epi8(even, odd);
    to[0] = (f32x8)_mm256_cvtph_ps(_mm_unpacklo_epi8(zero, low));
    to[1] = (f32x8)_mm256_cvtph_ps(_mm_unpackhi_epi8(zero, low));
    to[2] = (f32x8)_mm256_cvtph_ps(_mm_unpacklo_epi8(zero, high));
    to[3] = (f32x8)_mm256_cvtph_ps(_mm_unpackhi_epi8(zero, high));
#else
    float value[UNIT];
    for (int i = 0; i < UNIT / 2; i++) {
        value[2 * i] = e2m1_value(codes[i] & 15);
        value[2 * i + 1] = e2m1_value(codes[i] >> 4);
    }
    UNROLL for (int j = 0; j < 4; j++)
        to[j] = load8(value + 8 * j);
#endif
}

inline void int8_values(const uint8_t* codes, f32x8 (&to)[4]) {
    UNROLL for (int j = 0; j < 4; j++) {
#if defined(__AVX2__)
        to[j] = (f32x8)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(codes + 8 * j))));
#else
        typedef int8_t s8x8 __attribute__((vector_size(8)));
        s8x8 code;
        std::memcpy(&code, codes + 8 * j, 8);
        to[j] = __builtin_convertvector(code, f32x8);
#endif
    }
}
