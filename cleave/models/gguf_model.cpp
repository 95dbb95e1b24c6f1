#include "cleave/models/gguf_model.h"

#include <algorithm>

#include "cleave/models/gguf_file.inl"
#include "cleave/models/shape.inl"

namespace cleave {

namespace {

const std::map<std::string, std::string> outer_modules{
    {"token_embd", "model.embed_tokens"}, {"output_norm", "model.norm"}, {"output", "lm_head"}};
const std::map<std::string, std::string> layer_modules{
    {"attn_norm", "input_layernorm"},    {"attn_q", "self_attn.q_proj"},
    {"attn_k", "self_attn.k_proj"},      {"attn_v", "self_attn.v_proj"},
    {"attn_output", "self_attn.o_proj"}, {"attn_q_norm", "self_attn.q_norm"},
    {"attn_k_norm", "self_attn.k_norm"}, {"ffn_norm", "post_attention_layernorm"},
    {"ffn_gate", "mlp.gate_proj"},       {"ffn_up", "mlp.up_proj"},
    {"ffn_down", "mlp.down_proj"}};

/// "blk.3.attn_q.weight" taken apart.
struct TensorName {
  std::string block = {}; ///< "3"; empty outside of the layers
  std::string module;     ///< "attn_q"
  std::string part;       ///< "weight"

  explicit TensorName(const std::string& name) {
    const auto dot = name.rfind('.');
    module = name.substr(0, dot);
    part = dot == std::string::npos ? "" : name.substr(dot + 1);
    const auto before = module.rfind('.');
    if (module.starts_with("blk.") && before > 3) {
      block = module.substr(4, before - 4);
      module = module.substr(before + 1);
    }
  }
  /// The module's name in mlx_lm; empty: it has none.
  std::string plain() const {
    const auto& modules = block.empty() ? outer_modules : layer_modules;
    const auto it = modules.find(module);
    if (it == modules.end()) {
      return {};
    }
    return block.empty() ? it->second : "model.layers." + block + "." + it->second;
  }
};

void read_rope(const GgufFile& file, const Fields& f, const std::string& arch, ModelConfig& c) {
  c.rope.theta = static_cast<float>(f.number(arch + "rope.freq_base", 1, 10000));
  const int turned = f.integer(arch + "rope.dimension_count", 2, c.head_dim, c.head_dim);
  if (turned != c.head_dim) {
    f.refuse_field(arch + "rope.dimension_count", "heads turned as a whole, " + std::to_string(c.head_dim));
  }
  const auto type_key = arch + "rope.scaling.type";
  const bool old = f.find(arch + "rope.scale_linear");
  const auto type = f.text(type_key, old ? "linear" : "none");
  if (type == "linear" || type == "yarn") {
    c.rope.type = type;
    c.rope.factor = f.number(arch + (old ? "rope.scale_linear" : "rope.scaling.factor"), 0);
    c.rope.original_context = f.integer(arch + "rope.scaling.original_context_length", 1, most_positions, c.context);
  } else if (type != "none") {
    f.refuse_field(type_key, "none, linear or yarn");
  }
  if (file.tensors.count("rope_freqs.weight")) { // what Llama 3's scaling makes of each frequency
    auto factors = read_gguf_tensor(file, "rope_freqs.weight").weight;
    if (factors.shape() != mx::Shape{c.head_dim / 2} || factors.dtype() != mx::float32 || c.rope.type != "default" ||
        !mx::all(mx::logical_and(mx::isfinite(factors), mx::greater(factors, mx::array(0.0f)))).item<bool>()) {
      refuse(
          "load_model", "tensor 'rope_freqs.weight' in " + file.path.string(),
          std::to_string(c.head_dim / 2) + " factors above 0 and no other scaling");
    }
    c.rope.type = "factors";
    c.rope.long_factor.assign(factors.data<float>(), factors.data<float>() + factors.size());
  }
}

void read_tokens(const Fields& f, ModelConfig& c) {
  for (const char* key : {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"}) {
    const int id = f.integer(key, 0, c.vocab - 1, -1);
    if (id >= 0 && std::find(c.end_tokens.begin(), c.end_tokens.end(), id) == c.end_tokens.end()) {
      c.end_tokens.push_back(id);
    }
  }
}

ModelConfig read_gguf_config(const GgufFile& file) {
  const Fields f(file.metadata, file.path.string());
  ModelConfig c;
  c.source = file.path.string();
  c.model_type = f.text("general.architecture");
  if (c.model_type != "llama" && c.model_type != "qwen2" && c.model_type != "qwen3") {
    f.refuse_field("general.architecture", "llama, qwen2 or qwen3");
  }
  const auto arch = c.model_type + ".";
  const ShapeNames names{arch + "embedding_length",        arch + "block_count",
                         arch + "feed_forward_length",     arch + "attention.head_count",
                         arch + "attention.head_count_kv", arch + "attention.layer_norm_rms_epsilon"};
  read_shape(f, names, c);
  c.head_dim = f.integer(arch + "attention.key_length", 2, most_head_dim, c.hidden / c.heads);
  const int value_dim = f.integer(arch + "attention.value_length", 2, most_head_dim, c.head_dim);
  if (c.head_dim < 2 || c.head_dim % 2 || value_dim != c.head_dim) {
    refuse(
        "load_model",
        "heads of " + std::to_string(c.head_dim) + " and values of " + std::to_string(value_dim) + " in " + c.source,
        "an even size, the same for both");
  }
  c.context = c.trained_context = f.integer(arch + "context_length", 1, most_positions);
  const auto* tokens = f.find("tokenizer.ggml.tokens");
  const int listed = tokens && tokens->is_array() ? static_cast<int>(tokens->size()) : 0;
  c.vocab = f.integer(arch + "vocab_size", 1, most_vocab, listed ? std::optional(listed) : std::nullopt);
  c.qkv_bias = file.tensors.count("blk.0.attn_q.bias");
  c.o_bias = file.tensors.count("blk.0.attn_output.bias");
  c.qk_norm = c.model_type == "qwen3";
  c.tied = !file.tensors.count("output.weight");
  read_rope(file, f, arch, c);
  read_tokens(f, c);
  return c;
}

/// That of all activations: the scales' where weights are packed, else the weights'.
mx::Dtype model_dtype(const GgufFile& file) {
  auto dtype = mx::float32;
  for (const auto& [name, t] : file.tensors) {
    if (t.type == GgufType::bf16 && dtype == mx::float32) {
      dtype = mx::bfloat16;
    } else if (t.type != GgufType::f32 && t.type != GgufType::bf16) {
      return mx::float16;
    }
  }
  return dtype;
}

/// llama.cpp has the two values that are turned together in neighbouring rows, mlx_lm half a head apart. Whole rows
/// are moved, so one order serves packed weights, scales and biases.
mx::array unpermuted(const mx::array& a, int heads) {
  const int rows = a.shape(0), columns = static_cast<int>(a.size() / rows);
  const auto pairs = mx::reshape(a, {heads, rows / heads / 2, 2, columns});
  return mx::contiguous(mx::reshape(mx::swapaxes(pairs, 1, 2), a.shape()));
}

} // namespace

std::pair<ModelConfig, Weights> open_gguf(const std::filesystem::path& path) {
  const auto file = open_gguf_file(path);
  auto config = read_gguf_config(file);
  const auto dtype = model_dtype(file);
  std::unordered_map<std::string, mx::array> arrays;
  for (const auto& [raw_name, tensor] : file.tensors) {
    if (raw_name == "rope_freqs.weight") {
      continue;
    }
    const TensorName name(raw_name);
    const auto module = name.plain();
    if (module.empty() || (name.part != "weight" && name.part != "bias")) {
      refuse("load_model", "tensor '" + raw_name + "' in " + path.string(), "only tensors of a " + config.model_type);
    }
    const bool query = name.module == "attn_q", key = name.module == "attn_k";
    const int heads = config.model_type == "llama" && query ? config.heads
                      : config.model_type == "llama" && key ? config.kv_heads
                                                            : 0;
    if (heads && tensor.shape[0] != heads * config.head_dim) {
      refuse(
          "load_model", "tensor '" + raw_name + "' of " + std::to_string(tensor.shape[0]) + " rows in " + path.string(),
          std::to_string(heads) + " heads of " + std::to_string(config.head_dim));
    }
    const auto add = [&](const std::string& part, mx::array a) {
      const bool narrowed = mx::issubdtype(a.dtype(), mx::floating) && a.dtype() != dtype;
      if (narrowed) {
        a = mx::astype(a, dtype);
      }
      a = heads ? unpermuted(a, heads) : a;
      if (narrowed && !mx::all(mx::isfinite(a)).item<bool>()) {
        std::ostringstream s;
        s << "tensor '" << raw_name << "' in " << path.string() << " with numbers beyond " << dtype;
        refuse("load_model", s.str(), "numbers in its range");
      }
      arrays.emplace(module + "." + part, std::move(a));
    };
    auto read = read_gguf_tensor(file, raw_name);
    add(name.part, std::move(read.weight));
    if (read.scales) {
      config.quantized = true;
      add("scales", std::move(*read.scales));
      add("biases", std::move(*read.biases));
    }
  }
  Weights weights(std::move(arrays), config, path.string());
  return {std::move(config), std::move(weights)};
}

} // namespace cleave
