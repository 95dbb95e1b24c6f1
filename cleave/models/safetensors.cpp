#include "cleave/models/safetensors.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <set>

#include "cleave/models/fields.inl"

namespace cleave {

namespace {

namespace fs = std::filesystem;

[[noreturn]] void damaged(const fs::path& file, const std::string& what) {
  refuse("load_model", file.string() + ", " + what + ",", "a whole .safetensors file");
}

/// Bytes of one element; 0 for a dtype that mlx does not read.
int element_size(const std::string& dtype) {
  static const std::map<std::string, int> sizes{{"BOOL", 1}, {"U8", 1},  {"I8", 1},   {"F8_E4M3", 1}, {"U16", 2},
                                                {"I16", 2},  {"F16", 2}, {"BF16", 2}, {"U32", 4},     {"I32", 4},
                                                {"F32", 4},  {"U64", 8}, {"I64", 8},  {"F64", 8}};
  const auto it = sizes.find(dtype);
  return it == sizes.end() ? 0 : it->second;
}

TensorInfo read_tensor(const fs::path& file, const std::string& name, const Json& t, uint64_t data_bytes) {
  const bool whole = t.is_object() && t.contains("dtype") && t["dtype"].is_string() && t.contains("shape") &&
                     t["shape"].is_array() && t.contains("data_offsets") && t["data_offsets"].is_array() &&
                     t["data_offsets"].size() == 2 && t["data_offsets"][0].is_number_unsigned() &&
                     t["data_offsets"][1].is_number_unsigned();
  if (!whole) {
    damaged(file, "whose tensor '" + name + "' lacks dtype, shape or data_offsets");
  }
  TensorInfo info{t["dtype"].get<std::string>(), {}};
  const uint64_t size = element_size(info.dtype);
  if (size == 0) {
    damaged(file, "whose tensor '" + name + "' has dtype " + shown(t["dtype"]));
  }
  uint64_t bytes = size;
  for (const auto& n : t["shape"]) {
    if (!n.is_number_unsigned() || n > std::numeric_limits<int>::max()) {
      damaged(file, "whose tensor '" + name + "' has shape " + shown(t["shape"]));
    }
    info.shape.push_back(n.get<int>());
    const auto count = n.get<uint64_t>();
    const bool too_many = count > 0 && bytes > data_bytes / count; // the product itself might overflow
    bytes = too_many ? data_bytes + 1 : bytes * count;
  }
  const auto begin = t["data_offsets"][0].get<uint64_t>(), end = t["data_offsets"][1].get<uint64_t>();
  if (begin > end || end - begin != bytes) {
    damaged(file, "whose tensor '" + name + "' has offsets that do not fit its shape");
  }
  if (end > data_bytes) {
    damaged(file, "which ends " + std::to_string(end - data_bytes) + " bytes before its tensor '" + name + "'");
  }
  return info;
}

} // namespace

std::map<std::string, TensorInfo> read_safetensors_header(const fs::path& file) {
  std::error_code error;
  const uint64_t size = fs::is_regular_file(file, error) ? fs::file_size(file, error) : 0;
  std::ifstream stream(file, std::ios::binary);
  if (error || !stream) {
    damaged(file, "which cannot be read");
  }
  uint64_t length = 0;
  char start[8];
  if (size < 8 || !stream.read(start, 8)) {
    damaged(file, "which has " + std::to_string(size) + " bytes");
  }
  std::memcpy(&length, start, 8); // little-endian, as is every machine that mlx runs on
  if (length > size - 8) {
    damaged(file, "which has " + std::to_string(size) + " bytes and no room for its header");
  }
  std::string text(length, '\0');
  if (!stream.read(text.data(), static_cast<std::streamsize>(length))) {
    damaged(file, "which cannot be read");
  }
  const auto header = Json::parse(text, nullptr, false);
  if (!header.is_object()) {
    damaged(file, "whose header is no JSON object");
  }
  std::map<std::string, TensorInfo> tensors;
  for (const auto& [name, tensor] : header.items()) {
    if (name != "__metadata__") {
      tensors.emplace(name, read_tensor(file, name, tensor, size - 8 - length));
    }
  }
  return tensors;
}

std::vector<fs::path> find_shards(const fs::path& folder) {
  std::set<fs::path> shards;
  const auto index = folder / "model.safetensors.index.json";
  std::error_code error;
  if (fs::exists(index, error)) {
    const auto json = read_json(index);
    const auto map = Fields(json, index.string()).object("weight_map");
    if (!map || map->json().empty()) {
      Fields(json, index.string()).refuse_field("weight_map", "an object with the file of each tensor");
    }
    for (const auto& [name, file] : map->json().items()) {
      const auto plain = file.is_string() ? fs::path(file.get<std::string>()) : fs::path();
      if (plain.empty() || plain != plain.filename()) {
        refuse("load_model", "'" + name + "': " + shown(file) + " in " + index.string(), "the name of a file");
      }
      if (!fs::exists(folder / plain, error)) {
        refuse(
            "load_model", folder.string() + " without " + plain.string(),
            "every file that " + index.filename().string() + " names");
      }
      shards.insert(folder / plain);
    }
  } else {
    for (const auto& entry : fs::directory_iterator(folder, error)) {
      const auto name = entry.path().filename().string();
      if (name.starts_with("model") && name.ends_with(".safetensors")) {
        shards.insert(entry.path());
      }
    }
  }
  if (shards.empty()) {
    refuse("load_model", folder.string() + " without a model*.safetensors file", "the weights");
  }
  return {shards.begin(), shards.end()};
}

} // namespace cleave
