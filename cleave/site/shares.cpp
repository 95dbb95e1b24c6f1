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
  // Whole blocks for all but the first unit that has a share, main in the usual order; that one gets the rest.
  const size_t first = std::find_if(shares.begin(), shares.end(), [](double s) { return s > 0; }) - shares.begin();
  std::vector<int> rows(shares.size());
  std::vector<std::pair<double, size_t>> remainders;
  double excess = 0; // what the first unit has above its share, in blocks
  int left = total;
  for (size_t i = 0; i < shares.size(); ++i) {
    if (i == first) {
      continue;
    }
    const double exact = shares[i] * total / align;
    const int whole = std::min(left / align, static_cast<int>(exact + 1e-9));
    rows[i] = whole * align;
    left -= rows[i];
    remainders.emplace_back(exact - whole, i);
    excess += exact - whole;
  }
  std::stable_sort(remainders.begin(), remainders.end(), [](auto& a, auto& b) { return a.first > b.first; });
  for (auto [remainder, i] : remainders) {
    if (excess <= 0.5 + 1e-9 || left < align) {
      break;
    }
    rows[i] += align;
    left -= align;
    excess -= 1;
  }
  rows[first] = left;
  return rows;
}

} // namespace cleave
