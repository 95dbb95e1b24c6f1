#pragma once

#include <filesystem>
#include <string>
#include <unordered_map>

#include "cleave/linear_weight.h"
#include "cleave/models/config.h"

namespace cleave {

/// The arrays of a model by the names of mlx_lm ("model.layers.0.self_attn.q_proj.weight"), each to be taken once.
/// Every method throws ModelError naming the tensor that is missing or of another shape or dtype than needed.
class Weights {
 public:
  /// source: the folder or file, for messages.
  Weights(std::unordered_map<std::string, mx::array> arrays, const ModelConfig& config, std::string source);

  /// `name` [size] in a float dtype.
  mx::array vector(const std::string& name, int size);
  /// The weight [n, k] of a linear layer or an embedding, dense or packed, with its bias [n] where `bias`. What it is
  /// packed as shows in its shapes, and must be what the config says where it names the module.
  LinearWeight linear(const std::string& module, int n, int k, bool bias = false);
  bool has(const std::string& name) const {
    return arrays_.count(name) != 0;
  }
  /// Throws ModelError when an array was not taken: the model would compute something else without it.
  void check_all_taken() const;

 private:
  mx::array take(const std::string& name);
  void describe_packing(const std::string& module, LinearWeight& weight, int n, int k) const;
  [[noreturn]] void refuse_array(const std::string& name, const mx::array& array, const std::string& needed) const;

  std::unordered_map<std::string, mx::array> arrays_;
  bool quantized_;
  std::map<std::string, std::optional<PackedAs>> packed_as_;
  std::string source_;
};

/// The weights of a model folder, not read yet; headers and sizes of its files are checked. Of a vision model, the
/// text part's.
Weights open_weights(const std::filesystem::path& folder, const ModelConfig& config);

} // namespace cleave
