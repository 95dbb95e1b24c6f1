#pragma once

#include <span>

#include "cleave/unit/program.h"

namespace cleave {

/// How far `outputs`, a program's results for x, lie from those of `reference`, on up to four rows spread over x: the
/// root of the summed squares of the differences over that of the reference's results. 0 where both are 0.
float relative_error(KernelProgram& reference, const ConstMatrix& x, std::span<const Matrix> outputs);

} // namespace cleave
