#pragma once

#include "cleave/unit/program.h"
#include "cleave/units/cpu/onednn_gemm.h"

namespace cleave::onednn {

/// How activations of `dtype` are multiplied. exact: float32 in float32, the others in the fastest of their own dtype,
/// float32, and three bfloat16 products (where those are fast: AMX). bf16 and int8: in that, where it is faster than
/// exact. By measured trial products: the first call for each runs them (tens of milliseconds). Call on a thread with
/// the unit's OpenMP team.
const Arithmetic& arithmetic_for(Precision precision, mx::Dtype dtype);

} // namespace cleave::onednn
