#pragma once

#include "cleave/site/site.h"

namespace cleave {

/// y = W_down (act(W_gate x) * (W_up x)): each unit takes rows of gate and up with the same columns of down, and keeps
/// its part of the intermediate activations. The partial results are added in fp32.
class Mlp : public Site {
 public:
  /// Throws std::invalid_argument when the shapes do not form an mlp or shares are not legal. When down is packed, rows
  /// are cut at multiples of its group size.
  Mlp(LinearWeight gate,
      LinearWeight up,
      LinearWeight down,
      Activation activation,
      const std::vector<UnitShare>& shares,
      const SiteOptions& options = {});

  /// One array, [..., n].
  std::vector<mx::array> original(const mx::array& x) const override;

 protected:
  std::vector<std::vector<int>> cut(const std::vector<double>& shares) const override;
  Request request(const std::vector<int>& begin, const std::vector<int>& rows, bool alone) const override;
  std::vector<mx::array> split(const mx::array& x) const override;

 private:
  struct Weights {
    LinearWeight gate, up, down;
  };
  /// Rows [begin, end) of gate and up, columns of down; down's bias only `with_bias`.
  Weights slice(int begin, int end, bool with_bias) const;

  Weights weights_;
  Activation activation_;
  std::optional<Weights> main_;
};

} // namespace cleave
