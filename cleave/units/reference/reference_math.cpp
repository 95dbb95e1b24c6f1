#include "cleave/units/reference/reference_math.h"

namespace cleave {

/// Sixteen partial sums: the compiler may vectorise, and the error grows slower than that of one long chain.
float dot(const float* a, const float* b, int64_t n) {
  constexpr int lanes = 16;
  float sums[lanes] = {};
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    for (int l = 0; l < lanes; ++l) {
      sums[l] += a[i + l] * b[i + l];
    }
  }
  double total = 0;
  for (float s : sums) {
    total += s;
  }
  for (; i < n; ++i) {
    total += double(a[i]) * b[i];
  }
  return static_cast<float>(total);
}

Floats to_floats(const ConstMatrix& x) {
  Floats out(x.rows * x.cols);
  with_type(x.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    for (int64_t r = 0; r < x.rows; ++r) {
      const T* from = static_cast<const T*>(x.data) + r * x.stride;
      for (int64_t c = 0; c < x.cols; ++c) {
        out[r * x.cols + c] = static_cast<float>(from[c]);
      }
    }
  });
  return out;
}

void store(const Floats& values, const Matrix& to) {
  with_type(to.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    for (int64_t r = 0; r < to.rows; ++r) {
      T* row = static_cast<T*>(to.data) + r * to.stride;
      for (int64_t c = 0; c < to.cols; ++c) {
        row[c] = static_cast<T>(values[r * to.cols + c]);
      }
    }
  });
}

Floats multiply(const Floats& x, int64_t m, const LinearWeight& w) {
  const int64_t n = w.n(), k = w.k();
  Floats y(m * n), row(k), bias(n);
  if (w.bias) {
    unpack_vector(*w.bias, bias.data());
  }
  for (int64_t j = 0; j < n; ++j) {
    unpack_row(w, static_cast<int>(j), row.data());
    for (int64_t i = 0; i < m; ++i) {
      y[i * n + j] = dot(x.data() + i * k, row.data(), k) + bias[j];
    }
  }
  return y;
}

} // namespace cleave
