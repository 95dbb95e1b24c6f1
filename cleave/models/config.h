#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace cleave {

/// How positions turn queries and keys: the variants of mlx_lm's rope_utils.initialize_rope.
struct RopeConfig {
  std::string type = "default"; ///< default, linear, dynamic, llama3, yarn, longrope, proportional or factors
  float theta = 10000.0f;
  bool traditional = false; ///< neighbours are turned together, not values half a head apart
  double factor = 1;
  int original_context = 0; ///< 0: not given
  double low_freq_factor = 1, high_freq_factor = 4;
  double beta_fast = 32, beta_slow = 1, mscale = 1, mscale_all_dim = 0;
  std::vector<float> long_factor = {}; ///< of longrope and factors: one number, or one per pair
  double partial_rotary_factor = 1;
};

/// What a weight is packed as, where config.json names it for one module.
struct PackedAs {
  int group_size = 0; ///< 0: not given
  int bits = 0;
  std::string mode = "affine";
};

/// A decoder's shape, checked: every number is in range and they fit together.
struct ModelConfig {
  std::string model_type; ///< llama, mistral, qwen2, qwen3, qwen3_vl or qwen3_vl_text
  std::string source;     ///< the file, for messages
  int hidden = 0, layers = 0, intermediate = 0, heads = 0, kv_heads = 0, head_dim = 0, vocab = 0;
  float norm_eps = 0;
  int context = 0;         ///< positions at most; 0: not given
  int trained_context = 0; ///< max_position_embeddings as the file has it; 0: not given
  bool qkv_bias = false, o_bias = false, mlp_bias = false, qk_norm = false, tied = true;
  RopeConfig rope = {};
  int window = 0;                   ///< of the layers that see only so many positions; 0: there is none
  std::vector<bool> windowed = {};  ///< per layer
  std::vector<int> end_tokens = {}; ///< ids that end an answer
  bool quantized = false;           ///< whether packed weights are announced
  std::map<std::string, std::optional<PackedAs>> packed_as = {}; ///< by module; none: it is not packed
};

/// Reads config.json (and the end tokens of generation_config.json) of a model folder. Fields, defaults and their
/// meaning are mlx_lm's; of qwen3_vl, the text part's. Throws ModelError naming the field that is missing, of another
/// type, out of range or not supported.
ModelConfig read_config(const std::filesystem::path& folder);

/// The same from the text of a config.json; `source` stands for the file in messages.
ModelConfig parse_config(const std::string& json, const std::string& source);

/// Names of Qwen3-VL's text part as those of a plain decoder: "language_model.model.x", "model.language_model.x" and
/// "language_model.lm_head" lose the part that says so.
std::string plain_name(const std::string& name);

} // namespace cleave
