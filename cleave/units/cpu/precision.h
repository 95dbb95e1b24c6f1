#pragma once

#include "cleave/units/cpu/onednn_gemm.h"

namespace cleave::onednn {

/// How activations of `dtype` are multiplied without loss to them: float32 in float32, the others in the fastest of
/// their own dtype, float32, and three bfloat16 products (where those are fast: AMX), by measured trial products. Call
/// on a thread with the unit's OpenMP team. The first call for a dtype runs the trial (tens of milliseconds).
const Precision& exact_precision(mx::Dtype dtype);

} // namespace cleave::onednn
