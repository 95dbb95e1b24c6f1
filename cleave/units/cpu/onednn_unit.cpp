#include <numeric>
#include <sstream>
#include <stdexcept>

#include "cleave/kernels/kernels.h"
#include "cleave/units/cpu/arithmetic.h"
#include "cleave/units/cpu/cpu_program.h"
#include "cleave/units/cpu/cpu_unit.h"

namespace cleave {

namespace {

class OneDnnUnit : public Unit {
 public:
  OneDnnUnit(const std::string& name, const CoreGroup& cores)
      : Unit(name), workshop_(std::make_shared<Workshop>(cores)) {}

  std::string description() const override {
    const auto* v = dnnl::version();
    std::ostringstream s;
    s << "oneDNN " << v->major << '.' << v->minor << '.' << v->patch << " on " << workshop_->cores().threads()
      << (workshop_->cores().threads() == 1 ? " core" : " cores");
    for (size_t i = 0; i < workshop_->cores().cores().size(); ++i) {
      s << (i ? "," : " (") << workshop_->cores().cores()[i];
    }
    s << (workshop_->cores().cores().empty() ? "" : ")");
    for (auto dtype : {mx::float32, mx::float16, mx::bfloat16}) {
      const auto& p = arithmetic_for(Precision::exact, dtype);
      s << ", " << dtype << " in " << p.name() << " (" << p.reason << ")";
    }
    s << ", " << kernels::instruction_set() << " kernels";
    return s.str();
  }

  bool shares_cores_with_main() const override {
    return workshop_->cores().cores().empty();
  }

  std::optional<std::string> refusal(const ProgramSpec& spec) const override {
    if (!is_activation_dtype(spec.dtype)) {
      return "it needs float32, float16 or bfloat16 activations";
    }
    return std::nullopt;
  }

  size_t memory(const ProgramSpec& spec) const override {
    if (spec.packed) {
      return 0;
    }
    const int64_t outputs = std::accumulate(spec.n.begin(), spec.n.end(), 2 * int64_t(spec.hidden));
    const auto& p = arithmetic_for(spec.precision, spec.dtype);
    // Biases; int8: scales too, and what oneDNN keeps per output to make up for signed activations.
    const int64_t beside = sizeof(float) * (p.dtype == mx::int8 ? 8 : 1);
    return spec.parameters() * mx::size_of(p.dtype) * (p.products > 1 ? 2 : 1) + outputs * beside;
  }

  std::shared_ptr<Program> compile(const ProgramSpec& spec, const std::vector<LinearWeight>& weights) override {
    std::shared_ptr<Program> program;
    on_cores([&] {
      const onednn::Arithmetic packed{mx::float32, 1, "weights are unpacked at each call"};
      const auto& arithmetic = spec.packed ? packed : onednn::arithmetic_for(spec.precision, spec.dtype);
      const auto make = spec.kind == SiteKind::mlp         ? onednn::mlp_program
                        : spec.kind == SiteKind::attention ? onednn::attention_program
                                                           : onednn::linear_program;
      program = make(workshop_, spec, arithmetic, weights);
    });
    return program;
  }

 private:
  /// Runs work on a thread with the unit's cores and OpenMP team, which oneDNN plans for; oneDNN's errors become
  /// sentences.
  void on_cores(const std::function<void()>& work) const {
    workshop_->cores().run([&] {
      omp_set_num_threads(workshop_->cores().threads());
      try {
        work();
      } catch (const dnnl::error& e) {
        throw std::runtime_error(std::string("oneDNN: ") + e.what());
      }
    });
  }

  const onednn::Arithmetic& arithmetic_for(Precision precision, mx::Dtype dtype) const {
    const onednn::Arithmetic* found = nullptr;
    on_cores([&] { found = &onednn::arithmetic_for(precision, dtype); });
    return *found;
  }

  std::shared_ptr<Workshop> workshop_;
};

} // namespace

std::shared_ptr<Unit> make_onednn_unit(const std::string& name, const CoreGroup& cores) {
  return std::make_shared<OneDnnUnit>(name, cores);
}

} // namespace cleave
