// What the products share: activations in either form, decoded rows of them, outputs with bias and residual.

#pragma once

#include <cstdlib>

#include "native_decode.h"

constexpr int LINE = 256;  // outputs that are written together, at most

struct Activation {
    const void* data;  // original precision, if `parts.codes` is null
    int32_t dtype;
    int64_t stride;
    Parts parts;
    Format format;
};

struct Output {
    void* data;
    int32_t dtype;
    int64_t stride;
    const void* bias;
    int32_t bias_dtype;
    const void* residual;
    int32_t residual_dtype;
    int64_t residual_stride;
};

struct Shape {
    int64_t m, n, k;
};

class Buffer {
  public:
    explicit Buffer(int64_t floats)
        : data((float*)std::aligned_alloc(64, size_t(ceil_div(floats * 4, 64) * 64 + 64))) {}
    ~Buffer() { std::free(data); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    float* const data;
};

// ---- reading x

template <class T> inline void read_plain(const T* row, int64_t begin, int64_t end, float* to) {
    int64_t i = begin;
    for (; i + 8 <= end; i += 8) store8(to + i - begin, load8(row + i));
    for (; i < end; i++) to[i - begin] = to_float(row[i]);
}

// `count` floats from element `begin` on.
inline void read_line(const void* from, int32_t dtype, int64_t begin, int64_t count, float* to) {
    if (dtype == FLOAT32) read_plain((const float*)from, begin, begin + count, to);
    if (dtype == BFLOAT16) read_plain((const bf16*)from, begin, begin + count, to);
    if (dtype == FLOAT16) read_plain((const f16*)from, begin, begin + count, to);
}

// Columns begin to end (begin a multiple of 32) of a row of x as float32, and zeros up to a multiple of 32.
inline void read_row(const Activation& x, int64_t k, int64_t row, int64_t begin, int64_t end, float* to) {
    if (!x.parts.codes) {
        read_line(x.data, x.dtype, row * x.stride + begin, end - begin, to);
        for (int64_t c = end - begin; c % UNIT; c++) to[c] = 0.0f;
        return;
    }
    with_format(x.format, [&](auto kind) {
        typename decltype(kind)::row decoded(x.parts, x.format, k, row);
        decoded.decode(begin / UNIT, ceil_div(end, UNIT), to);
    });
}

// ---- writing y

template <class T> void round_line(const float* from, int64_t count, T* to) {
    int64_t i = 0;
    for (; i + 8 <= count; i += 8) round8_to(to + i, load8(from + i));
    for (; i < count; i++) round_to(to[i], from[i]);
}

// Bias in float32, one rounding; then the residual as an addition of its own.
template <class T> void finish(const Output& out, int64_t row, int64_t column, int64_t count, float* sums) {
    float added[LINE];
    if (out.bias) {
        read_line(out.bias, out.bias_dtype, column, count, added);
        for (int64_t i = 0; i < count; i++) sums[i] += added[i];
    }
    T* y = (T*)out.data + row * out.stride + column;
    round_line(sums, count, y);
    if (!out.residual) return;
    read_line(out.residual, out.residual_dtype, row * out.residual_stride + column, count, added);
    read_plain(y, 0, count, sums);
    for (int64_t i = 0; i < count; i++) sums[i] += added[i];
    round_line(sums, count, y);
}

// Writes y[row, column ...] from at most LINE sums, which it overwrites.
inline void write_row(const Output& out, int64_t row, int64_t column, int64_t count, float* sums) {
    if (out.dtype == FLOAT32) finish<float>(out, row, column, count, sums);
    if (out.dtype == BFLOAT16) finish<bf16>(out, row, column, count, sums);
    if (out.dtype == FLOAT16) finish<f16>(out, row, column, count, sums);
}
