#include <stdexcept>

#include "cleave/graph/heads_input.h"
#include "cleave/graph/primitive.h"
#include "cleave/kernels/attention.h"
#include "cleave/kernels/convert.h"
#include "cleave/kernels/kernels.h"
#include "cleave/kernels/rope.h"
#include "cleave/ops/fallback.h"
#include "cleave/ops/ops.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/fast.h"

namespace cleave::ops {

namespace {

/// A row-contiguous array as a matrix of its last dimension.
Matrix rows_of(const mx::array& a) {
  const int64_t cols = a.shape(-1);
  return {const_cast<void*>(a.data<void>()), a.dtype(), static_cast<int64_t>(a.size()) / cols, cols, cols};
}
ConstMatrix const_rows_of(const mx::array& a) {
  const auto m = rows_of(a);
  return {m.data, m.dtype, m.rows, m.cols, m.stride};
}

/// Lays [B, H, S, D] out as [B, S, H, D].
void allocate_tokens_first(mx::array& out) {
  const int64_t h = out.shape(1), s = out.shape(2), d = out.shape(3);
  auto flags = out.flags();
  flags.contiguous = true;
  flags.row_contiguous = h == 1 || s == 1;
  flags.col_contiguous = false;
  out.set_data(mx::allocator::malloc(out.nbytes()), out.size(), {s * h * d, d, h * d, 1}, flags);
}

class RmsNorm : public CpuPrimitive {
 public:
  RmsNorm(mx::Stream stream, float eps) : CpuPrimitive(stream), eps_(eps) {}
  const char* name() const override {
    return "CleaveRmsNorm";
  }
  bool is_equivalent(const mx::Primitive& other) const override {
    return eps_ == static_cast<const RmsNorm&>(other).eps_;
  }
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    return {inputs[0].shape()};
  }
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    outputs[0].set_data(mx::allocator::malloc(outputs[0].nbytes()));
    std::optional<ConstMatrix> weight;
    if (inputs.size() > 1) {
      weight = const_rows_of(inputs[1]);
    }
    mx::cpu::get_command_encoder(stream()).dispatch(
        [x = const_rows_of(inputs[0]), y = rows_of(outputs[0]), weight, eps = eps_] {
          std::vector<float> w(weight ? weight->cols : 0);
          if (weight) {
            convert_row(weight->data, weight->dtype, w.data(), mx::float32, weight->cols);
          }
          kernels::rms_norm(x, weight ? w.data() : nullptr, eps, y);
        });
  }

 private:
  float eps_;
};

class Add : public CpuPrimitive {
 public:
  using CpuPrimitive::CpuPrimitive;
  const char* name() const override {
    return "CleaveAdd";
  }
  bool is_equivalent(const mx::Primitive&) const override {
    return true;
  }
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    return {inputs[0].shape()};
  }
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    outputs[0].set_data(mx::allocator::malloc(outputs[0].nbytes()));
    mx::cpu::get_command_encoder(stream()).dispatch([a = const_rows_of(inputs[0]), b = const_rows_of(inputs[1]),
                                                     y = rows_of(outputs[0])] { kernels::add(a, b, y); });
  }
};

class Attention : public CpuPrimitive {
 public:
  Attention(mx::Stream stream, float scale, bool causal, int window)
      : CpuPrimitive(stream), scale_(scale), causal_(causal), window_(window) {}
  const char* name() const override {
    return "CleaveAttention";
  }
  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& o = static_cast<const Attention&>(other);
    return scale_ == o.scale_ && causal_ == o.causal_ && window_ == o.window_;
  }
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    return {with_last(inputs[0].shape(), inputs[2].shape(-1))};
  }
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const auto &q = inputs[0], &k = inputs[1], &v = inputs[2];
    allocate_tokens_first(outputs[0]);
    const kernels::AttentionShape shape{q.shape(0), q.shape(1), k.shape(1), q.shape(2), q.shape(3),
                                        v.shape(3), scale_,     causal_,    window_};
    mx::cpu::get_command_encoder(stream()).dispatch([shape, q = HeadsInput(q), k = HeadsInput(k), v = HeadsInput(v),
                                                     keys = k.shape(2), out = heads_of(outputs[0])]() mutable {
      const KeysValues kv{k.heads(), v.heads(), keys};
      kernels::attention(shape, q.heads(), {&kv, 1}, out);
    });
  }

 private:
  float scale_;
  bool causal_;
  int window_;
};

class Rotate : public CpuPrimitive {
 public:
  Rotate(mx::Stream stream, kernels::HeadTransform transform, int offset)
      : CpuPrimitive(stream), transform_(std::move(transform)), offset_(offset) {}
  const char* name() const override {
    return "CleaveRope";
  }
  bool is_equivalent(const mx::Primitive& other) const override {
    const auto& o = static_cast<const Rotate&>(other);
    return offset_ == o.offset_ && transform_.angles == o.transform_.angles &&
           transform_.traditional == o.transform_.traditional;
  }
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    return {inputs[0].shape()};
  }
  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    const auto& x = inputs[0];
    allocate_tokens_first(outputs[0]);
    mx::cpu::get_command_encoder(stream()).dispatch(
        [t = transform_, counts = kernels::HeadCounts{x.shape(0), x.shape(1), x.shape(2), x.shape(3)}, offset = offset_,
         from = HeadsInput(x),
         to = heads_of(outputs[0])]() mutable { kernels::transform_heads(t, counts, offset, from.heads(), to); });
  }

 private:
  kernels::HeadTransform transform_;
  int offset_;
};

bool fits(mx::Stream stream, std::initializer_list<mx::array> arrays) {
  for (const auto& a : arrays) {
    if (!is_activation_dtype(a.dtype()) || a.ndim() == 0 || a.size() == 0) {
      return false;
    }
  }
  return serves(stream);
}

} // namespace

bool serves(mx::StreamOrDevice s) {
  return mx::to_stream(s).device == mx::Device::cpu;
}

mx::array rms_norm(const mx::array& x, const std::optional<mx::array>& weight, float eps, mx::StreamOrDevice s) {
  const auto stream = mx::to_stream(s);
  if (!fits(stream, {x}) || (weight && !is_activation_dtype(weight->dtype()))) {
    return mx::fast::rms_norm(x, weight, eps, s);
  }
  if (weight && (weight->ndim() != 1 || weight->shape(0) != x.shape(-1))) {
    throw std::invalid_argument(
        "[rms_norm] got a weight of " + std::to_string(weight->size()) + " numbers and needs " +
        std::to_string(x.shape(-1)));
  }
  std::vector<mx::array> inputs{mx::contiguous(x, false, stream)};
  if (weight) {
    inputs.push_back(mx::contiguous(*weight, false, stream));
  }
  const auto dtype = weight ? mx::result_type(x, *weight) : x.dtype();
  return mx::array(x.shape(), dtype, std::make_shared<RmsNorm>(stream, eps), std::move(inputs));
}

mx::array add(const mx::array& a, const mx::array& b, mx::StreamOrDevice s) {
  const auto stream = mx::to_stream(s);
  if (!fits(stream, {a, b}) || a.shape() != b.shape() || a.dtype() != b.dtype()) {
    return mx::add(a, b, s);
  }
  return mx::array(
      a.shape(), a.dtype(), std::make_shared<Add>(stream),
      {mx::contiguous(a, false, stream), mx::contiguous(b, false, stream)});
}

mx::array attention(
    const mx::array& q,
    const mx::array& k,
    const mx::array& v,
    float scale,
    bool causal,
    int window,
    mx::StreamOrDevice s) {
  const bool shapes = q.ndim() == 4 && k.ndim() == 4 && v.ndim() == 4 && q.shape(0) == k.shape(0) &&
                      q.shape(0) == v.shape(0) && k.shape(1) == v.shape(1) &&
                      q.shape(1) % std::max(k.shape(1), 1) == 0 && k.shape(2) == v.shape(2) &&
                      q.shape(3) == k.shape(3) && (!causal || q.shape(2) <= k.shape(2));
  if (!shapes) {
    throw std::invalid_argument(
        "[attention] needs q [B, H, S, D], k [B, Hkv, T, D], v [B, Hkv, T, Dv], H a multiple of Hkv, and S <= T when "
        "causal");
  }
  const auto stream = mx::to_stream(s);
  if (!fits(stream, {q, k, v})) {
    return mlx_attention(q, k, v, scale, causal, window, s);
  }
  return mx::array(
      with_last(q.shape(), v.shape(3)), mx::result_type(q, k, v),
      std::make_shared<Attention>(stream, scale, causal, window), {q, k, v});
}

Rope::Rope(const RopeSpec& spec)
    : spec_(spec), angles_(std::make_shared<kernels::RopeAngles>(rope_frequencies(spec), spec.amplitude)) {}

mx::array Rope::operator()(const mx::array& x, int offset, mx::StreamOrDevice s) const {
  const auto stream = mx::to_stream(s);
  if (x.ndim() != 4 || x.shape(3) < spec_.dims || offset < 0 || !fits(stream, {x})) {
    return mlx_rope(spec_, x, offset, s);
  }
  kernels::HeadTransform transform{nullptr, 0, angles_, spec_.traditional};
  return mx::array(x.shape(), x.dtype(), std::make_shared<Rotate>(stream, std::move(transform), offset), {x});
}

} // namespace cleave::ops
