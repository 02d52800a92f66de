// What memory allows: a copy with stores that bypass the cache, and a read that keeps nothing.
#include "vector.h"

enum { STEP = 4 * LANES };

extern "C" void copy(const float* __restrict from, float* __restrict to, i64 count) {
#pragma omp parallel
  {
#pragma omp for schedule(static)
    for (i64 i = 0; i < count / STEP; i++) stream_copy(to + i * STEP, from + i * STEP, STEP);
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
