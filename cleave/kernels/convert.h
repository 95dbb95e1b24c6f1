#pragma once

#include "cleave/element.h"

namespace cleave {

/// Copies a matrix into one of the same rows and cols but another activation dtype or stride, on the calling thread's
/// OpenMP team. Rounds to nearest even.
void convert(const ConstMatrix& from, const Matrix& to);
/// One row of `n` adjacent elements.
void convert_row(const void* from, mx::Dtype from_dtype, void* to, mx::Dtype to_dtype, int64_t n);

} // namespace cleave
