#include "cleave/site/attention.h"

#include <numeric>
#include <sstream>
#include <stdexcept>

#include "mlx/fast.h"

namespace cleave {

namespace {

SiteReport describe(const Attention::Weights& w, const AttentionSpec& s) {
  for (const auto* part : {&w.q, &w.k, &w.v, &w.o}) {
    part->check("attention");
  }
  if (s.heads < 1 || s.kv_heads < 1 || s.head_dim < 1 || s.heads % s.kv_heads != 0 || s.window < 0) {
    throw std::invalid_argument(
        "[attention] got " + std::to_string(s.heads) + " heads of " + std::to_string(s.head_dim) + " channels, " +
        std::to_string(s.kv_heads) + " key-value heads, window " + std::to_string(s.window) +
        " and needs numbers of at least 1 (window: 0), heads a multiple of key-value heads");
  }
  const int q = s.heads * s.head_dim, kv = s.kv_heads * s.head_dim, k = w.q.k();
  auto is = [](const LinearWeight& l, int rows, int columns) { return l.n() == rows && l.k() == columns; };
  if (!is(w.q, q, k) || !is(w.k, kv, k) || !is(w.v, kv, k) || w.o.k() != q) {
    auto shape = [](const LinearWeight& l) { return "[" + std::to_string(l.n()) + ", " + std::to_string(l.k()) + "]"; };
    throw std::invalid_argument(
        "[attention] got q " + shape(w.q) + ", k " + shape(w.k) + ", v " + shape(w.v) + ", o " + shape(w.o) +
        " and needs q [" + std::to_string(q) + ", k], k and v [" + std::to_string(kv) + ", k], o [n, " +
        std::to_string(q) + "]");
  }
  for (const auto* norm : {&s.q_norm, &s.k_norm}) {
    if (*norm && ((*norm)->shape() != mx::Shape{s.head_dim} || !is_activation_dtype((*norm)->dtype()))) {
      std::ostringstream given;
      given << "[attention] got a norm of " << (*norm)->dtype() << ' ' << (*norm)->shape() << " and needs ["
            << s.head_dim << "] in float32, float16 or bfloat16";
      throw std::invalid_argument(given.str());
    }
  }
  if (s.rope && s.rope->dims > s.head_dim) {
    throw std::invalid_argument(
        "[attention] got rope over " + std::to_string(s.rope->dims) + " channels and needs at most the head's " +
        std::to_string(s.head_dim));
  }
  return {{}, SiteKind::attention, k, {w.o.n()}, w.q.format(), {}, {}, false};
}

/// [B, S, H * D] -> [B, H, S, D]
mx::array heads_of(const mx::array& x, int heads) {
  return mx::transpose(mx::reshape(x, {x.shape(0), x.shape(1), heads, -1}), {0, 2, 1, 3});
}

/// mlx widens to the weight's dtype where the two differ.
mx::array normed(const mx::array& x, const std::optional<mx::array>& weight, float eps) {
  if (!weight) {
    return x;
  }
  return x.dtype() == weight->dtype() ? ops::rms_norm(x, weight, eps) : mx::fast::rms_norm(x, weight, eps);
}

std::optional<CachedHeads> heads_between(const std::optional<CachedHeads>& past, int begin, int end) {
  if (!past) {
    return std::nullopt;
  }
  auto cut = [&](const mx::array& a) {
    return mx::slice(a, {0, begin, 0, 0}, {a.shape(0), end, a.shape(2), a.shape(3)});
  };
  return CachedHeads{cut(past->keys), cut(past->values)};
}

} // namespace

Attention::Attention(
    Weights weights, const AttentionSpec& spec, const std::vector<UnitShare>& shares, const SiteOptions& options)
    : Site(options, describe(weights, spec)), weights_(std::move(weights)), spec_(spec) {
  if (spec_.rope) {
    rope_.emplace(*spec_.rope);
  }
  for (auto* norm : {&spec_.q_norm, &spec_.k_norm}) {
    if (*norm) {
      *norm = mx::contiguous(**norm);
      mx::eval(**norm);
    }
  }
  build(shares);
  if (main_rows_[0] > 0) {
    main_ = slice(0, main_rows_[0], false);
    for (auto* w : {&main_->q, &main_->k, &main_->v, &main_->o}) {
      w->keep_transposed();
    }
  }
}

int Attention::block(const LinearWeight& o, const AttentionSpec& s) {
  const int columns = s.heads / s.kv_heads * s.head_dim;
  return o.packed() ? o.group_size / std::gcd(o.group_size, columns) : 1;
}

bool Attention::cuts_well(const LinearWeight& o, const AttentionSpec& s, const std::vector<UnitShare>& shares) {
  std::vector<double> fractions;
  for (const auto& share : shares) {
    if (share.share > 0) {
      fractions.push_back(share.share);
    }
  }
  const auto rows = cut_rows(s.kv_heads, fractions, block(o, s));
  bool well = fractions.size() > 1;
  for (size_t i = 0; i < rows.size(); ++i) {
    well = well && rows[i] <= 1.1 * fractions[i] * s.kv_heads;
  }
  return well;
}

std::vector<std::vector<int>> Attention::cut(const std::vector<double>& shares) const {
  std::vector<std::vector<int>> rows;
  for (int r : cut_rows(spec_.kv_heads, shares, std::lcm(options_.align, block(weights_.o, spec_)))) {
    rows.push_back({r});
  }
  return rows;
}

Attention::Weights Attention::slice(int begin, int end, bool with_bias) const {
  const int d = spec_.head_dim, q = spec_.heads / spec_.kv_heads * d;
  Weights part{
      weights_.q.rows(begin * q, end * q), weights_.k.rows(begin * d, end * d), weights_.v.rows(begin * d, end * d),
      weights_.o.columns(begin * q, end * q)};
  if (with_bias) {
    part.o.bias = weights_.o.bias;
  }
  for (const auto* w : {&part.q, &part.k, &part.v, &part.o}) {
    w->check("attention");
  }
  return part;
}

Site::Request Attention::request(const std::vector<int>& begin, const std::vector<int>& rows, bool alone) const {
  auto part = slice(begin[0], begin[0] + rows[0], alone);
  auto own = spec_;
  own.heads = part.q.n() / spec_.head_dim;
  own.kv_heads = rows[0];
  Request r{
      {SiteKind::attention,
       report_.k,
       {report_.n[0], part.k.n(), part.v.n()},
       part.q.n(),
       options_.tile,
       options_.dtype.value_or(weights_.q.activation_dtype())},
      {part.q, part.k, part.v, part.o}};
  r.spec.attention = own;
  return r;
}

void Attention::check_call(const mx::array& x, const std::optional<CachedHeads>& past) const {
  bool fits = x.ndim() == 3 && x.shape(2) == report_.k && x.size() > 0;
  if (past) {
    const mx::Shape shape{
        fits ? x.shape(0) : 0, spec_.kv_heads, past->keys.ndim() == 4 ? past->keys.shape(2) : 0, spec_.head_dim};
    fits = fits && past->keys.shape() == shape && past->values.shape() == shape &&
           is_activation_dtype(past->keys.dtype()) && is_activation_dtype(past->values.dtype());
  }
  if (!fits) {
    std::ostringstream given;
    given << "[attention] got x " << x.shape();
    if (past) {
      given << ", keys " << past->keys.dtype() << ' ' << past->keys.shape() << ", values " << past->values.dtype()
            << ' ' << past->values.shape();
    }
    given << " and needs x [B, S, " << report_.k << "], keys and values [B, " << spec_.kv_heads << ", T, "
          << spec_.head_dim << "] in float32, float16 or bfloat16";
    throw std::invalid_argument(given.str());
  }
}

std::vector<mx::array> Attention::operator()(const mx::array& x, const std::optional<CachedHeads>& past) const {
  check_call(x, past);
  if (engages(x)) {
    return split(x, past);
  }
  count_original();
  return original(x, past);
}

std::vector<mx::array> Attention::original(const mx::array& x) const {
  return original(x, std::nullopt);
}

std::vector<mx::array> Attention::original(const mx::array& x, const std::optional<CachedHeads>& past) const {
  check_call(x, past);
  return compute(weights_, x, past);
}

std::vector<mx::array> Attention::compute(
    const Weights& w, const mx::array& x, const std::optional<CachedHeads>& past) const {
  const auto heads = [&](const LinearWeight& l) { return heads_of(l.linear(x), l.n() / spec_.head_dim); };
  auto q = normed(heads(w.q), spec_.q_norm, spec_.norm_eps), k = normed(heads(w.k), spec_.k_norm, spec_.norm_eps);
  const auto v = heads(w.v);
  if (rope_) {
    const int offset = past ? past->keys.shape(2) : 0;
    q = (*rope_)(q, offset);
    k = (*rope_)(k, offset);
  }
  const auto keys = past ? mx::concatenate({past->keys, k}, 2) : k;
  const auto values = past ? mx::concatenate({past->values, v}, 2) : v;
  const auto y = ops::attention(q, keys, values, spec_.scale, true, spec_.window);
  return {w.o.linear(mx::reshape(mx::transpose(y, {0, 2, 1, 3}), {x.shape(0), x.shape(1), -1})), k, v};
}

std::vector<mx::array> Attention::split(const mx::array& x) const {
  check_call(x, std::nullopt);
  return split(x, std::nullopt);
}

std::vector<mx::array> Attention::split(const mx::array& x, const std::optional<CachedHeads>& past) const {
  const auto of = [&](const LinearWeight& w, const std::optional<mx::array>& norm) {
    const auto dtype = w.output_dtype(x.dtype());
    return norm ? mx::promote_types(dtype, norm->dtype()) : dtype;
  };
  const auto keys = of(weights_.k, spec_.k_norm), values = of(weights_.v, std::nullopt);
  const auto joined = mx::promote_types(mx::promote_types(of(weights_.q, spec_.q_norm), keys), values);
  const auto out = weights_.o.output_dtype(joined);
  const bool whole = !main_ && parts_.size() == 1;

  // Each sum and join lists the partner last, since inputs listed last are evaluated first.
  std::optional<mx::array> sum;
  std::vector<mx::array> k, v;
  if (main_) {
    auto own = compute(*main_, x, heads_between(past, 0, main_rows_[0]));
    sum = mx::astype(own[0], mx::float32);
    k.push_back(own[1]);
    v.push_back(own[2]);
  }
  int head = main_rows_[0];
  for (const auto& part : parts_) {
    const int rows = part.rows[0];
    auto results =
        unit_call(part.call, x, {whole ? out : mx::float32, keys, values}, {}, heads_between(past, head, head + rows));
    sum = sum ? mx::add(*sum, results[0]) : results[0];
    k.push_back(heads_of(results[1], rows));
    v.push_back(heads_of(results[2], rows));
    head += rows;
  }
  if (weights_.o.bias && !whole) {
    sum = mx::add(*sum, mx::astype(*weights_.o.bias, mx::float32));
  }
  auto join = [](const std::vector<mx::array>& parts) {
    return parts.size() == 1 ? parts[0] : mx::concatenate(parts, 1);
  };
  return {mx::astype(*sum, out), join(k), join(v)};
}

} // namespace cleave
