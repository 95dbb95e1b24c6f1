#pragma once

#include <string>
#include <unordered_map>

#include <dnnl.hpp>

#include "cleave/element.h"
#include "cleave/linear_weight.h"

namespace cleave::onednn {

/// What follows the product inside oneDNN.
enum class Epilogue { none, silu, gelu, gelu_tanh, relu, multiply };

const dnnl::engine& cpu_engine();

/// y = epilogue(x W^T + bias) for one weight, packed once in the compute dtype. Not safe for concurrent calls. Made and
/// run on threads whose OpenMP team has the same size, since oneDNN plans for it.
class Gemm {
 public:
  /// compute: float32, float16 or bfloat16; m: tokens that the packing is tuned for. A dense fp32 weight that needs no
  /// packing is used in place; the LinearWeight is kept alive for that.
  Gemm(const LinearWeight& weight, mx::Dtype compute, int m, Epilogue epilogue);

  int n() const {
    return n_;
  }
  /// Bytes held beside the model's arrays.
  size_t bytes() const;

  /// Whether oneDNN has a fast kernel for x or y with gaps between rows; without one they have to be dense.
  bool takes_strided_x() const {
    return strided_x_;
  }
  bool takes_strided_y() const {
    return strided_y_;
  }
  /// x: [m, k] of the compute dtype; y: [m, n] of float32 or the compute dtype; factor: like y, for Epilogue::multiply.
  void run(const dnnl::stream& stream, const ConstMatrix& x, const Matrix& y, const ConstMatrix* factor = nullptr);

 private:
  struct Key {
    int64_t m, x_stride, y_stride, factor_stride;
    int y_dtype;
    bool operator==(const Key&) const = default;
  };
  struct Hash {
    size_t operator()(const Key& k) const;
  };
  dnnl::matmul::primitive_desc describe(
      const dnnl::memory::desc& x,
      const dnnl::memory::desc& w,
      const dnnl::memory::desc& y,
      const dnnl::memory::desc* factor) const;
  void pack(const LinearWeight& weight, int m);

  int n_, k_;
  mx::Dtype compute_;
  Epilogue epilogue_;
  bool strided_x_ = false, strided_y_ = false;
  std::optional<LinearWeight> in_place_;
  dnnl::memory weights_;
  std::vector<float> bias_;
  std::unordered_map<Key, dnnl::matmul, Hash> primitives_;
};

/// In which dtype this processor multiplies activations of a dtype, and why.
struct Precision {
  mx::Dtype dtype;
  std::string reason;
};

/// The fastest dtype with fp16-class accuracy for activations of `dtype`: float16 or bfloat16 for activations of that
/// dtype, where a measured trial product is fast and exact enough, else float32. Call on a thread with the unit's
/// OpenMP team. The first call for a dtype runs the trial (tens of milliseconds).
const Precision& precision(mx::Dtype dtype);

} // namespace cleave::onednn
