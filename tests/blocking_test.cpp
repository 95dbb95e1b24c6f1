#include <future>

#include "sites.h"

namespace cleave::test {
namespace {

/// Units whose calls wait until the test lets them go.
struct Gate {
  std::promise<void> open;
  std::shared_future<void> opened = open.get_future().share();
  std::shared_ptr<ProbeUnit> unit(const std::string& name = "probe:a") const {
    return std::make_shared<ProbeUnit>([opened = opened] { opened.wait(); }, name);
  }
};

TEST(Blocking, NeitherBuildingNorAsyncEvalWaitsForAUnit) {
  Watchdog watchdog;
  Random random(55);
  for (int site : {0, 1}) {
    for (bool two : {false, true}) {
      Gate gate;
      std::vector<UnitShare> shares{{nullptr, 0.4}, {gate.unit(), 0.6}};
      if (two) {
        shares = {{nullptr, 0.2}, {gate.unit(), 0.3}, {gate.unit("probe:b"), 0.5}};
      }
      auto sites = make_sites(shares, from_rows(1));
      auto x = normal(random, {9, k});
      auto y = (*sites[site])(x);
      mx::async_eval(y); // one: mlx itself makes its caller wait above 10 open tasks
      EXPECT_EQ(y[0].status(), mx::array::Status::evaluated) << "queued, not available";
      auto later = (*sites[site])(x);
      EXPECT_EQ(sites[site]->stats().engaged, 0u);
      gate.open.set_value();
      expect_near(later, evaluated(sites[site]->original(x)));
      expect_near(y, evaluated(sites[site]->original(x)));
    }
  }
}

// mlx gives the memory of an input that nobody else needs to an output, and the unit has not read x by then.
TEST(Blocking, XIsNotReusedWhileAUnitHasStillToReadIt) {
  Watchdog watchdog;
  Random random(56);
  for (int variant = 0; variant < 8; ++variant) {
    const bool strided = variant & 1, sum_first = variant & 2, site = variant & 4;
    Gate gate;
    auto sites = make_sites({{nullptr, 0.2}, {gate.unit(), 0.3}, {gate.unit("probe:b"), 0.5}}, from_rows(1));
    auto right = make_sites(
        {{nullptr, 0.2}, {std::make_shared<ProbeUnit>(), 0.3}, {std::make_shared<ProbeUnit>(), 0.5}}, from_rows(1));
    auto seed = normal(random, strided ? mx::Shape{k, 9} : mx::Shape{9, k});
    auto x = [&] { return mx::multiply(strided ? mx::transpose(seed) : seed, mx::array(2.0f)); };
    const auto expected = evaluated((*right[site])(x()));
    auto y = [&] {
      auto temporary = x();
      auto out = (*sites[site])(temporary);
      out.insert(sum_first ? out.begin() : out.end(), mx::add(temporary, mx::array(100.0f)));
      return out;
    }();
    mx::async_eval(y);
    gate.open.set_value();
    y.erase(sum_first ? y.begin() : y.end() - 1);
    expect_same(y, expected);
  }
}

// As a program does that makes one step more than it needs.
TEST(Blocking, OutputsMayBeDroppedWhileAUnitHasStillToWriteThem) {
  Watchdog watchdog;
  Random random(57);
  for (int variant = 0; variant < 6; ++variant) {
    Gate gate;
    std::vector<UnitShare> shares{{gate.unit(), 1}};
    if (variant / 2 == 1) {
      shares = {{nullptr, 0.4}, {gate.unit(), 0.6}};
    } else if (variant / 2 == 2) {
      shares = {{gate.unit(), 0.5}, {gate.unit("probe:b"), 0.5}};
    }
    const auto streams = {gate.unit()->stream(), gate.unit("probe:b")->stream(), mx::default_stream(mx::Device::cpu)};
    {
      auto sites = make_sites(shares, from_rows(1));
      auto y = (*sites[variant % 2])(normal(random, {9, k}));
      mx::async_eval(y);
    }
    gate.open.set_value();
    for (auto stream : streams) {
      mx::synchronize(stream);
    }
  }
}

TEST(ShareZero, HoldsNoMemoryAndMakesNoCalls) {
  Random random(57);
  auto probe = std::make_shared<ProbeUnit>();
  for (const auto& site : make_sites({{nullptr, 1}, {probe, 0}}, from_rows(1))) {
    EXPECT_FALSE(site->report().splits);
    ASSERT_EQ(site->report().parts.size(), 1u);
    EXPECT_EQ(site->report().parts[0].unit, "main");
    auto x = normal(random, {9, k});
    expect_same((*site)(x), site->original(x));
    EXPECT_EQ(site->stats().engaged, 0u);
  }
  EXPECT_EQ(probe->probe().compiled, 0);
  EXPECT_EQ(probe->probe().ran, 0);
}

TEST(ShareOne, LeavesMainNothing) {
  Random random(58);
  auto probe = std::make_shared<ProbeUnit>();
  for (const auto& site : make_sites({{nullptr, 0}, {probe, 1}}, from_rows(1))) {
    ASSERT_EQ(site->report().parts.size(), 1u);
    EXPECT_EQ(site->report().parts[0].unit, "probe");
    auto x = normal(random, {9, k});
    expect_near((*site)(x), evaluated(site->original(x)));
    EXPECT_EQ(site->stats().engaged, 1u);
  }
  EXPECT_EQ(probe->probe().ran, 2);
}

} // namespace
} // namespace cleave::test
