// The bar for grouped matmul: [tokens, K] against one [K, N] matrix a group, in register tiles. N is a multiple of PANEL.
#include "vector.h"

enum { K = INNER, N = OUTER, ROWS = 8, VECTORS = 2, PANEL = VECTORS * LANES };

// M x VECTORS accumulators live in registers for the whole of K
template <int M>
static void tile(const float* __restrict a, const float* __restrict b, float* __restrict c) {
  vec sums[M][VECTORS] = {};
  for (int k = 0; k < K; k++)
#pragma GCC unroll 8
    for (int i = 0; i < M; i++)
#pragma GCC unroll 2
      for (int j = 0; j < VECTORS; j++) sums[i][j] += a[i * K + k] * *(const vec*)(b + k * PANEL + j * LANES);
#pragma GCC unroll 8
  for (int i = 0; i < M; i++)
#pragma GCC unroll 2
    for (int j = 0; j < VECTORS; j++) *(vec_unaligned*)(c + i * N + j * LANES) = sums[i][j];
}

extern "C" void grouped_matmul(const float* __restrict x, const float* __restrict weights, const i64* __restrict offsets, i64 groups,
                               float* __restrict out) {
#pragma omp parallel
  {
    // packed: a column panel in the weights touches a new page every other row
    alignas(64) float panel[K * PANEL];
#pragma omp for collapse(2) schedule(dynamic, 1)
    for (i64 g = 0; g < groups; g++)
      for (int n = 0; n < N; n += PANEL) {
        i64 i = offsets[g], end = offsets[g + 1];
        if (i == end) continue;
        for (int k = 0; k < K; k++)
#pragma omp simd
          for (int j = 0; j < PANEL; j++) panel[k * PANEL + j] = weights[(g * K + k) * N + n + j];
        for (; i + ROWS <= end; i += ROWS) tile<ROWS>(x + i * K, panel, out + i * N + n);
        for (; i + 2 <= end; i += 2) tile<2>(x + i * K, panel, out + i * N + n);
        if (i < end) tile<1>(x + i * K, panel, out + i * N + n);
      }
  }
}
