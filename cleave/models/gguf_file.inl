// What a GGUF file holds. For .cpp files only: users of the library need no JSON.
#pragma once

#include <filesystem>
#include <map>
#include <optional>
#include <string>

#include "cleave/mlx.h"
#include "cleave/models/fields.inl"

namespace cleave {

/// F32, F16, BF16, Q4_0, Q4_1 or Q8_0.
enum class GgufType { f32 = 0, f16 = 1, q4_0 = 2, q4_1 = 3, q8_0 = 8, bf16 = 30 };

/// Where a tensor lies.
struct GgufTensor {
  GgufType type;
  mx::Shape shape; ///< length of a row last, as mlx has it
  uint64_t begin, bytes;

  /// Bits of an element in mlx's packed form; 0: not packed.
  int bits() const {
    return type == GgufType::q8_0 ? 8 : type == GgufType::q4_0 || type == GgufType::q4_1 ? 4 : 0;
  }
};

struct GgufFile {
  std::filesystem::path path;
  Json metadata; ///< an object
  std::map<std::string, GgufTensor> tensors;
};

/// mlx's form of a tensor; scales and biases of packed ones.
struct GgufArrays {
  mx::array weight;
  std::optional<mx::array> scales = std::nullopt, biases = std::nullopt;
};

/// Reads the header, checked against the file's size. Throws ModelError when the file is cut short, damaged, or has a
/// tensor of another type.
GgufFile open_gguf_file(const std::filesystem::path& path);

/// Reads one tensor, evaluated. Packed [n, k]: uint32 [n, k * bits / 32], scales and biases [n, k / 32] float16, the
/// same numbers bit for bit. Not by mx::load_gguf: that opens the file for writing too, believes its sizes, and turns
/// types that it does not keep into float16.
GgufArrays read_gguf_tensor(const GgufFile& file, const std::string& name);

} // namespace cleave
