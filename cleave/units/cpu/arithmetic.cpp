#include "cleave/units/cpu/arithmetic.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <mutex>
#include <random>

#include "cleave/trace/span.h"

namespace cleave::onednn {

namespace {

struct Trial {
  double time;  ///< shortest, in nanoseconds (others' work only adds); negative: no fast kernel
  double error; ///< largest against double precision, relative to the root of the sum of squares
};

/// `step` divides all values, so that they are exact in the activations' dtype and only the sums can err; but too fine
/// for bfloat16 where fp16 is asked for, or three products would come down to one.
Trial trial(const Arithmetic& arithmetic, float step) {
  constexpr int m = 512, k = 1024, n = 768; // of the size of a small layer
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> xs(m * k), ws(n * k);
  for (auto* v : {&xs, &ws}) {
    for (auto& e : *v) {
      e = std::round(normal(random) / step) * step;
    }
  }
  try {
    Gemm gemm({{mx::array(ws.data(), {n, k}, mx::float32)}}, arithmetic, m);
    Workshop workshop(CoreGroup("cpu", ""));
    std::vector<float> y(m * n);
    dnnl::stream stream(cpu_engine());
    Trial result{-1, 0};
    for (int i = 0; i < 7; ++i) {
      const auto begin = trace::now_ns();
      const auto x = gemm.prepare({xs.data(), mx::float32, m, k, k}, workshop, 0);
      gemm.run(stream, x, {y.data(), mx::float32, m, n, n});
      stream.wait();
      if (const auto rest = gemm.rest(x); rest.scales) {
        kernels::scale_rows({y.data(), mx::float32, m, n, n}, rest, {y.data(), mx::float32, m, n, n});
      }
      const auto time = static_cast<double>(trace::now_ns() - begin);
      result.time = i == 0 ? time : std::min(result.time, time);
    }
    for (int i = 0; i < m; i += 149) {
      for (int j = 0; j < n; j += 127) {
        double exact = 0, size = 0;
        for (int c = 0; c < k; ++c) {
          double term = double(xs[i * k + c]) * ws[j * k + c];
          exact += term;
          size += term * term;
        }
        result.error = std::max(result.error, std::abs(y[i * n + j] - exact) / std::sqrt(size));
      }
    }
    return result;
  } catch (const std::exception&) {
    return {-1, 0};
  }
}

/// The fastest of `base` and the candidates that errs by no more than `allowed`.
Arithmetic fastest(
    const Arithmetic& base_arithmetic, const std::vector<Arithmetic>& candidates, float step, double allowed) {
  const Trial base = trial(base_arithmetic, step);
  Arithmetic best = base_arithmetic;
  double best_ratio = 1;
  for (const auto& candidate : candidates) {
    const Trial t = trial(candidate, step);
    const double ratio = t.time / base.time;
    // At equal speed a single narrow product wins, since it halves the copy of the weights.
    const double needed = candidate.products == 1 ? std::max(best_ratio, 1.1) : best_ratio * 0.9;
    if (t.time < 0 || t.error > allowed || ratio >= needed) {
      continue;
    }
    char text[80];
    std::snprintf(
        text, sizeof(text), "trial: %.2fx %s's time, error %.1e", ratio, base_arithmetic.name().c_str(), t.error);
    best = candidate;
    best.reason = text;
    best_ratio = std::min(ratio, 1.0);
  }
  return best;
}

Arithmetic choose_exact(mx::Dtype dtype) {
  const Arithmetic base{mx::float32, 1, dtype == mx::float32 ? "exact" : "no faster kernel"};
  constexpr double allowed = 1.0 / 4096; // fp16-class: the sums may add half a unit in the last place of fp16
  if (dtype == mx::float16) {
    return fastest(base, {{mx::float16}, {mx::bfloat16, 3}}, 1.0f / 256, allowed);
  }
  return dtype == mx::bfloat16 ? fastest(base, {{mx::bfloat16}}, 1.0f / 16, allowed) : base;
}

Arithmetic choose(Precision precision, mx::Dtype dtype) {
  if (precision == Precision::exact) {
    return choose_exact(dtype);
  }
  const auto narrow = precision == Precision::int8 ? mx::int8 : mx::bfloat16;
  // Its error is what was asked for; a trial on wild numbers would show none in bfloat16.
  return fastest(arithmetic_for(Precision::exact, dtype), {{narrow}}, 1.0f / 256, 1.0);
}

} // namespace

const Arithmetic& arithmetic_for(Precision precision, mx::Dtype dtype) {
  static std::mutex mutex;
  static std::map<std::pair<Precision, mx::Dtype::Val>, Arithmetic> chosen; // its references stay
  {
    std::lock_guard lock(mutex);
    if (auto found = chosen.find({precision, dtype.val()}); found != chosen.end()) {
      return found->second;
    }
  }
  auto best = choose(precision, dtype); // two threads may try; the first result stays
  std::lock_guard lock(mutex);
  return chosen.emplace(std::pair(precision, dtype.val()), std::move(best)).first->second;
}

} // namespace cleave::onednn
