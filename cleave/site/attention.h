#pragma once

#include "cleave/ops/ops.h"
#include "cleave/site/site.h"

namespace cleave {

/// The attention of a layer with its projections: each unit takes key-value heads with their query heads, that is their
/// rows of q, k and v and their columns of o, and keeps queries, scores and attention's output to itself. The partial
/// results of o are added in fp32; the new keys and values come back for the model's cache.
class Attention : public Site {
 public:
  struct Weights {
    LinearWeight q, k, v, o;
  };

  /// Throws std::invalid_argument when the shapes do not fit spec or shares are not legal. When o is packed, heads are
  /// cut at multiples of block().
  Attention(
      Weights weights,
      const AttentionSpec& spec,
      const std::vector<UnitShare>& shares,
      const SiteOptions& options = {});

  /// The smallest number of key-value heads whose columns of o can be cut off: 1, or more where packed groups of o
  /// reach over heads; all of them when no cut is possible.
  static int block(const LinearWeight& o, const AttentionSpec& spec);

  /// Whether several units have shares, and heads can be cut so that none gets more than a tenth above its own: since
  /// all wait for the slowest, a site that is cut worse costs more than its fewer handoffs save.
  static bool cuts_well(const LinearWeight& o, const AttentionSpec& spec, const std::vector<UnitShare>& shares);

  /// x [B, S, k] at the positions after `past` (all heads, T of them) -> y [B, S, n] and the new keys (normed and
  /// turned) and values, [B, kv_heads, S, head_dim]. Split when engages(x), else by the original ops.
  std::vector<mx::array> operator()(const mx::array& x, const std::optional<CachedHeads>& past) const;
  using Site::operator();

  /// The same without a past.
  std::vector<mx::array> original(const mx::array& x) const override;
  std::vector<mx::array> original(const mx::array& x, const std::optional<CachedHeads>& past) const;

 protected:
  std::vector<std::vector<int>> cut(const std::vector<double>& shares) const override;
  Request request(const std::vector<int>& begin, const std::vector<int>& rows, bool alone) const override;
  std::vector<mx::array> split(const mx::array& x) const override;

 private:
  std::vector<mx::array> split(const mx::array& x, const std::optional<CachedHeads>& past) const;
  void check_call(const mx::array& x, const std::optional<CachedHeads>& past) const;
  /// Key-value heads [begin, end); o's bias only `with_bias`.
  Weights slice(int begin, int end, bool with_bias) const;
  /// y, keys and values of the heads of `w` by ordinary ops.
  std::vector<mx::array> compute(const Weights& w, const mx::array& x, const std::optional<CachedHeads>& past) const;

  Weights weights_;
  AttentionSpec spec_;
  std::optional<ops::Rope> rope_;
  std::optional<Weights> main_;
};

} // namespace cleave
