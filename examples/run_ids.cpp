// Continues a text that is given as token ids: run_ids MODEL COUNT ID ID ID... prints COUNT further ids, fewer where
// the model ends its answer. MODEL is a folder as mlx_lm reads it, or a .gguf file.
#include <algorithm>
#include <charconv>
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
      const std::string word = argv[i];
      const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), ids.emplace_back());
      if (error != std::errc() || end != word.data() + word.size()) {
        throw std::invalid_argument("[run_ids] got " + word + " and needs whole numbers");
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
