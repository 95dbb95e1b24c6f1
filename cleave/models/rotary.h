#pragma once

#include "cleave/models/config.h"
#include "cleave/ops/ops.h"

namespace cleave {

/// What a model's scaling makes of rope, by the same float32 operations as mlx_lm's rope_utils, so that far positions
/// turn by the same angles. `dims` even.
RopeSpec rope_spec(const RopeConfig& config, int dims, int context);

/// The base of "dynamic" scaling for a call that ends before position `end`; up to `context` it is theta.
float dynamic_base(const RopeConfig& config, int dims, int context, int end);

/// Rotary position embedding of a model. Callable from any thread.
class Rotary {
 public:
  /// dims: of a head, all turned. context: max_position_embeddings, from which "dynamic" and "longrope" count.
  Rotary(const RopeConfig& config, int dims, int context);
  /// x [B, H, S, dims] at positions offset, offset + 1, ... -> the same shape and dtype.
  mx::array operator()(const mx::array& x, int offset) const;
  /// The same turn at every length; null where it depends on the length ("dynamic").
  const RopeSpec* spec() const;

 private:
  RopeConfig config_;
  int dims_, context_;
  RopeSpec spec_;
  ops::Rope rope_;
};

} // namespace cleave
