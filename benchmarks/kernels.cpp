// The bar for the example kernels that handwritten.cpp has no loop for: a ragged batch added to a dense one, and means of rows that
// have feature counts of their own. Written as there: threads take rows, and what is long is cut into pieces for all of them.
#include "vector.h"

enum {
  F = FEATURES,
  VECTORS = F / LANES,
  LONG = 2048,
  CHUNK = 1024,
  PIECE = 16384,  // columns of a dense row that are one thread's work
};

static_assert(F % LANES == 0, "features fill whole vectors");

static inline i64 least(i64 a, i64 b) { return a < b ? a : b; }

// no stage in between: a vector is computed where the result has its boundaries, and both inputs are read wherever they lie
static inline void stream_sum(const float* __restrict a, const float* __restrict b, i64 n, float* __restrict out) {
  i64 head = least((LANES - ((unsigned long long)out >> 2) % LANES) % LANES, n), i = 0;
  for (; i < head; i++) out[i] = a[i] + b[i];
  for (; i + LANES <= n; i += LANES) stream_store(out + i, *(const vec_unaligned*)(a + i) + *(const vec_unaligned*)(b + i));
  for (; i < n; i++) out[i] = a[i] + b[i];
}

extern "C" void dense_add(const float* __restrict x, const i64* __restrict offsets, i64 rows, const float* __restrict dense,
                          i64 columns, float* __restrict out) {
  i64 pieces = (columns + PIECE - 1) / PIECE;
#pragma omp parallel
  {
#pragma omp for schedule(dynamic, 4)
    for (i64 t = 0; t < rows * pieces; t++) {
      i64 r = t / pieces, start = t % pieces * PIECE, n = least(PIECE, columns - start), at = r * columns + start;
      i64 left = offsets[r + 1] - offsets[r] - start, own = left < 0 ? 0 : least(left, n);
      stream_sum(dense + at, x + offsets[r] + start, own, out + at);
      stream_copy(out + at + own, dense + at + own, n - own);
    }
    stream_fence();
  }
}

// all features, also those that a row does not have: with half to all of 64 in use, reading only those was not faster
static inline void row_sum(const float* __restrict x, i64 n, float* __restrict out) {
  vec sum[VECTORS] = {};
  for (i64 i = 0; i < n; i++)
    for (int v = 0; v < VECTORS; v++) sum[v] += *(const vec_unaligned*)(x + i * F + v * LANES);
  for (int v = 0; v < VECTORS; v++) *(vec_unaligned*)(out + v * LANES) = sum[v];
}

static inline void finish(const float* __restrict sum, i64 n, i64 count, float* __restrict out) {
  float inverse = 1.0f / (n > 0 ? n : 1);
#pragma omp simd
  for (int f = 0; f < F; f++) out[f] = f < count ? sum[f] * inverse : 0.0f;
}

// partials: FEATURES floats for each chunk of the longest row
extern "C" void mean(const float* __restrict x, const i64* __restrict offsets, const i64* __restrict counts, i64 rows,
                     float* __restrict out, float* __restrict partials) {
#pragma omp parallel
  {
    for (i64 r = 0; r < rows; r++) {
      i64 start = offsets[r], n = offsets[r + 1] - start;
      if (n <= LONG) continue;
      i64 chunks = (n + CHUNK - 1) / CHUNK;
#pragma omp for schedule(static)
      for (i64 c = 0; c < chunks; c++) row_sum(x + (start + c * CHUNK) * F, least(CHUNK, n - c * CHUNK), partials + c * F);
#pragma omp single
      {
        float sum[F];
        row_sum(partials, chunks, sum);
        finish(sum, n, counts[r], out + r * F);
      }
    }
#pragma omp for schedule(dynamic, 16)
    for (i64 r = 0; r < rows; r++) {
      i64 start = offsets[r], n = offsets[r + 1] - start;
      if (n > LONG) continue;
      float sum[F];
      row_sum(x + start * F, n, sum);
      finish(sum, n, counts[r], out + r * F);
    }
  }
}
