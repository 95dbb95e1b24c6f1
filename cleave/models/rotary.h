#pragma once

#include "cleave/models/config.h"
#include "cleave/ops/ops.h"

namespace cleave {

/// What the scaling makes of rope: freqs in place of a base, and a factor on what is turned.
struct RopeScaling {
  std::optional<mx::array> freqs = std::nullopt; ///< [dims / 2] float32: positions per radian, mlx's convention
  float position_scale = 1;
  float input_scale = 1;
};

/// By the same float32 operations as mlx_lm's rope_utils, so that far positions turn by the same angles. `dims` even.
RopeScaling rope_scaling(const RopeConfig& config, int dims, int context);

/// The base of "dynamic" scaling for a call that ends before position `end`; up to `context` it is theta.
float dynamic_base(const RopeConfig& config, int dims, int context, int end);

/// Rotary position embedding of a model. Callable from any thread.
class Rotary {
 public:
  /// dims: of a head, all turned. context: max_position_embeddings, from which "dynamic" and "longrope" count.
  Rotary(const RopeConfig& config, int dims, int context);
  /// x [B, H, S, dims] at positions offset, offset + 1, ... -> the same shape and dtype.
  mx::array operator()(const mx::array& x, int offset) const;

 private:
  RopeConfig config_;
  int dims_, context_;
  RopeScaling scaling_;
  ops::Rope rope_;
};

} // namespace cleave
