#pragma once

#include <memory>
#include <optional>

#include "cleave/rope.h"

namespace cleave {

namespace kernels {
class RopeAngles;
}

/// Operations between the linear sites of a decoder, as lazy nodes that use all cores where the stream is a CPU's and
/// kernels are built for the processor (x86-64 Linux); elsewhere, and for dtypes other than float32, float16 and
/// bfloat16, they are mlx's own. Sums are in fp32. No derivatives.
namespace ops {

/// Whether the stream's device is one that the kernels serve.
bool serves(mx::StreamOrDevice s);

/// x / sqrt(mean(x^2) + eps) * weight over the last dimension. x [..., d], weight [d] -> [..., d] of the promoted
/// dtype.
mx::array rms_norm(const mx::array& x, const std::optional<mx::array>& weight, float eps, mx::StreamOrDevice s = {});

/// a + b for arrays of one shape and dtype; mlx's own add for others.
mx::array add(const mx::array& a, const mx::array& b, mx::StreamOrDevice s = {});

/// softmax(scale * q k^T) v. q [B, H, S, D], k [B, Hkv, T, D], v [B, Hkv, T, Dv], H a multiple of Hkv -> [B, H, S, Dv]
/// of the promoted dtype, laid out as [B, S, H, Dv], so that joining the heads costs no copy. `causal`: the last query
/// sees all T positions, each one before it one less; with a window above 0 no more than the last `window` of those.
/// Throws std::invalid_argument when the shapes do not fit.
mx::array attention(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    float scale,
    bool causal,
    int window = 0,
    mx::StreamOrDevice s = {});

/// Rotary position embedding. Holds the angles of the positions seen, so make one and
/// keep it. Callable from any thread.
class Rope {
 public:
  /// Throws std::invalid_argument when the parts of spec do not fit together.
  explicit Rope(const RopeSpec& spec);

  /// x [B, H, S, D] at positions offset, offset + 1, ... -> the same shape and dtype.
  mx::array operator()(const mx::array& x, int offset, mx::StreamOrDevice s = {}) const;

 private:
  RopeSpec spec_;
  std::shared_ptr<kernels::RopeAngles> angles_;
};

} // namespace ops
} // namespace cleave
