#include "cleave/kernels/attention.h"

#include "cleave/kernels/convert.h"
#include "cleave/kernels/rope.h"
#include "cleave/units/cpu/cpu_program.h"

namespace cleave::onednn {

namespace {

using Floats = std::vector<float>;

Floats to_floats(const std::optional<mx::array>& vector) {
  Floats out(vector ? vector->size() : 0);
  if (vector) {
    unpack_vector(*vector, out.data());
  }
  return out;
}

/// Columns of a matrix whose rows are the tokens of one sequence, as heads side by side.
Heads heads_in(const Matrix& m, int64_t column, int d) {
  auto* data = static_cast<char*>(m.data) + column * static_cast<int64_t>(mx::size_of(m.dtype));
  return {data, m.dtype, 0, d, m.stride};
}

/// One sequence of a past.
Heads sequence(const Heads& h, int64_t batch) {
  return {h.row(batch, 0, 0), h.dtype, 0, h.head_stride, h.token_stride};
}

/// Works tile by tile: a tile's queries see the past, the earlier tiles' keys, which lie in the output, and their own.
class AttentionProgram : public KernelProgram, protected CpuProgram {
 public:
  AttentionProgram(
      std::shared_ptr<Workshop> workshop,
      const ProgramSpec& spec,
      const Arithmetic& arithmetic,
      const std::vector<LinearWeight>& weights)
      : CpuProgram(std::move(workshop), spec),
        a_(*spec.attention),
        qkv_({weights[0], weights[1], weights[2]}, arithmetic, spec.tile, spec.packed),
        o_({weights[3]}, arithmetic, spec.tile, spec.packed),
        q_norm_(to_floats(a_.q_norm)),
        k_norm_(to_floats(a_.k_norm)) {
    if (a_.rope) {
      angles_ = kernels::RopeAngles::shared(rope_frequencies(*a_.rope), a_.rope->amplitude);
    }
  }

  size_t bytes() const override {
    return qkv_.bytes() + o_.bytes();
  }
  bool accepts(mx::Dtype x) const override {
    return accepts_dtype(x, spec_, qkv_.arithmetic());
  }
  std::string arithmetic() const override {
    return qkv_.arithmetic().name();
  }

  void run(const ConstMatrix& x, std::span<const Matrix> outputs, const Past& past) override {
    std::lock_guard lock(workshop_->mutex());
    workshop_->enter();
    dnnl::stream stream(cpu_engine());
    const int64_t tokens = x.rows / past.batch;
    for (int64_t b = 0; b < past.batch; ++b) {
      const auto& before = past.before;
      KeysValues cached = before;
      if (before.tokens > 0) {
        cached = {sequence(before.keys, b), sequence(before.values, b), before.tokens};
      }
      const Sequence to{
          slice(outputs[0], b * tokens, tokens), slice(outputs[1], b * tokens, tokens),
          slice(outputs[2], b * tokens, tokens)};
      for (int64_t begin = 0; begin < tokens; begin += spec_.tile) {
        const int64_t rows = std::min<int64_t>(spec_.tile, tokens - begin);
        run_tile(stream, slice(x, b * tokens + begin, rows), cached, to, begin);
      }
    }
  }

 private:
  struct Sequence {
    Matrix y, keys, values;
  };

  kernels::HeadTransform transform(const Floats& norm) const {
    return {norm.empty() ? nullptr : norm.data(), a_.norm_eps, angles_, a_.rope && a_.rope->traditional};
  }

  void run_tile(
      const dnnl::stream& stream, const ConstMatrix& x, const KeysValues& cached, const Sequence& to, int64_t begin) {
    const int d = a_.head_dim;
    const int64_t q_columns = int64_t(a_.heads) * d, kv_columns = int64_t(a_.kv_heads) * d;
    const auto qkv = scratch(wide, x.rows, q_columns + 2 * kv_columns);
    multiply(qkv_, stream, qkv_.prepare(x, *workshop_, input), qkv);
    const auto q = heads_in(qkv, 0, d);
    const int64_t position = cached.tokens + begin;
    kernels::transform_heads(transform(q_norm_), {1, a_.heads, x.rows, d}, position, q, q);
    kernels::transform_heads(
        transform(k_norm_), {1, a_.kv_heads, x.rows, d}, position, heads_in(qkv, q_columns, d),
        heads_in(slice(to.keys, begin, x.rows), 0, d));
    convert(columns(qkv, q_columns + kv_columns, kv_columns), slice(to.values, begin, x.rows));

    const KeysValues segments[] = {cached, {heads_in(to.keys, 0, d), heads_in(to.values, 0, d), begin + x.rows}};
    // In place: a block of queries is read before its results are written.
    kernels::attention({1, a_.heads, a_.kv_heads, x.rows, d, d, a_.scale, true, a_.window}, q, segments, q);
    multiply(o_, stream, o_.prepare(columns(qkv, 0, q_columns), *workshop_, middle), slice(to.y, begin, x.rows));
  }

  AttentionSpec a_;
  Gemm qkv_, o_;
  Floats q_norm_, k_norm_;
  std::shared_ptr<kernels::RopeAngles> angles_;
};

} // namespace

std::shared_ptr<Program> attention_program(
    std::shared_ptr<Workshop> workshop,
    const ProgramSpec& spec,
    const Arithmetic& arithmetic,
    const std::vector<LinearWeight>& weights) {
  return std::make_shared<AttentionProgram>(std::move(workshop), spec, arithmetic, weights);
}

} // namespace cleave::onednn
