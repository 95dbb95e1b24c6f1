#include "cleave/site/linear_group.h"

#include <algorithm>
#include <stdexcept>

#include "cleave/graph/join.h"

namespace cleave {

namespace {

SiteReport describe(const std::vector<LinearWeight>& members) {
  if (members.empty()) {
    throw std::invalid_argument("[linear_group] got no weight and needs at least one");
  }
  SiteReport report{{}, SiteKind::linear_group, members[0].k(), {}, members[0].format(), {}, {}, false};
  for (const auto& w : members) {
    w.check("linear_group");
    if (w.k() != report.k) {
      throw std::invalid_argument(
          "[linear_group] got members with " + std::to_string(report.k) + " and " + std::to_string(w.k()) +
          " input channels and needs one input for all");
    }
    report.n.push_back(w.n());
  }
  return report;
}

} // namespace

LinearGroup::LinearGroup(
    std::vector<LinearWeight> members, const std::vector<UnitShare>& shares, const SiteOptions& options)
    : Site(options, describe(members)), members_(std::move(members)) {
  build(shares);
  for (size_t i = 0; i < members_.size(); ++i) {
    main_.emplace_back();
    if (main_rows_[i] > 0) {
      main_[i] = members_[i].rows(0, main_rows_[i]);
      main_[i]->check("linear_group");
      main_[i]->keep_transposed();
    }
  }
}

std::vector<std::vector<int>> LinearGroup::cut(const std::vector<double>& shares) const {
  std::vector<std::vector<int>> rows(shares.size(), std::vector<int>(members_.size()));
  for (size_t i = 0; i < members_.size(); ++i) {
    auto member = cut_rows(members_[i].n(), shares, options_.align);
    for (size_t u = 0; u < shares.size(); ++u) {
      rows[u][i] = member[u];
    }
  }
  return rows;
}

Site::Request LinearGroup::request(const std::vector<int>& begin, const std::vector<int>& rows, bool) const {
  Request r{
      {SiteKind::linear_group,
       report_.k,
       {},
       0,
       options_.tile,
       options_.dtype.value_or(members_[0].activation_dtype())},
      {}};
  for (size_t i = 0; i < members_.size(); ++i) {
    if (rows[i] > 0) {
      r.spec.n.push_back(rows[i]);
      r.weights.push_back(members_[i].rows(begin[i], begin[i] + rows[i]));
      r.weights.back().check("linear_group");
    }
  }
  return r;
}

std::vector<mx::array> LinearGroup::original(const mx::array& x) const {
  std::vector<mx::array> out;
  for (const auto& w : members_) {
    out.push_back(w.linear(x));
  }
  return out;
}

std::vector<mx::array> LinearGroup::split(const mx::array& x) const {
  const size_t count = members_.size();
  std::vector<mx::Dtype> dtypes;
  for (const auto& w : members_) {
    dtypes.push_back(w.output_dtype(x.dtype()));
  }
  // On a CPU main the units write into one buffer, which saves the join's copy; a GPU joins at its own bandwidth.
  const auto main_stream = mx::default_stream(mx::default_device());
  const bool in_place = main_stream.device == mx::Device::cpu && parts_.size() > 1;
  std::vector<mx::array> buffers;
  if (in_place) {
    buffers = joint_buffers(x, report_.n, dtypes, parts_[0].call->unit->stream());
  }
  std::vector<std::vector<mx::array>> pieces(count);
  for (size_t i = 0; i < count; ++i) {
    if (main_[i]) {
      auto y = main_[i]->linear(x);
      pieces[i].push_back(in_place ? mx::contiguous(y) : y);
    }
  }
  auto column = main_rows_;
  for (const auto& part : parts_) {
    std::vector<mx::Dtype> outs;
    std::vector<Slot> slots;
    for (size_t i = 0; i < count; ++i) {
      if (part.rows[i] > 0) {
        outs.push_back(dtypes[i]);
        if (in_place) {
          slots.push_back({buffers[i], column[i]});
        }
      }
    }
    auto results = unit_call(part.call, x, outs, slots);
    for (size_t i = 0, r = 0; i < count; ++i) {
      if (part.rows[i] > 0) {
        pieces[i].push_back(std::move(results[r++]));
        column[i] += part.rows[i];
      }
    }
  }
  std::vector<mx::array> out;
  for (size_t i = 0; i < count; ++i) {
    if (in_place) {
      out.push_back(join_in(buffers[i], pieces[i], main_stream));
    } else {
      // Inputs listed last are evaluated first: partners start before main's own share.
      out.push_back(pieces[i].size() == 1 ? pieces[i][0] : mx::concatenate(pieces[i], -1));
    }
  }
  return out;
}

std::optional<float> LinearGroup::main_rows_difference(int tokens) const {
  std::vector<mx::array> differences;
  auto x = mx::astype(
      mx::random::normal({tokens, report_.k}, mx::float32, 0.0f, 1.0f, mx::random::key(0)),
      members_[0].activation_dtype());
  for (size_t i = 0; i < members_.size(); ++i) {
    if (main_[i] && main_rows_[i] < members_[i].n()) {
      auto whole = mx::slice(members_[i].linear(x), {0, 0}, {tokens, main_rows_[i]});
      differences.push_back(mx::astype(mx::max(mx::abs(mx::subtract(whole, main_[i]->linear(x)))), mx::float32));
    }
  }
  if (differences.empty()) {
    return std::nullopt;
  }
  return mx::max(mx::stack(differences)).item<float>();
}

} // namespace cleave
