#pragma once

#include <span>
#include <string>
#include <vector>

#include "cleave/activation.h"
#include "cleave/element.h"
#include "cleave/linear_weight.h"

namespace cleave {

enum class SiteKind { linear_group, mlp };

const char* to_string(SiteKind kind);

/// The coarsest arithmetic that a unit may multiply in. exact: activations lose nothing that their dtype holds. bf16:
/// operands may be rounded to bfloat16. int8: operands may be rounded to 8-bit integers, with one scale per row of x
/// and one per output channel of W. A unit that gains nothing by it stays exact; Program::arithmetic tells.
enum class Precision { exact, bf16, int8 };

const char* to_string(Precision precision);
/// Throws std::invalid_argument for a name that is not one of exact, bf16, int8.
Precision precision_from_string(const std::string& name);

/// What a unit is asked to compile: shapes and dtypes only, no weights.
struct ProgramSpec {
  SiteKind kind;
  int k;                                    ///< input channels of x
  std::vector<int> n;                       ///< output channels per output (linear group: one per member; mlp: one)
  int hidden = 0;                           ///< mlp only: rows of gate and up, columns of down
  int tile = 512;                           ///< tokens the program is tuned for; other counts must work too
  mx::Dtype dtype = mx::float32;            ///< of the activations expected
  Activation activation = Activation::silu; ///< mlp only
  Precision precision = Precision::exact;

  int64_t parameters() const; ///< number of weights
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
  /// x: [m, k]; outputs: one [m, n_i] each, in order. Blocks until done. A throw means the unit failed.
  virtual void run(const ConstMatrix& x, std::span<const Matrix> outputs) = 0;
};

/// A program that is a graph of public mlx ops on the unit's stream.
class GraphProgram : public Program {
 public:
  /// x: [..., k] -> arrays [..., n_i] of dtype out_i. Lazy.
  virtual std::vector<mx::array> graph(const mx::array& x, const std::vector<mx::Dtype>& out, mx::Stream stream) = 0;
};

} // namespace cleave
