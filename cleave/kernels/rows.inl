// Pointwise kernels on rows of floats; see kernels.h for what each one does.

static void gated_silu(const float* gate, const float* up, float* out, int64_t n) {
  int64_t i = 0;
  auto one = [](vf g, vf u) {
    const vf e = exp2(g * all(-1.44269504f));
    return g / (all(1.0f) + e) * u;
  };
  for (; i + kLanes <= n; i += kLanes) {
    store(out + i, one(load(gate + i), load(up + i)));
  }
  if (i < n) {
    const vf y = one(load_part(gate + i, n - i, 0), load_part(up + i, n - i, 0));
    __builtin_memcpy(out + i, &y, (n - i) * sizeof(float));
  }
}

static void gated_gelu_tanh(const float* gate, const float* up, float* out, int64_t n) {
  // Constants of Hendrycks & Gimpel, "Gaussian Error Linear Units"; tanh(z) = 1 - 2 / (1 + e^2z).
  int64_t i = 0;
  auto one = [](vf g, vf u) {
    const vf z = all(0.79788456f) * (g + all(0.044715f) * g * g * g);
    const vf t = all(1.0f) - all(2.0f) / (all(1.0f) + exp2(z * all(2.88539008f)));
    return all(0.5f) * g * (all(1.0f) + t) * u;
  };
  for (; i + kLanes <= n; i += kLanes) {
    store(out + i, one(load(gate + i), load(up + i)));
  }
  if (i < n) {
    const vf y = one(load_part(gate + i, n - i, 0), load_part(up + i, n - i, 0));
    __builtin_memcpy(out + i, &y, (n - i) * sizeof(float));
  }
}

static void gated_relu(const float* gate, const float* up, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    out[i] = (gate[i] > 0 || gate[i] != gate[i] ? gate[i] : 0.0f) * up[i];
  }
}

static void gated_gelu(const float* gate, const float* up, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    out[i] = 0.5f * gate[i] * (1.0f + __builtin_erff(gate[i] * 0.70710678f)) * up[i];
  }
}

static void rms_norm(const float* x, const float* weight, float eps, float* y, int64_t n) {
  vf squares[2] = {};
  int64_t i = 0;
  for (; i + 2 * kLanes <= n; i += 2 * kLanes) {
    const vf a = load(x + i), b = load(x + i + kLanes);
    squares[0] += a * a;
    squares[1] += b * b;
  }
  float s = sum(squares[0] + squares[1]);
  for (; i < n; ++i) {
    s += x[i] * x[i];
  }
  const float r = 1.0f / __builtin_sqrtf(s / static_cast<float>(n) + eps);
  for (i = 0; i < n; ++i) {
    y[i] = x[i] * r * (weight ? weight[i] : 1.0f);
  }
}

static void add(const float* a, const float* b, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    y[i] = a[i] + b[i];
  }
}

/// Pairs (i, i + half), or (2i, 2i + 1) when `traditional`, turned by the angle of which cosine and sine are given.
static void rope(float* x, const float* cosine, const float* sine, int64_t half, bool traditional) {
  if (traditional) {
    for (int64_t i = 0; i < half; ++i) {
      const float a = x[2 * i], b = x[2 * i + 1];
      x[2 * i] = a * cosine[i] - b * sine[i];
      x[2 * i + 1] = b * cosine[i] + a * sine[i];
    }
    return;
  }
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cosine[i] - b * sine[i];
    x[i + half] = b * cosine[i] + a * sine[i];
  }
}

/// x = high + low + what is under 2^-17 of x, both bfloat16. A value that is not finite goes whole into high.
static bool split(const float* x, uint16_t* high, uint16_t* low, int64_t n) {
  uint32_t rests = 0;
  for (int64_t i = 0; i < n; ++i) {
    uint32_t w;
    __builtin_memcpy(&w, x + i, 4);
    const bool finite = (w & 0x7f800000u) != 0x7f800000u;
    const uint32_t rounded = w + 0x7fffu + ((w >> 16) & 1u);
    // Rounding up the largest values would make an infinity of them.
    const bool fits = finite && (rounded & 0x7f800000u) != 0x7f800000u;
    const uint32_t h = (fits ? rounded : w) & 0xffff0000u;
    float hf, rest;
    __builtin_memcpy(&hf, &h, 4);
    rest = x[i] - hf;
    uint32_t l;
    __builtin_memcpy(&l, &rest, 4);
    l = (l + 0x7fffu + ((l >> 16) & 1u)) & 0xffff0000u;
    const uint32_t nan = (w & 0x7fffffffu) > 0x7f800000u ? 0x00400000u : 0u; // a NaN may live in the bits cut off
    high[i] = static_cast<uint16_t>((h | nan) >> 16);
    const uint32_t rest_bits = finite ? l >> 16 : 0u;
    low[i] = static_cast<uint16_t>(rest_bits);
    rests |= rest_bits & 0x7fffu;
  }
  return rests != 0;
}

/// Codes of a row by its largest magnitude; returns the scale. A row that is not finite has the scale NaN.
static float quantize(const float* x, int8_t* codes, int64_t n) {
  const int64_t whole = n / kLanes * kLanes;
  vf tops{}, checks{}; // checks: 0 while all are finite, else NaN
  for (int64_t i = 0; i < whole; i += kLanes) {
    const vf v = load(x + i);
    tops = max(tops, floats(bits(v) & 0x7fffffff));
    checks += v * all(0.0f);
  }
  const vf rest = load_part(x + whole, n - whole, 0);
  const float top = largest(max(tops, floats(bits(rest) & 0x7fffffff)));
  const float check = sum(checks + rest * all(0.0f));
  const float inverse = top > 0 ? 127.0f / top : 0.0f;
  for (int64_t i = 0; i < n; ++i) { // gcc narrows plain loops well, __builtin_convertvector element by element
    const float v = x[i] * inverse + 12582912.0f; // rounds to an integer in the low bits, see exp2
    int32_t w;
    __builtin_memcpy(&w, &v, 4);
    codes[i] = static_cast<int8_t>(w);
  }
  return check == 0 ? top / 127.0f : __builtin_nanf("");
}

static void scale(const float* x, float* y, float factor, const float* bias, int64_t n) {
  if (bias) {
#pragma GCC ivdep
    for (int64_t i = 0; i < n; ++i) {
      y[i] = x[i] * factor + bias[i];
    }
    return;
  }
#pragma GCC ivdep
  for (int64_t i = 0; i < n; ++i) {
    y[i] = x[i] * factor;
  }
}

static void widen_bf16(const uint16_t* x, float* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t word = uint32_t(x[i]) << 16;
    __builtin_memcpy(y + i, &word, sizeof(word));
  }
}

/// To the nearest, ties to even; a NaN stays one.
static void round_bf16(const float* x, uint16_t* y, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    uint32_t word;
    __builtin_memcpy(&word, x + i, sizeof(word));
    const bool nan = (word & 0x7fffffffu) > 0x7f800000u;
    const uint32_t rounded = (word + 0x7fffu + ((word >> 16) & 1u)) >> 16;
    y[i] = static_cast<uint16_t>(nan ? 0x7fc0u : rounded);
  }
}
