// The bar: loops a careful engineer would write by hand for [total, FEATURES] floats, rows given by offsets.
// Rows up to LONG are one thread's work and stay in its cache; longer ones are cut into chunks shared by all threads.
#include "vector.h"

extern "C" int omp_get_thread_num();

enum {
  F = FEATURES,
  LONG = 2048,  // rows of a scratch that fits, with its input, in a 1 MB second-level cache
  CHUNK = 1024,
  TILE = 16,
  STAGE = 8,  // 2 KB: more spills out of the first-level cache together with the input
};

#define SIMD _Pragma("omp simd")
#define EACH for (int f = 0; f < F; f++)

static inline i64 least(i64 a, i64 b) { return a < b ? a : b; }

// argument <= 0 or nan; below 2^-126 the result is 0. The magic constant leaves the biased exponent in the low bits.
static inline float exp_nonpositive(float x) {
  const float magic = 12583039.0f;
  float shifted = __builtin_fmaf(x, 1.44269504f, magic), n = shifted - magic;
  float r = __builtin_fmaf(n, -0.693145752f, x);
  r = __builtin_fmaf(n, -1.42860677e-6f, r);
  float p = 0.00138145406f;
  p = __builtin_fmaf(p, r, 0.00836874545f);
  p = __builtin_fmaf(p, r, 0.041668389f);
  p = __builtin_fmaf(p, r, 0.166665211f);
  p = __builtin_fmaf(p, r, 0.49999994f);
  p = __builtin_fmaf(p, r, 1.0f);
  p = __builtin_fmaf(p, r, 1.0f);
  unsigned bits;
  __builtin_memcpy(&bits, &shifted, 4);
  bits <<= 23;
  float scale;
  __builtin_memcpy(&scale, &bits, 4);
  float y = p * scale;
  return x < -87.0f ? 0.0f : y;
}

static inline void row_sum(const float* __restrict x, i64 n, float* __restrict out) {
  float sum[F];
  SIMD EACH sum[f] = 0;
  for (i64 i = 0; i < n; i++) SIMD EACH sum[f] += x[i * F + f];
  SIMD EACH out[f] = sum[f];
}

// partials: FEATURES floats for each chunk of the longest row
extern "C" void sum(const float* __restrict x, const i64* __restrict offsets, i64 rows, float* __restrict out, float* partials) {
#pragma omp parallel
  {
    for (i64 r = 0; r < rows; r++) {
      i64 start = offsets[r], n = offsets[r + 1] - start;
      if (n <= LONG) continue;
      i64 chunks = (n + CHUNK - 1) / CHUNK;
#pragma omp for schedule(static)
      for (i64 c = 0; c < chunks; c++) row_sum(x + (start + c * CHUNK) * F, least(CHUNK, n - c * CHUNK), partials + c * F);
#pragma omp single
      row_sum(partials, chunks, out + r * F);
    }
#pragma omp for schedule(dynamic, 16)
    for (i64 r = 0; r < rows; r++)
      if (offsets[r + 1] - offsets[r] <= LONG) row_sum(x + offsets[r] * F, offsets[r + 1] - offsets[r], out + r * F);
  }
}

extern "C" void pointwise(const float* __restrict x, const float* __restrict bias, float scale, i64 total, float* __restrict out) {
#pragma omp parallel
  {
    alignas(64) float stage[STAGE * F];
#pragma omp for schedule(static)
    for (i64 t = 0; t < (total + STAGE - 1) / STAGE; t++) {
      i64 start = t * STAGE, n = least(STAGE, total - start);
      for (i64 i = 0; i < n; i++) SIMD EACH {
          float y = x[(start + i) * F + f] * scale + bias[f];
          stage[i * F + f] = y < 0.0f ? 0.0f : y;
        }
      stream_copy(out + start * F, stage, n * F);
    }
    stream_fence();
  }
}

// a nan lost by this maximum still reaches the sum of exponentials
static inline void row_max(const float* __restrict x, i64 n, float* __restrict out) {
  float top[F];
  SIMD EACH top[f] = -__builtin_inff();
  for (i64 i = 0; i < n; i++) SIMD EACH top[f] = x[i * F + f] > top[f] ? x[i * F + f] : top[f];
  SIMD EACH out[f] = top[f];
}

// one read: the sum is rescaled once per tile to the maximum so far
static inline void online(const float* __restrict x, i64 n, float* __restrict top_out, float* __restrict sum_out) {
  float top[F], sum[F];
  SIMD EACH top[f] = -__builtin_inff(), sum[f] = 0;
  for (i64 i = 0; i < n; i += TILE) {
    i64 count = least(TILE, n - i);
    float next[F], part[F];
    row_max(x + i * F, count, next);
    SIMD EACH {
      next[f] = next[f] > top[f] ? next[f] : top[f];
      // nothing but -inf so far: any finite reference gives the sum 0, while -inf - -inf is nan
      float reference = next[f] == -__builtin_inff() ? 0.0f : next[f];
      sum[f] *= exp_nonpositive(top[f] - reference);
      top[f] = next[f];
      next[f] = reference;
      part[f] = 0;
    }
    for (i64 j = i; j < i + count; j++) SIMD EACH part[f] += exp_nonpositive(x[j * F + f] - next[f]);
    SIMD EACH sum[f] += part[f];
  }
  SIMD EACH top_out[f] = top[f], sum_out[f] = sum[f];
}

// the next row is fetched while this one's exponentials keep the arithmetic busy
static inline void row_softmax(const float* __restrict x, i64 n, float* __restrict scratch, float* __restrict out) {
  alignas(64) float top[F], sum[F], stage[STAGE * F];
  row_max(x, n, top);
  SIMD EACH sum[f] = 0;
  for (i64 i = 0; i < n; i++) {
    for (int f = 0; f < F; f += 16) __builtin_prefetch(x + (n + i) * F + f, 0, 2);
    SIMD EACH {
      float e = exp_nonpositive(x[i * F + f] - top[f]);
      scratch[i * F + f] = e;
      sum[f] += e;
    }
  }
  SIMD EACH sum[f] = 1.0f / sum[f];
  for (i64 i = 0; i < n; i += STAGE) {
    i64 count = least(STAGE, n - i);
    for (i64 j = 0; j < count; j++) SIMD EACH stage[j * F + f] = scratch[(i + j) * F + f] * sum[f];
    stream_copy(out + i * F, stage, count * F);
  }
}

static inline void softmax_chunk(const float* __restrict x, i64 n, const float* top, const float* inverse, float* __restrict out) {
  alignas(64) float stage[STAGE * F];
  for (i64 i = 0; i < n; i += STAGE) {
    i64 count = least(STAGE, n - i);
    for (i64 j = 0; j < count; j++)
      SIMD EACH stage[j * F + f] = exp_nonpositive(x[(i + j) * F + f] - top[f]) * inverse[f];
    stream_copy(out + i * F, stage, count * F);
  }
}

// scratch: LONG x FEATURES floats a thread; partials: 2 x FEATURES floats for each chunk of the longest row
extern "C" void softmax(const float* __restrict x, const i64* __restrict offsets, i64 rows, float* __restrict out, float* partials,
                        float* scratch) {
#pragma omp parallel
  {
    for (i64 r = 0; r < rows; r++) {
      i64 start = offsets[r], n = offsets[r + 1] - start;
      if (n <= LONG) continue;
      i64 chunks = (n + CHUNK - 1) / CHUNK;
      float *tops = partials, *sums = partials + chunks * F;
#pragma omp for schedule(static)
      for (i64 c = 0; c < chunks; c++)
        online(x + (start + c * CHUNK) * F, least(CHUNK, n - c * CHUNK), tops + c * F, sums + c * F);
      float top[F], inverse[F];
      row_max(tops, chunks, top);
      SIMD EACH inverse[f] = 0;
      for (i64 c = 0; c < chunks; c++) SIMD EACH inverse[f] += sums[c * F + f] * exp_nonpositive(tops[c * F + f] - top[f]);
      SIMD EACH inverse[f] = 1.0f / inverse[f];
#pragma omp for schedule(static)
      for (i64 c = 0; c < chunks; c++) {
        i64 at = (start + c * CHUNK) * F;
        softmax_chunk(x + at, least(CHUNK, n - c * CHUNK), top, inverse, out + at);
      }
    }
    float* own = scratch + (i64)omp_get_thread_num() * LONG * F;
#pragma omp for schedule(dynamic, 16)
    for (i64 r = 0; r < rows; r++)
      if (offsets[r + 1] - offsets[r] <= LONG)
        row_softmax(x + offsets[r] * F, offsets[r + 1] - offsets[r], own, out + offsets[r] * F);
    stream_fence();
  }
}

struct Moments {
  double count, mean, squares;

  void join(double other_count, double other_mean, double other_squares) {
    double total = count + other_count, delta = other_mean - mean;
    if (total == 0) return;
    squares += other_squares + delta * delta * count * (other_count / total);
    mean += delta * (other_count / total);
    count = total;
  }
};

// one read: each tile is shifted by the mean so far, which keeps the squares small, and joined by Chan's rule
static inline Moments moments(const float* __restrict x, i64 n) {
  Moments all = {0, 0, 0};
  if (n == 0) return all;
  float shift = 0;
#pragma omp simd reduction(+ : shift)
  for (int f = 0; f < F; f++) shift += x[f];
  shift /= F;
  for (i64 i = 0; i < n; i += 2 * TILE) {
    i64 count = least(2 * TILE, n - i);
    float first[F], second[F], a = 0, b = 0;
    SIMD EACH first[f] = 0, second[f] = 0;
    for (i64 j = i; j < i + count; j++) SIMD EACH {
        float t = x[j * F + f] - shift;
        first[f] += t;
        second[f] += t * t;
      }
#pragma omp simd reduction(+ : a, b)
    for (int f = 0; f < F; f++) a += first[f], b += second[f];
    double delta = (double)a / (count * F);
    all.join(count * F, shift + delta, b - a * delta);
    shift = all.mean;
  }
  return all;
}

static inline void normalize(const float* __restrict x, i64 n, Moments row, float epsilon, float* __restrict out) {
  alignas(64) float stage[STAGE * F];
  float mean = row.mean, scale = 1.0 / __builtin_sqrt(row.squares / row.count + epsilon);
  for (i64 i = 0; i < n; i += STAGE) {
    i64 count = least(STAGE, n - i);
    for (i64 j = 0; j < count; j++) SIMD EACH stage[j * F + f] = (x[(i + j) * F + f] - mean) * scale;
    stream_copy(out + i * F, stage, count * F);
  }
}

// partials: three doubles for each chunk of the longest row
extern "C" void layer_norm(const float* __restrict x, const i64* __restrict offsets, i64 rows, float epsilon, float* __restrict out,
                           double* partials) {
  Moments* parts = (Moments*)partials;
#pragma omp parallel
  {
    for (i64 r = 0; r < rows; r++) {
      i64 start = offsets[r], n = offsets[r + 1] - start;
      if (n <= LONG) continue;
      i64 chunks = (n + CHUNK - 1) / CHUNK;
#pragma omp for schedule(static)
      for (i64 c = 0; c < chunks; c++) parts[c] = moments(x + (start + c * CHUNK) * F, least(CHUNK, n - c * CHUNK));
      Moments row = {0, 0, 0};
      for (i64 c = 0; c < chunks; c++) row.join(parts[c].count, parts[c].mean, parts[c].squares);
#pragma omp for schedule(static)
      for (i64 c = 0; c < chunks; c++) {
        i64 at = (start + c * CHUNK) * F;
        normalize(x + at, least(CHUNK, n - c * CHUNK), row, epsilon, out + at);
      }
    }
#pragma omp for schedule(dynamic, 16)
    for (i64 r = 0; r < rows; r++) {
      i64 start = offsets[r], n = offsets[r + 1] - start;
      if (n <= LONG) normalize(x + start * F, n, moments(x + start * F, n), epsilon, out + start * F);
    }
    stream_fence();
  }
}
