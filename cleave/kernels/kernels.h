#pragma once

#include <vector>

#include "cleave/activation.h"
#include "cleave/element.h"

// Pointwise kernels over matrices, on the calling thread's OpenMP team. They compute in fp32 and take float32, float16
// and bfloat16 for every matrix. The best instruction set is chosen when the program starts.
namespace cleave::kernels {

/// Name of the instruction set in use: avx512, avx2 or generic.
const char* instruction_set();

/// y = x / sqrt(mean(x^2) + eps) * weight, row by row. weight: [cols] or null.
void rms_norm(const ConstMatrix& x, const float* weight, float eps, const Matrix& y);

/// What an int8 product leaves to its reader: y = y * scales[row] + bias. `bias` may be null; no scales: nothing is
/// left.
struct RowScale {
  const float* scales = nullptr;
  const float* bias = nullptr;
};

/// Two matrices of one shape; `rest` concerns both, its bias lies [gate, up] side by side.
struct GateUp {
  ConstMatrix gate, up;
  RowScale rest = {};
};

/// y = act(gate) * up.
void gated(Activation activation, const GateUp& in, const Matrix& y);

/// act(gate) * up in the form of quantize_rows.
void gated(Activation activation, const GateUp& in, int8_t* codes, float* scales);

/// y = a + b.
void add(const ConstMatrix& a, const ConstMatrix& b, const Matrix& y);

/// x = high + low, two bfloat16 matrices [rows, cols], which keep 16 bits of the mantissa. Returns whether low is not
/// all zero.
bool split(const ConstMatrix& x, uint16_t* high, uint16_t* low);

/// x ~ scales * codes with |codes| <= 127 and one scale per row. codes: [rows, cols].
void quantize_rows(const ConstMatrix& x, int8_t* codes, float* scales);

/// y = x * scales + bias. x: float32; y may be x itself.
void scale_rows(const ConstMatrix& x, const RowScale& rest, const Matrix& y);

} // namespace cleave::kernels
