#include "cleave/units/cpu/onednn_gemm.h"

#include <atomic>
#include <cmath>
#include <numeric>
#include <string_view>

#include "cleave/kernels/buffer.h"
#include "cleave/kernels/convert.h"
#include "cleave/kernels/kernels.h"
#include "cleave/kernels/team.h"
#include "cleave/units/cpu/in_place.h"

namespace cleave::onednn {

namespace {

using memory = dnnl::memory;

memory::data_type type_of(mx::Dtype dtype) {
  if (dtype == mx::float16) {
    return memory::data_type::f16;
  }
  if (dtype == mx::int8) {
    return memory::data_type::s8;
  }
  return dtype == mx::bfloat16 ? memory::data_type::bf16 : memory::data_type::f32;
}

memory::desc matrix(int64_t rows, int64_t cols, mx::Dtype dtype, int64_t stride) {
  return {memory::dims{rows, cols}, type_of(dtype), memory::dims{stride, 1}};
}

/// W [n, k] row-major, read as the [k, n] operand.
memory::desc row_major(int64_t k, int64_t n, mx::Dtype dtype, int64_t stride) {
  return {memory::dims{k, n}, type_of(dtype), memory::dims{1, stride}};
}

/// oneDNN answers what its fast kernels cannot do with a reference hundreds of times slower.
bool is_fast(const dnnl::matmul::primitive_desc& d) {
  return std::string_view(d.impl_info_str()).find("ref") == std::string_view::npos;
}

} // namespace

const dnnl::engine& cpu_engine() {
  static const dnnl::engine* engine = new dnnl::engine(dnnl::engine::kind::cpu, 0); // leaked, see trace/span.cpp
  return *engine;
}

std::string Arithmetic::name() const {
  const std::string type = dtype == mx::float32   ? "float32"
                           : dtype == mx::float16 ? "float16"
                           : dtype == mx::int8    ? "int8"
                                                  : "bfloat16";
  return products == 1 ? type : std::to_string(products) + " x " + type;
}

size_t Gemm::Hash::operator()(const Key& k) const {
  size_t h = 0;
  for (int64_t v : {k.m, k.n, k.x_stride, k.y_stride, int64_t(k.y_dtype), int64_t(k.adds)}) {
    h = h * 1000003 + static_cast<size_t>(v);
  }
  return h;
}

Gemm::Gemm(const std::vector<LinearWeight>& weights, const Arithmetic& arithmetic, int m, bool unpack_each_time)
    : n_(0), k_(weights[0].k()), arithmetic_(arithmetic) {
  bool biased = false;
  for (const auto& w : weights) {
    n_ += w.n();
    biased |= w.bias.has_value();
  }
  if (unpack_each_time) {
    each_time_ = weights;
    return;
  }
  if (biased) {
    bias_.resize(n_);
    float* at = bias_.data();
    for (const auto& w : weights) {
      if (w.bias) {
        unpack_vector(*w.bias, at);
      }
      at += w.n();
    }
  }
  pack(weights, m);
  auto fast = [&](int64_t x_stride, int64_t y_stride) {
    try {
      return is_fast(describe(
          matrix(m, k_, arithmetic_.dtype, x_stride), weights_.get_desc(), matrix(m, n_, mx::float32, y_stride),
          arithmetic_.products > 1));
    } catch (const dnnl::error&) {
      return false;
    }
  };
  if (!fast(k_, n_)) {
    throw std::runtime_error("oneDNN has no fast kernel for " + arithmetic_.name() + " on this processor");
  }
  strided_x_ = fast(k_ + 1, n_);
  strided_y_ = fast(k_, n_ + 1);
}

size_t Gemm::bytes() const {
  if (!each_time_.empty()) {
    return 0;
  }
  return (bias_.size() + scales_.size()) * sizeof(float) + (in_place_ ? 0 : weights_.get_desc().get_size()) +
         (low_ ? low_.get_desc().get_size() : 0);
}

dnnl::matmul::primitive_desc Gemm::describe(
    const memory::desc& x, const memory::desc& w, const memory::desc& y, bool adds) const {
  dnnl::primitive_attr attr;
  if (!scales_.empty()) {
    attr.set_scales_mask(DNNL_ARG_WEIGHTS, 1 << 1);
  }
  if (adds) {
    dnnl::post_ops ops;
    ops.append_sum();
    attr.set_post_ops(ops);
  }
  if (bias_.empty() || adds || !scales_.empty()) { // int8: the bias is added after the scales of x
    return {cpu_engine(), x, w, y, attr};
  }
  return {cpu_engine(), x, w, matrix(1, n_, mx::float32, n_), y, attr};
}

void Gemm::run_blocks(const dnnl::stream& stream, const ConstMatrix& x, const Matrix& y) {
  static thread_local kernels::Buffer buffer;
  // A thread's part of a block stays in its second-level cache.
  constexpr int64_t floats_per_thread = 1 << 16;
  const int64_t block = std::max<int64_t>(32, floats_per_thread * omp_get_max_threads() / k_ / 32 * 32);
  int64_t column = 0;
  for (const auto& w : each_time_) {
    std::vector<float> bias(w.bias ? w.n() : 0);
    if (w.bias) {
      unpack_vector(*w.bias, bias.data());
    }
    for (int64_t begin = 0; begin < w.n(); begin += block) {
      const int64_t rows = std::min<int64_t>(block, w.n() - begin);
      float* values = buffer.at_least(rows * k_);
      unpack_rows(w, begin, begin + rows, values);
      const memory plain(row_major(k_, rows, mx::float32, k_), cpu_engine(), values);
      const Matrix part{static_cast<float*>(y.data) + column + begin, mx::float32, y.rows, rows, y.stride};
      multiply(stream, x, plain, part, false);
    }
    if (w.bias) {
      const Matrix whole{static_cast<float*>(y.data) + column, mx::float32, y.rows, w.n(), y.stride};
      kernels::add(
          {whole.data, mx::float32, y.rows, w.n(), y.stride}, {bias.data(), mx::float32, y.rows, w.n(), 0}, whole);
    }
    column += w.n();
  }
}

void Gemm::pack(const std::vector<LinearWeight>& weights, int m) {
  std::vector<std::pair<const LinearWeight*, int>> rows; // of the stacked weight
  rows.reserve(n_);
  for (const auto& w : weights) {
    for (int r = 0; r < w.n(); ++r) {
      rows.emplace_back(&w, r);
    }
  }
  const auto dtype = arithmetic_.dtype;
  if (dtype == mx::int8) {
    scales_.resize(n_);
  }
  // oneDNN's choice for the product alone; a bias does not change it.
  const memory::desc any(memory::dims{k_, n_}, type_of(dtype), memory::format_tag::any);
  const auto chosen = describe(matrix(m, k_, dtype, k_), any, matrix(m, n_, mx::float32, n_), false).weights_desc();
  const auto plain = row_major(k_, n_, dtype, k_);
  const auto transposed = memory::desc(memory::dims{k_, n_}, type_of(dtype), memory::format_tag::ab);
  const bool no_packing = chosen == plain || chosen == transposed;

  const auto& w = weights[0].weight;
  if (weights.size() == 1 && no_packing && dtype == mx::float32 && !weights[0].packed() && w.dtype() == mx::float32 &&
      w.strides(1) == 1) {
    in_place_ = weights[0];
    weights_ = memory(row_major(k_, n_, dtype, w.strides(0)), cpu_engine(), const_cast<float*>(w.data<float>()));
    return;
  }
  memory high(plain, cpu_engine()), low;
  if (arithmetic_.products > 1) {
    low = memory(plain, cpu_engine());
  }
  std::atomic<bool> rest = false; // weights that are bfloat16 numbers have no low part
  kernels::on_team([&](kernels::Fence&) {
    std::vector<float> values(k_);
#pragma omp for schedule(static) nowait
    for (int r = 0; r < n_; ++r) {
      unpack_row(*rows[r].first, rows[r].second, values.data());
      const ConstMatrix row{values.data(), mx::float32, 1, k_, k_};
      auto at = [&](memory& part) {
        return static_cast<char*>(part.get_data_handle()) + int64_t(r) * k_ * mx::size_of(dtype);
      };
      if (dtype == mx::int8) {
        kernels::quantize_rows(row, reinterpret_cast<int8_t*>(at(high)), &scales_[r]);
      } else if (low) {
        if (kernels::split(row, reinterpret_cast<uint16_t*>(at(high)), reinterpret_cast<uint16_t*>(at(low)))) {
          rest = true;
        }
      } else {
        convert_row(values.data(), mx::float32, at(high), dtype, k_);
      }
    }
  });
  auto packed = [&](memory& part) {
    if (no_packing) {
      return part;
    }
    memory out(chosen, cpu_engine());
    dnnl::stream stream(cpu_engine());
    dnnl::reorder(part, out).execute(stream, part, out);
    stream.wait();
    return out;
  };
  weights_ = packed(high);
  if (rest) {
    low_ = packed(low);
  }
}

Operand Gemm::prepare(const ConstMatrix& x, Workshop& workshop, size_t slot) const {
  const auto dtype = arithmetic_.dtype;
  if (arithmetic_.products == 1 && x.dtype == dtype && (x.stride == x.cols || strided_x_)) {
    return {x};
  }
  const size_t count = x.rows * x.cols;
  void* data =
      workshop.scratch(slot, arithmetic_.products == 1 ? count * mx::size_of(dtype) : 2 * count * sizeof(uint16_t));
  const ConstMatrix to{data, dtype, x.rows, x.cols, x.cols};
  if (dtype == mx::int8) {
    auto* scales = static_cast<float*>(workshop.scratch(slot + 1, x.rows * sizeof(float)));
    kernels::quantize_rows(x, static_cast<int8_t*>(data), scales);
    return {to, nullptr, scales};
  }
  if (arithmetic_.products > 1) {
    auto* high = static_cast<uint16_t*>(data);
    const bool rest = kernels::split(x, high, high + count);
    return {to, rest ? high + count : nullptr}; // activations of bfloat16 have no low part
  }
  convert(x, {data, dtype, x.rows, x.cols, x.cols});
  return {to};
}

bool Gemm::takes(const Matrix& y) const {
  if (!each_time_.empty()) {
    return y.dtype == mx::float32;
  }
  const bool own = arithmetic_.products == 1 && y.dtype == arithmetic_.dtype && y.dtype != mx::int8;
  return (y.dtype == mx::float32 || own) && (y.stride == n_ || strided_y_);
}

void Gemm::run(const dnnl::stream& stream, const Operand& x, const Matrix& y) {
  if (!each_time_.empty()) {
    run_blocks(stream, x.matrix, y);
    return;
  }
  multiply(stream, x.matrix, weights_, y, false);
  if (x.low) {
    auto low = x.matrix;
    low.data = x.low;
    multiply(stream, low, weights_, y, true);
  }
  if (low_) {
    multiply(stream, x.matrix, low_, y, true);
  }
}

kernels::RowScale Gemm::rest(const Operand& x) const {
  return {x.scales, x.scales && !bias_.empty() ? bias_.data() : nullptr};
}

void Gemm::multiply(const dnnl::stream& stream, const ConstMatrix& x, const memory& w, const Matrix& y, bool adds) {
  const auto x_desc = matrix(x.rows, k_, arithmetic_.dtype, x.stride);
  const auto y_desc = matrix(x.rows, y.cols, y.dtype, y.stride);
  const Key key{x.rows, y.cols, x.stride, y.stride, static_cast<int>(type_of(y.dtype)), adds};
  auto found = primitives_.find(key);
  if (found == primitives_.end()) {
    constexpr size_t most = 64; // tails of many lengths must not grow it without end
    if (primitives_.size() >= most) {
      primitives_.clear();
    }
    found = primitives_.emplace(key, dnnl::matmul(describe(x_desc, w.get_desc(), y_desc, adds))).first;
  }
  auto wrap = [](const memory::desc& desc, const void* data) {
    return memory(desc, cpu_engine(), const_cast<void*>(data));
  };
  std::unordered_map<int, memory> arguments{
      {DNNL_ARG_SRC, wrap(x_desc, x.data)}, {DNNL_ARG_WEIGHTS, w}, {DNNL_ARG_DST, wrap(y_desc, y.data)}};
  if (!scales_.empty()) {
    const memory::desc scales(memory::dims{n_}, memory::data_type::f32, memory::format_tag::a);
    arguments.emplace(DNNL_ARG_ATTR_SCALES | DNNL_ARG_WEIGHTS, wrap(scales, scales_.data()));
  } else if (!bias_.empty() && !adds) {
    arguments.emplace(DNNL_ARG_BIAS, wrap(matrix(1, n_, mx::float32, n_), bias_.data()));
  }
  found->second.execute(stream, arguments);
}

} // namespace cleave::onednn
