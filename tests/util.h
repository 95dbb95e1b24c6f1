#pragma once

#include <gtest/gtest.h>

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <ostream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cleave/linear_weight.h"
#include "cleave/site/shares.h"
#include "cleave/unit/unit.h"

namespace cleave::test {

using Random = std::mt19937;

int uniform(Random& random, int from, int to);
template <typename T>
T pick(Random& random, const std::vector<T>& from) {
  return from[uniform(random, 0, static_cast<int>(from.size()) - 1)];
}

/// Evaluated, contiguous.
mx::array normal(Random& random, const mx::Shape& shape, mx::Dtype dtype = mx::float32, float scale = 1);

/// A weight format with the dtype of its scales, of the bias and of the activations it meets.
struct Format {
  mx::Dtype dtype = mx::float32;
  std::string mode = {}; ///< empty: dense
  int bits = 0;
  int group = 0;
};
std::ostream& operator<<(std::ostream& out, const Format& format);

/// Random weights such that normal activations give outputs of about size 1.
LinearWeight make_weight(Random& random, const Format& format, int n, int k, bool bias = false);

/// How x lies in memory.
enum class Layout { contiguous, transposed, sliced_columns, sliced_rows, every_other_row, reversed_rows, broadcast };
std::ostream& operator<<(std::ostream& out, Layout layout);
const std::vector<Layout>& all_layouts();
/// [leading..., k] of random numbers; lazy where the layout is not contiguous.
mx::array make_x(Random& random, const mx::Shape& leading, int k, mx::Dtype dtype, Layout layout = Layout::contiguous);

std::vector<double> to_doubles(const mx::array& a);
/// x W^T + bias in double precision; mlx decodes the weight, with scales widened to fp32 first.
std::vector<double> exact_linear(const std::vector<double>& x, const LinearWeight& weight);

testing::AssertionResult same_bits(const mx::array& a, const mx::array& b);
/// Same shape and dtype, and no further from the exact numbers than about twice the original's distance.
testing::AssertionResult as_good_as(
    const mx::array& split, const mx::array& original, const std::vector<double>& exact);

/// A unit made once per process; null when this machine lacks it.
std::shared_ptr<Unit> unit(const std::string& name);
/// Units of those lists that this machine has all of.
std::vector<std::vector<std::string>> available(const std::vector<std::vector<std::string>>& lists);
std::vector<UnitShare> shares_of(const std::vector<std::string>& names, const std::vector<double>& shares);

/// Computes like the reference, counts, and calls `before` in each call.
class ProbeUnit : public Unit {
 public:
  struct Probe {
    std::function<void()> before;
    std::atomic<int> compiled{0};
    std::atomic<int> ran{0};
  };
  /// Units of one name share a stream, so two that are to run at the same time need two.
  explicit ProbeUnit(std::function<void()> before = {}, const std::string& name = "probe");

  std::string description() const override;
  std::optional<std::string> refusal(const ProgramSpec& spec) const override;
  size_t memory(const ProgramSpec& spec) const override;
  std::shared_ptr<Program> compile(const ProgramSpec& spec, const std::vector<LinearWeight>& weights) override;
  const Probe& probe() const {
    return *probe_;
  }

 private:
  std::shared_ptr<Probe> probe_;
};

/// Ends the process with a message when it lives longer than `limit`: a test that hangs must fail.
class Watchdog {
 public:
  explicit Watchdog(std::chrono::seconds limit = std::chrono::seconds(60));
  ~Watchdog();

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool over_ = false;
  std::thread thread_;
};

} // namespace cleave::test
