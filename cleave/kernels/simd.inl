// Vectors of floats for one processor target, by the compiler's vector extension. Included by a target's own file
// inside a namespace of that target, so that no function of one target can stand in for that of another.

typedef float vf __attribute__((vector_size(4 * kLanes)));
typedef int32_t vi __attribute__((vector_size(4 * kLanes)));
typedef uint32_t vu __attribute__((vector_size(4 * kLanes)));
typedef uint16_t vh __attribute__((vector_size(2 * kLanes)));

static inline vf load(const float* p) {
  vf v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}
static inline void store(float* p, vf v) {
  __builtin_memcpy(p, &v, sizeof(v));
}
static inline vf all(float x) {
  return x - vf{};
}
static inline vf max(vf a, vf b) {
  return a > b ? a : b;
}
static inline vf min(vf a, vf b) {
  return a < b ? a : b;
}
static inline vi bits(vf v) {
  return (vi)v;
}
static inline vf floats(vi v) {
  return (vf)v;
}
static inline float sum(vf v) {
  typedef float quad __attribute__((vector_size(16)));
  quad parts[kLanes / 4];
  __builtin_memcpy(parts, &v, sizeof(v));
  quad s = parts[0];
  for (int i = 1; i < kLanes / 4; ++i) {
    s += parts[i];
  }
  return (s[0] + s[2]) + (s[1] + s[3]);
}
static inline float largest(vf v) {
  float m = v[0];
  for (int i = 1; i < kLanes; ++i) {
    m = v[i] > m ? v[i] : m;
  }
  return m;
}

/// The first `n` of a vector, the rest `other`.
static inline vf load_part(const float* p, int64_t n, float other) {
  vf v = all(other);
  __builtin_memcpy(&v, p, n * sizeof(float));
  return v;
}

/// 2^x, relative error under 2.5e-7: x = n + f with f in [-0.5, 0.5], a minimax polynomial of degree 6 for 2^f
/// (coefficients by a Remez fit, tests/kernels_test.cpp checks the error). Below 2^-126 the result is 0, from 2^128
/// on infinity; NaN stays NaN.
static inline vf exp2(vf x) {
  const vf low = all(-126.0f);
  const vf clamped = min(max(x, low), all(128.0f)); // whose exponent is that of infinity
  const vf magic = all(12582912.0f); // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const vf shifted = clamped + magic;
  const vf f = clamped - (shifted - magic);
  vf p = all(1.5403530e-4f);
  p = p * f + all(1.3333558e-3f);
  p = p * f + all(9.6181291e-3f);
  p = p * f + all(5.5504109e-2f);
  p = p * f + all(2.4022651e-1f);
  p = p * f + all(6.9314718e-1f);
  p = p * f + all(1.0f);
  const vf scaled = floats(bits(p) + (bits(shifted) << 23));
  const vf positive = x < low ? all(0.0f) : scaled;
  return x == x ? positive : x;
}
