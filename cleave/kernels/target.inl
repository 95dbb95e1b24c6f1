// The kernels of one target: the including file defines kLanes inside a namespace of its own and includes no other
// header of functions, which the linker might otherwise take for all targets.

#include "cleave/kernels/simd.inl"

#include "cleave/kernels/rows.inl"

#include "cleave/kernels/attention.inl"

#include "cleave/kernels/packed.inl"

const Table table{kName, kLanes,   gated_silu, gated_gelu, gated_gelu_tanh, gated_relu, rms_norm, add,      rope,
                  split, quantize, scale,      widen_bf16, round_bf16,      pack_keys,  attend,   arranged, arrange,
                  dot,   unpack,   mix,        soften_all};
