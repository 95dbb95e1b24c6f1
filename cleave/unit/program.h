#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cleave/activation.h"
#include "cleave/element.h"
#include "cleave/linear_weight.h"
#include "cleave/rope.h"

namespace cleave {

enum class SiteKind { linear_group, mlp, attention };

const char* to_string(SiteKind kind);

/// The coarsest arithmetic that a unit may multiply in. exact: activations lose nothing that their dtype holds. bf16:
/// operands may be rounded to bfloat16. int8: operands may be rounded to 8-bit integers, with one scale per row of x
/// and one per output channel of W. A unit that gains nothing by it stays exact; Program::arithmetic tells.
enum class Precision { exact, bf16, int8 };

const char* to_string(Precision precision);
/// Throws std::invalid_argument for a name that is not one of exact, bf16, int8.
Precision precision_from_string(const std::string& name);

/// Causal attention with its projections: y = W_o softmax(scale * q k^T) v, where q, k, v are W_q x, W_k x, W_v x, and
/// q and k are then normed and turned head by head.
struct AttentionSpec {
  int heads;                                      ///< of queries, a multiple of kv_heads; neighbours share keys
  int kv_heads;                                   ///< of keys and values
  int head_dim;                                   ///< channels per head
  float scale;                                    ///< of the scores
  int window = 0;                                 ///< each position sees itself and window - 1 before it; 0: all
  std::optional<mx::array> q_norm = std::nullopt; ///< [head_dim]: weight of an RMSNorm of each head before rope
  std::optional<mx::array> k_norm = std::nullopt;
  float norm_eps = 0;
  std::optional<RopeSpec> rope = std::nullopt;
};

/// What a unit is asked to compile: shapes and dtypes only, no matrices.
struct ProgramSpec {
  SiteKind kind;
  int k; ///< input channels of x
  /// Output channels per output. Linear group: one per member; mlp: one; attention: y, then keys and values, head by
  /// head.
  std::vector<int> n;
  int hidden = 0;                ///< mlp: rows of gate and up, columns of down; attention: rows of q, columns of o
  int tile = 512;                ///< tokens the program is tuned for; other counts must work too
  mx::Dtype dtype = mx::float32; ///< of the activations expected
  Activation activation = Activation::silu;              ///< mlp only
  std::optional<AttentionSpec> attention = std::nullopt; ///< attention only; of the unit's own heads
  Precision precision = Precision::exact;
  bool packed = false; ///< the program is to hold no copy of the weights, but to unpack them at each call

  int64_t parameters() const; ///< number of weights
};

/// What an attention program's call has beside x: how many sequences x [batch * tokens, k] continues, and the keys
/// (normed and turned) and values of all their positions so far.
struct Past {
  int64_t batch = 1;
  KeysValues before = {{nullptr, mx::float32, 0, 0, 0}, {nullptr, mx::float32, 0, 0, 0}, 0};
};

/// What a unit has compiled and holds for one site. Bound to its weights; safe to call from any thread.
class Program {
 public:
  virtual ~Program() = default;
  /// Bytes held beside the model's own arrays.
  virtual size_t bytes() const = 0;
  /// How it multiplies, such as "float32" or "int8".
  virtual std::string arithmetic() const {
    return "float32";
  }
  /// True when activations of this dtype may be given.
  virtual bool accepts(mx::Dtype x) const {
    return is_activation_dtype(x);
  }
};

/// A program whose work happens in a task on the unit's stream.
class KernelProgram : public Program {
 public:
  /// x: [m, k]; outputs: one [m, n_i] each, in order; `past` concerns attention only. Blocks until done. A throw means
  /// the unit failed.
  virtual void run(const ConstMatrix& x, std::span<const Matrix> outputs, const Past& past) = 0;
};

/// A program that is a graph of public mlx ops on the unit's stream.
class GraphProgram : public Program {
 public:
  /// x: [..., k] -> arrays [..., n_i] of dtype out_i. Lazy.
  virtual std::vector<mx::array> graph(const mx::array& x, const std::vector<mx::Dtype>& out, mx::Stream stream) = 0;
};

} // namespace cleave
