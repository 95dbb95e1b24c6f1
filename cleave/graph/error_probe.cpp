#include "cleave/graph/error_probe.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace cleave {

namespace {

double value(const Matrix& m, int64_t row, int64_t col) {
  double v = 0;
  with_type(m.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    v = static_cast<float>(static_cast<const T*>(m.data)[row * m.stride + col]);
  });
  return v;
}

} // namespace

float relative_error(KernelProgram& reference, const ConstMatrix& x, std::span<const Matrix> outputs) {
  constexpr int64_t most = 4; // each costs a pass of plain loops over the weights
  const int64_t count = std::min(most, x.rows);
  double differences = 0, sizes = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t row = i * (x.rows - 1) / std::max<int64_t>(1, count - 1);
    const auto* data = static_cast<const char*>(x.data) + row * x.stride * static_cast<int64_t>(mx::size_of(x.dtype));
    std::vector<std::vector<float>> results;
    std::vector<Matrix> to;
    for (const auto& out : outputs) {
      results.emplace_back(out.cols);
      to.push_back({results.back().data(), mx::float32, 1, out.cols, out.cols});
    }
    reference.run({data, x.dtype, 1, x.cols, x.cols}, to);
    for (size_t o = 0; o < outputs.size(); ++o) {
      for (int64_t c = 0; c < outputs[o].cols; ++c) {
        const double exact = results[o][c], difference = value(outputs[o], row, c) - exact;
        differences += difference * difference;
        sizes += exact * exact;
      }
    }
  }
  return sizes > 0 ? static_cast<float>(std::sqrt(differences / sizes)) : 0.0f;
}

} // namespace cleave
