#include "cleave/site/mlp.h"

#include <numeric>
#include <stdexcept>

#include "cleave/unit/gated.h"

namespace cleave {

namespace {

SiteReport describe(const LinearWeight& gate, const LinearWeight& up, const LinearWeight& down) {
  for (const auto* w : {&gate, &up, &down}) {
    w->check("mlp");
  }
  if (gate.k() != up.k() || gate.n() != up.n() || down.k() != gate.n()) {
    auto shape = [](const LinearWeight& w) { return "[" + std::to_string(w.n()) + ", " + std::to_string(w.k()) + "]"; };
    throw std::invalid_argument(
        "[mlp] got gate " + shape(gate) + ", up " + shape(up) + ", down " + shape(down) +
        " and needs gate and up of one shape [h, k] and down [n, h]");
  }
  return {{}, SiteKind::mlp, gate.k(), {down.n()}, gate.format(), {}, {}, false};
}

} // namespace

Mlp::Mlp(
    LinearWeight gate,
    LinearWeight up,
    LinearWeight down,
    Activation activation,
    const std::vector<UnitShare>& shares,
    const SiteOptions& options)
    : Site(options, describe(gate, up, down)),
      weights_{std::move(gate), std::move(up), std::move(down)},
      activation_(activation) {
  gated(activation_, mx::zeros({1}), mx::zeros({1})); // mlx's compiler is tried here, not while a graph is built
  build(shares);
  if (main_rows_[0] > 0) {
    main_ = slice(0, main_rows_[0], false);
    for (auto* w : {&main_->gate, &main_->up, &main_->down}) {
      w->keep_transposed();
    }
  }
}

std::vector<std::vector<int>> Mlp::cut(const std::vector<double>& shares) const {
  const int group = weights_.down.packed() ? weights_.down.group_size : 1;
  std::vector<std::vector<int>> rows;
  for (int r : cut_rows(weights_.gate.n(), shares, std::lcm(options_.align, group))) {
    rows.push_back({r});
  }
  return rows;
}

Mlp::Weights Mlp::slice(int begin, int end, bool with_bias) const {
  Weights part{weights_.gate.rows(begin, end), weights_.up.rows(begin, end), weights_.down.columns(begin, end)};
  if (with_bias) {
    part.down.bias = weights_.down.bias;
  }
  for (const auto* w : {&part.gate, &part.up, &part.down}) {
    w->check("mlp");
  }
  return part;
}

Site::Request Mlp::request(const std::vector<int>& begin, const std::vector<int>& rows, bool alone) const {
  auto part = slice(begin[0], begin[0] + rows[0], alone);
  return {
      {SiteKind::mlp, report_.k, report_.n, rows[0], options_.tile,
       options_.dtype.value_or(weights_.gate.activation_dtype()), activation_},
      {part.gate, part.up, part.down}};
}

std::vector<mx::array> Mlp::original(const mx::array& x) const {
  return {weights_.down.linear(gated(activation_, weights_.gate.linear(x), weights_.up.linear(x)))};
}

std::vector<mx::array> Mlp::split(const mx::array& x) const {
  const auto hidden = mx::promote_types(weights_.gate.output_dtype(x.dtype()), weights_.up.output_dtype(x.dtype()));
  const auto out = weights_.down.output_dtype(hidden);
  if (!main_ && parts_.size() == 1) {
    return unit_call(parts_[0].call, x, {out});
  }
  // Each sum lists the partner last, since inputs listed last are evaluated first.
  std::optional<mx::array> sum;
  if (main_) {
    sum = mx::astype(main_->down.linear(gated(activation_, main_->gate.linear(x), main_->up.linear(x))), mx::float32);
  }
  for (const auto& part : parts_) {
    auto partial = unit_call(part.call, x, {mx::float32})[0];
    sum = sum ? mx::add(*sum, partial) : partial;
  }
  if (weights_.down.bias) {
    sum = mx::add(*sum, mx::astype(*weights_.down.bias, mx::float32));
  }
  return {mx::astype(*sum, out)};
}

} // namespace cleave
