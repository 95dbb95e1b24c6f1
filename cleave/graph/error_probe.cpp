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

/// Adds up squares over some rows.
struct Squares {
  double differences = 0, sizes = 0;

  void add(KernelProgram& reference, const ConstMatrix& x, std::span<const Matrix> outputs, const Past& past) {
    std::vector<std::vector<float>> results;
    std::vector<Matrix> to;
    for (const auto& out : outputs) {
      results.emplace_back(x.rows * out.cols);
      to.push_back({results.back().data(), mx::float32, x.rows, out.cols, out.cols});
    }
    reference.run(x, to, past);
    for (size_t o = 0; o < outputs.size(); ++o) {
      for (int64_t i = 0; i < x.rows * outputs[o].cols; ++i) {
        const double exact = results[o][i];
        const double difference = value(outputs[o], i / outputs[o].cols, i % outputs[o].cols) - exact;
        differences += difference * difference;
        sizes += exact * exact;
      }
    }
  }
};

} // namespace

float relative_error(
    KernelProgram& reference, SiteKind kind, const ConstMatrix& x, std::span<const Matrix> outputs, const Past& past) {
  constexpr int64_t most = 4; // each costs a pass of plain loops over the weights
  Squares squares;
  auto add = [&](int64_t begin, int64_t rows) {
    std::vector<Matrix> results;
    for (const auto& out : outputs) {
      results.push_back(slice(out, begin, rows));
    }
    squares.add(reference, slice(x, begin, rows), results, {1, past.before});
  };
  if (kind == SiteKind::attention) {
    add(0, std::min(most, x.rows / past.batch));
  } else {
    const int64_t count = std::min(most, x.rows);
    for (int64_t i = 0; i < count; ++i) {
      add(i * (x.rows - 1) / std::max<int64_t>(1, count - 1), 1);
    }
  }
  return squares.sizes > 0 ? static_cast<float>(std::sqrt(squares.differences / squares.sizes)) : 0.0f;
}

} // namespace cleave
