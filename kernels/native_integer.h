// Products of int8 codes in integers: exact sums, hence the same bits whatever the way, and twice as fast as in
// float32.

#pragma once

#include "native_io.h"

// Both operands int8 with a scale a row, sums that fit 32 bits, and instructions for it. (The scales are applied to the
// sum; with fewer than four terms that would not keep within the bound of products of decoded values.)
bool integer_product_supports(const Activation& x, const Parts& w, const Format& format, const Shape& s);

// y, if it is supported. False if there is no memory.
bool integer_product(const Activation& x, const Parts& w, const Format& format, const Shape& s, const Output& out,
                     int threads);
