#pragma once

#include "cleave/element.h"

namespace cleave {

/// Copies a matrix into one of the same rows and cols but another activation dtype or stride, on the calling thread's
/// OpenMP team. Rounds to nearest even.
void convert(const ConstMatrix& from, const Matrix& to);

} // namespace cleave
