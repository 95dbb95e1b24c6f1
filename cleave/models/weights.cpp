#include "cleave/models/weights.h"

#include <algorithm>
#include <sstream>

#include "cleave/element.h"
#include "cleave/models/error.h"
#include "cleave/models/safetensors.h"

namespace cleave {

Weights::Weights(std::unordered_map<std::string, mx::array> arrays, const ModelConfig& config, std::string source)
    : arrays_(std::move(arrays)),
      quantized_(config.quantized),
      packed_as_(config.packed_as),
      source_(std::move(source)) {}

void Weights::refuse_array(const std::string& name, const mx::array& array, const std::string& needed) const {
  std::ostringstream s;
  s << "tensor '" << name << "' of " << array.dtype() << ' ' << array.shape() << " in " << source_;
  refuse("load_model", s.str(), needed);
}

mx::array Weights::take(const std::string& name) {
  auto node = arrays_.extract(name);
  if (node.empty()) {
    refuse("load_model", source_ + " without tensor '" + name + "'", "every tensor of the model that its config names");
  }
  return std::move(node.mapped());
}

mx::array Weights::vector(const std::string& name, int size) {
  auto array = take(name);
  if (array.shape() != mx::Shape{size} || !is_activation_dtype(array.dtype())) {
    refuse_array(name, array, "[" + std::to_string(size) + "] in float32, float16 or bfloat16");
  }
  return array;
}

LinearWeight Weights::linear(const std::string& module, int n, int k, bool bias) {
  LinearWeight w{take(module + ".weight")};
  if (has(module + ".scales")) {
    w.scales = take(module + ".scales");
    if (has(module + ".biases")) {
      w.biases = take(module + ".biases");
    }
    describe_packing(module, w, n, k);
  }
  const bool dense = !w.packed() && is_activation_dtype(w.weight.dtype());
  if (w.weight.ndim() != 2 || w.weight.shape(0) != n || (!w.packed() && !dense) || w.k() != k) {
    const auto shape = "[" + std::to_string(n) + ", " + std::to_string(k) + "]";
    refuse_array(module + ".weight", w.weight, shape + " in float32, float16 or bfloat16, or packed with its scales");
  }
  if (bias) {
    w.bias = vector(module + ".bias", n);
  }
  return w;
}

void Weights::describe_packing(const std::string& module, LinearWeight& w, int n, int k) const {
  const auto& scales = *w.scales;
  if (!quantized_) {
    refuse_array(module + ".scales", scales, "'quantization' in config.json");
  }
  const bool words = w.weight.dtype() == mx::uint32 && w.weight.ndim() == 2 && w.weight.shape(0) == n &&
                     w.weight.shape(1) * int64_t(32) % k == 0;
  w.bits = words ? static_cast<int>(std::min(w.weight.shape(1) * int64_t(32) / k, int64_t(9))) : 0;
  if (w.bits < 2 || w.bits > 8 || w.bits == 7) {
    const auto shape = "[" + std::to_string(n) + ", " + std::to_string(k) + "]";
    refuse_array(module + ".weight", w.weight, "uint32 with 2, 3, 4, 5, 6 or 8 bits for each of " + shape);
  }
  if (scales.ndim() != 2 || scales.shape(0) != n || scales.shape(1) < 1 || k % scales.shape(1)) {
    refuse_array(
        module + ".scales", scales,
        "one for each group of " + std::to_string(k) + " inputs, in rows of " + std::to_string(n));
  }
  w.group_size = k / scales.shape(1);
  if (scales.dtype() == mx::uint8) {
    w.mode = w.bits == 8 ? "mxfp8" : w.group_size == 16 ? "nvfp4" : "mxfp4";
    if ((w.bits != 4 && w.bits != 8) || w.group_size != (w.mode == "nvfp4" ? 16 : 32) || w.biases) {
      refuse_array(
          module + ".scales", scales, "mxfp4 or mxfp8 in groups of 32 or nvfp4 in groups of 16, without biases");
    }
  } else {
    w.mode = "affine";
    if (!is_activation_dtype(scales.dtype())) {
      refuse_array(module + ".scales", scales, "float32, float16 or bfloat16");
    }
    if (!w.biases) {
      refuse("load_model", source_ + " without tensor '" + module + ".biases'", "biases beside the scales");
    }
    if (w.biases->shape() != scales.shape() || w.biases->dtype() != scales.dtype()) {
      refuse_array(module + ".biases", *w.biases, "the shape and dtype of the scales");
    }
  }
  const auto named = packed_as_.find(module);
  if (named != packed_as_.end()) {
    const auto& as = named->second;
    const bool fits = as && as->mode == w.mode && (!as->group_size || as->group_size == w.group_size) &&
                      (!as->bits || as->bits == w.bits);
    if (!fits) {
      refuse_array(
          module + ".weight", w.weight,
          "what 'quantization' says of it, where it is " + w.mode + " " + std::to_string(w.bits) + "-bit group " +
              std::to_string(w.group_size));
    }
  }
}

void Weights::check_all_taken() const {
  std::string first;
  for (const auto& [name, array] : arrays_) {
    if (first.empty() || name < first) {
      first = name;
    }
  }
  if (!first.empty()) {
    refuse("load_model", "tensor '" + first + "' in " + source_, "only tensors that the model's type has");
  }
}

namespace {

/// Tensors that files have and the decoder does not need: the vision tower, angles that follow from the config, and the
/// head of a model whose embedding is it.
bool unneeded(const std::string& name, const ModelConfig& config) {
  for (const char* tower : {"visual.", "vision_tower.", "model.visual."}) {
    if (config.model_type == "qwen3_vl" && name.starts_with(tower)) {
      return true;
    }
  }
  return name.find("rotary_emb.inv_freq") != std::string::npos || (config.tied && name.starts_with("lm_head."));
}

} // namespace

Weights open_weights(const std::filesystem::path& folder, const ModelConfig& config) {
  std::unordered_map<std::string, mx::array> arrays;
  for (const auto& shard : find_shards(folder)) {
    read_safetensors_header(shard);
    std::unordered_map<std::string, mx::array> loaded;
    try {
      loaded = mx::load_safetensors(shard.string(), mx::Device(mx::Device::cpu)).first;
    } catch (const std::exception& e) {
      refuse("load_model", shard.string() + ", which mlx does not read (" + e.what() + "),", "a .safetensors file");
    }
    for (auto& [raw_name, array] : loaded) {
      const auto name = plain_name(raw_name);
      if (!unneeded(name, config) && !arrays.emplace(name, std::move(array)).second) {
        refuse("load_model", "tensor '" + raw_name + "' twice in " + folder.string(), "each tensor once");
      }
    }
  }
  return Weights(std::move(arrays), config, folder.string());
}

} // namespace cleave
