#include "cleave/kernels/packed.h"

#include <algorithm>
#include <cstring>

#include "cleave/kernels/buffer.h"
#include "cleave/kernels/row_access.h"
#include "cleave/kernels/table.h"
#include "cleave/kernels/team.h"

namespace cleave::kernels {

namespace {

Number number_of(mx::Dtype dtype) {
  return dtype == mx::float32 ? Number::f32 : dtype == mx::float16 ? Number::f16 : Number::bf16;
}

/// The task for rows from `begin` on, without x and y.
WeightTask task_of(const WeightRows& w, int64_t begin, int64_t rows) {
  WeightTask t{};
  t.data = static_cast<const uint8_t*>(w.data) + begin * w.stride;
  t.stride = w.stride;
  if (w.bits != 0) {
    t.scales = static_cast<const uint8_t*>(w.scales) + begin * w.scale_stride;
    t.biases = static_cast<const uint8_t*>(w.biases) + begin * w.scale_stride;
    t.scale_stride = w.scale_stride;
  }
  t.number = number_of(w.dtype);
  t.bits = w.bits;
  t.group = w.group;
  t.rows = rows;
  t.k = w.k;
  return t;
}

/// How many of n rows have kReadable bytes of the array behind them.
int64_t readable(int64_t n, int64_t stride) {
  if (stride <= 0) { // a broadcast row
    return 0;
  }
  return std::max<int64_t>(0, n - (kReadable + stride - 1) / stride);
}

/// A copy of one row with room behind it, for the last ones of an array.
class PaddedRow {
 public:
  WeightTask of(const WeightTask& t) {
    const int64_t codes = t.k / 8 * t.bits, scales = t.k / t.group * (t.number == Number::f32 ? 4 : 2);
    bytes_.resize(codes + 2 * scales + 3 * kReadable);
    WeightTask out = t;
    out.rows = 1;
    out.data = put(t.data, codes, 0);
    out.scales = put(t.scales, scales, codes + kReadable);
    out.biases = put(t.biases, scales, codes + scales + 2 * kReadable);
    return out;
  }

 private:
  const uint8_t* put(const uint8_t* from, int64_t count, int64_t at) {
    std::memcpy(bytes_.data() + at, from, count);
    return bytes_.data() + at;
  }
  std::vector<uint8_t> bytes_;
};

/// Calls kernel(task) for rows [begin, end) of a weight; place(task, row) completes the task that begins at `row`.
template <typename Kernel, typename Place>
void for_rows(const WeightRows& w, int64_t begin, int64_t end, const Kernel& kernel, const Place& place) {
  int64_t safe = end;
  if (w.bits != 0) {
    safe = std::min({end, readable(w.n, w.stride), readable(w.n, w.scale_stride)});
  }
  if (begin < safe) {
    auto t = task_of(w, begin, safe - begin);
    place(t, begin);
    kernel(t);
  }
  PaddedRow padded;
  for (int64_t row = std::max(begin, safe); row < end; ++row) {
    auto t = padded.of(task_of(w, row, 1));
    place(t, row);
    kernel(t);
  }
}

/// x as the kernels of one format read it.
struct Input {
  const float *x, *sums;
  Arranged size;
};

bool same_order(const WeightRows& a, const WeightRows& b) {
  return a.bits == b.bits && a.group == b.group;
}

/// x for each weight, those of one format sharing it; nothing where x is not finite.
std::vector<Input> arranged_inputs(std::span<const WeightRows> weights, const ConstMatrix& x) {
  static thread_local std::vector<Buffer> buffers;
  buffers.resize(std::max(buffers.size(), weights.size()));
  RowReader from(x);
  std::vector<Input> inputs;
  for (size_t i = 0; i < weights.size(); ++i) {
    const auto& w = weights[i];
    if (i > 0 && same_order(w, weights[i - 1])) {
      inputs.push_back(inputs.back());
      continue;
    }
    const auto size = table().arranged(w.bits, w.group, w.k);
    float* to = buffers[i].at_least(x.rows * (size.columns + size.groups));
    float* sums = to + x.rows * size.columns;
    for (int64_t r = 0; r < x.rows; ++r) {
      if (!table().arrange(from(r), w.bits, w.group, w.k, to + r * size.columns, sums + r * size.groups)) {
        return {};
      }
    }
    inputs.push_back({to, sums, size});
  }
  return inputs;
}

constexpr int64_t kBlock = 32; ///< rows of a weight whose results are put in place together

/// Rows [begin, end) of one weight, at most kBlock, for all rows of x.
void multiply_block(
    const WeightRows& w, const Input& in, int64_t m, int64_t begin, int64_t end, const Matrix& y, float* results) {
  for_rows(w, begin, end, table().dot, [&](WeightTask& t, int64_t row) {
    t.x = in.x;
    t.x_stride = in.size.columns;
    t.sums = in.sums;
    t.sums_stride = in.size.groups;
    t.m = m;
    t.y = results + row - begin;
    t.y_stride = kBlock;
  });
  float bias[kBlock];
  if (w.bias) {
    const auto* from = static_cast<const char*>(w.bias) + begin * mx::size_of(w.bias_dtype);
    convert_row(from, w.bias_dtype, bias, mx::float32, end - begin);
  }
  for (int64_t i = 0; i < m; ++i) {
    float* row = results + i * kBlock;
    if (w.bias) {
      table().add(row, bias, row, end - begin);
    }
    auto* to = static_cast<char*>(y.data) + (i * y.stride + begin) * mx::size_of(y.dtype);
    convert_row(row, mx::float32, to, y.dtype, end - begin);
  }
}

} // namespace

bool multiply_rows(std::span<const WeightRows> weights, const ConstMatrix& x, std::span<const Matrix> y) {
  const auto inputs = arranged_inputs(weights, x);
  if (inputs.empty()) {
    return false;
  }
  std::vector<int64_t> first{0}; // block of each weight
  for (const auto& w : weights) {
    first.push_back(first.back() + (w.n + kBlock - 1) / kBlock);
  }
  on_team([&](Fence&) {
    static thread_local Buffer buffer;
    float* results = buffer.at_least(x.rows * kBlock);
    size_t i = 0;
#pragma omp for schedule(static) nowait
    for (int64_t b = 0; b < first.back(); ++b) {
      while (b >= first[i + 1]) {
        ++i;
      }
      const int64_t begin = (b - first[i]) * kBlock;
      multiply_block(weights[i], inputs[i], x.rows, begin, std::min(begin + kBlock, weights[i].n), y[i], results);
    }
  });
  return true;
}

void unpack_rows(const WeightRows& w, int64_t begin, int64_t end, float* out) {
  constexpr int64_t block = 8;
  on_team_for((end - begin + block - 1) / block, [&](int64_t b) {
    const int64_t from = begin + b * block, to = std::min(from + block, end);
    if (w.bits == 0) {
      for (int64_t r = from; r < to; ++r) {
        const auto* row = static_cast<const char*>(w.data) + r * w.stride;
        convert_row(row, w.dtype, out + (r - begin) * w.k, mx::float32, w.k);
      }
      return;
    }
    for_rows(w, from, to, table().unpack, [&](WeightTask& t, int64_t row) {
      t.y = out + (row - begin) * w.k;
      t.y_stride = w.k;
    });
  });
}

} // namespace cleave::kernels
