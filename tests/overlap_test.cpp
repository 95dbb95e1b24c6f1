#include <gmock/gmock.h>

#include "cleave/site/linear_group.h"
#include "cleave/site/mlp.h"
#include "cleave/trace/span.h"
#include "util.h"

namespace cleave::test {
namespace {

/// Two threads wait here for each other, again and again.
class Meeting {
 public:
  void operator()() {
    std::unique_lock lock(mutex_);
    ++arrived_;
    const int goal = arrived_ + arrived_ % 2;
    changed_.notify_all();
    changed_.wait(lock, [&] { return arrived_ >= goal; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int arrived_ = 0;
};

// Each call waits until the other unit's has begun: this ends only when both run at the same time.
TEST(Overlap, TwoUnitsOfOneSiteRunAtTheSameTime) {
  Watchdog watchdog;
  Random random(41);
  auto meet = [meeting = std::make_shared<Meeting>()] { (*meeting)(); };
  auto a = std::make_shared<ProbeUnit>(meet, "probe:a"), b = std::make_shared<ProbeUnit>(meet, "probe:b");
  auto w = make_weight(random, {}, 12, 8);
  LinearGroup group({w}, {{nullptr, 0.4}, {a, 0.3}, {b, 0.3}}, {.min_rows = 1});
  Mlp mlp(
      w, w, make_weight(random, {}, 8, 12), Activation::relu, {{nullptr, 0.4}, {a, 0.3}, {b, 0.3}}, {.min_rows = 1});
  auto x = normal(random, {5, 8});
  for (int i = 0; i < 3; ++i) {
    mx::eval(group(x));
    mx::eval(mlp(x));
  }
  EXPECT_EQ(a->probe().ran, 6);
  EXPECT_EQ(b->probe().ran, 6);
}

TEST(Overlap, TwoCoresOverlapByTheirSpans) {
  auto a = unit("cpu:0"), b = unit("cpu:1");
  if (!a || !b) {
    GTEST_SKIP() << "this process may not run on cores 0 and 1, or this build has no oneDNN";
  }
  Random random(43);
  auto w = make_weight(random, {}, 2048, 1024);
  LinearGroup site({w}, {{a, 0.5}, {b, 0.5}}, {.name = "overlap", .min_rows = 1});
  auto x = normal(random, {512, 1024});
  mx::eval(site(x)); // oneDNN makes its kernels in the first call
  bool overlapped = false;
  for (int attempt = 0; attempt < 10 && !overlapped; ++attempt) { // another process may hold a core for a while
    trace::take();
    trace::enable(true);
    mx::eval(site(x));
    trace::enable(false);
    const auto spans = trace::take();
    ASSERT_EQ(spans.size(), 2u);
    ASSERT_NE(spans[0].unit, spans[1].unit);
    for (const auto& span : spans) {
      EXPECT_EQ(span.site, "overlap");
      EXPECT_EQ(span.rows, 512);
      EXPECT_LT(span.begin_ns, span.end_ns);
    }
    EXPECT_LE(spans[0].end_ns, spans[1].end_ns);
    overlapped = spans[0].begin_ns < spans[1].end_ns && spans[1].begin_ns < spans[0].end_ns;
  }
  EXPECT_TRUE(overlapped);
}

TEST(Trace, KeepsNothingWhileItIsOff) {
  Random random(44);
  for (const auto* name : {"reference", "mlx-cpu"}) {
    LinearGroup site(
        {make_weight(random, {}, 8, 8)}, {{nullptr, 0.5}, {unit(name), 0.5}}, {.name = "s", .min_rows = 1});
    auto x = normal(random, {5, 8});
    trace::take();
    mx::eval(site(x));
    EXPECT_THAT(trace::take(), testing::IsEmpty()) << name;
    trace::enable(true);
    mx::eval(site(x));
    trace::enable(false);
    const auto spans = trace::take();
    ASSERT_EQ(spans.size(), 1u) << name;
    EXPECT_EQ(spans[0].unit, name);
    EXPECT_EQ(spans[0].rows, 5);
    EXPECT_THAT(trace::take(), testing::IsEmpty());
  }
}

TEST(Trace, KeepsTheNewest65536Spans) {
  trace::take();
  for (int i = 0; i < 65536 + 3; ++i) {
    trace::record({"s", "u", i, i + 1, 1});
  }
  const auto spans = trace::take();
  ASSERT_EQ(spans.size(), 65536u);
  EXPECT_EQ(spans.front().begin_ns, 3);
  EXPECT_EQ(spans.back().begin_ns, 65536 + 2);
}

} // namespace
} // namespace cleave::test
