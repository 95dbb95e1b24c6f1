#pragma once

#include <stdexcept>
#include <string>

namespace cleave {

/// A model or prompt that cannot be used; what() is one sentence that names the file or field.
class ModelError : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

/// Throws ModelError("[op] got GIVEN and needs NEEDED"). Names out of damaged files are shown as printable UTF-8.
[[noreturn]] void refuse(const std::string& op, const std::string& given, const std::string& needed);

} // namespace cleave
