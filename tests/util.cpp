#include "util.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>

#include "cleave/unit/registry.h"
#include "cleave/units/reference/reference_unit.h"

namespace cleave::test {

namespace {
/// mlx keeps freed buffers for later arrays, which hides a late access from the sanitizers.
class NoCache : public testing::Environment {
  void SetUp() override {
    mx::set_cache_limit(0);
  }
};
[[maybe_unused]] const auto* const no_cache = testing::AddGlobalTestEnvironment(new NoCache);
} // namespace

int uniform(Random& random, int from, int to) {
  return std::uniform_int_distribution<int>(from, to)(random);
}

mx::array normal(Random& random, const mx::Shape& shape, mx::Dtype dtype, float scale) {
  std::normal_distribution<float> distribution(0, scale);
  size_t size = 1;
  for (auto d : shape) {
    size *= d;
  }
  std::vector<float> values(size);
  for (auto& v : values) {
    v = distribution(random);
  }
  auto a = mx::astype(mx::array(values.data(), shape, mx::float32), dtype);
  mx::eval(a);
  return a;
}

std::ostream& operator<<(std::ostream& out, const Format& f) {
  if (!f.mode.empty()) {
    out << f.mode << '_' << f.bits << "bit_group" << f.group << '_';
  }
  return out << f.dtype;
}

LinearWeight make_weight(Random& random, const Format& format, int n, int k, bool bias) {
  auto dense = normal(random, {n, k}, format.dtype, 1 / std::sqrt(static_cast<float>(k)));
  LinearWeight w{dense};
  if (!format.mode.empty()) {
    auto packed = mx::quantize(dense, format.group, format.bits, format.mode);
    mx::eval(packed);
    w.weight = packed[0];
    w.scales = packed[1];
    if (packed.size() > 2) {
      w.biases = packed[2];
    }
    w.group_size = format.group;
    w.bits = format.bits;
    w.mode = format.mode;
  }
  if (bias) {
    w.bias = normal(random, {n}, format.dtype);
  }
  return w;
}

std::ostream& operator<<(std::ostream& out, Layout layout) {
  static const char* names[] = {"contiguous",      "transposed",    "sliced columns", "sliced rows",
                                "every other row", "reversed rows", "broadcast"};
  return out << names[static_cast<int>(layout)];
}

const std::vector<Layout>& all_layouts() {
  static const std::vector<Layout> layouts{Layout::contiguous,  Layout::transposed,      Layout::sliced_columns,
                                           Layout::sliced_rows, Layout::every_other_row, Layout::reversed_rows,
                                           Layout::broadcast};
  return layouts;
}

mx::array make_x(Random& random, const mx::Shape& leading, int k, mx::Dtype dtype, Layout layout) {
  auto shape = leading;
  shape.push_back(k);
  const int last = static_cast<int>(shape.size()) - 1;
  const int row = last - 1;
  if (layout == Layout::contiguous || (last == 0 && layout != Layout::sliced_columns)) {
    return normal(random, shape, dtype);
  }
  auto wide = shape;
  mx::Shape start(shape.size(), 0), step(shape.size(), 1);
  auto stop = shape;
  switch (layout) {
    case Layout::contiguous:
      break;
    case Layout::transposed:
      std::swap(wide[row], wide[last]);
      return mx::swapaxes(normal(random, wide, dtype), row, last);
    case Layout::sliced_columns:
      wide[last] += 5;
      start[last] = 3;
      stop[last] += 3;
      break;
    case Layout::sliced_rows:
      for (int d = 0; d <= row; ++d) {
        wide[d] += 3;
        start[d] = 1;
        stop[d] += 1;
      }
      break;
    case Layout::every_other_row:
      wide[row] *= 2;
      stop[row] *= 2;
      step[row] = 2;
      break;
    case Layout::reversed_rows:
      start[row] = shape[row] - 1;
      stop[row] = -shape[row] - 1;
      step[row] = -1;
      break;
    case Layout::broadcast:
      wide[row] = 1;
      return mx::broadcast_to(normal(random, wide, dtype), shape);
  }
  return mx::slice(normal(random, wide, dtype), start, stop, step);
}

std::vector<double> to_doubles(const mx::array& a) {
  auto floats = mx::contiguous(mx::astype(a, mx::float32));
  mx::eval(floats);
  return {floats.data<float>(), floats.data<float>() + floats.size()};
}

std::vector<double> exact_linear(const std::vector<double>& x, const LinearWeight& w) {
  auto dense = w.weight;
  if (w.packed()) {
    auto wide = [](const std::optional<mx::array>& a) { return a ? std::optional(mx::astype(*a, mx::float32)) : a; };
    const bool affine = w.mode == "affine";
    dense = mx::dequantize(
        w.weight, affine ? *wide(w.scales) : *w.scales, affine ? wide(w.biases) : std::nullopt, w.group_size, w.bits,
        w.mode, std::nullopt, mx::float32);
  }
  const auto values = to_doubles(dense);
  const auto bias = w.bias ? to_doubles(*w.bias) : std::vector<double>(w.n());
  const size_t n = w.n(), k = w.k(), m = x.size() / k;
  std::vector<double> y(m * n);
  for (size_t i = 0; i < m; ++i) {
    for (size_t j = 0; j < n; ++j) {
      double sum = bias[j];
      for (size_t c = 0; c < k; ++c) {
        sum += x[i * k + c] * values[j * k + c];
      }
      y[i * n + j] = sum;
    }
  }
  return y;
}

testing::AssertionResult same_bits(const mx::array& a, const mx::array& b) {
  if (a.shape() != b.shape() || a.dtype() != b.dtype()) {
    return testing::AssertionFailure() << a.dtype() << ' ' << a.shape() << " is not " << b.dtype() << ' ' << b.shape();
  }
  auto left = mx::contiguous(a), right = mx::contiguous(b);
  mx::eval(left, right);
  if (std::memcmp(left.data<char>(), right.data<char>(), left.nbytes()) == 0) {
    return testing::AssertionSuccess();
  }
  auto difference = mx::abs(mx::subtract(mx::astype(left, mx::float32), mx::astype(right, mx::float32)));
  return testing::AssertionFailure() << "bits differ, by at most " << mx::max(difference).item<float>();
}

testing::AssertionResult as_good_as(
    const mx::array& split, const mx::array& original, const std::vector<double>& exact) {
  if (split.shape() != original.shape() || split.dtype() != original.dtype()) {
    return testing::AssertionFailure() << "got " << split.dtype() << ' ' << split.shape() << " for " << original.dtype()
                                       << ' ' << original.shape();
  }
  struct Error {
    double rms = 0, max = 0;
  };
  double size = 0, largest = 0;
  for (double e : exact) {
    size += e * e / static_cast<double>(exact.size());
    largest = std::max(largest, std::abs(e));
  }
  auto error_of = [&](const mx::array& y) {
    const auto values = to_doubles(y);
    Error error;
    for (size_t i = 0; i < exact.size(); ++i) {
      const double d = std::abs(values[i] - exact[i]);
      error.rms += d * d / static_cast<double>(exact.size());
      error.max = std::isnan(d) ? INFINITY : std::max(error.max, d);
    }
    error.rms = std::sqrt(error.rms);
    return error;
  };
  // The slack counts where an output is so small that the original may be exact by chance.
  const double ulp = std::ldexp(
      1.0, original.dtype() == mx::float32   ? -23
           : original.dtype() == mx::float16 ? -10
                                             : -7);
  const auto got = error_of(split), base = error_of(original);
  const double rms_limit = 2 * base.rms + ulp / 2 * std::max(1.0, std::sqrt(size));
  const double max_limit = 2 * base.max + 2 * ulp * std::max(1.0, largest);
  if (got.rms <= rms_limit && got.max <= max_limit) {
    return testing::AssertionSuccess();
  }
  return testing::AssertionFailure() << "error rms " << got.rms << ", max " << got.max << "; original's rms "
                                     << base.rms << ", max " << base.max;
}

std::shared_ptr<Unit> unit(const std::string& name) {
  static std::mutex mutex;
  static auto* units = new std::map<std::string, std::shared_ptr<Unit>>; // leaked: stream threads outlive main
  std::lock_guard lock(mutex);
  auto found = units->find(name);
  if (found == units->end()) {
    std::shared_ptr<Unit> made;
    try {
      made = make_unit(name);
    } catch (const std::runtime_error&) {
    }
    found = units->emplace(name, made).first;
  }
  return found->second;
}

std::vector<std::vector<std::string>> available(const std::vector<std::vector<std::string>>& lists) {
  std::vector<std::vector<std::string>> out;
  for (const auto& list : lists) {
    if (std::all_of(list.begin(), list.end(), [](const auto& name) { return is_main_unit(name) || unit(name); })) {
      out.push_back(list);
    }
  }
  return out;
}

std::vector<UnitShare> shares_of(const std::vector<std::string>& names, const std::vector<double>& shares) {
  std::vector<UnitShare> out;
  for (size_t i = 0; i < names.size(); ++i) {
    out.push_back({is_main_unit(names[i]) ? nullptr : unit(names[i]), shares[i]});
  }
  return out;
}

namespace {

class ProbeProgram : public KernelProgram {
 public:
  ProbeProgram(std::shared_ptr<KernelProgram> inner, std::shared_ptr<ProbeUnit::Probe> probe)
      : inner_(std::move(inner)), probe_(std::move(probe)) {}

  size_t bytes() const override {
    return 1;
  }
  void run(const ConstMatrix& x, std::span<const Matrix> outputs, const Past& past) override {
    ++probe_->ran;
    if (probe_->before) {
      probe_->before();
    }
    inner_->run(x, outputs, past);
  }

 private:
  std::shared_ptr<KernelProgram> inner_;
  std::shared_ptr<ProbeUnit::Probe> probe_;
};

} // namespace

ProbeUnit::ProbeUnit(std::function<void()> before, const std::string& name)
    : Unit(name), probe_(std::make_shared<Probe>()) {
  probe_->before = std::move(before);
}

std::string ProbeUnit::description() const {
  return "for tests: counts";
}

std::optional<std::string> ProbeUnit::refusal(const ProgramSpec&) const {
  return std::nullopt;
}

size_t ProbeUnit::memory(const ProgramSpec&) const {
  return 1;
}

std::shared_ptr<Program> ProbeUnit::compile(const ProgramSpec& spec, const std::vector<LinearWeight>& weights) {
  ++probe_->compiled;
  return std::make_shared<ProbeProgram>(reference_program(spec, weights), probe_);
}

Watchdog::Watchdog(std::chrono::seconds limit)
    : thread_([this, limit] {
        std::unique_lock lock(mutex_);
        if (!changed_.wait_for(lock, limit, [this] { return over_; })) {
          std::fprintf(stderr, "the watchdog waited %lld s\n", static_cast<long long>(limit.count()));
          std::abort();
        }
      }) {}

Watchdog::~Watchdog() {
  {
    std::lock_guard lock(mutex_);
    over_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

} // namespace cleave::test
