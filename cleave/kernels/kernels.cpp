#include "cleave/kernels/kernels.h"

#include <array>
#include <atomic>

#include "cleave/kernels/row_access.h"
#include "cleave/kernels/table.h"
#include "cleave/kernels/team.h"

namespace cleave::kernels {

namespace avx512 {
extern const Table table;
}
namespace avx2 {
extern const Table table;
}
namespace generic {
extern const Table table;
}

const Table* const* tables() {
  static const auto all = [] {
    __builtin_cpu_init();
    std::array<const Table*, 4> found{};
    size_t count = 0;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
      found[count++] = &avx512::table;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
      found[count++] = &avx2::table;
    }
    found[count] = &generic::table;
    return found;
  }();
  return all.data();
}

const Table& table() {
  static const Table& best = *tables()[0];
  return best;
}

const char* instruction_set() {
  return table().name;
}

void rms_norm(const ConstMatrix& x, const float* weight, float eps, const Matrix& y) {
  on_team([&](Fence&) {
    RowReader from(x);
    RowWriter to(y);
#pragma omp for schedule(static) nowait
    for (int64_t r = 0; r < x.rows; ++r) {
      table().rms_norm(from(r), weight, eps, to.at(r), x.cols);
      to.done(r);
    }
  });
}

namespace {

/// Calls done(row, values) for each row of act(gate) * up; `make` gives each thread its own `done` and where to
/// compute.
template <typename Make>
void each_gated_row(Activation activation, const GateUp& in, Make make) {
  const auto& t = table();
  const auto f = activation == Activation::silu        ? t.gated_silu
                 : activation == Activation::gelu      ? t.gated_gelu
                 : activation == Activation::gelu_tanh ? t.gated_gelu_tanh
                                                       : t.gated_relu;
  const int64_t cols = in.gate.cols;
  const auto& [scales, bias] = in.rest;
  on_team([&](Fence&) {
    RowReader gate(in.gate), up(in.up);
    std::vector<float> scaled(scales ? 2 * cols : 0);
    auto to = make();
#pragma omp for schedule(static) nowait
    for (int64_t r = 0; r < in.gate.rows; ++r) {
      const float *g = gate(r), *u = up(r);
      if (scales) {
        t.scale(g, scaled.data(), scales[r], bias, cols);
        t.scale(u, scaled.data() + cols, scales[r], bias ? bias + cols : nullptr, cols);
        g = scaled.data();
        u = g + cols;
      }
      f(g, u, to.at(r), cols);
      to.done(r);
    }
  });
}

/// Like RowWriter, but a row ends as codes and a scale.
struct RowQuantizer {
  int8_t* codes;
  float* scales;
  std::vector<float> row;

  float* at(int64_t) {
    return row.data();
  }
  void done(int64_t r) {
    scales[r] = table().quantize(row.data(), codes + r * static_cast<int64_t>(row.size()), row.size());
  }
};

} // namespace

void gated(Activation activation, const GateUp& in, const Matrix& y) {
  each_gated_row(activation, in, [&] { return RowWriter(y); });
}

void gated(Activation activation, const GateUp& in, int8_t* codes, float* scales) {
  each_gated_row(activation, in, [&] { return RowQuantizer{codes, scales, std::vector<float>(in.gate.cols)}; });
}

void add(const ConstMatrix& a, const ConstMatrix& b, const Matrix& y) {
  on_team([&](Fence&) {
    RowReader left(a), right(b);
    RowWriter to(y);
#pragma omp for schedule(static) nowait
    for (int64_t r = 0; r < y.rows; ++r) {
      table().add(left(r), right(r), to.at(r), y.cols);
      to.done(r);
    }
  });
}

bool split(const ConstMatrix& x, uint16_t* high, uint16_t* low) {
  std::atomic<bool> rest = false;
  on_team([&](Fence&) {
    RowReader from(x);
    bool mine = false;
#pragma omp for schedule(static) nowait
    for (int64_t r = 0; r < x.rows; ++r) {
      mine |= table().split(from(r), high + r * x.cols, low + r * x.cols, x.cols);
    }
    if (mine) {
      rest = true;
    }
  });
  return rest;
}

void quantize_rows(const ConstMatrix& x, int8_t* codes, float* scales) {
  on_team([&](Fence&) {
    RowReader from(x);
#pragma omp for schedule(static) nowait
    for (int64_t r = 0; r < x.rows; ++r) {
      scales[r] = table().quantize(from(r), codes + r * x.cols, x.cols);
    }
  });
}

void scale_rows(const ConstMatrix& x, const RowScale& rest, const Matrix& y) {
  on_team([&](Fence&) {
    RowReader from(x);
    RowWriter to(y);
#pragma omp for schedule(static) nowait
    for (int64_t r = 0; r < x.rows; ++r) {
      table().scale(from(r), to.at(r), rest.scales[r], rest.bias, x.cols);
      to.done(r);
    }
  });
}

} // namespace cleave::kernels
