#pragma once

#include "cleave/unit/program.h"

namespace cleave {

/// act(gate) * up by public mlx ops on stream s, fused into one kernel where mlx can compile.
mx::array gated(Activation activation, const mx::array& gate, const mx::array& up, mx::StreamOrDevice s = {});

} // namespace cleave
