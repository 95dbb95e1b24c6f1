#include "cleave/kernels/convert.h"

#include <immintrin.h>

#include <algorithm>
#include <cstring>

#include "cleave/kernels/table.h"
#include "cleave/kernels/team.h"

namespace cleave {

namespace {

bool has_f16c() {
  static const bool yes = __builtin_cpu_supports("f16c") && __builtin_cpu_supports("avx2");
  return yes;
}

__attribute__((target("avx2,f16c"))) void f16_to_f32(const uint16_t* from, float* to, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
  for (; i < n; ++i) {
    to[i] = _cvtsh_ss(from[i]);
  }
}

__attribute__((target("avx2,f16c"))) void f32_to_f16(const float* from, uint16_t* to, int64_t n) {
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm_storeu_si128(
        reinterpret_cast<__m128i*>(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
  }
  for (; i < n; ++i) {
    to[i] = _cvtss_sh(from[i], _MM_FROUND_TO_NEAREST_INT);
  }
}

/// Between two narrow dtypes, by way of float32.
void by_floats(const void* from, mx::Dtype a, void* to, mx::Dtype b, int64_t n) {
  constexpr int64_t chunk = 512;
  float floats[chunk];
  for (int64_t i = 0; i < n; i += chunk) {
    const int64_t count = std::min(chunk, n - i), at = i * static_cast<int64_t>(sizeof(uint16_t));
    convert_row(static_cast<const char*>(from) + at, a, floats, mx::float32, count);
    convert_row(floats, mx::float32, static_cast<char*>(to) + at, b, count);
  }
}

template <typename From, typename To>
void scalar(const void* from, void* to, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    static_cast<To*>(to)[i] = static_cast<To>(static_cast<float>(static_cast<const From*>(from)[i]));
  }
}

} // namespace

void convert_row(const void* from, mx::Dtype a, void* to, mx::Dtype b, int64_t n) {
  if (a == b) {
    std::memcpy(to, from, n * mx::size_of(a));
  } else if (a == mx::float16 && b == mx::float32 && has_f16c()) {
    f16_to_f32(static_cast<const uint16_t*>(from), static_cast<float*>(to), n);
  } else if (a == mx::float32 && b == mx::float16 && has_f16c()) {
    f32_to_f16(static_cast<const float*>(from), static_cast<uint16_t*>(to), n);
  } else if (a == mx::bfloat16 && b == mx::float32) {
    kernels::table().widen_bf16(static_cast<const uint16_t*>(from), static_cast<float*>(to), n);
  } else if (a == mx::float32 && b == mx::bfloat16) {
    kernels::table().round_bf16(static_cast<const float*>(from), static_cast<uint16_t*>(to), n);
  } else if (a != mx::float32 && b != mx::float32) {
    by_floats(from, a, to, b, n);
  } else {
    with_type(a, [&](auto* f) {
      with_type(b, [&](auto* t) {
        scalar<std::remove_pointer_t<decltype(f)>, std::remove_pointer_t<decltype(t)>>(from, to, n);
      });
    });
  }
}

void convert(const ConstMatrix& from, const Matrix& to) {
  const auto a = from.stride * mx::size_of(from.dtype);
  const auto b = to.stride * mx::size_of(to.dtype);
  kernels::on_team_for(from.rows, [&](int64_t r) {
    convert_row(
        static_cast<const char*>(from.data) + r * a, from.dtype, static_cast<char*>(to.data) + r * b, to.dtype,
        from.cols);
  });
}

} // namespace cleave
