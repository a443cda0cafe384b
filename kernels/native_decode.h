// Reading a quantized row, 32 elements at a time, as float32: olq_fx/numerics.py `dequantize`, bit by bit.
//
// The common case goes through registers without branches on codes. What is rare (a NaN code, a scale that is NaN or so
// large that a product could leave the range of float32) goes element by element.

#pragma once

#include "native_codes.h"

// Scales up to here times any code stay within the range of float32.
constexpr float SAFE_SCALE = 1e35f;

// Between these, and zero, whatever is multiplied with a code keeps all its bits, and so does that with another such
// one.
constexpr float ORDINARY_LOW = 0x1p-100f, ORDINARY_HIGH = 0x1p100f;
constexpr float LEAST_SCALE = 0x1p-126f;  // of zeros

constexpr int SECTION = 16;                  // units whose scales are looked at together
constexpr int SECTION_SCALES = 2 * SECTION;  // that these have, at most

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
    static constexpr int ELEMENT = element;
    static constexpr bool HALVES = scale_kind == SCALE_E4M3;  // two scales a unit

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

    // Units that share a scale, as far as they are of one section. (Where two share a unit, that is 1 too.)
    int span() const { return shift_ < 4 ? 1 << shift_ : SECTION; }

    // The scales of `count` whole units of a section, times `bias`: one for each span, or two for each unit. False if
    // one of them is not ordinary.
    inline bool section_scales(int64_t first, int64_t count, float bias, float* to) const {
        if (scale_kind == SCALE_F32) {
            bool all = true;
            for (int64_t u = first; u < first + count; u += span()) {
                float scale = float_scale(u >> shift_), size = magnitude(scale);
                all &= (size >= ORDINARY_LOW && size <= ORDINARY_HIGH) || size == LEAST_SCALE;
                *to++ = scale * bias;
            }
            return all;
        }
        constexpr int each = scale_kind == SCALE_E4M3 ? 2 : 1;
        uint8_t bytes[SECTION_SCALES];
        const uint8_t* from = scale_ + each * first;
        if (count < SECTION) {
            std::memset(bytes, scale_kind == SCALE_E4M3 ? 0x38 : 127, sizeof(bytes));  // 1
            std::memcpy(bytes, from, size_t(each * count));
            from = bytes;
        }
        if (scale_kind == SCALE_E4M3) return e4m3_scales(from, bias, to);
        return e8m0_scales(from, coarse_kind == COARSE_SPAN ? coarse_[first >> coarse_shift_] : 1.0f, bias, to);
    }

    int64_t row_bytes() const { return element == E2M1 ? (k_ + 1) / 2 : k_; }
    const uint8_t* codes_of(int64_t unit) const { return codes_ + unit * (element == E2M1 ? UNIT / 2 : UNIT); }

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

    // Which are not ordinary.
    static inline i32x8 rare(f32x8 scale) {
        i32x8 size = size_bits(scale);
        return (size < bit_cast<int32_t>(ORDINARY_LOW)) | (size > bit_cast<int32_t>(ORDINARY_HIGH));
    }

    inline bool e4m3_scales(const uint8_t* from, float bias, float* to) const {
        f32x8 value[4];
        i32x8 bad = {};
        e4m3_values(from, value, bad);
        UNROLL for (int j = 0; j < 4; j++) {
            f32x8 scale = value[j] * E4M3_REBIAS * factor_;
            bad |= rare(scale) & (value[j] != 0.0f);
            store8(to + 8 * j, scale * bias);
        }
        return !any(bad) && !any(rare(f32x8{} + factor_));
    }

    static inline bool e8m0_scales(const uint8_t* from, float coarse, float bias, float* to) {
        typedef uint8_t u8x8 __attribute__((vector_size(8)));
        i32x8 bad = {};
        UNROLL for (int j = 0; j < SECTION / 8; j++) {
            u8x8 bytes;
            std::memcpy(&bytes, from + 8 * j, 8);
            f32x8 scale = (f32x8)(__builtin_convertvector(bytes, i32x8) << 23) * coarse;
            i32x8 least = coarse_kind == NO_COARSE ? size_bits(scale) != bit_cast<int32_t>(LEAST_SCALE) : ~i32x8{};
            bad |= rare(scale) & least;
            store8(to + 8 * j, scale * bias);
        }
        return !any(bad);
    }

    float coarse(int64_t u) const { return coarse_kind == COARSE_SPAN ? coarse_[u >> coarse_shift_] : factor_; }

    inline float float_scale(int64_t i) const {
        float scale;
        std::memcpy(&scale, scale_ + 4 * i, 4);
        return scale;
    }

    // What `unscaled` gives times this is the value of the codes; with a scale of at most SAFE_SCALE it is exact to
    // multiply that one.
    static constexpr float REBIAS = element == E4M3 ? E4M3_REBIAS : 1.0f;

    // The values of the codes alone, over REBIAS.
    inline void unscaled(int64_t u, f32x8 (&to)[4], i32x8& nan) const {
        if (element == E4M3) e4m3_values(codes_ + u * UNIT, to, nan);
        if (element == E2M1) e2m1_values(codes_ + u * UNIT / 2, to);
        if (element == INT8) int8_values(codes_ + u * UNIT, to);
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
