#pragma once

#include <string>
#include <unordered_map>

#include <dnnl.hpp>

#include "cleave/element.h"
#include "cleave/kernels/kernels.h"
#include "cleave/linear_weight.h"
#include "cleave/units/cpu/workshop.h"

namespace cleave::onednn {

const dnnl::engine& cpu_engine();

/// How a product is computed.
struct Arithmetic {
  mx::Dtype dtype; ///< of the operands: float32, float16, bfloat16, or int8 (one scale per row of x and of W)
  /// 3 (bfloat16 only): x and W are sums of two bfloat16 numbers each, high and low, and y = high high + low high +
  /// high low, which keeps 16 bits of the mantissa. Henry, Tang, Heinecke, "Leveraging the bfloat16 Artificial
  /// Intelligence Datatype for Higher-Precision Computations", 2019.
  int products = 1;
  std::string reason = {}; ///< why it was chosen

  std::string name() const; ///< such as "float16" or "3 x bfloat16"
};

/// x in the form that products take, in the unit's scratch memory or in place.
struct Operand {
  ConstMatrix matrix;
  const void* low = nullptr;     ///< three products: the second part, laid out like the first
  const float* scales = nullptr; ///< int8: [rows]
};

/// y = x W^T + bias for weights [n_i, k] stacked to [n, k], packed once for an arithmetic. Not safe for concurrent
/// calls. Made and run on threads whose OpenMP team has the same size, since oneDNN plans for it.
class Gemm {
 public:
  /// m: tokens that the packing is tuned for. A single dense fp32 weight that needs no packing is used in place; the
  /// LinearWeight is kept alive for that. With `unpack_each_time` (float32 only) nothing is held: each run unpacks
  /// blocks of rows that stay in cache.
  Gemm(const std::vector<LinearWeight>& weights, const Arithmetic& arithmetic, int m, bool unpack_each_time = false);

  int n() const {
    return n_;
  }
  const Arithmetic& arithmetic() const {
    return arithmetic_;
  }
  /// Bytes held beside the model's arrays.
  size_t bytes() const;

  /// x [m, k] in this product's form; `slot` and the next one of the scratch memory may be used.
  Operand prepare(const ConstMatrix& x, Workshop& workshop, size_t slot) const;
  /// Whether y may have dtype and stride; a dense float32 one always may.
  bool takes(const Matrix& y) const;
  /// y = x W^T + bias; int8: without what rest() tells.
  void run(const dnnl::stream& stream, const Operand& x, const Matrix& y);
  kernels::RowScale rest(const Operand& x) const;

 private:
  struct Key {
    int64_t m, n, x_stride, y_stride;
    int y_dtype;
    bool adds;
    bool operator==(const Key&) const = default;
  };
  struct Hash {
    size_t operator()(const Key& k) const;
  };
  dnnl::matmul::primitive_desc describe(
      const dnnl::memory::desc& x, const dnnl::memory::desc& w, const dnnl::memory::desc& y, bool adds) const;
  void run_blocks(const dnnl::stream& stream, const ConstMatrix& x, const Matrix& y);
  void pack(const std::vector<LinearWeight>& weights, int m);
  void multiply(const dnnl::stream& stream, const ConstMatrix& x, const dnnl::memory& w, const Matrix& y, bool adds);

  int n_, k_;
  Arithmetic arithmetic_;
  bool strided_x_ = false, strided_y_ = false;
  std::optional<LinearWeight> in_place_;
  std::vector<LinearWeight> each_time_; ///< weights that are unpacked in each run; weights_ is empty then
  dnnl::memory weights_, low_;          ///< low_ is empty where one part holds the weights
  std::vector<float> bias_, scales_;
  std::unordered_map<Key, dnnl::matmul, Hash> primitives_;
};

} // namespace cleave::onednn
