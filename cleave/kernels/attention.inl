// Blocked causal attention in fp32 with an online softmax (Milakov & Gimelshein 2018; blocks as in Dao et al.,
// "FlashAttention", 2022). Keys lie in panels [d][2 kLanes], values in rows of `columns(dv)` floats.

constexpr int kWidth = 2 * kLanes; ///< columns of a register tile
constexpr int kHeight = kLanes == 16 ? 12 : kLanes == 8 ? 6 : 4;

/// C[kRows, kWidth] (+)= A[kRows, k] B[k, kWidth].
template <int kRows>
static inline void tile(
    const float* a, int64_t lda, const float* b, int64_t ldb, int64_t k, float* c, int64_t ldc, bool add) {
  vf s[kRows][2];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    s[r][0] = s[r][1] = vf{};
  }
  for (int64_t i = 0; i < k; ++i) {
    const vf b0 = load(b + i * ldb), b1 = load(b + i * ldb + kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const vf x = all(a[r * lda + i]);
      s[r][0] += x * b0;
      s[r][1] += x * b1;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    float* to = c + r * ldc;
    store(to, add ? load(to) + s[r][0] : s[r][0]);
    store(to + kLanes, add ? load(to + kLanes) + s[r][1] : s[r][1]);
  }
}

/// tile() for any number of rows.
static void product(
    int64_t rows,
    const float* a,
    int64_t lda,
    const float* b,
    int64_t ldb,
    int64_t k,
    float* c,
    int64_t ldc,
    bool add) {
  for (; rows >= kHeight; rows -= kHeight, a += kHeight * lda, c += kHeight * ldc) {
    tile<kHeight>(a, lda, b, ldb, k, c, ldc, add);
  }
  for (; rows >= 2; rows -= 2, a += 2 * lda, c += 2 * ldc) {
    tile<2>(a, lda, b, ldb, k, c, ldc, add);
  }
  if (rows == 1) {
    tile<1>(a, lda, b, ldb, k, c, ldc, add);
  }
}

/// Scores of one row to weights, in place: 2^(s - m) for the first `last` of `keys`, 0 for the others. Returns the
/// factor by which what was summed before has to shrink.
static float soften(float* s, int64_t last, int64_t keys, float& top, float& total) {
  vf m = all(top);
  int64_t i = 0;
  for (; i + kLanes <= last; i += kLanes) {
    m = max(load(s + i), m);
  }
  if (i < last) {
    m = max(load_part(s + i, last - i, top), m);
  }
  const float old = top;
  top = largest(m);
  const float base = top == -__builtin_inff() ? 0.0f : top; // nothing seen yet, or all -inf
  vf sums{};
  for (i = 0; i + kLanes <= last; i += kLanes) {
    const vf e = exp2(load(s + i) - all(base));
    store(s + i, e);
    sums += e;
  }
  float tail = 0;
  if (i < last) {
    const vf e = exp2(load_part(s + i, last - i, -__builtin_inff()) - all(base));
    __builtin_memcpy(s + i, &e, (last - i) * sizeof(float));
    tail = sum(e);
    i = last;
  }
  for (; i < keys; ++i) {
    s[i] = 0;
  }
  const float shrink = old == -__builtin_inff() ? 0.0f : exp2(all(old - base))[0];
  total = total * shrink + sum(sums) + tail;
  return shrink;
}

static float soften_all(float* s, int64_t n) {
  float top = -__builtin_inff(), total = 0;
  soften(s, n, n, top, total);
  return total;
}

static void pack_keys(const float* k, int64_t stride, int64_t keys, int64_t d, float* panel) {
  for (int64_t c = 0; c < keys; ++c) {
    for (int64_t i = 0; i < d; ++i) {
      panel[i * kWidth + c] = k[c * stride + i];
    }
  }
  for (int64_t i = 0; keys < kWidth && i < d; ++i) {
    for (int64_t c = keys; c < kWidth; ++c) {
      panel[i * kWidth + c] = 0;
    }
  }
}

static void attend(const AttentionTask& t) {
  const int64_t columns = (t.dv + kWidth - 1) / kWidth * kWidth;
  float* scores = t.scratch;
  float* sums = scores + kQueryBlock * kKeyBlock;
  float tops[kQueryBlock], totals[kQueryBlock];
  for (int64_t r = 0; r < t.rows; ++r) {
    tops[r] = -__builtin_inff();
    totals[r] = 0;
  }
  for (int64_t i = 0; i < t.rows * columns; ++i) {
    sums[i] = 0;
  }
  const int64_t end = t.last(t.rows - 1);
  for (int64_t begin = t.first(0) / kKeyBlock * kKeyBlock; begin < end; begin += kKeyBlock) {
    const int64_t keys = end - begin < kKeyBlock ? end - begin : kKeyBlock;
    const int64_t padded = (keys + kWidth - 1) / kWidth * kWidth;
    // Rows that see none of this block lie above the first that does.
    int64_t skip = 0;
    while (skip < t.rows && t.last(skip) <= begin) {
      ++skip;
    }
    for (int64_t c = 0; c < padded; c += kWidth) {
      product(
          t.rows - skip, t.q + skip * t.d, t.d, t.keys + (begin + c) * t.d, kWidth, t.d, scores + skip * kKeyBlock + c,
          kKeyBlock, false);
    }
    for (int64_t r = skip; r < t.rows; ++r) {
      const int64_t seen = t.last(r) - begin < keys ? t.last(r) - begin : keys;
      for (int64_t i = 0; i < t.first(r) - begin && i < seen; ++i) {
        scores[r * kKeyBlock + i] = -__builtin_inff();
      }
      const float shrink = soften(scores + r * kKeyBlock, seen, padded, tops[r], totals[r]);
      if (shrink != 1.0f) {
        for (int64_t i = 0; i < columns; ++i) {
          sums[r * columns + i] *= shrink;
        }
      }
    }
    for (int64_t c = 0; c < columns; c += kWidth) {
      product(
          t.rows - skip, scores + skip * kKeyBlock, kKeyBlock, t.values + begin * columns + c, columns, keys,
          sums + skip * columns + c, columns, true);
    }
  }
  for (int64_t r = 0; r < t.rows; ++r) {
    const float scale = 1.0f / totals[r];
    for (int64_t i = 0; i < t.dv; ++i) {
      t.out[r * t.out_stride + i] = sums[r * columns + i] * scale;
    }
  }
}
