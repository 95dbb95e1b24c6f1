// Continues a text that is given as token ids: run_ids MODEL COUNT ID ID ID... prints COUNT further ids, fewer where
// the model ends its answer. MODEL is a folder as mlx_lm reads it, or a .gguf file.
#include <algorithm>
#include <cstdio>
#include <string>

#include "cleave/models/session.h"

int main(int argc, char** argv) {
  if (argc < 4) {
    std::fprintf(stderr, "usage: %s MODEL COUNT ID [ID ...]\n", argv[0]);
    return 2;
  }
  try {
    std::vector<int> ids;
    for (int i = 2; i < argc; ++i) {
      size_t read = 0;
      ids.push_back(std::stoi(argv[i], &read));
      if (argv[i][read] != '\0') {
        throw std::invalid_argument(std::string(argv[i]) + " is no number");
      }
    }
    const int count = ids[0];
    ids.erase(ids.begin());

    auto decoder = cleave::load_decoder(argv[1]); // DecoderOptions::shares lets units take part
    cleave::Session session(decoder);
    session.feed(ids, static_cast<int>(ids.size()) + std::max(count, 0));
    const auto& ends = decoder->config().end_tokens;
    for (int i = 0; i < count; ++i) {
      const int id = session.next();
      if (std::find(ends.begin(), ends.end(), id) != ends.end()) {
        break;
      }
      std::printf("%d\n", id);
      std::fflush(stdout);
    }
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
