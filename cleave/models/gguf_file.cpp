#include <cstring>

#include "cleave/models/gguf_file.inl"

namespace cleave {

namespace {

namespace fs = std::filesystem;

constexpr int block_size = 32; // elements that share a scale

[[noreturn]] void damaged(const fs::path& file, const std::string& what) {
  refuse("load_model", file.string() + ", " + what + ",", "a whole .gguf file of version 2 or 3");
}

/// Little-endian fields one after another, none of them beyond the end of the file.
class Reader {
 public:
  explicit Reader(const fs::path& path) : path_(path) {
    std::error_code error;
    size_ = fs::is_regular_file(path, error) ? fs::file_size(path, error) : 0;
    stream_.open(path, std::ios::binary);
    if (error || !stream_) {
      damaged(path, "which cannot be read");
    }
  }

  void bytes(void* to, uint64_t count) {
    need(count);
    if (!stream_.read(static_cast<char*>(to), static_cast<std::streamsize>(count))) {
      damaged(path_, "which cannot be read");
    }
    position_ += count;
  }
  template <typename T>
  T number() {
    T value;
    bytes(&value, sizeof(T));
    return value;
  }
  std::string text() {
    const auto length = number<uint64_t>();
    need(length);
    std::string value(length, '\0');
    bytes(value.data(), length);
    return value;
  }
  void need(uint64_t count) const {
    if (count > size_ - position_) {
      damaged(path_, "which ends within its header at " + std::to_string(size_) + " bytes");
    }
  }
  uint64_t position() const {
    return position_;
  }
  uint64_t size() const {
    return size_;
  }

 private:
  fs::path path_;
  std::ifstream stream_;
  uint64_t size_ = 0, position_ = 0;
};

Json read_scalar(Reader& r, const fs::path& path, const std::string& key, uint32_t type) {
  switch (type) {
    case 0:
      return r.number<uint8_t>();
    case 1:
      return r.number<int8_t>();
    case 2:
      return r.number<uint16_t>();
    case 3:
      return r.number<int16_t>();
    case 4:
      return r.number<uint32_t>();
    case 5:
      return r.number<int32_t>();
    case 6:
      return r.number<float>();
    case 7:
      return r.number<uint8_t>() != 0;
    case 8:
      return r.text();
    case 10:
      return r.number<uint64_t>();
    case 11:
      return r.number<int64_t>();
    case 12:
      return r.number<double>();
    default:
      damaged(path, "whose '" + key + "' has type " + std::to_string(type));
  }
}

Json read_value(Reader& r, const fs::path& path, const std::string& key) {
  const auto type = r.number<uint32_t>();
  if (type != 9) {
    return read_scalar(r, path, key, type);
  }
  const auto of = r.number<uint32_t>();
  const auto count = r.number<uint64_t>();
  r.need(count); // each takes a byte at least
  auto list = Json::array();
  for (uint64_t i = 0; i < count; ++i) {
    list.push_back(read_scalar(r, path, key, of));
  }
  return list;
}

/// Elements and bytes of one block.
std::pair<int, int> block_of(GgufType type) {
  switch (type) {
    case GgufType::f32:
      return {1, 4};
    case GgufType::q4_0:
      return {block_size, 18};
    case GgufType::q4_1:
      return {block_size, 20};
    case GgufType::q8_0:
      return {block_size, 34};
    default:
      return {1, 2};
  }
}

/// The tensor's entry in the header; `begin` counts from the start of the data.
GgufTensor read_entry(Reader& r, const fs::path& path, const std::string& name) {
  const auto wrong = [&](const std::string& what) { damaged(path, "whose tensor '" + name + "' has " + what); };
  const auto ndim = r.number<uint32_t>();
  if (ndim < 1 || ndim > 4) {
    wrong(std::to_string(ndim) + " dimensions");
  }
  std::vector<uint64_t> dims(ndim);
  for (auto& d : dims) {
    d = r.number<uint64_t>();
  }
  const auto type = r.number<uint32_t>();
  for (uint32_t known : {0, 1, 2, 3, 8, 30}) {
    if (type == known) {
      GgufTensor t{static_cast<GgufType>(type), {}, r.number<uint64_t>(), 0};
      const auto [elements, bytes] = block_of(t.type);
      if (dims[0] % elements) {
        wrong("rows of " + std::to_string(dims[0]) + ", not whole blocks of " + std::to_string(elements));
      }
      t.bytes = bytes;
      dims[0] /= elements;
      for (auto d : dims) {
        if (d > std::numeric_limits<int>::max() / block_size || (d > 0 && t.bytes > r.size() / d)) {
          wrong("more elements than the file has room for");
        }
        t.bytes *= d;
        t.shape.insert(t.shape.begin(), static_cast<int>(d));
      }
      t.shape.back() *= elements;
      return t;
    }
  }
  refuse(
      "load_model", path.string() + ", whose tensor '" + name + "' has type " + std::to_string(type) + ",",
      "tensors of type F32, F16, BF16, Q4_0, Q4_1 or Q8_0");
}

} // namespace

GgufFile open_gguf_file(const fs::path& path) {
  Reader r(path);
  char magic[4] = {};
  if (r.size() < 24) {
    damaged(path, "which has " + std::to_string(r.size()) + " bytes");
  }
  r.bytes(magic, 4);
  if (std::memcmp(magic, "GGUF", 4) != 0) {
    damaged(path, "which does not start with GGUF");
  }
  const auto version = r.number<uint32_t>();
  if (version != 2 && version != 3) {
    damaged(path, "which has version " + std::to_string(version));
  }
  const auto tensor_count = r.number<uint64_t>(), value_count = r.number<uint64_t>();
  GgufFile file{path, Json::object(), {}};
  for (uint64_t i = 0; i < value_count; ++i) {
    const auto key = r.text();
    file.metadata[key] = read_value(r, path, key);
  }
  for (uint64_t i = 0; i < tensor_count; ++i) {
    const auto name = r.text();
    if (!file.tensors.emplace(name, read_entry(r, path, name)).second) {
      damaged(path, "which lists tensor '" + name + "' twice");
    }
  }
  const auto alignment = Fields(file.metadata, path.string()).integer("general.alignment", 1, 1 << 20, 32);
  const uint64_t data = (r.position() + alignment - 1) / alignment * alignment;
  for (auto& [name, t] : file.tensors) {
    if (data > r.size() || t.begin > r.size() - data || t.bytes > r.size() - data - t.begin) {
      damaged(path, "which has " + std::to_string(r.size()) + " bytes and ends before its tensor '" + name + "'");
    }
    t.begin += data;
  }
  return file;
}

namespace {

mx::array allocated(mx::Shape shape, mx::Dtype dtype) {
  size_t bytes = mx::size_of(dtype);
  for (auto n : shape) {
    bytes *= n;
  }
  return mx::array(mx::allocator::malloc(bytes), std::move(shape), dtype);
}

/// Two rows of 16 elements, one in the low and one in the high halves of the bytes, as 32 elements in their order.
void unpack_halves(const uint8_t* from, uint8_t* to) {
  for (int i = 0; i < 16; i += 2, ++to) {
    to[0] = static_cast<uint8_t>((from[i] & 15) | (from[i + 1] & 15) << 4);
    to[8] = static_cast<uint8_t>(from[i] >> 4 | (from[i + 1] & 0xf0));
  }
}

GgufArrays repacked(const GgufTensor& t, const std::vector<uint8_t>& blocks) {
  auto words = t.shape, groups = t.shape;
  words.back() = static_cast<int>(int64_t(words.back()) * t.bits() / 32);
  groups.back() /= block_size;
  GgufArrays out{allocated(words, mx::uint32), allocated(groups, mx::float16), allocated(groups, mx::float16)};
  auto* to = reinterpret_cast<uint8_t*>(out.weight.data<uint32_t>());
  auto *scales = out.scales->data<mx::float16_t>(), *biases = out.biases->data<mx::float16_t>();
  const int stride = block_of(t.type).second;
  for (size_t i = 0; i < out.scales->size(); ++i) {
    const auto* from = blocks.data() + i * stride;
    std::memcpy(&scales[i], from, 2);
    from += 2;
    if (t.type == GgufType::q4_1) {
      std::memcpy(&biases[i], from, 2);
      from += 2;
    } else { // signed codes, which mlx has from 0
      const float zero = t.type == GgufType::q8_0 ? -128.0f : -8.0f;
      biases[i] = mx::float16_t(zero * static_cast<float>(scales[i]));
    }
    if (t.type == GgufType::q8_0) {
      for (int j = 0; j < block_size; ++j) {
        *to++ = from[j] ^ 0x80;
      }
    } else {
      unpack_halves(from, to);
      to += 16;
    }
  }
  return out;
}

} // namespace

GgufArrays read_gguf_tensor(const GgufFile& file, const std::string& name) {
  const auto& t = file.tensors.at(name);
  std::ifstream stream(file.path, std::ios::binary);
  const auto read = [&](void* to) {
    stream.seekg(static_cast<std::streamoff>(t.begin));
    if (!stream.read(static_cast<char*>(to), static_cast<std::streamsize>(t.bytes))) {
      damaged(file.path, "whose tensor '" + name + "' cannot be read");
    }
  };
  if (t.bits()) {
    std::vector<uint8_t> blocks(t.bytes);
    read(blocks.data());
    return repacked(t, blocks);
  }
  const auto dtype = t.type == GgufType::f32 ? mx::float32 : t.type == GgufType::f16 ? mx::float16 : mx::bfloat16;
  GgufArrays out{allocated(t.shape, dtype)};
  read(out.weight.data<uint8_t>());
  return out;
}

} // namespace cleave
