// Sorts every row separately, by all threads. An element becomes a word: the upper bits are a key with the order of the elements (one
// key for all NaNs, above everything; one key for -0 and 0), the lower bits its position. Words are distinct, so the sort is stable.
typedef unsigned long long u64;
typedef unsigned __int128 u128;

template <class T> struct Key { static inline u64 of(T x) { return (u64)((i64)x) ^ (sizeof(T) == 8 ? 1ull << 63 : 1ull << 31); } };
template <> struct Key<f32> {
  static inline u64 of(f32 x) {
    const u32 bits = as_bits(x == 0 ? 0.0f : x);
    return x != x ? 0xffffffffu : bits >> 31 ? ~bits : bits | 0x80000000u;
  }
};
template <> struct Key<f64> {
  static inline u64 of(f64 x) {
    const f64 y = x == 0 ? 0.0 : x;
    u64 bits;
    __builtin_memcpy(&bits, &y, 8);
    return x != x ? ~0ull : bits >> 63 ? ~bits : bits | 1ull << 63;
  }
};
template <> struct Key<bf16> { static inline u64 of(bf16 x) { return Key<f32>::of(load(x)); } };
template <> struct Key<f16> { static inline u64 of(f16 x) { return Key<f32>::of(load(x)); } };

// 32 bits each for key and position, or 64 bits each.
template <bool wide> struct Words { typedef u64 type; static const int bits = 32; };
template <> struct Words<true> { typedef u128 type; static const int bits = 64; };

template <class W> static void insertion_sort(W* words, i64 n) {
  for (i64 k = 1; k < n; k++) {
    const W word = words[k];
    i64 j = k;
    for (; j > 0 && words[j - 1] > word; j--) words[j] = words[j - 1];
    words[j] = word;
  }
}

template <class W> static void merge_sort(W* words, W* other, i64 n) {
  const i64 small = 16;
  for (i64 k = 0; k < n; k += small) insertion_sort(words + k, smaller<i64>(small, n - k));
  W *from = words, *to = other;
  for (i64 width = small; width < n; width *= 2) {
    for (i64 k = 0; k < n; k += 2 * width) {
      i64 a = k, b = smaller<i64>(k + width, n), out = k;
      const i64 a_end = b, b_end = smaller<i64>(k + 2 * width, n);
      while (a < a_end && b < b_end) {
        const bool first = from[a] < from[b];
        to[out++] = first ? from[a] : from[b];
        a += first;
        b += !first;
      }
      while (a < a_end) to[out++] = from[a++];
      while (b < b_end) to[out++] = from[b++];
    }
    W* swap = from;
    from = to;
    to = swap;
  }
  if (from != words) for (i64 k = 0; k < n; k++) words[k] = from[k];
}

// A radix sort by the bytes of the key, lowest first; bytes that are equal in all words are skipped.
template <class W> static void radix_sort(W* words, W* other, i64 n, int low, int bytes) {
  W *from = words, *to = other;
  for (int byte = 0; byte < bytes; byte++) {
    const int shift = low + 8 * byte;
    i64 begin[256] = {0};
    for (i64 k = 0; k < n; k++) begin[(int)(from[k] >> shift) & 255]++;
    if (begin[(int)(from[0] >> shift) & 255] == n) continue;
    i64 total = 0;
    for (int digit = 0; digit < 256; digit++) {
      const i64 count = begin[digit];
      begin[digit] = total;
      total += count;
    }
    for (i64 k = 0; k < n; k++) to[begin[(int)(from[k] >> shift) & 255]++] = from[k];
    W* swap = from;
    from = to;
    to = swap;
  }
  if (from != words) for (i64 k = 0; k < n; k++) words[k] = from[k];
}

extern "C" void sort_rows(void* const* pointer, const i64* given) {
  typedef ELEMENT T;
  typedef Words<sizeof(T) == 8> Form;
  typedef Form::type W;
  const T* __restrict x = (const T*)pointer[0];
  const i64* __restrict starts = (const i64*)pointer[1];
  T* __restrict values = (T*)pointer[2];
  i64* __restrict indices = (i64*)pointer[3];
  const int threads = (int)given[0];
  const i64 outer = given[1], rows = given[2], inner = given[3], size = given[4], longest = given[5];
  const u64 turn = given[6] ? (sizeof(T) == 8 ? ~0ull : 0xffffffffull) : 0;  // descending: the opposite order of keys
  const int key_bytes = (int)sizeof(T) == 8 ? 8 : 4;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 8)
  for (i64 unit = 0; unit < outer * rows; unit++) {
    W* words = (W*)pointer[4] + omp_get_thread_num() * 2 * longest;
    const i64 row = unit % rows, n = starts[row + 1] - starts[row];
    const i64 first = (unit / rows * size + starts[row]) * inner;
    for (i64 column = 0; column < inner; column++) {
      for (i64 k = 0; k < n; k++) {
        words[k] = (W)((Key<T>::of(x[first + k * inner + column]) ^ turn) & (key_bytes == 8 ? ~0ull : 0xffffffffull)) << Form::bits | (W)k;
      }
      if (n < 512) merge_sort(words, words + longest, n);
      else radix_sort(words, words + longest, n, Form::bits, key_bytes);
      for (i64 k = 0; k < n; k++) {
        const i64 from = (i64)(words[k] & (((W)1 << Form::bits) - 1));
        values[first + k * inner + column] = x[first + from * inner + column];
        indices[first + k * inner + column] = from;
      }
    }
  }
}
