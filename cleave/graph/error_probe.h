#pragma once

#include <span>

#include "cleave/unit/program.h"

namespace cleave {

/// How far `outputs`, a program's results for x, lie from those of `reference`: the root of the summed squares of the
/// differences over that of the reference's results; 0 where both are 0. Of up to four rows: spread over x, or for an
/// attention, where a row depends on those before it, the first of the first sequence.
float relative_error(
    KernelProgram& reference, SiteKind kind, const ConstMatrix& x, std::span<const Matrix> outputs, const Past& past);

} // namespace cleave
