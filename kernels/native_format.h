// What the kernels are told of a format: the row of olq_fx/formats.py in numbers.

#pragma once

#include "native_simd.h"

enum Element : int32_t { E4M3 = 0, E2M1 = 1, INT8 = 2 };
enum ScaleKind : int32_t { SCALE_F32 = 0, SCALE_E8M0 = 1, SCALE_E4M3 = 2 };
enum Coarse : int32_t { NO_COARSE = 0, COARSE_TENSOR = 1, COARSE_ROW = 2, COARSE_SPAN = 3 };
enum Rule : int32_t {
    RULE_AMAX = 0,
    RULE_POWER_OF_TWO = 1,
    RULE_FLOOR = 2,
    RULE_EVEN = 3,
    RULE_CEIL = 4,
    RULE_MSE = 5,
    RULE_FOUR_OVER_SIX = 6,
};

constexpr int UNIT = 32;  // elements that are read or written together: a multiple of the smallest groups

// An extent of 0 is the whole axis. `coarse_columns` is the length of a COARSE_SPAN. A COARSE_TENSOR scale is stored as
// its reciprocal.
struct Format {
    int32_t element, scale, group_rows, group_columns, coarse, coarse_columns;
};

// The parts of an (rows, k) tensor, each contiguous.
struct Parts {
    uint8_t* codes;
    void* scale;
    float* coarse;
};

inline int64_t ceil_div(int64_t value, int64_t divisor) { return (value + divisor - 1) / divisor; }
inline int64_t code_bytes(const Format& format, int64_t k) { return format.element == E2M1 ? (k + 1) / 2 : k; }
inline int64_t scale_columns(const Format& format, int64_t k) {
    return format.group_columns ? ceil_div(k, format.group_columns) : 1;
}
inline int64_t coarse_columns(const Format& format, int64_t k) {
    return format.coarse == COARSE_SPAN ? ceil_div(k, format.coarse_columns) : 1;
}

// Calls work(i) for 0 <= i < count, `grain` of them at a time on `threads` threads. Which thread runs what changes
// nothing in the results.
template <class Work> inline void parallel_for(int64_t count, int64_t grain, int threads, const Work& work) {
    if (threads <= 1 || count <= grain) {
        for (int64_t i = 0; i < count; i++) work(i);
        return;
    }
#pragma omp parallel for num_threads(threads) schedule(dynamic, grain)
    for (int64_t i = 0; i < count; i++) work(i);
}

// The float32 value of an e8m0 byte.
inline float e8m0_value(uint8_t byte) {
    return bit_cast<float>(byte == 255 ? NAN_BITS : byte == 0 ? 1 << 22 : int32_t(byte) << 23);
}
