// A stable counting sort by all threads: each thread counts the keys of its own run of positions, prefix sums determine where the
// positions of every key and run begin, and each thread writes its positions there, in order.
extern "C" void group_by(void* const* pointer, const i64* given) {
  const i64* __restrict keys = (const i64*)pointer[0];
  i64* __restrict offsets = (i64*)pointer[1];
  i64* __restrict permutation = (i64*)pointer[2];
  i64* __restrict begin = (i64*)pointer[3];  // [threads][groups + 1]
  const int threads = (int)given[0];
  const i64 size = given[1], groups = given[2];
  const i64 run = (size + threads - 1) / threads;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int t = 0; t < threads; t++) {
    i64* own = begin + t * (groups + 1);
    for (i64 g = 0; g <= groups; g++) own[g] = 0;
    for (i64 n = t * run; n < smaller<i64>(size, (t + 1) * run); n++) {
      own[keys[n] < 0 || keys[n] >= groups ? groups : keys[n]]++;
    }
  }
  i64 total = 0;
  for (i64 g = 0; g <= groups; g++) {
    offsets[g] = total;
    for (int t = 0; t < threads; t++) {
      const i64 count = begin[t * (groups + 1) + g];
      begin[t * (groups + 1) + g] = total;
      total += count;
    }
  }
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int t = 0; t < threads; t++) {
    i64* own = begin + t * (groups + 1);
    for (i64 n = t * run; n < smaller<i64>(size, (t + 1) * run); n++) {
      permutation[own[keys[n] < 0 || keys[n] >= groups ? groups : keys[n]]++] = n;
    }
  }
}
