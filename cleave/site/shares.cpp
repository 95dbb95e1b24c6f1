#include "cleave/site/shares.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>
#include <sstream>
#include <stdexcept>

namespace cleave {

void check_shares(const std::vector<UnitShare>& shares) {
  double sum = 0;
  std::set<const Unit*> seen;
  std::ostringstream given;
  for (const auto& [unit, share] : shares) {
    given << (sum == 0 && seen.empty() ? "" : ", ") << (unit ? unit->name() : "main") << " " << share;
    if (!(share >= 0 && share <= 1)) {
      throw std::invalid_argument("[shares] got " + given.str() + " and needs shares in [0, 1]");
    }
    if (!seen.insert(unit.get()).second) {
      throw std::invalid_argument("[shares] got " + given.str() + " and needs each unit once");
    }
    sum += share;
  }
  if (std::abs(sum - 1) > 1e-6) {
    given << " with sum " << sum;
    throw std::invalid_argument("[shares] got " + given.str() + " and needs shares that sum to 1");
  }
}

std::vector<int> cut_rows(int total, const std::vector<double>& shares, int align) {
  const int blocks = total / align;
  std::vector<int> rows(shares.size());
  std::vector<std::pair<double, size_t>> remainders;
  int left = blocks;
  for (size_t i = 0; i < shares.size(); ++i) {
    double exact = shares[i] * blocks;
    rows[i] = std::min(left, static_cast<int>(exact + 1e-9));
    left -= rows[i];
    remainders.emplace_back(exact - rows[i], i);
  }
  std::stable_sort(remainders.begin(), remainders.end(), [](auto& a, auto& b) { return a.first > b.first; });
  for (size_t i = 0; left > 0; i = (i + 1) % shares.size()) {
    if (shares[remainders[i].second] > 0) {
      ++rows[remainders[i].second];
      --left;
    }
  }
  for (auto& r : rows) {
    r *= align;
  }
  // What is no whole block goes to the first unit that has a share, main in the usual order.
  auto first = std::find_if(shares.begin(), shares.end(), [](double s) { return s > 0; });
  rows[first - shares.begin()] += total - blocks * align;
  return rows;
}

} // namespace cleave
