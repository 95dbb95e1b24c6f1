// Products with weights where they lie in a model's arrays. Packed ones are never widened to memory: per group,
// y += scale * (codes . x) + bias * sum(x).

// What the vector extension has no words for.
#if defined(__AVX512F__)
static inline vf from_half(const uint16_t* p) {
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
/// Lanes of 4 bytes each, picked out of the 16 at p; an index with the high bit gives 0.
static inline vi pick(const uint8_t* p, vi bytes) {
  return (vi)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)p)), (__m512i)bytes);
}
#elif defined(__AVX2__)
static inline vf from_half(const uint16_t* p) {
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}
static inline vi pick(const uint8_t* p, vi bytes) {
  return (vi)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p)), (__m256i)bytes);
}
#else
static inline vf from_half(const uint16_t* p) {
  vh h;
  __builtin_memcpy(&h, p, sizeof(h));
  const vi w = __builtin_convertvector(h, vi);
  const vi magnitude = (w & 0x7fff) << 13;
  const vf value = floats(magnitude) * all(0x1p112f); // exact for subnormal numbers too
  const vi special = magnitude >= (0x7c00 << 13);     // infinity, NaN
  return floats((special & (magnitude | 0x7f800000)) | (~special & bits(value)) | (w & 0x8000) << 16);
}
static inline vi pick(const uint8_t* p, vi bytes) {
  vi out{};
  for (int lane = 0; lane < kLanes; ++lane) {
    for (int b = 0; b < 4; ++b) {
      const uint8_t at = (uint8_t)(bytes[lane] >> 8 * b);
      out[lane] |= at < 16 ? p[at] << 8 * b : 0;
    }
  }
  return out;
}
#endif

static inline vf from_bfloat(const uint16_t* p) {
  vh h;
  __builtin_memcpy(&h, p, sizeof(h));
  return floats(__builtin_convertvector(h, vi) << 16);
}

template <Number kNumber>
static inline vf numbers(const uint8_t* p, int64_t i) {
  if constexpr (kNumber == Number::f32) {
    return load((const float*)p + i);
  } else {
    const auto* at = (const uint16_t*)p + i;
    return kNumber == Number::f16 ? from_half(at) : from_bfloat(at);
  }
}
static inline vf numbers(Number type, const uint8_t* p, int64_t i) {
  return type == Number::f32   ? numbers<Number::f32>(p, i)
         : type == Number::f16 ? numbers<Number::f16>(p, i)
                               : numbers<Number::bf16>(p, i);
}

/// Codes are read in chunks of kSteps vectors. Where a 32-bit word holds whole codes, a chunk is kLanes words and a
/// step takes one code of each; x is put into that order beforehand, which saves bringing the codes into the order of
/// x.
template <int kBits>
constexpr bool kByWord = 32 % kBits == 0;
template <int kBits>
constexpr int kSteps = kByWord<kBits> ? 32 / kBits : 32 / kLanes;
template <int kBits>
constexpr int kChunk = kSteps<kBits>* kLanes;

static int steps_of(int bits) {
  return 32 % bits == 0 ? 32 / bits : 32 / kLanes;
}

/// Codes of step j as floats: put into the mantissa of 2^e, where one step of the code is 1, and 2^e taken off.
template <int kBits>
static inline vf codes_by_word(vi words, int j) {
  const int bit = j * kBits, place = bit % 16;
  const vi shifted = bit < 16 ? words : (vi)((vu)words >> 16);
  const int32_t exponent = (127 + 23 - place) << 23;
  const vi one = vi{} + exponent;
  return floats((shifted & (((1 << kBits) - 1) << place)) | one) - floats(one);
}

/// Where in 16 bytes the codes of kLanes neighbours lie: two bytes per code, and how far to shift them. The codes begin
/// at bit `first`.
template <int kBits>
struct Places {
  vi bytes, shift;

  explicit Places(int first) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const int bit = first + lane * kBits, next = bit % 8 + kBits > 8 ? bit / 8 + 1 : 0x80;
      bytes[lane] = (int32_t)(0x80800000u | next << 8 | bit / 8);
      shift[lane] = bit % 8;
    }
  }
};

/// The codes of kLanes neighbours from code number i on, a multiple of kLanes, as floats.
template <int kBits>
static inline vf codes_in_order(const uint8_t* row, int64_t i, const Places<kBits> (&places)[2]) {
  const Places<kBits>& at = places[i * kBits % 8 != 0]; // never, but with 4 lanes and odd widths
  const vi codes = (pick(row + i * kBits / 8, at.bytes) >> at.shift) & ((1 << kBits) - 1);
  return __builtin_convertvector(codes, vf);
}

static Arranged arranged(int bits, int group, int64_t k) {
  if (bits == 0) {
    return {(k + kLanes - 1) / kLanes * kLanes, 0};
  }
  const int64_t chunk = steps_of(bits) * kLanes;
  return {(k + chunk - 1) / chunk * chunk, k / group + 2 * kLanes};
}

/// x in the order of the codes of whole words: `steps` of them in each.
static void arrange_by_word(const float* x, int64_t k, int64_t columns, int steps, float* to) {
  const int64_t chunk = int64_t(steps) * kLanes;
  for (int64_t c = 0; c < columns; c += chunk) {
    for (int j = 0; j < steps; ++j) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const int64_t i = c + int64_t(lane) * steps + j;
        to[c + int64_t(j) * kLanes + lane] = i < k ? x[i] : 0.0f;
      }
    }
  }
}

static bool arrange(const float* x, int bits, int group, int64_t k, float* to, float* sums) {
  const Arranged size = arranged(bits, group, k);
  vf check{};
  if (bits != 0 && 32 % bits == 0) {
    arrange_by_word(x, k, size.columns, steps_of(bits), to);
  } else {
    __builtin_memcpy(to, x, k * sizeof(float));
    for (int64_t i = k; i < size.columns; ++i) {
      to[i] = 0;
    }
  }
  for (int64_t g = 0; g < size.groups; ++g) {
    vf s{};
    for (int64_t i = g * group; i < (g + 1) * group && i < k; i += kLanes) {
      s += load(x + i);
    }
    sums[g] = sum(s);
    check += s * all(0.0f);
  }
  for (int64_t i = 0; bits == 0 && i < size.columns; i += kLanes) {
    check += load(to + i) * all(0.0f);
  }
  return sum(check) == 0;
}

/// What the rows of a task have in common.
template <int kBits>
struct Format {
  Places<kBits> places[2]{Places<kBits>(0), Places<kBits>(4)};
  int group_log2;
  int64_t groups;
  vi group_of_lane{}, last_group_of_lane{}; ///< of a chunk's words, counted from the first's; in a row's last chunk
  vi last_biases{};                         ///< which of a row's last vector of biases are its own

  explicit Format(const WeightTask& t) : group_log2(__builtin_ctz(t.group)), groups(t.k >> group_log2) {
    const int64_t last = groups - 1 - ((t.k - 1) / kChunk<kBits> * kChunk<kBits> >> group_log2);
    for (int lane = 0; lane < kLanes; ++lane) {
      const int group = kByWord<kBits> ? lane * kSteps<kBits> >> group_log2 : 0;
      group_of_lane[lane] = group;
      last_group_of_lane[lane] = group < last ? group : (int)last;
      last_biases[lane] = lane <= (groups - 1) % kLanes ? -1 : 0;
    }
  }
};

/// Sums of kRows rows of x over a chunk that begins at column i, without scale and bias.
template <int kBits, int kRows>
static inline void dot_chunk(
    const WeightTask& t,
    const Format<kBits>& format,
    const uint8_t* codes,
    const float* x,
    int64_t i,
    vi group_of_lane,
    const uint8_t* scales,
    vf (&total)[kRows]) {
  vi words{};
  if constexpr (kByWord<kBits>) {
    __builtin_memcpy(&words, codes + i * kBits / 8, sizeof(words));
  }
  vf part[kRows] = {};
#pragma GCC unroll 16
  for (int j = 0; j < kSteps<kBits>; ++j) {
    vf q;
    if constexpr (kByWord<kBits>) {
      q = codes_by_word<kBits>(words, j);
    } else {
      q = codes_in_order<kBits>(codes, i + j * kLanes, format.places);
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      part[r] += q * load(x + r * t.x_stride + i + j * kLanes);
    }
  }
  vf scale = numbers(t.number, scales, i >> format.group_log2);
  if constexpr (kByWord<kBits>) {
    scale = __builtin_shuffle(scale, group_of_lane);
  } else {
    scale = all(scale[0]);
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    total[r] += scale * part[r];
  }
}

/// A row's products with kRows rows of x. What lies behind the row is multiplied by the zeros behind x.
template <int kBits, int kRows>
static inline void dot_row(
    const WeightTask& t, const Format<kBits>& format, int64_t row, const float* x, const float* sums, float* y) {
  const uint8_t* codes = t.data + row * t.stride;
  const uint8_t* scales = t.scales + row * t.scale_stride;
  const uint8_t* biases = t.biases + row * t.scale_stride;
  vf total[kRows] = {};
  for (int64_t g = 0; g < format.groups; g += kLanes) {
    vf b = numbers(t.number, biases, g);
    if (g + kLanes > format.groups) {
      b = floats(bits(b) & format.last_biases);
    }
    for (int r = 0; r < kRows; ++r) {
      total[r] += b * load(sums + r * t.sums_stride + g);
    }
  }
  int64_t i = 0;
  for (; i + kChunk<kBits> < t.k; i += kChunk<kBits>) {
    dot_chunk<kBits, kRows>(t, format, codes, x, i, format.group_of_lane, scales, total);
  }
  dot_chunk<kBits, kRows>(t, format, codes, x, i, format.last_group_of_lane, scales, total);
  for (int r = 0; r < kRows; ++r) {
    y[r * t.y_stride + row] = sum(total[r]);
  }
}

template <Number kNumber, int kRows>
static inline void dot_dense_row(const WeightTask& t, int64_t row, const float* x, float* y) {
  const uint8_t* w = t.data + row * t.stride;
  const int64_t whole = t.k / kLanes * kLanes;
  vf total[kRows] = {};
  for (int64_t i = 0; i < whole; i += kLanes) {
    const vf v = numbers<kNumber>(w, i);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      total[r] += v * load(x + r * t.x_stride + i);
    }
  }
  if (whole < t.k) { // what follows the row may be anything, NaN included
    constexpr int size = kNumber == Number::f32 ? 4 : 2;
    uint8_t rest[kLanes * size] = {};
    __builtin_memcpy(rest, w + whole * size, (t.k - whole) * size);
    const vf v = numbers<kNumber>(rest, 0);
    for (int r = 0; r < kRows; ++r) {
      total[r] += v * load(x + r * t.x_stride + whole);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    y[r * t.y_stride + row] = sum(total[r]);
  }
}

/// Calls f(number of rows as a type, first row) for blocks of 4, 2 and 1 of the m rows of x.
template <int kCount>
struct Rows {
  static constexpr int count = kCount;
};
template <typename F>
static inline void by_rows_of_x(int64_t m, const F& f) {
  int64_t i = 0;
  for (; i + 4 <= m; i += 4) {
    f(Rows<4>{}, i);
  }
  if (i + 2 <= m) {
    f(Rows<2>{}, i);
    i += 2;
  }
  if (i < m) {
    f(Rows<1>{}, i);
  }
}

template <int kBits>
static void dot_packed(const WeightTask& t) {
  const Format<kBits> format(t);
  for (int64_t row = 0; row < t.rows; ++row) {
    by_rows_of_x(t.m, [&](auto rows, int64_t i) {
      dot_row<kBits, decltype(rows)::count>(
          t, format, row, t.x + i * t.x_stride, t.sums + i * t.sums_stride, t.y + i * t.y_stride);
    });
  }
}

template <Number kNumber>
static void dot_dense(const WeightTask& t) {
  for (int64_t row = 0; row < t.rows; ++row) {
    by_rows_of_x(t.m, [&](auto rows, int64_t i) {
      dot_dense_row<kNumber, decltype(rows)::count>(t, row, t.x + i * t.x_stride, t.y + i * t.y_stride);
    });
  }
}

template <int kBits>
static void unpack_rows(const WeightTask& t) {
  const Format<kBits> format(t);
  for (int64_t row = 0; row < t.rows; ++row) {
    const uint8_t* codes = t.data + row * t.stride;
    for (int64_t first = 0; first < format.groups; first += kLanes) {
      const vf scales = numbers(t.number, t.scales + row * t.scale_stride, first);
      const vf biases = numbers(t.number, t.biases + row * t.scale_stride, first);
      for (int64_t g = first; g < format.groups && g < first + kLanes; ++g) {
        const vf scale = all(scales[g - first]), bias = all(biases[g - first]);
        for (int64_t i = g * t.group; i < (g + 1) * t.group; i += kLanes) {
          store(t.y + row * t.y_stride + i, codes_in_order<kBits>(codes, i, format.places) * scale + bias);
        }
      }
    }
  }
}

static void dot(const WeightTask& t) {
  switch (t.bits) {
    case 0:
      return t.number == Number::f32   ? dot_dense<Number::f32>(t)
             : t.number == Number::f16 ? dot_dense<Number::f16>(t)
                                       : dot_dense<Number::bf16>(t);
    case 2:
      return dot_packed<2>(t);
    case 3:
      return dot_packed<3>(t);
    case 4:
      return dot_packed<4>(t);
    case 5:
      return dot_packed<5>(t);
    case 6:
      return dot_packed<6>(t);
    case 8:
      return dot_packed<8>(t);
  }
}

static void unpack(const WeightTask& t) {
  switch (t.bits) {
    case 2:
      return unpack_rows<2>(t);
    case 3:
      return unpack_rows<3>(t);
    case 4:
      return unpack_rows<4>(t);
    case 5:
      return unpack_rows<5>(t);
    case 6:
      return unpack_rows<6>(t);
    case 8:
      return unpack_rows<8>(t);
  }
}
