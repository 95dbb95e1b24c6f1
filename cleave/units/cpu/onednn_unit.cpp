#include <omp.h>

#include <numeric>
#include <sstream>
#include <stdexcept>

#include "cleave/units/cpu/convert.h"
#include "cleave/units/cpu/cpu_unit.h"
#include "cleave/units/cpu/onednn_gemm.h"

namespace cleave {

namespace {

using onednn::Epilogue;
using onednn::Gemm;

/// What the programs of a unit share: its cores, and scratch memory that one call at a time may use.
struct Workshop {
  explicit Workshop(CoreGroup group) : cores(std::move(group)) {}

  /// Makes the calling thread one of the group; a stream's thread serves units of one name only, so once is enough.
  void enter() {
    static thread_local const Workshop* entered = nullptr;
    if (entered != this) {
      cores.pin();
      omp_set_num_threads(cores.threads());
      entered = this;
    }
  }
  /// The slot's buffer, at least `bytes` long.
  void* scratch(size_t slot, size_t bytes) {
    if (buffers.size() <= slot) {
      buffers.resize(slot + 1);
    }
    if (buffers[slot].size() < bytes) {
      buffers[slot].resize(bytes);
    }
    return buffers[slot].data();
  }

  CoreGroup cores;
  std::mutex mutex;
  std::vector<std::vector<char>> buffers;
};

Epilogue epilogue(Activation activation) {
  switch (activation) {
    case Activation::silu:
      return Epilogue::silu;
    case Activation::gelu:
      return Epilogue::gelu;
    case Activation::gelu_tanh:
      return Epilogue::gelu_tanh;
    case Activation::relu:
      return Epilogue::relu;
  }
  return Epilogue::none;
}

class OneDnnProgram : public KernelProgram {
 public:
  OneDnnProgram(
      std::shared_ptr<Workshop> workshop,
      const ProgramSpec& spec,
      mx::Dtype compute,
      const std::vector<LinearWeight>& weights)
      : workshop_(std::move(workshop)), spec_(spec), compute_(compute) {
    const bool mlp = spec.kind == SiteKind::mlp;
    for (size_t i = 0; i < weights.size(); ++i) {
      auto after = Epilogue::none;
      if (mlp && i == 0) {
        after = epilogue(spec.activation);
      } else if (mlp && i == 1) {
        after = Epilogue::multiply;
      }
      gemms_.emplace_back(weights[i], compute, spec.tile, after);
    }
  }

  size_t bytes() const override {
    size_t total = 0;
    for (const auto& g : gemms_) {
      total += g.bytes();
    }
    return total;
  }

  bool accepts(mx::Dtype x) const override {
    // A narrower dtype than x's could overflow.
    return is_activation_dtype(x) && (compute_ == mx::float32 || x == compute_);
  }

  void run(const ConstMatrix& x, std::span<const Matrix> outputs) override {
    std::lock_guard lock(workshop_->mutex);
    workshop_->enter();
    dnnl::stream stream(onednn::cpu_engine());
    // Tile by tile: scratch stays small and in cache, and few primitives serve every length.
    for (int64_t begin = 0; begin < x.rows; begin += spec_.tile) {
      const int64_t rows = std::min<int64_t>(spec_.tile, x.rows - begin);
      const auto part = converted(slice(x, begin, rows));
      if (spec_.kind == SiteKind::mlp) {
        run_mlp(stream, part, slice(outputs[0], begin, rows));
        continue;
      }
      for (size_t i = 0; i < gemms_.size(); ++i) {
        multiply(gemms_[i], stream, part, slice(outputs[i], begin, rows));
      }
    }
  }

 private:
  enum Scratch { input, result, gate, hidden };

  template <typename M>
  static M slice(const M& m, int64_t begin, int64_t rows) {
    auto* data = static_cast<std::conditional_t<std::is_same_v<M, Matrix>, char*, const char*>>(m.data);
    return {data + begin * m.stride * mx::size_of(m.dtype), m.dtype, rows, m.cols, m.stride};
  }

  /// x in the dtype and the layout that the products take.
  ConstMatrix converted(const ConstMatrix& x) {
    if (x.dtype == compute_ && (x.stride == x.cols || gemms_[0].takes_strided_x())) {
      return x;
    }
    auto to = scratch(input, x.rows, x.cols, compute_);
    convert(x, to);
    return {to.data, to.dtype, to.rows, to.cols, to.stride};
  }

  Matrix scratch(Scratch slot, int64_t rows, int64_t cols, mx::Dtype dtype) {
    return {workshop_->scratch(slot, rows * cols * mx::size_of(dtype)), dtype, rows, cols, cols};
  }

  void multiply(Gemm& gemm, const dnnl::stream& stream, const ConstMatrix& x, const Matrix& to) {
    const bool known = to.dtype == mx::float32 || to.dtype == compute_;
    if (known && (to.stride == to.cols || gemm.takes_strided_y())) {
      gemm.run(stream, x, to);
      return;
    }
    auto dense = scratch(result, to.rows, to.cols, known ? to.dtype : mx::float32);
    gemm.run(stream, x, dense);
    convert({dense.data, dense.dtype, dense.rows, dense.cols, dense.stride}, to);
  }

  void run_mlp(const dnnl::stream& stream, const ConstMatrix& x, const Matrix& to) {
    auto g = scratch(gate, x.rows, spec_.hidden, compute_);
    auto h = scratch(hidden, x.rows, spec_.hidden, compute_);
    gemms_[0].run(stream, x, g);
    const ConstMatrix factor{g.data, g.dtype, g.rows, g.cols, g.stride};
    gemms_[1].run(stream, x, h, &factor);
    multiply(gemms_[2], stream, {h.data, h.dtype, h.rows, h.cols, h.stride}, to);
  }

  std::shared_ptr<Workshop> workshop_;
  ProgramSpec spec_;
  mx::Dtype compute_;
  std::vector<Gemm> gemms_;
};

class OneDnnUnit : public Unit {
 public:
  OneDnnUnit(const std::string& name, const CoreGroup& cores)
      : Unit(name), workshop_(std::make_shared<Workshop>(cores)) {}

  std::string description() const override {
    const auto* v = dnnl::version();
    std::ostringstream s;
    s << "oneDNN " << v->major << '.' << v->minor << '.' << v->patch << " on " << workshop_->cores.threads()
      << (workshop_->cores.threads() == 1 ? " core" : " cores");
    for (size_t i = 0; i < workshop_->cores.cores().size(); ++i) {
      s << (i ? "," : " (") << workshop_->cores.cores()[i];
    }
    s << (workshop_->cores.cores().empty() ? "" : ")");
    for (auto dtype : {mx::float16, mx::bfloat16}) {
      const auto& p = precision(dtype);
      s << ", " << dtype << " in " << p.dtype << " (" << p.reason << ")";
    }
    return s.str();
  }

  std::optional<std::string> refusal(const ProgramSpec& spec) const override {
    if (!is_activation_dtype(spec.dtype)) {
      return "it needs float32, float16 or bfloat16 activations";
    }
    return std::nullopt;
  }

  size_t memory(const ProgramSpec& spec) const override {
    const int64_t biases = std::accumulate(spec.n.begin(), spec.n.end(), 2 * int64_t(spec.hidden));
    return spec.parameters() * mx::size_of(precision(spec.dtype).dtype) + biases * sizeof(float);
  }

  std::shared_ptr<Program> compile(const ProgramSpec& spec, const std::vector<LinearWeight>& weights) override {
    std::shared_ptr<Program> program;
    on_cores([&] {
      program = std::make_shared<OneDnnProgram>(workshop_, spec, onednn::precision(spec.dtype).dtype, weights);
    });
    return program;
  }

 private:
  /// Runs work on a thread with the unit's cores and OpenMP team, which oneDNN plans for; oneDNN's errors become
  /// sentences.
  void on_cores(const std::function<void()>& work) const {
    workshop_->cores.run([&] {
      omp_set_num_threads(workshop_->cores.threads());
      try {
        work();
      } catch (const dnnl::error& e) {
        throw std::runtime_error(std::string("oneDNN: ") + e.what());
      }
    });
  }

  const onednn::Precision& precision(mx::Dtype dtype) const {
    const onednn::Precision* found = nullptr;
    on_cores([&] { found = &onednn::precision(dtype); });
    return *found;
  }

  std::shared_ptr<Workshop> workshop_;
};

} // namespace

std::shared_ptr<Unit> make_onednn_unit(const std::string& name, const CoreGroup& cores) {
  return std::make_shared<OneDnnUnit>(name, cores);
}

} // namespace cleave
