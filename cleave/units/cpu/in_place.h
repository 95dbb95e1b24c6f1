#pragma once

#include <span>
#include <vector>

#include "cleave/kernels/packed.h"
#include "cleave/linear_weight.h"

namespace cleave {

/// Weights of one k that are multiplied where they lie in the model's arrays, which it keeps alive. Holds no bytes.
class InPlace {
 public:
  explicit InPlace(std::vector<LinearWeight> weights);

  /// Whether kernels read these weights: dense, or affine in groups of 32, 64, 128 and so on, with adjacent columns.
  bool serves() const {
    return !rows_.empty();
  }
  /// Nothing where kernels do not serve the weights.
  const std::vector<kernels::WeightRows>& rows() const {
    return rows_;
  }
  /// y_i = x W_i^T + bias_i. False, with nothing written, where kernels do not serve the weights or x is not finite.
  bool multiply(const ConstMatrix& x, std::span<const Matrix> y) const {
    return serves() && kernels::multiply_rows(rows_, x, y);
  }

 private:
  std::vector<LinearWeight> weights_;
  std::vector<kernels::WeightRows> rows_;
};

/// Rows [begin, end) of any weight as float32 to `out`, on the calling thread's team.
void unpack_rows(const LinearWeight& weight, int64_t begin, int64_t end, float* out);

} // namespace cleave
