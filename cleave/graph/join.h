#pragma once

#include <vector>

#include "cleave/unit/unit.h"

namespace cleave {

/// Uninitialised arrays [..., n_i] with the leading dimensions of x, allocated on a CPU stream. Parts that are computed
/// by calls with slots in them need no copy when they are joined.
std::vector<mx::array> joint_buffers(
    const mx::array& x, const std::vector<int>& n, const std::vector<mx::Dtype>& dtypes, mx::Stream stream);

/// The parts side by side in the last dimension, on CPU stream `stream`: the buffer itself, after copying into it the
/// parts that are not already views of it. parts: [..., n_i], in the order of their columns, of the buffer's dtype.
mx::array join_in(const mx::array& buffer, const std::vector<mx::array>& parts, mx::Stream stream);

} // namespace cleave
