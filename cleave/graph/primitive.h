#pragma once

#include <stdexcept>

#include "cleave/mlx.h"
#include "mlx/primitives.h"

namespace cleave {

/// Base of cleave's graph nodes: they run on CPU streams and have no derivatives.
class CpuPrimitive : public mx::Primitive {
 public:
  using mx::Primitive::Primitive;

  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("[cleave] a split site's node was placed on a GPU stream and needs a CPU stream");
  }
  std::vector<mx::array> jvp(
      const std::vector<mx::array>&, const std::vector<mx::array>&, const std::vector<int>&) override {
    no_transform("jvp");
  }
  std::vector<mx::array> vjp(
      const std::vector<mx::array>&,
      const std::vector<mx::array>&,
      const std::vector<int>&,
      const std::vector<mx::array>&) override {
    no_transform("vjp");
  }
  std::pair<std::vector<mx::array>, std::vector<int>> vmap(
      const std::vector<mx::array>&, const std::vector<int>&) override {
    no_transform("vmap");
  }

 private:
  [[noreturn]] static void no_transform(const char* which) {
    throw std::runtime_error(
        std::string("[cleave] got ") + which +
        " of a split site, which serves inference only: call cleave.unpatch_model(model) first");
  }
};

/// x.shape with the last dimension replaced.
inline mx::Shape with_last(const mx::Shape& shape, int n) {
  auto out = shape;
  out.back() = n;
  return out;
}

} // namespace cleave
