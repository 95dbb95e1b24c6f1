#include "cleave/models/gguf_model.h"

#include "cleave/models/error.h"

namespace cleave {

std::pair<ModelConfig, Weights> open_gguf(const std::filesystem::path& file) {
  refuse("load_model", file.string(), "a folder");
}

} // namespace cleave
