// What a split site costs and gains. Every contender of a comparison is sampled in turn inside one benchmark, so that
// the machine's other load meets all of them; counters carry medians, and ratios within the run.
#include <benchmark/benchmark.h>

#include <algorithm>
#include <chrono>
#include <functional>

#include "cleave/site/linear_group.h"
#include "cleave/site/mlp.h"
#include "cleave/unit/registry.h"

namespace {

namespace mx = mlx::core;
using namespace cleave;

double seconds(const std::function<void()>& work) {
  auto begin = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

double median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v.empty() ? 0 : v[v.size() / 2];
}

mx::array random(mx::Shape shape, mx::Dtype dtype, uint64_t seed) {
  float scale = 1 / std::sqrt(float(shape.back()));
  auto a = mx::astype(mx::random::normal(shape, mx::float32, 0.0f, scale, mx::random::key(seed)), dtype);
  mx::eval(a);
  return a;
}

/// A unit whose calls compute nothing: what remains is the graph's own cost.
class NullUnit : public Unit {
 public:
  using Unit::Unit;
  std::string description() const override {
    return "computes nothing";
  }
  std::optional<std::string> refusal(const ProgramSpec&) const override {
    return std::nullopt;
  }
  size_t memory(const ProgramSpec&) const override {
    return 0;
  }
  std::shared_ptr<Program> compile(const ProgramSpec&, const std::vector<LinearWeight>&) override {
    struct Null : KernelProgram {
      size_t bytes() const override {
        return 0;
      }
      void run(const ConstMatrix&, std::span<const Matrix>, const Past&) override {}
    };
    return std::make_shared<Null>();
  }
};

/// 64 small layers in one eval, half of each layer's rows on a unit that computes nothing, against plain ops with the
/// same rows for main joined with a constant. Side by side (all on one x) this is the nodes' own cost; in a chain it
/// also has the handoff, two wake-ups of a stream's thread per layer.
void graph_nodes(benchmark::State& state, bool chained) {
  constexpr int layers = 64, k = 16, m = 4;
  auto unit = std::make_shared<NullUnit>("null");
  LinearWeight weight{random({k, k}, mx::float32, 1)};
  LinearGroup site({weight}, {{nullptr, 0.5}, {unit, 0.5}}, {.name = "chain", .tile = m, .min_rows = 0});
  auto half = weight.rows(0, k / 2);
  half.check("bench");
  const auto rest = mx::zeros({m, k / 2});
  mx::eval(rest);
  const auto x = random({m, k}, mx::float32, 2);
  std::vector<double> plain, split, built_plain, built_split;
  auto run = [&](std::vector<double>& built, std::vector<double>& all, const auto& layer) {
    std::vector<mx::array> outputs;
    all.push_back(seconds([&] {
      built.push_back(seconds([&] {
        auto y = x;
        for (int i = 0; i < layers; ++i) {
          y = layer(chained ? y : x);
          outputs.push_back(y);
        }
      }));
      mx::eval(outputs);
    }));
  };
  for (auto _ : state) {
    run(built_plain, plain, [&](const mx::array& y) { return mx::concatenate({half.linear(y), rest}, -1); });
    run(built_split, split, [&](const mx::array& y) { return site(y)[0]; });
    state.SetIterationTime(split.back());
  }
  const double us = 1e6 / layers;
  state.counters["plain_us"] = median(plain) * us;
  state.counters["split_us"] = median(split) * us;
  state.counters["added_us"] = (median(split) - median(plain)) * us;
  state.counters["added_while_building_us"] = (median(built_split) - median(built_plain)) * us;
}
BENCHMARK_CAPTURE(graph_nodes, side_by_side, false)->UseManualTime()->Iterations(301)->Unit(benchmark::kMicrosecond);
BENCHMARK_CAPTURE(graph_nodes, in_a_chain, true)->UseManualTime()->Iterations(301)->Unit(benchmark::kMicrosecond);

/// Output rows per second of the CPU unit against stock MLX's product, 2048 -> 2048 channels. Stock MLX is slow on a
/// Linux CPU, so both get the same few tokens, and the unit also the full 512.
void rows_per_second(benchmark::State& state, const std::string& format, int tokens) {
  constexpr int k = 2048, n = 2048;
  const auto dtype = format == "float32" ? mx::float32 : mx::float16;
  LinearWeight weight{random({n, k}, dtype, 1)};
  if (format == "affine4") {
    auto q = mx::quantize(weight.weight, 64, 4);
    weight = {q[0], q[1], q[2], std::nullopt, 64, 4, "affine"};
  }
  const auto site = [&](int tile) {
    return LinearGroup({weight}, {{make_unit("cpu"), 1.0}}, {.name = "rows", .tile = tile, .min_rows = 0});
  };
  auto few = site(tokens), full = site(512);
  const auto x = random({tokens, k}, dtype, 2), x512 = random({512, k}, dtype, 3);
  mx::eval(few(x)[0], full(x512)[0]);
  std::vector<double> stock, unit, unit512;
  for (auto _ : state) {
    stock.push_back(seconds([&] { mx::eval(weight.linear(x)); }));
    unit.push_back(seconds([&] { mx::eval(few(x)[0]); }));
    unit512.push_back(seconds([&] { mx::eval(full(x512)[0]); }));
    state.SetIterationTime(unit.back());
  }
  state.counters["tokens"] = tokens;
  state.counters["stock_rows_per_s"] = double(n) * tokens / median(stock);
  state.counters["unit_rows_per_s"] = double(n) * tokens / median(unit);
  state.counters["ratio"] = median(stock) / median(unit);
  state.counters["unit_512_rows_per_s"] = double(n) * 512 / median(unit512);
  state.counters["unit_512_gflops"] = 2.0 * k * n * 512 / median(unit512) / 1e9;
}
BENCHMARK_CAPTURE(rows_per_second, float32, "float32", 32)
    ->UseManualTime()
    ->Iterations(5)
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(rows_per_second, float16, "float16", 32)
    ->UseManualTime()
    ->Iterations(5)
    ->Unit(benchmark::kMillisecond);
BENCHMARK_CAPTURE(rows_per_second, affine4, "affine4", 4)
    ->UseManualTime()
    ->Iterations(3)
    ->Unit(benchmark::kMillisecond);

/// Two CPU units of one core each against either alone. Layer shapes of Qwen3-VL-2B: hidden 2048, intermediate 6144,
/// 16 query and 8 key-value heads of 128 (its config.json).
void two_units(benchmark::State& state, const std::string& site_name, mx::Dtype dtype) {
  const int tokens = static_cast<int>(state.range(0));
  std::shared_ptr<Unit> a, b;
  try {
    a = make_unit("cpu:0");
    b = make_unit("cpu:1");
  } catch (const std::exception& e) {
    state.SkipWithError(e.what());
    return;
  }
  constexpr int hidden = 2048, inner = 6144, kv = 1024;
  auto weight = [&](int n, int k, uint64_t seed) { return LinearWeight{random({n, k}, dtype, seed)}; };
  std::vector<LinearWeight> weights;
  if (site_name == "qkv") {
    weights = {weight(hidden, hidden, 1), weight(kv, hidden, 2), weight(kv, hidden, 3)};
  } else if (site_name == "o") {
    weights = {weight(hidden, hidden, 1)};
  } else if (site_name == "gate_up") {
    weights = {weight(inner, hidden, 1), weight(inner, hidden, 2)};
  } else if (site_name == "down") {
    weights = {weight(hidden, inner, 1)};
  } else {
    weights = {weight(inner, hidden, 1), weight(inner, hidden, 2), weight(hidden, inner, 3)};
  }
  const auto x = random({tokens, weights[0].k()}, dtype, 9);
  auto make = [&](double share) -> std::unique_ptr<Site> {
    const std::vector<UnitShare> shares{{a, share}, {b, 1 - share}};
    const SiteOptions options{.name = site_name, .tile = 512};
    if (site_name == "mlp") {
      return std::make_unique<Mlp>(weights[0], weights[1], weights[2], Activation::silu, shares, options);
    }
    return std::make_unique<LinearGroup>(weights, shares, options);
  };
  auto time = [&](const Site& site) { return seconds([&] { mx::eval(site(x)); }); };
  const auto on_a = make(1), on_b = make(0);
  time(*on_a);
  time(*on_b);
  const double first_a = time(*on_a), first_b = time(*on_b);
  const auto both = make(first_b / (first_a + first_b));
  time(*both);
  std::vector<double> ta, tb, tab, achieved;
  for (auto _ : state) {
    ta.push_back(time(*on_a));
    tb.push_back(time(*on_b));
    tab.push_back(time(*both));
    achieved.push_back(100 * ta.back() * tb.back() / (ta.back() + tb.back()) / tab.back());
    state.SetIterationTime(tab.back());
  }
  const double bound = median(ta) * median(tb) / (median(ta) + median(tb));
  auto sorted = achieved;
  std::sort(sorted.begin(), sorted.end());
  state.counters["a_ms"] = median(ta) * 1e3;
  state.counters["b_ms"] = median(tb) * 1e3;
  state.counters["both_ms"] = median(tab) * 1e3;
  state.counters["bound_ms"] = bound * 1e3;
  state.counters["achieved_pct"] = median(achieved);
  state.counters["achieved_low_pct"] = sorted[sorted.size() / 4];
  state.counters["achieved_high_pct"] = sorted[sorted.size() * 3 / 4];
}
#define TWO_UNITS(site, dtype)                                   \
  BENCHMARK_CAPTURE(two_units, site##_##dtype, #site, mx::dtype) \
      ->Arg(512)                                                 \
      ->Arg(1024)                                                \
      ->UseManualTime()                                          \
      ->Iterations(9)                                            \
      ->Unit(benchmark::kMillisecond)
TWO_UNITS(qkv, float32);
TWO_UNITS(o, float32);
TWO_UNITS(gate_up, float32);
TWO_UNITS(down, float32);
TWO_UNITS(mlp, float32);
TWO_UNITS(qkv, bfloat16);
TWO_UNITS(o, bfloat16);
TWO_UNITS(gate_up, bfloat16);
TWO_UNITS(down, bfloat16);
TWO_UNITS(mlp, bfloat16);

} // namespace

BENCHMARK_MAIN();
