#pragma once

#include <cstdint>
#include <stdexcept>
#include <type_traits>

#include "cleave/mlx.h"

namespace cleave {

/// A row-major matrix in host memory: `stride` elements lie between rows, columns are adjacent.
struct ConstMatrix {
  const void* data;
  mx::Dtype dtype;
  int64_t rows;
  int64_t cols;
  int64_t stride;
};

/// Like ConstMatrix, but writable.
struct Matrix {
  void* data;
  mx::Dtype dtype;
  int64_t rows;
  int64_t cols;
  int64_t stride;
};

/// Rows [begin, begin + rows) of a matrix.
template <typename M>
M slice(const M& m, int64_t begin, int64_t rows) {
  auto* data = static_cast<std::conditional_t<std::is_same_v<M, Matrix>, char*, const char*>>(m.data);
  return {data + begin * m.stride * static_cast<int64_t>(mx::size_of(m.dtype)), m.dtype, rows, m.cols, m.stride};
}

/// [batch, heads, tokens, d] in host memory by its strides in elements; the last dimension's is 1.
struct Heads {
  void* data;
  mx::Dtype dtype;
  int64_t batch_stride, head_stride, token_stride;

  void* row(int64_t batch, int64_t head, int64_t token) const {
    const int64_t at = batch * batch_stride + head * head_stride + token * token_stride;
    return static_cast<char*>(data) + at * static_cast<int64_t>(mx::size_of(dtype));
  }
};

/// Consecutive keys and values of attention.
struct KeysValues {
  Heads keys, values;
  int64_t tokens;
};

/// True for the dtypes in which activations may arrive: float32, float16, bfloat16.
inline bool is_activation_dtype(mx::Dtype dtype) {
  return dtype == mx::float32 || dtype == mx::float16 || dtype == mx::bfloat16;
}

/// Calls `f` with a null pointer of the C++ type that stands for an activation dtype.
template <typename F>
decltype(auto) with_type(mx::Dtype dtype, F&& f) {
  if (dtype == mx::float16) {
    return f(static_cast<mx::float16_t*>(nullptr));
  }
  if (dtype == mx::bfloat16) {
    return f(static_cast<mx::bfloat16_t*>(nullptr));
  }
  if (dtype == mx::float32) {
    return f(static_cast<float*>(nullptr));
  }
  throw std::invalid_argument("[with_type] needs float32, float16 or bfloat16");
}

} // namespace cleave
