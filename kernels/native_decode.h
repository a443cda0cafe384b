// Reading a quantized row, 32 elements at a time, as float32: olq_fx/numerics.py `dequantize`, bit by bit.
//
// The common case goes through registers without branches on codes. What is rare (a NaN code, a scale that is NaN or so
// large that a product could leave the range of float32) goes element by element.

#pragma once

#include "native_format.h"
#include "native_simd.h"

// Scales up to here times any code stay within the range of float32.
constexpr float SAFE_SCALE = 1e35f;

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

inline float magnitude(float value) { return bit_cast<float>(bit_cast<int32_t>(value) & SIZE_BITS); }

struct E4m3Table {
    float value[256];
    E4m3Table() {
        for (int code = 0; code < 256; code++) value[code] = e4m3_value(uint8_t(code));
    }
};

inline const float* e4m3_table() {
    static const E4m3Table table;
    return table.value;
}

// One row of a quantized tensor.
template <int element, int scale_kind, int coarse_kind> class Row {
  public:
    Row(const Parts& parts, const Format& format, int64_t k, int64_t row)
        : codes_(parts.codes + row * code_bytes(format, k)),
          k_(k),
          e4m3_(scale_kind == SCALE_E4M3 ? e4m3_table() : nullptr) {
        int64_t scale_row = format.group_rows ? row / format.group_rows : 0;
        scale_ = (const uint8_t*)parts.scale + scale_row * scale_columns(format, k) * (scale_kind == SCALE_F32 ? 4 : 1);
        while (format.group_columns > UNIT << shift_) shift_++;
        if (!format.group_columns) shift_ = 62;
        if (coarse_kind == COARSE_TENSOR) factor_ = 1.0f / parts.coarse[0];
        if (coarse_kind == COARSE_ROW) factor_ = parts.coarse[row];
        if (coarse_kind == COARSE_SPAN) {
            coarse_ = parts.coarse + row * coarse_columns(format, k);
            while (format.coarse_columns > UNIT << coarse_shift_) coarse_shift_++;
        }
    }

    // Whether `fast` may read units begin to end: they are whole, and no scale of theirs is rare.
    bool plain(int64_t begin, int64_t end) const {
        if (end * UNIT > k_) return false;
        if (scale_kind == SCALE_E4M3) return magnitude(factor_) <= SAFE_SCALE / 448;
        if (scale_kind == SCALE_F32) {
            bool all = true;
            for (int64_t i = begin >> shift_; i <= (end - 1) >> shift_; i++)
                all &= magnitude(float_scale(i)) <= SAFE_SCALE;
            return all;
        }
        // Byte 0 is no normal number; 2^100 times a coarse scale of 2^16 is safe, and few tensors are larger.
        bool all = true;
        for (int64_t u = begin; u < end; u++) all &= uint8_t(scale_[u] - 1) < 127 + 100;
        if (coarse_kind == COARSE_SPAN)
            for (int64_t i = begin >> coarse_shift_; i <= (end - 1) >> coarse_shift_; i++)
                all &= magnitude(coarse_[i]) <= 0x1p16f;
        return all;
    }

    // Elements 32 u to 32 u + 31 of a plain unit. Marks in `nan` that a code was NaN: then they are wrong.
    inline void fast(int64_t u, f32x8 (&to)[4], i32x8& nan) const {
        unscaled(u, to, nan);
        if (scale_kind == SCALE_E4M3) {
            float low = e4m3_[scale_[2 * u]], high = e4m3_[scale_[2 * u + 1]];
            UNROLL for (int j = 0; j < 4; j++)
                to[j] = to[j] * (j < 2 ? low : high) * factor_;
            return;
        }
        float scale = scale_kind == SCALE_F32 ? float_scale(u >> shift_) : bit_cast<float>(int32_t(scale_[u]) << 23);
        UNROLL for (int j = 0; j < 4; j++)
            to[j] = to[j] * (scale * REBIAS);
        if (coarse_kind == COARSE_SPAN) {
            UNROLL for (int j = 0; j < 4; j++)
                to[j] = to[j] * coarse_[u >> coarse_shift_];
        }
    }

    // Elements 32 u to 32 u + 31 of any unit; zeros from k on.
    __attribute__((noinline)) void slow(int64_t u, f32x8 (&to)[4]) const {
        float value[UNIT] = {};
        for (int64_t i = 0; i < UNIT && u * UNIT + i < k_; i++) value[i] = one(u * UNIT + i);
        UNROLL for (int j = 0; j < 4; j++)
            to[j] = load8(value + 8 * j);
    }

    // Units begin to end, one after the other; zeros from k on.
    void decode(int64_t begin, int64_t end, float* to) const {
        int64_t whole = end * UNIT <= k_ ? end : k_ / UNIT;
        f32x8 value[4];
        i32x8 nan = {};
        bool quick = whole > begin && plain(begin, whole);
        for (int64_t u = begin; quick && u < whole; u++) {
            fast(u, value, nan);
            UNROLL for (int j = 0; j < 4; j++)
                store8(to + (u - begin) * UNIT + 8 * j, value[j]);
        }
        for (int64_t u = quick && !any(nan) ? whole : begin; u < end; u++) {
            slow(u, value);
            UNROLL for (int j = 0; j < 4; j++)
                store8(to + (u - begin) * UNIT + 8 * j, value[j]);
        }
    }

  private:
    const uint8_t* codes_;
    const uint8_t* scale_;
    const float* coarse_ = nullptr;
    int64_t k_;
    const float* e4m3_;
    float factor_ = 1.0f;
    int shift_ = 0, coarse_shift_ = 0;

    float coarse(int64_t u) const { return coarse_kind == COARSE_SPAN ? coarse_[u >> coarse_shift_] : factor_; }

    inline float float_scale(int64_t i) const {
        float scale;
        std::memcpy(&scale, scale_ + 4 * i, 4);
        return scale;
    }

    // What `unscaled` gives times this is the value of the codes; with a scale of at most SAFE_SCALE it is exact to
    // multiply that one.
#if defined(__AVX2__) && defined(__F16C__)
    static constexpr float REBIAS = element == E4M3 ? 256.0f : 1.0f;
#else
    static constexpr float REBIAS = 1.0f;
#endif

    // The values of the codes alone, over REBIAS.
    inline void unscaled(int64_t u, f32x8 (&to)[4], i32x8& nan) const {
        if (element == E4M3) e4m3_values(codes_ + u * UNIT, to, nan);
        if (element == E2M1) e2m1_values(codes_ + u * UNIT / 2, to);
        if (element == INT8) {
            UNROLL for (int j = 0; j < 4; j++) {
#if defined(__AVX2__)
                to[j] = (f32x8)_mm256_cvtepi32_ps(
                    _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(codes_ + u * UNIT + 8 * j))));
#else
                typedef int8_t s8x8 __attribute__((vector_size(8)));
                s8x8 code;
                std::memcpy(&code, codes_ + u * UNIT + 8 * j, 8);
                to[j] = __builtin_convertvector(code, f32x8);
#endif
            }
        }
    }

    static inline void e4m3_values(const uint8_t* codes, f32x8 (&to)[4], i32x8& nan) {
#if defined(__AVX2__) && defined(__F16C__)
        const __m256i mask = _mm256_set1_epi8(0x7f);
        __m256i all = _mm256_loadu_si256((const __m256i*)codes);
        nan |= (i32x8)_mm256_cmpeq_epi8(_mm256_and_si256(all, mask), mask);
        // As float16 the exponent is 8 too small, hence REBIAS; the sign is moved past the bit in between.
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

    static inline void e2m1_values(const uint8_t* codes, f32x8 (&to)[4]) {
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

    float one(int64_t i) const {
        float value = element == E4M3   ? e4m3_value(codes_[i])
                      : element == INT8 ? float(int8_t(codes_[i]))
                                        : e2m1_value(codes_[i / 2] >> 4 * (i & 1) & 15);
        float scale;
        if (scale_kind == SCALE_F32)
            scale = float_scale(i / UNIT >> shift_);
        else
            scale = scale_kind == SCALE_E8M0 ? e8m0_value(scale_[i / UNIT >> shift_]) : e4m3_value(scale_[i / 16]);
        value = value * scale;
        if (coarse_kind != NO_COARSE) value = value * coarse(i / UNIT);
        // Beyond the range is the largest number; a NaN stays one.
        return value > LARGEST ? LARGEST : value < -LARGEST ? -LARGEST : value;
    }
};

// The kinds of formats that there are, as types.
template <int element, int scale, int coarse> struct Kind {
    using row = Row<element, scale, coarse>;
};

// Calls work(Kind<...>()) with the kind of a format. False if there is none such.
template <class Work> inline bool with_format(const Format& f, const Work& work) {
    if (f.group_columns && (f.group_columns & (f.group_columns - 1))) return false;
    if (f.scale == SCALE_E4M3 ? f.group_columns != 16 : f.group_columns && f.group_columns < UNIT) return false;
    if (f.element == E4M3 && f.scale == SCALE_F32 && !f.coarse)
        work(Kind<E4M3, SCALE_F32, NO_COARSE>());
    else if (f.element == INT8 && f.scale == SCALE_F32 && !f.coarse)
        work(Kind<INT8, SCALE_F32, NO_COARSE>());
    else if (f.element == E4M3 && f.scale == SCALE_E8M0 && !f.coarse)
        work(Kind<E4M3, SCALE_E8M0, NO_COARSE>());
    else if (f.element == E2M1 && f.scale == SCALE_E8M0 && !f.coarse)
        work(Kind<E2M1, SCALE_E8M0, NO_COARSE>());
    else if (f.element == E2M1 && f.scale == SCALE_E8M0 && f.coarse == COARSE_SPAN)
        work(Kind<E2M1, SCALE_E8M0, COARSE_SPAN>());
    else if (f.element == E2M1 && f.scale == SCALE_E4M3 && f.coarse == COARSE_TENSOR)
        work(Kind<E2M1, SCALE_E4M3, COARSE_TENSOR>());
    else if (f.element == E2M1 && f.scale == SCALE_E4M3 && f.coarse == COARSE_ROW)
        work(Kind<E2M1, SCALE_E4M3, COARSE_ROW>());
    else
        return false;
    return true;
}
