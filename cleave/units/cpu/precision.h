#pragma once

#include "cleave/units/cpu/onednn_gemm.h"

namespace cleave::onednn {

/// The fastest precision of at least fp16's accuracy for activations of `dtype`, by measured trial products: their own
/// dtype, float32, or three bfloat16 products where those are fast (AMX). Call on a thread with the unit's OpenMP team.
/// The first call for a dtype runs the trial (tens of milliseconds).
const Precision& exact_precision(mx::Dtype dtype);

} // namespace cleave::onednn
