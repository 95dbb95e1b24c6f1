#pragma once

#include "cleave/unit/unit.h"
#include "cleave/units/cpu/cores.h"

namespace cleave {

/// The unit "cpu": oneDNN where it is built in, mlx's own CPU product on macOS, the reference elsewhere. `options` is a
/// core group (see CoreGroup).
std::shared_ptr<Unit> make_cpu_unit(const std::string& name, const std::string& options);

/// The unit "mlx-cpu": mlx's own product in fp32 on a CPU stream (Accelerate BLAS inside on macOS). fp32 since another
/// project met crashes in the half-precision path there (mlx-dspark changelog, 0.17 to 0.18).
std::shared_ptr<Unit> make_mlx_cpu_unit(const std::string& name, const std::string& options);

/// oneDNN on the group's cores, or null where oneDNN is not built in.
std::shared_ptr<Unit> make_onednn_unit(const std::string& name, const CoreGroup& cores);

} // namespace cleave
