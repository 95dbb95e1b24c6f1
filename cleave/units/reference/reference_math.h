#pragma once

#include <vector>

#include "cleave/unit/program.h"

// What the reference computes with, in fp32 by plain loops.
namespace cleave {

using Floats = std::vector<float>;

float dot(const float* a, const float* b, int64_t n);
Floats to_floats(const ConstMatrix& x);
void store(const Floats& values, const Matrix& to);
/// x [m, k] -> [m, n]
Floats multiply(const Floats& x, int64_t m, const LinearWeight& w);

/// An attention program's call. weights: q, k, v, o; x [rows, k]; outputs: y, keys, values.
void reference_attention(
    const AttentionSpec& spec,
    const std::vector<LinearWeight>& weights,
    const Floats& x,
    int64_t rows,
    const Past& past,
    std::span<const Matrix> outputs);

} // namespace cleave
