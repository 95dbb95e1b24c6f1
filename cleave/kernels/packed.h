#pragma once

#include <span>
#include <vector>

#include "cleave/element.h"

// Products of a few rows of x with weights where they lie in host memory, on the calling thread's OpenMP team. They
// cost the reading of the packed weights once, and compute in fp32.
namespace cleave::kernels {

/// A weight [n, k]: dense in float32, float16 or bfloat16; or affine codes of `bits` (2, 3, 4, 5, 6, 8), little-endian,
/// with scales and biases per `group` (a power of two, at least 32). Strides are bytes between rows.
struct WeightRows {
  const void* data;
  mx::Dtype dtype; ///< of dense weights; packed: of scales and biases
  int64_t n, k, stride;
  int bits = 0; ///< 0: dense
  int group = 0;
  const void *scales = nullptr, *biases = nullptr;
  int64_t scale_stride = 0;   ///< of the biases too
  const void* bias = nullptr; ///< [n], added to the product
  mx::Dtype bias_dtype = mx::float32;
};

/// y_i = x W_i^T + bias_i for weights of one k. y_i: [m, n_i] of any activation dtype. False, with nothing written,
/// where x is not finite: 0 * infinity must stay in its place, and packed rows are summed in groups.
bool multiply_rows(std::span<const WeightRows> weights, const ConstMatrix& x, std::span<const Matrix> y);

/// Rows [begin, end) as float32 to `out`, [end - begin, k].
void unpack_rows(const WeightRows& weight, int64_t begin, int64_t end, float* out);

} // namespace cleave::kernels
