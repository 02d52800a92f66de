// What memory allows: a copy with stores that bypass the cache, and a read that keeps nothing.
#include "vector.h"

enum { STEP = 4 * LANES, BLOCK = 512 };

extern "C" void copy(const float* __restrict from, float* __restrict to, i64 count) {
#pragma omp parallel
  {
    // By blocks of 2 KB: memory that turns between reads and writes less often is a few percent faster. The block lies a quarter of a
    // page from what it is read from: a load waits for a store to an address that ends in the same twelve bits.
    alignas(64) float room[2 * BLOCK];
    float* __restrict stage = room + (((i64)from + 1024 - (i64)room) & 1984) / 4;
#pragma omp for schedule(static)
    for (i64 i = 0; i < (count + BLOCK - 1) / BLOCK; i++) {
      i64 start = i * BLOCK, n = count - start < BLOCK ? count - start : BLOCK;
#pragma omp simd
      for (i64 j = 0; j < n; j++) stage[j] = from[start + j];
      stream_copy(to + start, stage, n);
    }
    stream_fence();
  }
}

// the sum comes back so that no compiler may drop the loads
extern "C" float read(const float* from, i64 count) {
  float sum = 0;
#pragma omp parallel reduction(+ : sum)
  {
    vec a = {}, b = {}, c = {}, d = {};
#pragma omp for schedule(static)
    for (i64 i = 0; i < count / STEP; i++) {
      const vec_unaligned* p = (const vec_unaligned*)(from + i * STEP);
      a += p[0];
      b += p[1];
      c += p[2];
      d += p[3];
    }
    a += b + c + d;
    for (int lane = 0; lane < LANES; lane++) sum += a[lane];
  }
  return sum;
}
