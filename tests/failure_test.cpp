#include <gmock/gmock.h>

#include <algorithm>

#include "cleave/site/linear_group.h"
#include "cleave/site/mlp.h"
#include "cleave/unit/registry.h"
#include "util.h"

namespace cleave::test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

class Failure : public testing::Test {
 protected:
  void SetUp() override {
    testing::internal::CaptureStderr();
  }
  void TearDown() override {
    const auto text = testing::internal::GetCapturedStderr();
    EXPECT_EQ(std::count(text.begin(), text.end(), '\n'), log_lines) << text;
    if (log_lines > 0) {
      EXPECT_THAT(text, testing::StartsWith("cleave: unit fault:"));
      EXPECT_THAT(text, HasSubstr("failed as asked"));
    }
  }

  std::unique_ptr<LinearGroup> group(std::vector<UnitShare> shares) {
    return std::make_unique<LinearGroup>(members, shares, options);
  }
  /// What the unit would have given: the reference computes the same way.
  std::vector<mx::array> expected(const mx::array& x) {
    auto right = group({{nullptr, 0.5}, {std::make_shared<ProbeUnit>(), 0.5}})->operator()(x);
    mx::eval(right);
    return right;
  }
  static void expect_same(const std::vector<mx::array>& a, const std::vector<mx::array>& b) {
    ASSERT_EQ(a.size(), b.size());
    for (size_t i = 0; i < a.size(); ++i) {
      EXPECT_TRUE(same_bits(a[i], b[i])) << "member " << i;
    }
  }

  Random random{31};
  std::vector<LinearWeight> members{make_weight(random, {}, 20, 24, true), make_weight(random, {}, 9, 24)};
  SiteOptions options{"q+k", 16, 1, 1};
  int log_lines = 1;
};

TEST_F(Failure, AFailedCallAndTheLaterOnesGiveTheRightAnswer) {
  for (int k : {1, 3}) {
    auto fault = make_unit("fault:" + std::to_string(k));
    auto site = group({{nullptr, 0.5}, {fault, 0.5}});
    for (int call = 1; call <= 5; ++call) {
      SCOPED_TRACE(testing::Message() << "call " << call << " of fault:" << k);
      auto x = normal(random, {17, 24});
      EXPECT_EQ(site->engages(x), call <= k);
      auto y = (*site)(x);
      mx::eval(y);
      expect_same(y, call <= k ? expected(x) : site->original(x));
      EXPECT_EQ(fault->failed(), call >= k);
      EXPECT_EQ(fault->failures(), call >= k ? 1u : 0u);
      EXPECT_EQ(site->stats().engaged, static_cast<uint64_t>(std::min(call, k)));
      EXPECT_EQ(site->stats().rescued, call >= k ? 1u : 0u);
      EXPECT_EQ(site->stats().original, static_cast<uint64_t>(std::max(0, call - k)));
    }
    EXPECT_THAT(fault->failure(), HasSubstr("q+k: call " + std::to_string(k) + " failed as asked"));
  }
  log_lines = 2;
}

TEST_F(Failure, CallsQueuedBehindAFailedOneAreRescuedInTheSameGraph) {
  auto fault = make_unit("fault:2");
  auto site = group({{nullptr, 0.5}, {fault, 0.5}});
  std::vector<mx::array> xs, outs;
  for (int call = 0; call < 5; ++call) {
    xs.push_back(normal(random, {5 + call, 24}));
    for (auto& y : (*site)(xs.back())) {
      outs.push_back(y);
    }
  }
  mx::eval(outs);
  for (size_t call = 0; call < xs.size(); ++call) {
    expect_same({outs[2 * call], outs[2 * call + 1]}, expected(xs[call]));
  }
  EXPECT_EQ(fault->failures(), 1u);
  EXPECT_EQ(site->stats().engaged, 5u);
  EXPECT_EQ(site->stats().rescued, 4u);
}

TEST_F(Failure, OneOfSeveralUnitsMayFail) {
  auto fault = make_unit("fault:1");
  auto probe = std::make_shared<ProbeUnit>();
  auto site = group({{nullptr, 0.2}, {probe, 0.3}, {fault, 0.5}});
  auto right = group({{nullptr, 0.2}, {probe, 0.3}, {std::make_shared<ProbeUnit>(), 0.5}});
  auto x = normal(random, {17, 24});
  auto y = (*site)(x);
  mx::eval(y);
  expect_same(y, (*right)(x));
  EXPECT_FALSE(probe->failed());
  EXPECT_EQ(site->stats().engaged, 2u);
  EXPECT_EQ(site->stats().rescued, 1u);
  expect_same((*site)(x), site->original(x));
  EXPECT_EQ(site->stats().engaged, 2u) << "a site with a failed unit does not split";
}

TEST_F(Failure, AnMlpIsRescuedToo) {
  Random r(32);
  auto gate = make_weight(r, {}, 24, 16, true), up = make_weight(r, {}, 24, 16), down = make_weight(r, {}, 8, 24, true);
  auto fault = make_unit("fault:1");
  Mlp site(gate, up, down, Activation::silu, {{nullptr, 0.5}, {fault, 0.5}}, options);
  Mlp right(gate, up, down, Activation::silu, {{nullptr, 0.5}, {std::make_shared<ProbeUnit>(), 0.5}}, options);
  auto x = normal(r, {17, 16});
  expect_same(site(x), right(x));
  EXPECT_EQ(site.stats().rescued, 1u);
  expect_same(site(x), site.original(x));
}

TEST_F(Failure, AFailureSwitchesTheUnitOffAtEverySite) {
  auto fault = make_unit("fault:1");
  auto first = group({{nullptr, 0.5}, {fault, 0.5}}), second = group({{nullptr, 0.5}, {fault, 0.5}});
  auto x = normal(random, {17, 24});
  EXPECT_TRUE(second->engages(x));
  mx::eval((*first)(x));
  EXPECT_FALSE(second->engages(x));
  expect_same((*second)(x), second->original(x));
  EXPECT_EQ(second->stats().engaged, 0u);

  auto third = group({{nullptr, 0.5}, {fault, 0.5}});
  EXPECT_FALSE(third->report().splits);
  EXPECT_THAT(third->report().refusals, ElementsAre(HasSubstr("switched off: q+k: call 1 failed as asked")));
  expect_same((*third)(x), third->original(x));
}

TEST_F(Failure, TheUnitsStreamStaysUsable) {
  auto fault = make_unit("fault:1");
  auto site = group({{nullptr, 0.5}, {fault, 0.5}});
  auto x = normal(random, {17, 24});
  mx::eval((*site)(x));
  ASSERT_TRUE(fault->failed());
  EXPECT_NO_THROW(mx::synchronize(fault->stream()));
  EXPECT_EQ(mx::add(mx::array(1), mx::array(2), fault->stream()).item<int>(), 3);
  EXPECT_NO_THROW(mx::synchronize(fault->stream()));
}

TEST_F(Failure, ACallWithoutMainIsRescued) {
  auto fault = make_unit("fault:1");
  auto site = group({{fault, 1}});
  auto x = normal(random, {17, 24});
  expect_same((*site)(x), group({{std::make_shared<ProbeUnit>(), 1}})->operator()(x));
  EXPECT_EQ(site->stats().rescued, 1u);
}

TEST_F(Failure, OnlyTheFirstIsLoggedAndKept) {
  auto fault = make_unit("fault:1");
  EXPECT_EQ(fault->failure(), "");
  fault->report_failure("this failed as asked");
  fault->report_failure("that failed too");
  EXPECT_EQ(fault->failures(), 2u);
  EXPECT_EQ(fault->failure(), "this failed as asked");
}

TEST_F(Failure, SeveralThreadsMayMeetIt) {
  Watchdog watchdog;
  auto fault = make_unit("fault:20");
  auto site = group({{nullptr, 0.5}, {fault, 0.5}});
  constexpr int count = 4, calls = 20;
  std::vector<std::vector<mx::array>> xs(count);
  for (auto& thread : xs) {
    for (int call = 0; call < calls; ++call) {
      thread.push_back(normal(random, {5, 24}));
    }
  }
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (const auto& mine : xs) {
    threads.emplace_back([&] {
      for (const auto& x : mine) {
        auto y = (*site)(x);
        auto right = site->original(x);
        for (size_t i = 0; i < y.size(); ++i) {
          wrong += !mx::allclose(y[i], right[i], 1e-5, 1e-5).item<bool>();
        }
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(wrong, 0);
  EXPECT_TRUE(fault->failed());
  EXPECT_LE(fault->failures(), static_cast<size_t>(count)) << "each thread may have one call under way";
  EXPECT_EQ(site->stats().engaged + site->stats().original, static_cast<uint64_t>(count * calls));
}

TEST_F(Failure, AFailedCompileLeavesTheRowsToMainWithASentence) {
  log_lines = 0;
  auto fault = make_unit("fault:0");
  auto site = group({{nullptr, 0.5}, {fault, 0.5}});
  EXPECT_FALSE(site->report().splits);
  EXPECT_THAT(site->report().refusals, ElementsAre("fault:0: compile failed as asked"));
  ASSERT_EQ(site->report().parts.size(), 1u);
  EXPECT_EQ(site->report().parts[0].unit, "main");
  EXPECT_THAT(site->report().parts[0].rows, ElementsAre(20, 9));
  auto x = normal(random, {17, 24});
  expect_same((*site)(x), site->original(x));
  EXPECT_EQ(site->stats().engaged, 0u);
  EXPECT_FALSE(fault->failed()) << "a refused site says nothing about others";
}

TEST_F(Failure, AFailedCompileLeavesTheOtherUnitsTheirRows) {
  log_lines = 0;
  auto site = group({{nullptr, 0.2}, {make_unit("fault:0"), 0.3}, {std::make_shared<ProbeUnit>(), 0.5}});
  EXPECT_TRUE(site->report().splits);
  EXPECT_THAT(site->report().refusals, testing::SizeIs(1));
  ASSERT_EQ(site->report().parts.size(), 2u);
  EXPECT_THAT(site->report().parts[0].rows, ElementsAre(10, 5));
  EXPECT_THAT(site->report().parts[1].rows, ElementsAre(10, 4));
  auto x = normal(random, {17, 24});
  expect_same((*site)(x), expected(x));
}

class PickyUnit : public ProbeUnit {
 public:
  using ProbeUnit::ProbeUnit;
  std::optional<std::string> refusal(const ProgramSpec& spec) const override {
    return spec.n[0] > 10 ? std::optional<std::string>("it takes at most 10 rows") : std::nullopt;
  }
};

TEST_F(Failure, ARefusalIsShownAndItsRowsGoToMain) {
  log_lines = 0;
  auto picky = std::make_shared<PickyUnit>();
  auto refused = group({{nullptr, 0.4}, {picky, 0.6}});
  EXPECT_FALSE(refused->report().splits);
  EXPECT_THAT(refused->report().refusals, ElementsAre("probe: it takes at most 10 rows"));
  EXPECT_EQ(picky->probe().compiled, 0);
  auto taken = group({{nullptr, 0.5}, {picky, 0.5}});
  EXPECT_TRUE(taken->report().splits);
  EXPECT_THAT(taken->report().refusals, IsEmpty());
}

} // namespace
} // namespace cleave::test
