#pragma once

#include <memory>
#include <vector>

#include "cleave/site/linear_group.h"
#include "cleave/site/mlp.h"
#include "util.h"

namespace cleave::test {

using Arrays = std::vector<mx::array>;
constexpr int k = 24;

inline SiteOptions from_rows(int min_rows) {
  return {.name = "site", .tile = 16, .min_rows = min_rows};
}

inline std::unique_ptr<Site> make_group(const std::vector<UnitShare>& shares, const SiteOptions& options) {
  Random random(51);
  std::vector<LinearWeight> members;
  for (int n : {20, 24, 7}) {
    members.push_back(make_weight(random, {}, n, k, n != 7));
  }
  return std::make_unique<LinearGroup>(members, shares, options);
}

inline std::unique_ptr<Site> make_mlp(const std::vector<UnitShare>& shares, const SiteOptions& options) {
  Random random(52);
  auto gate = make_weight(random, {}, 40, k), up = make_weight(random, {}, 40, k);
  auto down = make_weight(random, {}, k, 40, true);
  return std::make_unique<Mlp>(gate, up, down, Activation::silu, shares, options);
}

inline std::vector<std::unique_ptr<Site>> make_sites(const std::vector<UnitShare>& shares, const SiteOptions& options) {
  std::vector<std::unique_ptr<Site>> sites;
  sites.push_back(make_group(shares, options));
  sites.push_back(make_mlp(shares, options));
  return sites;
}

inline Arrays evaluated(Arrays arrays) {
  mx::eval(arrays);
  return arrays;
}

inline void expect_same(const Arrays& a, const Arrays& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(same_bits(a[i], b[i])) << "output " << i;
  }
}

/// For products summed in another order, and ops that mlx may fuse otherwise.
inline void expect_near(const Arrays& a, const Arrays& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    ASSERT_EQ(a[i].shape(), b[i].shape());
    EXPECT_TRUE(mx::allclose(a[i], b[i], 1e-5, 1e-5).item<bool>()) << "output " << i;
  }
}

} // namespace cleave::test
