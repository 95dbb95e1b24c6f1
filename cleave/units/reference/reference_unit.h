#pragma once

#include "cleave/unit/unit.h"

namespace cleave {

/// Plain loops over the weights as MLX holds them: the oracle, and what finishes a call that another unit failed.
/// Holds no bytes of its own. `weights` as for Unit::compile.
std::shared_ptr<KernelProgram> reference_program(const ProgramSpec& spec, std::vector<LinearWeight> weights);

std::shared_ptr<Unit> make_reference_unit(const std::string& name, const std::string& options);

} // namespace cleave
