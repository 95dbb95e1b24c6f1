#include "cleave/models/error.h"

#include <nlohmann/json.hpp>

namespace cleave {

namespace {

bool is_utf8(const std::string& text) {
  try {
    nlohmann::json(text).dump();
    return true;
  } catch (const nlohmann::json::exception&) {
    return false;
  }
}

std::string printable(std::string text) {
  constexpr size_t most = 1000; // a damaged length makes names of megabytes
  if (text.size() > most) {
    text = text.substr(0, most) + "...";
  }
  const bool ascii_only = !is_utf8(text);
  for (auto& c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f || (ascii_only && byte >= 0x80)) {
      c = '?';
    }
  }
  return text;
}

} // namespace

void refuse(const std::string& op, const std::string& given, const std::string& needed) {
  throw ModelError("[" + op + "] got " + printable(given) + " and needs " + printable(needed));
}

} // namespace cleave
