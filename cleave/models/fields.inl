// Fields of a JSON object, each with its type and range checked. For .cpp files only: users of the library need no
// JSON.
#pragma once

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "cleave/models/error.h"

namespace cleave {

using Json = nlohmann::json;

/// Largest numbers that a model's shape may have, in every form of its file: far beyond any model, and such that
/// products of two of them fit 64 bits.
constexpr int most_positions = 1 << 30, most_hidden = 1 << 20, most_intermediate = 1 << 24, most_vocab = 1 << 24,
              most_layers = 4096, most_heads = 4096, most_head_dim = 4096;

/// A value as a person would want to see it in one sentence.
inline std::string shown(const Json& value) {
  for (const auto& inner : value) { // written by recursion, which a file must not be able to drive deep
    if (inner.is_structured()) {
      return std::string(value.is_array() ? "a list of " : "an object of ") + std::to_string(value.size());
    }
  }
  auto text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  return text.size() > 80 ? text.substr(0, 77) + "..." : text;
}

/// The elements of a list, or the one value that stands in its place.
inline std::vector<const Json*> elements(const Json& value) {
  std::vector<const Json*> out;
  if (!value.is_array()) {
    return {&value};
  }
  for (const auto& element : value) {
    out.push_back(&element);
  }
  return out;
}

/// `text` parsed; `source` stands for it in messages. Throws ModelError when it is no JSON object.
inline Json parse_object(const std::string& text, const std::string& source) {
  Json value;
  try {
    value = Json::parse(text);
  } catch (const Json::parse_error& e) {
    const auto end = text.begin() + static_cast<std::ptrdiff_t>(std::min(e.byte, text.size()));
    const auto line = std::to_string(1 + std::count(text.begin(), end, '\n'));
    refuse("load_model", source + ", which is no JSON at line " + line + ",", "a file with one JSON object");
  } catch (const Json::exception&) { // a number beyond all range
  }
  if (!value.is_object()) {
    refuse("load_model", source + ", which is no JSON object,", "a file with one JSON object");
  }
  return value;
}

/// The file's text parsed. Throws ModelError when it is no readable file or no JSON object.
inline Json read_json(const std::filesystem::path& file) {
  std::error_code ignored;
  std::ifstream stream;
  if (std::filesystem::is_regular_file(file, ignored)) {
    stream.open(file, std::ios::binary);
  }
  if (!stream.is_open()) {
    refuse("load_model", file.string() + ", which is no readable file,", "a file of JSON");
  }
  const std::string text{std::istreambuf_iterator<char>(stream), {}};
  return parse_object(text, file.string());
}

/// An absent field and one of null are the same; a field without a fallback has to be there.
class Fields {
 public:
  /// `object` must outlive this.
  Fields(const Json& object, std::string where) : object_(&object), where_(std::move(where)) {}

  const Json* find(const std::string& key) const {
    auto it = object_->find(key);
    return it == object_->end() || it->is_null() ? nullptr : &*it;
  }

  [[noreturn]] void refuse_field(const std::string& key, const std::string& needed) const {
    const auto* value = find(key);
    refuse("load_model", (value ? "'" + key + "': " + shown(*value) : "no '" + key + "'") + " in " + where_, needed);
  }

  int integer(const std::string& key, int low, int high, std::optional<int> fallback = {}) const {
    const auto* value = find(key);
    if (!value && fallback) {
      return *fallback;
    }
    if (!value || !value->is_number_integer() || *value < low || *value > high) {
      refuse_field(key, "an integer from " + std::to_string(low) + " to " + std::to_string(high));
    }
    return value->get<int>();
  }

  /// A finite number above `above`.
  double number(const std::string& key, double above, std::optional<double> fallback = {}) const {
    const auto* value = find(key);
    if (!value && fallback) {
      return *fallback;
    }
    // Beyond float's range nothing is computed.
    constexpr double most = std::numeric_limits<float>::max();
    if (!value || !value->is_number() || !(value->get<double>() > above && value->get<double>() < most)) {
      refuse_field(key, above < 0 ? "a finite number" : "a finite number above " + shown(above));
    }
    return value->get<double>();
  }

  bool flag(const std::string& key, std::optional<bool> fallback = {}) const {
    const auto* value = find(key);
    if (!value && fallback) {
      return *fallback;
    }
    if (!value || !value->is_boolean()) {
      refuse_field(key, "true or false");
    }
    return value->get<bool>();
  }

  std::string text(const std::string& key, std::optional<std::string> fallback = {}) const {
    const auto* value = find(key);
    if (!value && fallback) {
      return *fallback;
    }
    if (!value || !value->is_string()) {
      refuse_field(key, "a text");
    }
    return value->get<std::string>();
  }

  /// The object under `key`, or none.
  std::optional<Fields> object(const std::string& key) const {
    const auto* value = find(key);
    if (!value) {
      return std::nullopt;
    }
    if (!value->is_object()) {
      refuse_field(key, "an object");
    }
    return Fields(*value, "'" + key + "' of " + where_);
  }

  const Json& json() const {
    return *object_;
  }
  const std::string& where() const {
    return where_;
  }

 private:
  const Json* object_;
  std::string where_;
};

} // namespace cleave
