#pragma once

#include <optional>
#include <string>

#include "cleave/mlx.h"

namespace cleave {

/// The parameters of one linear layer, y = x W^T + bias, as MLX holds them.
///
/// Dense: `weight` [n, k] in float32, float16 or bfloat16, and `mode` empty. Packed: `weight` [n, k * bits / 32]
/// uint32, `scales` [n, k / group_size], for mode "affine" also `biases` of that shape; the modes are those of
/// mlx::core::quantize. Slices are views: no weight is copied or quantised anew.
struct LinearWeight {
  mx::array weight;
  std::optional<mx::array> scales = std::nullopt;
  std::optional<mx::array> biases = std::nullopt;
  std::optional<mx::array> bias = std::nullopt; ///< [n], added to the product
  int group_size = 0;
  int bits = 0;
  std::string mode = {};
  std::optional<mx::array> transposed = std::nullopt; ///< weight^T, a view; see keep_transposed()

  bool packed() const {
    return !mode.empty();
  }
  int n() const;              ///< output channels
  int k() const;              ///< input channels
  size_t nbytes() const;      ///< of all arrays
  std::string format() const; ///< such as "float16" or "affine 4-bit group 64"

  /// Output channels [begin, end), with their part of the bias.
  LinearWeight rows(int begin, int end) const;
  /// Input channels [begin, end), without bias. Packed: both are multiples of group_size.
  LinearWeight columns(int begin, int end) const;

  /// The product by public mlx ops, exactly as nn.Linear and nn.QuantizedLinear build it. x: [..., k] -> [..., n].
  mx::array linear(const mx::array& x, mx::StreamOrDevice s = {}) const;
  /// Dense: makes the view weight^T once, which saves linear() a node per call.
  void keep_transposed();
  /// dtype of linear(x).
  mx::Dtype output_dtype(mx::Dtype x) const;
  /// dtype in which activations are expected to arrive: the weight's or that of its scales. The fp modes name none
  /// but by a bias; float32, which units compute without loss for any, stands for unknown.
  mx::Dtype activation_dtype() const;

  /// Throws std::invalid_argument, naming shape or dtype, when the arrays do not fit together; evaluates them.
  void check(const std::string& op) const;
};

/// Decodes row `row` of a weight to k floats. The arrays must be evaluated and in host memory. Written from the format
/// alone, not from mlx's kernels, so that it can serve as an oracle. Affine: w = q * scale + bias, q little-endian
/// bits. mxfp4, mxfp8 (OCP Microscaling 1.0): e2m1 or e4m3 codes with an e8m0 scale per 32; nvfp4: e2m1 codes with an
/// e4m3 scale per 16.
void unpack_row(const LinearWeight& weight, int row, float* out);
/// Writes a bias [n] as n floats.
void unpack_vector(const mx::array& vector, float* out);

} // namespace cleave
