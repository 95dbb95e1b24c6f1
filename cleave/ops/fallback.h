#pragma once

#include "cleave/rope.h"

// What cleave::ops computes where it has no kernels, by mlx's own ops.
namespace cleave::ops {

mx::array mlx_attention(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    float scale,
    bool causal,
    int window,
    mx::StreamOrDevice s);

mx::array mlx_rope(const RopeSpec& spec, const mx::array& x, int offset, mx::StreamOrDevice s);

} // namespace cleave::ops
