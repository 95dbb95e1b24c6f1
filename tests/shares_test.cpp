#include "cleave/site/shares.h"

#include <gmock/gmock.h>

#include <numeric>

#include "util.h"

namespace cleave::test {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::StartsWith;
using testing::ThrowsMessage;

std::vector<double> random_shares(Random& random) {
  std::vector<double> shares(uniform(random, 1, 6));
  double sum = 0;
  for (auto& s : shares) {
    s = uniform(random, 0, 3) == 0 ? 0 : std::uniform_real_distribution<double>(0.001, 1)(random);
    sum += s;
  }
  if (sum == 0) {
    shares[0] = sum = 1;
  }
  for (auto& s : shares) {
    s /= sum;
  }
  return shares;
}

TEST(CutRows, SumsToTheTotalStaysNearTheShareAndAligns) {
  Random random(1);
  for (int i = 0; i < 20000; ++i) {
    const auto shares = random_shares(random);
    const int total = uniform(random, 1, i % 2 ? 300 : 20000);
    const int align = pick<int>(random, {1, 1, 2, 8, 16, 32, 64, 100});
    const auto rows = cut_rows(total, shares, align);
    SCOPED_TRACE(
        testing::Message() << "total " << total << " align " << align << " shares " << testing::PrintToString(shares)
                           << " rows " << testing::PrintToString(rows));
    ASSERT_EQ(rows.size(), shares.size());
    ASSERT_EQ(std::accumulate(rows.begin(), rows.end(), 0), total);
    int unaligned = 0;
    for (size_t u = 0; u < rows.size(); ++u) {
      ASSERT_GE(rows[u], 0);
      ASSERT_LT(std::abs(rows[u] - shares[u] * total), align + 1e-6) << "of unit " << u;
      unaligned += rows[u] % align != 0;
      if (shares[u] == 0) {
        ASSERT_EQ(rows[u], 0);
      }
    }
    ASSERT_LE(unaligned, 1);
  }
}

TEST(CutRows, GivesAllToAShareOfOne) {
  for (int align : {1, 16, 64}) {
    EXPECT_THAT(cut_rows(100, {1, 0}, align), ElementsAre(100, 0));
    EXPECT_THAT(cut_rows(100, {0, 1}, align), ElementsAre(0, 100));
    EXPECT_THAT(cut_rows(100, {0, 1, 0}, align), ElementsAre(0, 100, 0));
    EXPECT_THAT(cut_rows(100, {1}, align), ElementsAre(100));
  }
}

TEST(CutRows, CutsManyUnits) {
  EXPECT_THAT(cut_rows(1009, std::vector<double>(10, 0.1)), testing::Each(testing::AnyOf(100, 101)));
  EXPECT_THAT(cut_rows(1024, {0.5, 0.25, 0.25}, 128), ElementsAre(512, 256, 256));
}

TEST(CutRows, RoundsTheLargestRemainderUp) {
  EXPECT_THAT(cut_rows(10, {0.64, 0.36}), ElementsAre(6, 4));
  EXPECT_THAT(cut_rows(10, {0.36, 0.64}), ElementsAre(4, 6));
  EXPECT_THAT(cut_rows(100, {0.34, 0.66}, 10), ElementsAre(30, 70));
}

TEST(CheckShares, AcceptsWhatSumsToOne) {
  auto a = std::make_shared<ProbeUnit>(), b = std::make_shared<ProbeUnit>();
  check_shares({{nullptr, 1}});
  check_shares({{a, 1}});
  check_shares({{nullptr, 0}, {a, 1}});
  check_shares({{nullptr, 0.1}, {a, 0.2}, {b, 0.7}});
  check_shares({{nullptr, 1.0 / 3}, {a, 1.0 / 3}, {b, 1.0 / 3}});
}

TEST(CheckShares, NamesWhatIsWrong) {
  auto a = std::make_shared<ProbeUnit>();
  auto wrong = [](const std::vector<UnitShare>& shares, const auto& matcher) {
    EXPECT_THAT(
        [&] { check_shares(shares); },
        ThrowsMessage<std::invalid_argument>(AllOf(StartsWith("[shares] got"), matcher)));
  };
  wrong({}, HasSubstr("sum to 1"));
  wrong({{nullptr, 0.5}, {a, 0.4}}, AllOf(HasSubstr("main 0.5, probe 0.4 with sum 0.9"), HasSubstr("sum to 1")));
  wrong({{nullptr, 0.5}, {a, 0.50001}}, HasSubstr("sum to 1"));
  wrong({{nullptr, -0.5}, {a, 1.5}}, AllOf(HasSubstr("main -0.5"), HasSubstr("in [0, 1]")));
  wrong({{nullptr, 0.0}, {a, 1.5}}, AllOf(HasSubstr("probe 1.5"), HasSubstr("in [0, 1]")));
  wrong({{a, std::nan("")}}, HasSubstr("in [0, 1]"));
  wrong({{a, 0.5}, {a, 0.5}}, HasSubstr("each unit once"));
  wrong({{nullptr, 0.5}, {nullptr, 0.5}}, HasSubstr("each unit once"));
}

} // namespace
} // namespace cleave::test
