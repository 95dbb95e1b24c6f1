#pragma once

#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace cleave {

struct TensorInfo {
  std::string dtype; ///< as the file names it, such as "BF16"
  std::vector<int> shape;
};

/// The tensors of a .safetensors file by its header, checked against the file's size and against each other: mlx
/// trusts offsets. Throws ModelError when the file is cut short or damaged.
std::map<std::string, TensorInfo> read_safetensors_header(const std::filesystem::path& file);

/// The .safetensors files of a model folder: those that model.safetensors.index.json names, or all that begin with
/// "model". Throws ModelError when there is none or one is missing.
std::vector<std::filesystem::path> find_shards(const std::filesystem::path& folder);

} // namespace cleave
