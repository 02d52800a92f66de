// The machine's widest vectors and stores that bypass the cache, without the compiler's intrinsics headers (0.6 s to parse).
#pragma once

typedef long long i64;

#if defined(__AVX512F__)
enum { LANES = 16 };
#else
enum { LANES = 8 };
#endif

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef float vec_unaligned __attribute__((vector_size(LANES * 4), aligned(4)));

// address: on a boundary of a whole vector
static inline void stream_store(float* address, vec value) {
#if defined(__AVX512F__)
  __builtin_ia32_movntps512(address, value);
#elif defined(__AVX__)
  __builtin_ia32_movntps256(address, value);
#else
  *(vec*)address = value;
#endif
}

// streamed stores are not ordered with the ones a barrier makes: each thread ends its work with this
static inline void stream_fence() {
#if defined(__x86_64__)
  __builtin_ia32_sfence();
#endif
}

static inline void stream_copy(float* __restrict to, const float* __restrict from, i64 count) {
  i64 head = (LANES - (((unsigned long long)to >> 2) % LANES)) % LANES, i = 0;
  if (head > count) head = count;
  for (; i < head; i++) to[i] = from[i];
  for (; i + LANES <= count; i += LANES) stream_store(to + i, *(const vec_unaligned*)(from + i));
  for (; i < count; i++) to[i] = from[i];
}
