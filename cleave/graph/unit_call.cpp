#include "cleave/graph/unit_call.h"

#include <stdexcept>

#include "cleave/graph/error_probe.h"
#include "cleave/graph/gather.h"
#include "cleave/graph/heads_input.h"
#include "cleave/graph/primitive.h"
#include "cleave/trace/span.h"
#include "mlx/backend/common/utils.h"
#include "mlx/backend/cpu/encoder.h"

namespace cleave {

namespace {

/// x as a matrix of its last dimension, when one stride serves all rows.
std::optional<ConstMatrix> as_matrix(const mx::array& x) {
  const int64_t cols = x.shape(-1);
  const int64_t rows = x.size() / cols;
  ConstMatrix m{x.data<void>(), x.dtype(), rows, cols, cols};
  if (x.flags().row_contiguous) {
    return m;
  }
  if (x.strides(-1) != 1 && cols != 1) {
    return std::nullopt;
  }
  std::optional<int64_t> stride; // of the innermost leading dimension that is not 1; a reversed view's is negative
  int64_t expected = 0;
  for (int d = static_cast<int>(x.ndim()) - 2; d >= 0; --d) {
    if (x.shape(d) == 1) {
      continue;
    }
    if (!stride) {
      stride = x.strides(d);
    } else if (x.strides(d) != expected) {
      return std::nullopt;
    }
    expected = x.strides(d) * x.shape(d);
  }
  m.stride = stride.value_or(cols);
  return m.stride < cols ? std::nullopt : std::optional(m);
}

/// A call's past on its way into the task.
class PastInput {
 public:
  PastInput(const mx::array& x, const mx::array* keys, const mx::array* values)
      : batch_(x.ndim() > 2 ? x.shape(0) : 1) {
    if (keys) {
      keys_.emplace(*keys);
      values_.emplace(*values);
      tokens_ = keys->shape(2);
    }
  }
  /// Call in the task, once; valid while this object lives.
  Past past() {
    Past p{batch_};
    if (keys_) {
      p.before = {keys_->heads(), values_->heads(), tokens_};
    }
    return p;
  }

 private:
  int64_t batch_, tokens_ = 0;
  std::optional<HeadsInput> keys_, values_;
};

/// Runs a program; when the unit fails, or has failed before this call came to run, the reference finishes it.
void run(const UnitProgram& p, const ConstMatrix& x, std::span<const Matrix> outputs, const Past& past) {
  const int64_t begin = trace::enabled() ? trace::now_ns() : 0;
  bool done = false;
  if (!p.unit->failed()) {
    try {
      static_cast<KernelProgram&>(*p.program).run(x, outputs, past);
      done = true;
    } catch (const std::exception& e) {
      p.unit->report_failure(p.stats->site + ": " + e.what());
    }
  }
  if (!done) {
    p.rescue->run(x, outputs, past);
    ++p.stats->rescued;
  } else if (p.stats->unprobed.exchange(false)) {
    p.stats->error = relative_error(*p.rescue, p.kind, x, outputs, past);
  }
  ++p.stats->engaged;
  if (begin != 0) {
    trace::record({p.stats->site, done ? p.unit->name() : "reference", begin, trace::now_ns(), x.rows});
  }
}

class UnitCall : public CpuPrimitive {
 public:
  UnitCall(mx::Stream stream, SharedProgram program, std::vector<int> columns, bool has_past)
      : CpuPrimitive(stream), program_(std::move(program)), columns_(std::move(columns)), has_past_(has_past) {}

  const char* name() const override {
    return "UnitCall";
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    std::vector<mx::Shape> shapes;
    for (int n : program_->n) {
      shapes.push_back(with_last(inputs[0].shape(), n));
    }
    return shapes;
  }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    // mlx itself keeps the buffers of inputs and siblings until the tasks queued here are done.
    const auto& x = inputs[0];
    std::vector<Matrix> to;
    to.reserve(outputs.size());
    for (size_t i = 0; i < outputs.size(); ++i) {
      auto& out = outputs[i];
      const int64_t n = out.shape(-1);
      const int64_t rows = out.size() / n;
      int64_t stride = n;
      if (columns_.empty()) {
        out.set_data(mx::allocator::malloc(out.nbytes()));
      } else {
        stride = place(out, inputs[1 + i], columns_[i]);
      }
      to.push_back({out.data<void>(), out.dtype(), rows, n, stride});
    }
    const auto* values = has_past_ ? &inputs.back() : nullptr;
    PastInput past(x, values ? values - 1 : nullptr, values);
    auto& encoder = mx::cpu::get_command_encoder(stream());
    if (auto matrix = as_matrix(x)) {
      encoder.dispatch([p = program_, matrix = *matrix, to = std::move(to), past = std::move(past)]() mutable {
        run(*p, matrix, to, past.past());
      });
      return;
    }
    encoder.dispatch([p = program_, data = x.data<void>(), dtype = x.dtype(), itemsize = x.itemsize(),
                      shape = x.shape(), strides = x.strides(), to = std::move(to), past = std::move(past)]() mutable {
      auto copy = gather(data, itemsize, shape, strides);
      run(*p, {copy.data(), dtype, to[0].rows, shape.back(), shape.back()}, to, past.past());
    });
  }

 private:
  /// Makes `out` a view of the columns of `buffer` from `column` on; returns the row stride.
  static int64_t place(mx::array& out, const mx::array& buffer, int column) {
    auto flags = out.flags();
    flags.contiguous = flags.row_contiguous = flags.col_contiguous = false;
    out.copy_shared_buffer(buffer, buffer.strides(), flags, buffer.data_size() - column, column);
    return buffer.shape(-1);
  }

  SharedProgram program_;
  std::vector<int> columns_; ///< per output, when placed in buffers
  bool has_past_;            ///< whether the last two inputs are cached keys and values
};

/// Passes its inputs on and notes the time at which the unit's stream comes by: the two ends of a graph program.
class Mark : public CpuPrimitive {
 public:
  Mark(mx::Stream stream, SharedProgram program, std::shared_ptr<std::atomic<int64_t>> begin, bool end)
      : CpuPrimitive(stream), program_(std::move(program)), begin_(std::move(begin)), end_(end) {}

  const char* name() const override {
    return "UnitMark";
  }

  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override {
    std::vector<mx::Shape> shapes;
    for (const auto& in : inputs) {
      shapes.push_back(in.shape());
    }
    return shapes;
  }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    for (size_t i = 0; i < inputs.size(); ++i) {
      outputs[i].copy_shared_buffer(inputs[i]);
    }
    const auto rows = static_cast<int64_t>(inputs[0].size() / inputs[0].shape(-1));
    mx::cpu::get_command_encoder(stream()).dispatch([p = program_, begin = begin_, end = end_, rows] {
      if (!end) {
        *begin = trace::enabled() ? trace::now_ns() : 0;
        return;
      }
      ++p->stats->engaged;
      if (*begin != 0) {
        trace::record({p->stats->site, p->unit->name(), *begin, trace::now_ns(), rows});
      }
    });
  }

 private:
  SharedProgram program_;
  std::shared_ptr<std::atomic<int64_t>> begin_;
  bool end_;
};

std::vector<mx::array> mark(
    std::vector<mx::array> arrays,
    mx::Stream stream,
    const SharedProgram& program,
    const std::shared_ptr<std::atomic<int64_t>>& begin,
    bool end) {
  std::vector<mx::Shape> shapes;
  std::vector<mx::Dtype> dtypes;
  for (const auto& a : arrays) {
    shapes.push_back(a.shape());
    dtypes.push_back(a.dtype());
  }
  auto node = std::make_shared<Mark>(stream, program, begin, end);
  return mx::array::make_arrays(std::move(shapes), dtypes, node, arrays);
}

} // namespace

std::vector<mx::array> unit_call(
    const SharedProgram& p,
    const mx::array& x,
    const std::vector<mx::Dtype>& out,
    const std::vector<Slot>& slots,
    const std::optional<CachedHeads>& past) {
  const auto main = mx::default_stream(mx::default_device());
  const bool on_main = p->alone && main.device == mx::Device::cpu && p->unit->shares_cores_with_main();
  const auto stream = on_main ? main : p->unit->stream();
  if (auto* graph = dynamic_cast<GraphProgram*>(p->program.get())) {
    auto begin = std::make_shared<std::atomic<int64_t>>(0);
    auto marked = mark({x}, stream, p, begin, false);
    return mark(graph->graph(marked[0], out, stream), stream, p, begin, true);
  }
  std::vector<mx::Shape> shapes;
  std::vector<int> columns;
  std::vector<mx::array> inputs{x};
  for (int n : p->n) {
    shapes.push_back(with_last(x.shape(), n));
  }
  for (const auto& slot : slots) {
    inputs.push_back(slot.buffer);
    columns.push_back(slot.column);
  }
  if (past) {
    inputs.push_back(past->keys);
    inputs.push_back(past->values);
  }
  return mx::array::make_arrays(
      std::move(shapes), out, std::make_shared<UnitCall>(stream, p, std::move(columns), past.has_value()), inputs);
}

} // namespace cleave
