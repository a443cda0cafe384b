// Eight floats at a time, in the vector extensions of GCC and Clang, with x86 instructions where they have no words.
//
// Every function here is exact or correctly rounded, so each path gives the same bits.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

// Before a loop of a few known rounds: its arrays of vectors then live in registers, also at -O2.
#define UNROLL _Pragma("GCC unroll 16")

typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));
typedef uint16_t u16x8 __attribute__((vector_size(16)));

// The dtypes of activations, biases and outputs, as Python names them by number.
enum Dtype : int32_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };
struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

constexpr int32_t SIZE_BITS = 0x7fffffff;
constexpr int32_t INF_BITS = 0x7f800000;
constexpr int32_t NAN_BITS = 0x7fc00000;
constexpr float LARGEST = 3.40282346638528859812e+38f;

template <class To, class From> inline To bit_cast(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "same size");
    To to;
    std::memcpy(&to, &from, sizeof(To));
    return to;
}

inline f32x8 load8(const float* from) {
    f32x8 value;
    std::memcpy(&value, from, sizeof(value));
    return value;
}

inline void store8(float* to, f32x8 value) { std::memcpy(to, &value, sizeof(value)); }

inline float to_float(float value) { return value; }

inline float to_float(bf16 value) { return bit_cast<float>(uint32_t(value.bits) << 16); }

inline float to_float(f16 value) {
    uint32_t sign = uint32_t(value.bits & 0x8000) << 16, size = value.bits & 0x7fff;
    if (size >= 0x7c00) return bit_cast<float>(sign | 0x7f800000u | (size & 0x3ff) << 13);
    if (size < 0x400) return bit_cast<float>(sign | bit_cast<uint32_t>(float(size) * 0x1p-24f));
    return bit_cast<float>(sign | ((size << 13) + (112u << 23)));
}

inline f32x8 load8(const bf16* from) {
    u16x8 bits;
    std::memcpy(&bits, from, sizeof(bits));
    return (f32x8)(__builtin_convertvector(bits, u32x8) << 16);
}

inline f32x8 load8(const f16* from) {
#if defined(__F16C__)
    return (f32x8)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
    f32x8 value;
    for (int i = 0; i < 8; i++) value[i] = to_float(from[i]);
    return value;
#endif
}

inline void round_to(float& to, float value) { to = value; }

inline void round_to(bf16& to, float value) {
    uint32_t bits = bit_cast<uint32_t>(value);
    bool nan = (bits & SIZE_BITS) > uint32_t(INF_BITS);
    to.bits = nan ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline void round_to(f16& to, float value) {
#if defined(__F16C__)
    to.bits = uint16_t(_cvtss_sh(value, _MM_FROUND_TO_NEAREST_INT));
#else
    uint32_t bits = bit_cast<uint32_t>(value), sign = bits >> 16 & 0x8000, size = bits & SIZE_BITS;
    uint32_t code;
    if (size > uint32_t(INF_BITS))
        code = 0x7e00;
    else if (size >= 0x477ff000)
        code = 0x7c00;  // 65520, half way to what would be the next number
    else if (size < 0x38800000)
        code = bit_cast<uint32_t>(bit_cast<float>(size) + 0.5f) - 0x3f000000;  // below 2^-14
    else
        code = (size - (112u << 23) + 0xfff + (size >> 13 & 1)) >> 13;
    to.bits = uint16_t(sign | code);
#endif
}

inline void round8_to(float* to, f32x8 value) { store8(to, value); }

inline void round8_to(bf16* to, f32x8 value) {
    u32x8 bits = (u32x8)value;
    u32x8 rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    rounded = (bits & SIZE_BITS) > uint32_t(INF_BITS) ? u32x8{} + 0x7fc0 : rounded;
#if defined(__AVX2__)
    __m128i low = _mm256_castsi256_si128((__m256i)rounded), high = _mm256_extracti128_si256((__m256i)rounded, 1);
    _mm_storeu_si128((__m128i*)to, _mm_packus_epi32(low, high));
#else
    u16x8 narrow = __builtin_convertvector(rounded, u16x8);
    std::memcpy(to, &narrow, sizeof(narrow));
#endif
}

inline void round8_to(f16* to, f32x8 value) {
#if defined(__F16C__)
    _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < 8; i++) round_to(to[i], value[i]);
#endif
}

inline int32_t max_of(i32x8 value) {
#if defined(__AVX2__)
    __m128i half = _mm_max_epi32(_mm256_castsi256_si128((__m256i)value), _mm256_extracti128_si256((__m256i)value, 1));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1));
    return _mm_cvtsi128_si32(half);
#else
    int32_t largest = value[0];
    for (int i = 1; i < 8; i++) largest = value[i] > largest ? value[i] : largest;
    return largest;
#endif
}

inline bool any(i32x8 value) {
#if defined(__AVX2__)
    return !_mm256_testz_si256((__m256i)value, (__m256i)value);
#else
    int32_t bits = 0;
    for (int i = 0; i < 8; i++) bits |= value[i];
    return bits != 0;
#endif
}

// The sum of eight floats by halves: i and i + 4, i and i + 2, i and i + 1. The order is part of the formats'
// definition.
inline float sum_by_halves(f32x8 value) {
#if defined(__AVX2__)
    __m128 half = _mm_add_ps(_mm256_castps256_ps128((__m256)value), _mm256_extractf128_ps((__m256)value, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_shuffle_ps(half, half, 1)));
#else
    float a = value[0] + value[4], b = value[1] + value[5], c = value[2] + value[6], d = value[3] + value[7];
    return (a + c) + (b + d);
#endif
}

inline f32x8 min8(f32x8 a, f32x8 b) { return a < b ? a : b; }
inline i32x8 max8(i32x8 a, i32x8 b) { return a > b ? a : b; }
inline i32x8 size_bits(f32x8 value) { return (i32x8)value & SIZE_BITS; }
inline f32x8 size_of(f32x8 value) { return (f32x8)size_bits(value); }
