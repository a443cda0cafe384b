// Products with few rows of x, decoded in registers at about the speed of reading the weight.

#pragma once

#include "native_io.h"

constexpr int FEW = 8;  // rows of x that this way takes, at most

// y. False if there is no memory.
bool few_rows_product(const Activation& x, const Parts& w, const Format& format, const Shape& s, const Output& out,
                      int threads);
