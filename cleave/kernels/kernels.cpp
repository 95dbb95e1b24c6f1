#include "cleave/kernels/kernels.h"

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

const Table& table() {
  static const Table& best = [&]() -> const Table& {
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
      return avx512::table;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
      return avx2::table;
    }
    return generic::table;
  }();
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

void gated(Activation activation, const ConstMatrix& gate, const ConstMatrix& up, const Matrix& y) {
  const auto& t = table();
  const auto f = activation == Activation::silu        ? t.gated_silu
                 : activation == Activation::gelu      ? t.gated_gelu
                 : activation == Activation::gelu_tanh ? t.gated_gelu_tanh
                                                       : t.gated_relu;
  on_team([&](Fence&) {
    RowReader g(gate), u(up);
    RowWriter to(y);
#pragma omp for schedule(static) nowait
    for (int64_t r = 0; r < y.rows; ++r) {
      f(g(r), u(r), to.at(r), y.cols);
      to.done(r);
    }
  });
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

void scale_rows(const Matrix& y, const float* scales, const float* bias) {
  on_team_for(
      y.rows, [&](int64_t r) { table().scale(static_cast<float*>(y.data) + r * y.stride, scales[r], bias, y.cols); });
}

} // namespace cleave::kernels
