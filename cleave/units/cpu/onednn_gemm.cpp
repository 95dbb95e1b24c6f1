#include "cleave/units/cpu/onednn_gemm.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <stdexcept>
#include <string_view>

#include "cleave/trace/span.h"
#include "cleave/units/cpu/convert.h"

namespace cleave::onednn {

namespace {

using memory = dnnl::memory;

memory::data_type type_of(mx::Dtype dtype) {
  if (dtype == mx::float16) {
    return memory::data_type::f16;
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
bool is_fast(const memory::desc& x, const memory::desc& w, const memory::desc& y) {
  try {
    dnnl::matmul::primitive_desc d(cpu_engine(), x, w, y);
    return std::string_view(d.impl_info_str()).find("ref") == std::string_view::npos;
  } catch (const dnnl::error&) {
    return false;
  }
}

} // namespace

const dnnl::engine& cpu_engine() {
  static const dnnl::engine* engine = new dnnl::engine(dnnl::engine::kind::cpu, 0); // leaked, see trace/span.cpp
  return *engine;
}

size_t Gemm::Hash::operator()(const Key& k) const {
  size_t h = 0;
  for (int64_t v : {k.m, k.x_stride, k.y_stride, k.factor_stride, int64_t(k.y_dtype)}) {
    h = h * 1000003 + static_cast<size_t>(v);
  }
  return h;
}

Gemm::Gemm(const LinearWeight& weight, mx::Dtype compute, int m, Epilogue epilogue)
    : n_(weight.n()), k_(weight.k()), compute_(compute), epilogue_(epilogue) {
  if (weight.bias) {
    bias_.resize(n_);
    unpack_vector(*weight.bias, bias_.data());
  }
  pack(weight, m);
  const auto& w = weights_.get_desc();
  const auto x = matrix(m, k_, compute, k_), y = matrix(m, n_, mx::float32, n_);
  strided_x_ = is_fast(matrix(m, k_, compute, k_ + 1), w, y);
  strided_y_ = is_fast(x, w, matrix(m, n_, mx::float32, n_ + 1));
}

size_t Gemm::bytes() const {
  return bias_.size() * sizeof(float) + (in_place_ ? 0 : weights_.get_desc().get_size());
}

dnnl::matmul::primitive_desc Gemm::describe(
    const memory::desc& x, const memory::desc& w, const memory::desc& y, const memory::desc* factor) const {
  dnnl::post_ops ops;
  switch (epilogue_) {
    case Epilogue::none:
      break;
    case Epilogue::silu:
      ops.append_eltwise(dnnl::algorithm::eltwise_swish, 1.0f, 0.0f);
      break;
    case Epilogue::gelu:
      ops.append_eltwise(dnnl::algorithm::eltwise_gelu_erf, 0.0f, 0.0f);
      break;
    case Epilogue::gelu_tanh:
      ops.append_eltwise(dnnl::algorithm::eltwise_gelu_tanh, 0.0f, 0.0f);
      break;
    case Epilogue::relu:
      ops.append_eltwise(dnnl::algorithm::eltwise_relu, 0.0f, 0.0f);
      break;
    case Epilogue::multiply:
      ops.append_binary(dnnl::algorithm::binary_mul, *factor);
      break;
  }
  dnnl::primitive_attr attr;
  attr.set_post_ops(ops);
  if (bias_.empty()) {
    return {cpu_engine(), x, w, y, attr};
  }
  return {cpu_engine(), x, w, matrix(1, n_, mx::float32, n_), y, attr};
}

void Gemm::pack(const LinearWeight& weight, int m) {
  // oneDNN's choice is asked for without epilogue: the layout depends on the product alone.
  const memory::desc any(memory::dims{k_, n_}, type_of(compute_), memory::format_tag::any);
  const auto x = matrix(m, k_, compute_, k_);
  const auto y = matrix(m, n_, mx::float32, n_);
  const auto chosen = dnnl::matmul::primitive_desc(cpu_engine(), x, any, y).weights_desc();
  const auto plain = row_major(k_, n_, compute_, k_);
  const auto transposed = memory::desc(memory::dims{k_, n_}, type_of(compute_), memory::format_tag::ab);
  const bool no_packing = chosen == plain || chosen == transposed;

  const auto& w = weight.weight;
  if (no_packing && compute_ == mx::float32 && !weight.packed() && w.dtype() == mx::float32 && w.strides(1) == 1) {
    in_place_ = weight;
    weights_ = memory(row_major(k_, n_, compute_, w.strides(0)), cpu_engine(), const_cast<float*>(w.data<float>()));
    return;
  }
  memory floats(row_major(k_, n_, mx::float32, k_), cpu_engine());
  auto* values = static_cast<float*>(floats.get_data_handle());
#pragma omp parallel for schedule(static)
  for (int row = 0; row < n_; ++row) {
    unpack_row(weight, row, values + int64_t(row) * k_);
  }
  if (no_packing && compute_ == mx::float32) {
    weights_ = floats;
    return;
  }
  weights_ = memory(no_packing ? plain : chosen, cpu_engine());
  dnnl::stream stream(cpu_engine());
  dnnl::reorder(floats, weights_).execute(stream, floats, weights_);
  stream.wait();
}

void Gemm::run(const dnnl::stream& stream, const ConstMatrix& x, const Matrix& y, const ConstMatrix* factor) {
  const auto x_desc = matrix(x.rows, k_, compute_, x.stride);
  const auto y_desc = matrix(x.rows, n_, y.dtype, y.stride);
  memory::desc factor_desc;
  if (factor) {
    factor_desc = matrix(x.rows, n_, factor->dtype, factor->stride);
  }
  const Key key{x.rows, x.stride, y.stride, factor ? factor->stride : 0, static_cast<int>(type_of(y.dtype))};
  auto found = primitives_.find(key);
  if (found == primitives_.end()) {
    constexpr size_t most = 64; // tails of many lengths must not grow it without end
    if (primitives_.size() == most) {
      primitives_.clear();
    }
    auto description = describe(x_desc, weights_.get_desc(), y_desc, factor ? &factor_desc : nullptr);
    found = primitives_.emplace(key, dnnl::matmul(description)).first;
  }
  auto wrap = [](const memory::desc& desc, const void* data) {
    return memory(desc, cpu_engine(), const_cast<void*>(data));
  };
  std::unordered_map<int, memory> arguments{
      {DNNL_ARG_SRC, wrap(x_desc, x.data)}, {DNNL_ARG_WEIGHTS, weights_}, {DNNL_ARG_DST, wrap(y_desc, y.data)}};
  if (!bias_.empty()) {
    arguments.emplace(DNNL_ARG_BIAS, wrap(matrix(1, n_, mx::float32, n_), bias_.data()));
  }
  if (factor) {
    arguments.emplace(DNNL_ARG_ATTR_MULTIPLE_POST_OP(0) | DNNL_ARG_SRC_1, wrap(factor_desc, factor->data));
  }
  found->second.execute(stream, arguments);
}

namespace {

/// Shortest time of a trial product in nanoseconds (others' work only adds); `error` is its largest relative error
/// against double precision. A negative time: oneDNN has no fast kernel for the dtype.
double trial(mx::Dtype dtype, double& error) {
  constexpr int m = 128, k = 2048, n = 256;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> xs(m * k), ws(n * k);
  std::vector<uint16_t> narrow(m * k);
  for (auto* v : {&xs, &ws}) {
    for (auto& e : *v) {
      e = std::round(normal(random) * 16) / 16; // exact in every dtype tried: only the sums can err
    }
  }
  const void* x = xs.data();
  if (dtype != mx::float32) {
    convert({xs.data(), mx::float32, m, k, k}, {narrow.data(), dtype, m, k, k});
    x = narrow.data();
  }
  const memory::desc any(memory::dims{k, n}, type_of(dtype), memory::format_tag::any);
  if (!is_fast(matrix(m, k, dtype, k), any, matrix(m, n, mx::float32, n))) {
    return -1;
  }
  Gemm gemm({mx::array(ws.data(), {n, k}, mx::float32)}, dtype, m, Epilogue::none);
  std::vector<float> y(m * n);
  dnnl::stream stream(cpu_engine());
  std::vector<int64_t> times;
  for (int i = 0; i < 7; ++i) {
    const auto begin = trace::now_ns();
    gemm.run(stream, {x, dtype, m, k, k}, {y.data(), mx::float32, m, n, n});
    stream.wait();
    times.push_back(trace::now_ns() - begin);
  }
  error = 0;
  for (int i = 0; i < m; i += 37) {
    for (int j = 0; j < n; j += 41) {
      double exact = 0, size = 0;
      for (int c = 0; c < k; ++c) {
        double term = double(xs[i * k + c]) * ws[j * k + c];
        exact += term;
        size += term * term;
      }
      error = std::max(error, std::abs(y[i * n + j] - exact) / std::sqrt(size));
    }
  }
  return static_cast<double>(*std::min_element(times.begin(), times.end()));
}

Precision choose(mx::Dtype dtype) {
  double error = 0, base_error = 0;
  const double time = trial(dtype, error);
  if (time < 0) {
    return {mx::float32, "no faster kernel"};
  }
  const double ratio = time / trial(mx::float32, base_error);
  // fp16-class: the sums themselves may add no more than half a unit in the last place of fp16. At equal speed the
  // narrower dtype wins, since it halves the copy of the weights.
  constexpr double half_ulp = 1.0 / 4096, equal = 1.1;
  const bool use = error <= half_ulp && ratio < equal;
  char text[80];
  std::snprintf(text, sizeof(text), "trial: %.2fx fp32's time, error %.1e", ratio, error);
  return {use ? dtype : mx::float32, text};
}

} // namespace

const Precision& precision(mx::Dtype dtype) {
  if (dtype == mx::float16) {
    static const Precision chosen = choose(mx::float16);
    return chosen;
  }
  if (dtype == mx::bfloat16) {
    static const Precision chosen = choose(mx::bfloat16);
    return chosen;
  }
  static const Precision exact{mx::float32, "exact"};
  return exact;
}

} // namespace cleave::onednn
