#include "cleave/units/fault/fault_unit.h"

#include <charconv>
#include <stdexcept>

#include "cleave/units/reference/reference_unit.h"

namespace cleave {

namespace {

struct CallCounter {
  long fails_from;
  std::atomic<long> calls{0};
};

class FaultProgram : public KernelProgram {
 public:
  FaultProgram(std::shared_ptr<KernelProgram> inner, std::shared_ptr<CallCounter> counter)
      : inner_(std::move(inner)), counter_(std::move(counter)) {}

  size_t bytes() const override {
    return inner_->bytes();
  }
  void run(const ConstMatrix& x, std::span<const Matrix> outputs, const Past& past) override {
    long call = ++counter_->calls;
    if (call >= counter_->fails_from) {
      throw std::runtime_error("call " + std::to_string(call) + " failed as asked");
    }
    inner_->run(x, outputs, past);
  }

 private:
  std::shared_ptr<KernelProgram> inner_;
  std::shared_ptr<CallCounter> counter_;
};

class FaultUnit : public Unit {
 public:
  FaultUnit(std::string name, long fails_from) : Unit(std::move(name)), counter_(std::make_shared<CallCounter>()) {
    counter_->fails_from = fails_from;
  }
  std::string description() const override {
    return "for tests: fails from call " + std::to_string(counter_->fails_from) + " on";
  }
  std::optional<std::string> refusal(const ProgramSpec&) const override {
    return std::nullopt;
  }
  size_t memory(const ProgramSpec&) const override {
    return 0;
  }
  std::shared_ptr<Program> compile(const ProgramSpec& spec, const std::vector<LinearWeight>& weights) override {
    if (counter_->fails_from == 0) {
      throw std::runtime_error("compile failed as asked");
    }
    return std::make_shared<FaultProgram>(reference_program(spec, weights), counter_);
  }

 private:
  std::shared_ptr<CallCounter> counter_;
};

} // namespace

std::shared_ptr<Unit> make_fault_unit(const std::string& name, const std::string& options) {
  long call = -1;
  auto end = options.data() + options.size();
  auto [rest, error] = std::from_chars(options.data(), end, call);
  if (error != std::errc() || rest != end || call < 0) {
    throw std::invalid_argument(
        "[make_unit] got '" + name + "' and needs fault:N, N the first call that fails (0: compile)");
  }
  return std::make_shared<FaultUnit>(name, call);
}

} // namespace cleave
