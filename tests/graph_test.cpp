#include <gmock/gmock.h>

#include <algorithm>

#include "cleave/trace/span.h"
#include "mlx/compile.h"
#include "mlx/transforms.h"
#include "sites.h"

namespace cleave::test {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;
using testing::ThrowsMessage;

using Names = std::vector<std::string>;

std::vector<UnitShare> even(const Names& units) {
  return shares_of(units, std::vector<double>(units.size(), 1.0 / static_cast<double>(units.size())));
}

/// Over the ways in which outputs are joined: by mlx, in place, and for units that are graphs of mlx ops.
class Graph : public testing::TestWithParam<Names> {
 protected:
  void SetUp() override {
    for (const auto& name : GetParam()) {
      if (name != "main" && !unit(name)) {
        GTEST_SKIP() << "this machine has no unit " << name;
      }
    }
  }
  std::vector<std::unique_ptr<Site>> sites(int min_rows = 1) const {
    return make_sites(even(GetParam()), from_rows(min_rows));
  }
  uint64_t partners() const {
    return GetParam().size() - (GetParam()[0] == "main");
  }
  Random random{53};
};

TEST_P(Graph, BuildingRunsNothing) {
  for (const auto& site : sites()) {
    auto x = normal(random, {9, k});
    trace::take();
    trace::enable(true);
    Arrays all;
    for (int call = 0; call < 3; ++call) {
      for (auto& y : (*site)(x)) {
        all.push_back(y);
      }
    }
    EXPECT_EQ(site->stats().engaged, 0u);
    for (const auto& y : all) {
      EXPECT_EQ(y.status(), mx::array::Status::unscheduled);
    }
    EXPECT_THAT(trace::take(), testing::IsEmpty());
    mx::eval(all);
    EXPECT_EQ(site->stats().engaged, 3 * partners());
    EXPECT_EQ(trace::take().size(), 3 * partners());
    trace::enable(false);
  }
}

TEST_P(Graph, IsRightUnderCompile) {
  for (const auto& site : sites()) {
    auto compiled =
        mx::compile(std::function([&site](const Arrays& in) { return (*site)(mx::multiply(in[0], in[0])); }));
    for (const auto& shape : {mx::Shape{9, k}, {9, k}, {2, 5, k}, {30, k}, {9, k}}) {
      auto x = normal(random, shape);
      expect_near(compiled({x}), evaluated((*site)(mx::multiply(x, x))));
    }
    EXPECT_EQ(site->stats().engaged, 10 * partners());
    EXPECT_EQ(site->stats().original, 0u);
  }
}

TEST_P(Graph, IsRightUnderShapelessCompileWithChangingTokenCounts) {
  // addmm with a bias is not shapeless in mlx, split or not, so no member has one.
  Random r(54);
  auto a = make_weight(r, {}, k, k), b = make_weight(r, {}, k, k), c = make_weight(r, {}, k, 40);
  auto d = make_weight(r, {}, 40, k), e = make_weight(r, {}, 40, k);
  LinearGroup group({a, b}, even(GetParam()), from_rows(4));
  Mlp mlp(d, e, c, Activation::gelu, even(GetParam()), from_rows(4));
  auto model = [&](const Arrays& in) {
    auto y = group(mx::multiply(in[0], in[0]));
    return Arrays{mx::add(in[0], mlp(mx::add(y[0], mx::sigmoid(y[1])))[0])};
  };
  for (int first : {16, 40}) {
    auto compiled = mx::compile(std::function<Arrays(const Arrays&)>(model), true);
    for (int tokens : {first, 5, 64, 17, 1, first}) { // 1: below min_rows, but the trace has decided
      SCOPED_TRACE(testing::Message() << "traced with " << first << ", called with " << tokens);
      auto x = normal(random, {tokens, k});
      expect_near(compiled({x}), evaluated(model({x})));
    }
  }
  EXPECT_GT(group.stats().engaged, 0u);
}

TEST_P(Graph, ASiteTracedBelowMinRowsIsRightForMore) {
  auto site = make_mlp(even(GetParam()), from_rows(8));
  auto compiled = mx::compile(std::function([&](const Arrays& in) { return (*site)(in[0]); }));
  for (int tokens : {7, 8, 9, 7}) {
    auto x = normal(random, {tokens, k});
    expect_near(compiled({x}), evaluated(site->original(x)));
  }
}

TEST_P(Graph, ThreadsMayShareASite) {
  Watchdog watchdog(std::chrono::seconds(200));
  constexpr int count = 4, calls = 20;
  for (const auto& site : sites()) {
    std::vector<std::vector<mx::array>> xs(count);
    std::vector<std::vector<Arrays>> expected(count);
    for (int t = 0; t < count; ++t) {
      for (int call = 0; call < calls; ++call) {
        xs[t].push_back(normal(random, {3 + (t + call) % 30, k}));
        expected[t].push_back(evaluated((*site)(xs[t].back())));
      }
    }
    const auto before = site->stats().engaged.load();
    std::vector<std::vector<std::vector<std::vector<float>>>> got(count); // per thread, call and output
    std::vector<std::thread> threads;
    for (int t = 0; t < count; ++t) {
      threads.emplace_back([&, t] {
        for (const auto& x : xs[t]) {
          auto y = evaluated((*site)(x));
          got[t].emplace_back();
          for (const auto& a : y) {
            auto flat = mx::contiguous(a);
            mx::eval(flat);
            got[t].back().emplace_back(flat.data<float>(), flat.data<float>() + flat.size());
          }
        }
      });
    }
    for (auto& thread : threads) {
      thread.join();
    }
    for (int t = 0; t < count; ++t) {
      for (int call = 0; call < calls; ++call) {
        ASSERT_EQ(got[t][call].size(), expected[t][call].size());
        for (size_t i = 0; i < expected[t][call].size(); ++i) {
          const auto& e = expected[t][call][i];
          EXPECT_TRUE(same_bits(mx::array(got[t][call][i].data(), e.shape(), mx::float32), e))
              << "thread " << t << " call " << call << " output " << i;
        }
      }
    }
    EXPECT_EQ(site->stats().engaged - before, count * calls * partners());
    EXPECT_EQ(site->stats().rescued, 0u);
  }
}

TEST_P(Graph, OutputsMayBeConsumedInAnyOrderOrNotAtAll) {
  auto site = make_group(even(GetParam()), from_rows(1));
  auto x = normal(random, {9, k});
  const auto expected = evaluated((*site)(x));
  for (const std::vector<int>& order : {std::vector{2, 0, 1}, {1}, {2, 1}, {0, 2}}) {
    const auto before = site->stats().engaged.load();
    auto y = (*site)(x);
    for (int i : order) {
      EXPECT_TRUE(same_bits(y[i], expected[i])) << "output " << i << " of " << testing::PrintToString(order);
    }
    EXPECT_EQ(site->stats().engaged - before, partners());
  }
  const auto before = site->stats().engaged.load();
  (*site)(x); // dropped
  EXPECT_EQ(site->stats().engaged, before);
}

TEST_P(Graph, ManyCallsBeforeOneEvalEqualSeparateEvals) {
  for (const auto& site : sites()) {
    for (int calls : {4, 50}) {
      Arrays xs, together, apart;
      for (int call = 0; call < calls; ++call) {
        xs.push_back(normal(random, {2 + call % 20, k}));
        for (auto& y : evaluated((*site)(xs.back()))) {
          apart.push_back(y);
        }
      }
      for (const auto& x : xs) {
        for (auto& y : (*site)(x)) {
          together.push_back(y);
        }
      }
      expect_same(evaluated(together), apart);
    }
  }
}

TEST_P(Graph, AsyncEvalOfManyCallsIsRight) {
  for (const auto& site : sites()) {
    auto x = normal(random, {9, k});
    const auto expected = evaluated((*site)(x));
    std::vector<Arrays> all;
    for (int call = 0; call < 10; ++call) {
      all.push_back((*site)(x));
      mx::async_eval(all.back());
    }
    for (const auto& y : all) {
      expect_same(y, expected);
    }
  }
}

TEST_P(Graph, AChainOf28LayersEndsInOneEval) {
  Watchdog watchdog;
  auto group = make_group(even(GetParam()), from_rows(1));
  auto mlp = make_mlp(even(GetParam()), from_rows(1));
  auto x = normal(random, {33, k});
  auto run = [&](bool each) {
    auto h = x;
    for (int layer = 0; layer < 28; ++layer) {
      h = mx::add(h, mx::tanh((*group)(h)[1]));
      h = mx::add(h, mx::tanh((*mlp)(h)[0]));
      if (each) {
        mx::eval(h);
      }
    }
    mx::eval(h);
    return h;
  };
  const auto expected = run(true);
  EXPECT_TRUE(same_bits(run(false), expected));
  EXPECT_EQ(group->stats().engaged, 56 * partners());
  EXPECT_EQ(mlp->stats().engaged, 56 * partners());
}

TEST_P(Graph, CallsBelowMinRowsAreTheOriginalBitForBit) {
  for (const auto& site : make_sites(even(GetParam()), {})) { // 192 by default
    for (const auto& shape : {mx::Shape{191, k}, {1, k}, {k}, {2, 95, k}, {0, k}}) {
      auto x = normal(random, shape);
      EXPECT_FALSE(site->engages(x));
      expect_same((*site)(x), site->original(x));
    }
    EXPECT_EQ(site->stats().engaged, 0u);
    EXPECT_EQ(site->stats().original, 5u);
    EXPECT_TRUE(site->engages(normal(random, {192, k})));
    EXPECT_TRUE(site->engages(normal(random, {2, 96, k})));
  }
}

TEST_P(Graph, DerivativesAndVmapThrowASentence) {
  for (const auto& site : sites()) {
    auto x = normal(random, {2, 9, k});
    auto f = [&](const Arrays& in) { return Arrays{(*site)(in[0])[0]}; };
    auto says = [](const std::string& which) {
      return ThrowsMessage<std::runtime_error>(
          AllOf(StartsWith("[cleave] got " + which), HasSubstr("inference only"), HasSubstr("unpatch_model")));
    };
    const auto y = f({x})[0];
    EXPECT_THAT([&] { mx::vjp(f, {x}, {mx::ones_like(y)}); }, says("vjp"));
    EXPECT_THAT([&] { mx::jvp(f, {x}, {mx::ones_like(x)}); }, says("jvp"));
    EXPECT_THAT([&] { mx::grad([&](const mx::array& v) { return mx::sum(f({v})[0]); })(x); }, says("vjp"));
    EXPECT_THAT([&] { mx::vmap([&](const mx::array& v) { return f({v})[0]; })(x); }, says("vmap"));
    EXPECT_EQ(site->stats().engaged, 0u);
  }
}

TEST_P(Graph, CallsBelowMinRowsHaveDerivatives) {
  for (const auto& site : sites(100)) {
    auto x = normal(random, {9, k});
    auto of = [&](auto&& f) { return mx::grad([&](const mx::array& v) { return mx::sum(f(v)[0]); })(x); };
    EXPECT_TRUE(same_bits(of(*site), of([&](const mx::array& v) { return site->original(v); })));
  }
}

TEST_P(Graph, ASiteMayDieBeforeItsCallsRun) {
  Arrays expected, outs;
  {
    auto x = normal(random, {9, k});
    for (const auto& site : sites()) {
      for (auto& y : evaluated((*site)(x))) {
        expected.push_back(y);
      }
    }
    for (const auto& site : sites()) {
      for (auto& y : (*site)(x)) {
        outs.push_back(y);
      }
    }
  }
  expect_same(outs, expected);
}

INSTANTIATE_TEST_SUITE_P(
    Units,
    Graph,
    testing::Values(
        Names{"main", "reference"},
        Names{"main", "cpu"},
        Names{"main", "mlx-cpu"},
        Names{"main", "cpu:0", "reference"},
        Names{"main", "mlx-cpu", "reference"},
        Names{"reference", "cpu"}),
    [](const auto& info) {
      std::string name;
      for (auto part : info.param) {
        std::replace_if(
            part.begin(), part.end(), [](char c) { return !std::isalnum(c); }, '_');
        name += (name.empty() ? "" : "_and_") + part;
      }
      return name;
    });

} // namespace
} // namespace cleave::test
