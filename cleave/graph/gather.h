#pragma once

#include <vector>

#include "cleave/mlx.h"

namespace cleave {

/// Copies an array of any strides (in elements) into one whose elements follow each other.
std::vector<char> gather(const void* data, size_t itemsize, const mx::Shape& shape, const mx::Strides& strides);

} // namespace cleave
