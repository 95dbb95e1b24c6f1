#include "cleave/models/config.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "cleave/models/shape.inl"

namespace cleave {

namespace {

/// The object that describes rope's scaling: rope_scaling, or what newer files have, rope_parameters.
std::optional<Fields> rope_fields(const Fields& f) {
  auto scaling = f.object("rope_scaling");
  return scaling ? scaling : f.object("rope_parameters");
}

void read_factor_list(const Fields& f, int pairs, std::vector<float>& out) {
  const auto* value = f.find("long_factor");
  const bool list = value && value->is_array();
  if (!value || (list && static_cast<int>(value->size()) != pairs && value->size() != 1)) {
    f.refuse_field("long_factor", "a number, or one for each of " + std::to_string(pairs) + " pairs");
  }
  for (const auto* number : elements(*value)) {
    if (!number->is_number() || !(number->get<float>() > 0) || !std::isfinite(number->get<float>())) {
      f.refuse_field("long_factor", "finite numbers above 0");
    }
    out.push_back(number->get<float>());
  }
}

void read_yarn(const Fields& f, RopeConfig& rope) {
  rope.type = "yarn";
  rope.factor = f.number("factor", 0);
  rope.original_context = f.integer("original_max_position_embeddings", 1, most_positions, 4096);
  rope.beta_fast = f.number("beta_fast", 0, 32);
  rope.beta_slow = f.number("beta_slow", 0, 1);
  rope.mscale = f.number("mscale", -1, 1);
  rope.mscale_all_dim = f.number("mscale_all_dim", -1, 0);
}

void read_scaling(const Fields& f, int head_dim, int context, RopeConfig& rope) {
  const auto type = f.find("type") ? f.text("type") : f.text("rope_type", "default");
  rope.type = type;
  if (type == "default" || type == "mrope") {
    rope.type = "default"; // of text alone, the three position numbers of mrope are one
  } else if (type == "linear") {
    rope.factor = f.number("factor", 0);
  } else if (type == "dynamic") {
    rope.factor = f.number("factor", 0);
    if (context == 0 || head_dim < 4) {
      f.refuse_field("type", "max_position_embeddings and heads of at least 4 beside it");
    }
  } else if (type == "llama3") {
    rope.factor = f.number("factor", 0);
    rope.low_freq_factor = f.number("low_freq_factor", 0, 1);
    rope.high_freq_factor = f.number("high_freq_factor", rope.low_freq_factor, 4);
    rope.original_context = f.integer("original_max_position_embeddings", 1, most_positions, 8192);
  } else if (type == "yarn" || type == "deepseek_yarn" || type == "telechat3-yarn") {
    read_yarn(f, rope);
  } else if (type == "longrope") {
    rope.original_context = f.integer("original_max_position_embeddings", 2, most_positions);
    read_factor_list(f, head_dim / 2, rope.long_factor);
  } else if (type == "proportional") {
    rope.factor = f.number("factor", 0, 1);
    rope.partial_rotary_factor = f.number("partial_rotary_factor", 0, 1);
    if (rope.partial_rotary_factor > 1) {
      f.refuse_field("partial_rotary_factor", "a number of at most 1");
    }
  } else {
    f.refuse_field(
        f.find("type") ? "type" : "rope_type",
        "default, linear, dynamic, llama3, yarn, longrope, proportional or mrope");
  }
}

void read_rope(const Fields& f, double theta, ModelConfig& c) {
  c.trained_context = c.context;
  const auto scaling = rope_fields(f);
  if (scaling && !f.find("rope_theta") && scaling->find("rope_theta")) {
    c.rope.theta = static_cast<float>(scaling->number("rope_theta", 1));
  } else if (theta > 0 || f.find("rope_theta")) {
    c.rope.theta = static_cast<float>(f.number("rope_theta", 1, theta));
  } else {
    f.refuse_field("rope_theta", "a number above 1");
  }
  if (scaling) {
    read_scaling(*scaling, c.head_dim, c.context, c.rope);
  }
  // What the scaling makes of the context that the model was trained with.
  if (c.rope.type == "linear" || c.rope.type == "dynamic" || c.rope.type == "yarn") {
    const double trained = c.rope.type == "yarn" ? c.rope.original_context : c.context;
    const double reach = std::min(trained * c.rope.factor, static_cast<double>(most_positions));
    c.context = c.context ? std::max(c.context, static_cast<int>(reach)) : 0;
  }
}

void read_llama_layers(const Fields& f, ModelConfig& c) {
  const auto* types = f.find("layer_types");
  if (!types) {
    return;
  }
  if (!types->is_array() || static_cast<int>(types->size()) != c.layers) {
    f.refuse_field("layer_types", "one entry for each of " + std::to_string(c.layers) + " layers");
  }
  for (int i = 0; i < c.layers; ++i) {
    const auto& type = (*types)[i];
    if (type != "full_attention" && type != "sliding_attention") {
      f.refuse_field("layer_types", "full_attention or sliding_attention");
    }
    c.windowed[i] = type == "sliding_attention";
  }
  if (std::find(c.windowed.begin(), c.windowed.end(), true) != c.windowed.end()) {
    c.window = f.integer("sliding_window", 1, most_positions);
  }
}

/// mlx_lm runs Qwen with full attention whatever the file says, so that a model of another kind would be wrong.
void refuse_windows(const Fields& f) {
  if (f.flag("use_sliding_window", false)) {
    f.refuse_field("use_sliding_window", "full attention in every layer for this model_type");
  }
  if (const auto* types = f.find("layer_types")) {
    for (const auto& type : *types) {
      if (type != "full_attention") {
        f.refuse_field("layer_types", "full_attention in every layer for this model_type");
      }
    }
  }
}

void read_plain_shape(const Fields& f, ModelConfig& c) {
  const ShapeNames names{"hidden_size",         "num_hidden_layers",   "intermediate_size",
                         "num_attention_heads", "num_key_value_heads", "rms_norm_eps"};
  read_shape(f, names, c);
  c.vocab = f.integer("vocab_size", 1, most_vocab);
  if (f.find("head_dim") && c.model_type != "qwen2") {
    c.head_dim = f.integer("head_dim", 2, most_head_dim);
  } else if (c.model_type.starts_with("qwen3")) {
    f.refuse_field("head_dim", "an even number");
  } else {
    c.head_dim = c.hidden / c.heads;
  }
  if (c.head_dim < 2 || c.head_dim % 2 || (c.model_type == "qwen2" && c.head_dim * c.heads != c.hidden)) {
    refuse(
        "load_model",
        "heads of " + std::to_string(c.head_dim) + " for 'hidden_size': " + std::to_string(c.hidden) + " in " +
            f.where(),
        "heads of an even size");
  }
  const auto act = f.text("hidden_act", "silu");
  if (act != "silu" && act != "swish") {
    f.refuse_field("hidden_act", "silu");
  }
}

void read_tokens(const Fields& f, int vocab, std::vector<int>& out) {
  const auto* value = f.find("eos_token_id");
  if (!value) {
    return;
  }
  out.clear();
  for (const auto* id : elements(*value)) {
    if (!id->is_number_integer() || *id < 0 || *id >= vocab) {
      f.refuse_field("eos_token_id", "token ids from 0 to " + std::to_string(vocab - 1));
    }
    out.push_back(id->get<int>());
  }
}

/// Names of modules with an entry of their own; everything else shows in the shapes of the arrays.
void read_packing(const Fields& root, ModelConfig& c) {
  auto packing = root.object("quantization");
  if (!packing) {
    packing = root.object("quantization_config");
    if (packing && packing->find("quant_method")) {
      const auto method = packing->text("quant_method");
      if (method != "mxfp4" && method != "mxfp8") {
        packing->refuse_field("quant_method", "weights that mlx_lm quantised, or none");
      }
    }
  }
  c.quantized = packing.has_value();
  if (!packing) {
    return;
  }
  for (const auto& [name, value] : packing->json().items()) {
    if (value.is_boolean()) {
      if (!value.get<bool>()) {
        c.packed_as[plain_name(name)] = std::nullopt;
      }
    } else if (value.is_object()) {
      const Fields entry(value, "'" + name + "' of " + packing->where());
      c.packed_as[plain_name(name)] = PackedAs{
          entry.integer("group_size", 1, 1024, 0), entry.integer("bits", 1, 8, 0), entry.text("mode", "affine")};
    }
  }
}

ModelConfig from_json(const Json& root_json, const std::string& source) {
  const Fields root(root_json, source);
  ModelConfig c;
  c.source = source;
  c.model_type = root.text("model_type");
  const std::set<std::string> known{"llama", "mistral", "qwen2", "qwen3", "qwen3_vl", "qwen3_vl_text"};
  if (!known.count(c.model_type)) {
    root.refuse_field("model_type", "one of llama, mistral, qwen2, qwen3, qwen3_vl");
  }
  if (root.find("model_file")) {
    root.refuse_field("model_file", "a model without code of its own");
  }
  auto text = c.model_type == "qwen3_vl" ? root.object("text_config") : std::nullopt;
  const Fields f = text ? *text : root;
  read_plain_shape(f, c);
  const bool llama = c.model_type == "llama" || c.model_type == "mistral";
  c.context = f.integer(
      "max_position_embeddings", 1, most_positions,
      llama                     ? std::optional(0)
      : c.model_type == "qwen2" ? std::optional(32768)
                                : std::nullopt);
  if (llama) {
    c.qkv_bias = c.o_bias = f.flag("attention_bias", false);
    c.mlp_bias = f.flag("mlp_bias", false);
    read_llama_layers(f, c);
  } else {
    c.qkv_bias = c.model_type == "qwen2";
    c.qk_norm = c.model_type != "qwen2";
    refuse_windows(f);
  }
  c.rope.traditional = (llama || c.model_type == "qwen2") && f.flag("rope_traditional", false);
  if (llama || c.model_type == "qwen2") {
    c.tied = f.flag("tie_word_embeddings", true);
  } else { // the outer object's says the same where there are two
    c.tied = f.find("tie_word_embeddings") ? f.flag("tie_word_embeddings") : root.flag("tie_word_embeddings");
  }
  read_rope(f, llama ? 10000 : c.model_type == "qwen2" ? 1000000 : 0, c);
  read_packing(root, c);
  read_tokens(f, c.vocab, c.end_tokens);
  read_tokens(root, c.vocab, c.end_tokens);
  return c;
}

} // namespace

std::string plain_name(const std::string& name) {
  for (const auto& [from, to] :
       {std::pair<std::string, std::string>{"language_model.model.", "model."},
        {"model.language_model.", "model."},
        {"language_model.lm_head", "lm_head"}}) {
    if (name.starts_with(from)) {
      return to + name.substr(from.size());
    }
  }
  return name;
}

ModelConfig parse_config(const std::string& json, const std::string& source) {
  return from_json(parse_object(json, source), source);
}

ModelConfig read_config(const std::filesystem::path& folder) {
  auto config = from_json(read_json(folder / "config.json"), (folder / "config.json").string());
  const auto generation = folder / "generation_config.json";
  if (std::error_code error; std::filesystem::exists(generation, error)) {
    const auto json = read_json(generation);
    read_tokens(Fields(json, generation.string()), config.vocab, config.end_tokens);
  }
  return config;
}

} // namespace cleave
