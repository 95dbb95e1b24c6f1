#pragma once

#include <filesystem>
#include <utility>

#include "cleave/models/config.h"
#include "cleave/models/weights.h"

namespace cleave {

/// Config and weights of a model in a GGUF file, by the names and in the order of rows that mlx_lm has. Architectures
/// llama, qwen2 and qwen3; tensors in F32, F16, BF16, Q4_0, Q4_1 or Q8_0, which stay packed as they are. The whole file
/// is read at once. Throws ModelError naming the field or tensor that is missing, damaged or of another kind.
std::pair<ModelConfig, Weights> open_gguf(const std::filesystem::path& file);

} // namespace cleave
