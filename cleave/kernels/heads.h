#pragma once

#include "cleave/element.h"

namespace cleave::kernels {

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

/// How many of each dimension.
struct HeadCounts {
  int64_t batch, heads, tokens;
  int d;
};

} // namespace cleave::kernels
