#include "cleave/site/site.h"

#include <algorithm>
#include <numeric>
#include <stdexcept>

#include "cleave/units/reference/reference_unit.h"

namespace cleave {

namespace {
bool any_rows(const std::vector<int>& rows) {
  return std::any_of(rows.begin(), rows.end(), [](int r) { return r > 0; });
}
} // namespace

Site::Site(const SiteOptions& options, SiteReport report)
    : options_(options), report_(std::move(report)), stats_(std::make_shared<SiteStats>()) {
  if (options_.tile < 1 || options_.min_rows < 0 || options_.align < 1) {
    throw std::invalid_argument(
        "[site] got tile " + std::to_string(options_.tile) + ", min_rows " + std::to_string(options_.min_rows) +
        ", align " + std::to_string(options_.align) +
        " and needs tile and align of at least 1, min_rows of at least 0");
  }
  report_.name = options_.name;
  stats_->site = options_.name;
  stats_->unprobed = options_.precision != Precision::exact;
}

void Site::set_min_rows(int rows) {
  if (rows < 0) {
    throw std::invalid_argument("[site] got min_rows " + std::to_string(rows) + " and needs at least 0");
  }
  options_.min_rows = rows;
}

std::vector<mx::array> Site::operator()(const mx::array& x) const {
  if (engages(x)) {
    return split(x);
  }
  count_original();
  return original(x);
}

bool Site::engages(const mx::array& x) const {
  if (parts_.empty() || x.ndim() < 1 || x.shape(-1) != report_.k || x.size() == 0 ||
      static_cast<int64_t>(x.size()) / report_.k < options_.min_rows) {
    return false;
  }
  for (const auto& part : parts_) {
    if (part.call->unit->failed()) {
      return false;
    }
    if (!part.call->program->accepts(x.dtype())) {
      ++stats_->wrong_dtype;
      return false;
    }
  }
  return true;
}

void Site::build(const std::vector<UnitShare>& shares) {
  check_shares(shares);
  // Main first, whether it was named or not: a unit that refuses leaves its share to it.
  std::vector<UnitShare> all{{nullptr, 0}};
  for (const auto& s : shares) {
    if (s.unit) {
      all.push_back(s);
    } else {
      all[0].share = s.share;
    }
  }
  std::vector<double> fractions;
  for (const auto& s : all) {
    fractions.push_back(s.share);
  }
  while (auto refused = try_build(all, fractions)) {
    fractions[0] += std::exchange(fractions[*refused], 0.0);
  }
  report_.splits = !parts_.empty();
}

std::optional<size_t> Site::try_build(const std::vector<UnitShare>& shares, const std::vector<double>& fractions) {
  const auto rows = cut(fractions);
  const auto sharing = std::count_if(rows.begin(), rows.end(), any_rows);
  main_rows_ = rows[0];
  parts_.clear();
  report_.parts.clear();
  if (any_rows(main_rows_)) {
    report_.parts.push_back({"main", main_rows_, 0, "mlx"});
  }
  std::vector<int> begin = main_rows_;
  for (size_t u = 1; u < shares.size(); ++u) {
    if (!any_rows(rows[u])) {
      continue;
    }
    auto& unit = *shares[u].unit;
    auto asked = request(begin, rows[u], sharing == 1);
    asked.spec.precision = options_.precision;
    std::shared_ptr<Program> program;
    auto why = unit.failed() ? std::optional("it is switched off: " + unit.failure()) : unit.refusal(asked.spec);
    if (!why) {
      try {
        program = unit.compile(asked.spec, asked.weights);
      } catch (const std::exception& e) {
        why = e.what();
      }
    }
    if (why) {
      report_.refusals.push_back(unit.name() + ": " + *why);
      return u;
    }
    report_.parts.push_back({unit.name(), rows[u], program->bytes(), program->arithmetic()});
    auto rescue = reference_program(asked.spec, std::move(asked.weights));
    parts_.push_back(
        {std::make_shared<UnitProgram>(
             UnitProgram{shares[u].unit, program, rescue, stats_, asked.spec.kind, asked.spec.n, sharing == 1}),
         rows[u]});
    std::transform(begin.begin(), begin.end(), rows[u].begin(), begin.begin(), std::plus<>());
  }
  return std::nullopt;
}

} // namespace cleave
