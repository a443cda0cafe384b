// The codes of 32 elements as vectors of floats, as wide as the machine has them, not scaled yet.
//
// A product needs its terms in no order, so two codes that share a byte stay where they come out cheaply;
// `Codes::order` says which element stands where, for x to be laid out in the same way. What comes out is exact, over
// `Codes::REBIAS`.

#pragma once

#include "native_decode.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__F16C__)
#define OLQ_WIDE
typedef float wide __attribute__((vector_size(64)));
#else
typedef f32x8 wide;
#endif

constexpr int LANES = sizeof(wide) / 4;
constexpr int PARTS = UNIT / LANES;  // vectors of a unit

inline wide load_wide(const float* from) {
    wide value;
    std::memcpy(&value, from, sizeof(value));
    return value;
}

#if defined(OLQ_WIDE)
inline f32x8 lower_half(wide value) { return (f32x8)_mm512_castps512_ps256((__m512)value); }
inline float sum_of(wide value) {
    return sum_by_halves(lower_half(value) + (f32x8)_mm512_extractf64x4_pd((__m512d)value, 1));
}
inline wide widened(f32x8 value) { return (wide)_mm512_zextps256_ps512((__m256)value); }
#else
inline float sum_of(wide value) { return sum_by_halves(value); }
inline wide widened(f32x8 value) { return value; }
#endif

// Which codes were seen, as far as NaN is concerned: no more than one instruction for many of them.
#if defined(__AVX2__) && defined(__F16C__)
struct Seen {
    __m256i largest = _mm256_setzero_si256();  // magnitudes as bytes
    inline void add(__m256i codes) {
        largest = _mm256_max_epu8(largest, _mm256_and_si256(codes, _mm256_set1_epi8(0x7f)));
    }
    bool nan() const { return _mm256_movemask_epi8(_mm256_cmpeq_epi8(largest, _mm256_set1_epi8(0x7f))) != 0; }
};
#else
struct Seen {
    i32x8 marked = {};
    bool nan() const { return any(marked); }
};
#endif

// The order of the elements themselves. Whatever the order, each half of a unit has vectors of its own.
struct InOrder {
    static constexpr int order(int at) { return at; }
};

template <int element> struct Codes;

template <> struct Codes<E4M3> : InOrder {
    static constexpr float REBIAS = E4M3_REBIAS;
#if defined(__AVX2__) && defined(__F16C__)
    static inline void read(const uint8_t* codes, wide (&to)[PARTS], Seen& seen) {
        __m256i all = _mm256_loadu_si256((const __m256i*)codes);
        seen.add(all);
#if defined(OLQ_WIDE)
        __m512i words = _mm512_slli_epi16(_mm512_cvtepi8_epi16(all), 7);
        words = _mm512_and_si512(words, _mm512_set1_epi16(int16_t(0xbfff)));  // the bit below the sign is a second one
        to[0] = (wide)_mm512_cvtph_ps(_mm512_castsi512_si256(words));
        to[1] = (wide)_mm512_cvtph_ps(_mm512_extracti64x4_epi64(words, 1));
#else
        UNROLL for (int half = 0; half < 2; half++) {
            __m256i words = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(codes + 16 * half)));
            words = _mm256_and_si256(_mm256_slli_epi16(words, 7), _mm256_set1_epi16(int16_t(0xbfff)));
            to[2 * half] = (wide)_mm256_cvtph_ps(_mm256_castsi256_si128(words));
            to[2 * half + 1] = (wide)_mm256_cvtph_ps(_mm256_extracti128_si256(words, 1));
        }
#endif
    }
#else
    static inline void read(const uint8_t* codes, wide (&to)[PARTS], Seen& seen) {
        e4m3_values(codes, to, seen.marked);
    }
#endif
};

template <> struct Codes<INT8> : InOrder {
    static constexpr float REBIAS = 1.0f;
    static inline void read(const uint8_t* codes, wide (&to)[PARTS], Seen&) {
#if defined(OLQ_WIDE)
        UNROLL for (int j = 0; j < PARTS; j++)
            to[j] = (wide)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(codes + 16 * j))));
#else
        int8_values(codes, to);
#endif
    }
};

template <> struct Codes<E2M1> : InOrder {
#if defined(OLQ_WIDE)
    static constexpr float REBIAS = 1.0f;
    // Eight bytes are two words of eight nibbles; lane 2 i + h takes nibble i of word h.
    static constexpr int order(int at) { return at / 16 * 16 + at % 2 * 8 + at % 16 / 2; }
    static inline void read(const uint8_t* codes, wide (&to)[PARTS], Seen&) {
        const __m512 values = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f,
                                             -2.0f, -3.0f, -4.0f, -6.0f);
        const __m512i shifts = _mm512_setr_epi32(0, 0, 4, 4, 8, 8, 12, 12, 16, 16, 20, 20, 24, 24, 28, 28);
        UNROLL for (int j = 0; j < PARTS; j++) {
            long long eight;
            std::memcpy(&eight, codes + 8 * j, 8);
            // Only the lower four bits of an index count.
            to[j] = (wide)_mm512_permutexvar_ps(_mm512_srlv_epi32(_mm512_set1_epi64(eight), shifts), values);
        }
    }
#elif defined(__AVX2__) && defined(__F16C__)
    static constexpr float REBIAS = 0.5f;
    // Eight lower nibbles, their upper ones, the next eight lower ones, ...
    static constexpr int order(int at) { return at / 16 * 16 + at % 8 * 2 + at / 8 % 2; }
    static inline void read(const uint8_t* codes, wide (&to)[PARTS], Seen&) {
        const __m128i twice = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
        const __m128i nibble = _mm_set1_epi8(15);
        __m128i packed = _mm_loadu_si128((const __m128i*)codes);
        UNROLL for (int odd = 0; odd < 2; odd++) {
            __m128i index = _mm_and_si128(odd ? _mm_srli_epi16(packed, 4) : packed, nibble);
            __m128i bytes = _mm_shuffle_epi8(twice, index);
            to[odd] = (wide)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
            to[2 + odd] = (wide)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)));
        }
    }
#else
    static constexpr float REBIAS = 1.0f;
    static inline void read(const uint8_t* codes, wide (&to)[PARTS], Seen&) { e2m1_values(codes, to); }
#endif
};
