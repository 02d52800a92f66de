// Shared by all generated programs: number formats, elementwise functions, non-temporal copies, products of blocks.
// No headers are included, because parsing them would take longer than compiling a program.
typedef long long i64;
typedef int i32;
typedef short i16;
typedef signed char i8;
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef float f32;
typedef double f64;
extern "C" int omp_get_thread_num();
struct bf16 { u16 bits; };
struct f16 { u16 bits; };

static inline f32 as_float(u32 bits) { f32 x; __builtin_memcpy(&x, &bits, 4); return x; }
static inline u32 as_bits(f32 x) { u32 bits; __builtin_memcpy(&bits, &x, 4); return bits; }

// a * b + c, fused if the CPU has an instruction for it: for dots, sums of products and the functions below. Compiler flags disable
// implicit contraction. Without such an instruction, a library call for every product would cost too much.
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
static inline f32 fused(f32 a, f32 b, f32 c) { return __builtin_fmaf(a, b, c); }
static inline f64 fused(f64 a, f64 b, f64 c) { return __builtin_fma(a, b, c); }
#else
static inline f32 fused(f32 a, f32 b, f32 c) { return a * b + c; }
static inline f64 fused(f64 a, f64 b, f64 c) { return a * b + c; }
#endif
template <class T> static inline T fused(T a, T b, T c) { return a * b + c; }
// The same for vectors; compilers combine the lanes into one instruction.
template <class T, class V> static inline V fused_lanes(V a, V b, V c) {
  V out;
#pragma GCC unroll 16
  for (int k = 0; k < (int)(sizeof(V) / sizeof(T)); k++) out[k] = fused(a[k], b[k], c[k]);
  return out;
}

// Sixteen-bit floats are stored as such and computed in float32; conversions are integer arithmetic, which vectorises.
static inline f32 load(bf16 x) { return as_float((u32)x.bits << 16); }
static inline f32 load(f16 x) {
  u32 magnitude = x.bits & 0x7fffu;
  u32 sign = (u32)(x.bits & 0x8000u) << 16;
  f32 y = as_float(magnitude << 13) * 5.192296858534828e33f;  // 2^112 moves the exponent, subnormals included
  u32 special = (magnitude << 13) | 0x7f800000u;
  u32 bits = magnitude >= 0x7c00u ? special : as_bits(y);
  return as_float(bits | sign);
}
template <class T> static inline T load(T x) { return x; }

static inline void store(bf16& to, f32 x) {
  u32 bits = as_bits(x);
  u32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  to.bits = (u16)(x != x ? 0x7fc0u : rounded);
}
static inline void store(f16& to, f32 x) {
  u32 bits = as_bits(x), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7fffffffu;
  u32 normal = (magnitude + 0xc8000fffu + ((magnitude >> 13) & 1u)) >> 13;
  u32 small = as_bits(as_float(magnitude) + 0.5f) - as_bits(0.5f);  // adding 0.5 rounds to the spacing of subnormals
  u32 finite = magnitude < 0x38800000u ? small : normal;
  u32 large = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
  to.bits = (u16)(sign | (magnitude >= 0x477ff000u ? large : finite));
}
template <class T> static inline void store(T& to, T x) { to = x; }
// Blocks of float16, with the CPU's conversions if it has them; both round to nearest, ties to even. Stores are as wide as the loads of
// the next loop: a wide load would stall on several narrow stores, but not on one of its own width.
static inline void widen(f32* __restrict to, const f16* __restrict from, i64 count) {
  i64 i = 0;
#if defined(__AVX512F__)
  typedef short halves __attribute__((vector_size(32), aligned(2), may_alias));
  typedef f32 floats __attribute__((vector_size(64), aligned(4), may_alias));
  for (; i + 16 <= count; i += 16)
    *(floats*)(to + i) = __builtin_ia32_vcvtph2ps512_mask(*(const halves*)(from + i), floats{}, (u16)-1, 4);
#endif
#if defined(__F16C__) && defined(__clang__)
  typedef _Float16 half8 __attribute__((vector_size(16), aligned(2), may_alias));
  typedef f32 float8 __attribute__((vector_size(32), aligned(4), may_alias));
  for (; i + 8 <= count; i += 8) *(float8*)(to + i) = __builtin_convertvector(*(const half8*)(from + i), float8);
#elif defined(__F16C__)
  typedef short half8 __attribute__((vector_size(16), aligned(2), may_alias));
  typedef f32 float8 __attribute__((vector_size(32), aligned(4), may_alias));
  for (; i + 8 <= count; i += 8) *(float8*)(to + i) = __builtin_ia32_vcvtph2ps256(*(const half8*)(from + i));
#endif
  for (; i < count; i++) to[i] = load(from[i]);
}
static inline void narrow(f16* __restrict to, const f32* __restrict from, i64 count) {
  i64 i = 0;
#if defined(__F16C__)
  typedef short half8 __attribute__((vector_size(16), aligned(2), may_alias));
  typedef f32 float8 __attribute__((vector_size(32), aligned(4), may_alias));
  for (; i + 8 <= count; i += 8) *(half8*)(to + i) = __builtin_ia32_vcvtps2ph256(*(const float8*)(from + i), 0);
#endif
  for (; i < count; i++) store(to[i], from[i]);
}
static inline void narrow(bf16* __restrict to, const f32* __restrict from, i64 count) {
  i64 i = 0;
#if defined(__AVX512BW__) && __has_builtin(__builtin_shufflevector)
  // Two blocks at a time: one instruction extracts the upper halves of both, where a compiler would shift and pack each.
  typedef f32 floats __attribute__((vector_size(64), aligned(4), may_alias));
  typedef u32 bits __attribute__((vector_size(64)));
  typedef u16 halves __attribute__((vector_size(64)));
  typedef u16 stored __attribute__((vector_size(64), aligned(2), may_alias));
  for (; i + 32 <= count; i += 32) {
    const floats x = *(const floats*)(from + i), y = *(const floats*)(from + i + 16);
    const bits a = (bits)x, b = (bits)y, nan = bits{} + 0x7fc00000u;
    const bits c = x != x ? nan : a + 0x7fffu + (a >> 16 & 1u), d = y != y ? nan : b + 0x7fffu + (b >> 16 & 1u);
    *(stored*)(to + i) = __builtin_shufflevector((halves)c, (halves)d, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
                                                 33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63);
  }
  typedef u16 half __attribute__((vector_size(32), aligned(2), may_alias));
  for (; i + 16 <= count; i += 16) {
    const floats x = *(const floats*)(from + i);
    const bits a = (bits)x;
    *(half*)(to + i) = __builtin_convertvector((x != x ? bits{} + 0x7fc00000u : a + 0x7fffu + (a >> 16 & 1u)) >> 16, half);
  }
#endif
  for (; i < count; i++) store(to[i], from[i]);
}
static inline f32 round_bf16(f32 x) { bf16 y; store(y, x); return load(y); }
static inline f32 round_f16(f32 x) { f16 y; store(y, x); return load(y); }

// The lanes of a block combined, half with half, so that the order does not depend on the machine.
template <int N, class T, class F> static inline T fold(T* lanes, F combine) {
  if constexpr (N > 1) {
#pragma omp simd
    for (int k = 0; k < N / 2; k++) combine(lanes[k], lanes[k + N / 2]);
    return fold<N / 2>(lanes, combine);
  }
  return lanes[0];
}

// Adds to an element atomically.
template <class T, class V> static inline void add_alone(T& to, V x) {
  if constexpr (sizeof(T) >= 4) {
#pragma omp atomic
    to += x;
  } else {
#pragma omp critical(add_alone)
    store(to, (V)(load(to) + x));
  }
}
template <class T> static inline T smaller(T a, T b) { return a < b ? a : b; }
template <class T> static inline T larger(T a, T b) { return a > b ? a : b; }
// NaN propagates, as in torch; g++ vectorises two separate selects best.
template <class T> static inline T max_nan(T m, T x) { T g = x > m ? x : m; return x != x ? x : g; }
template <class T> static inline T min_nan(T m, T x) { T g = x < m ? x : m; return x != x ? x : g; }
#pragma omp declare reduction(max_nan : f32 : omp_out = max_nan(omp_out, omp_in)) initializer(omp_priv = -__builtin_inff())
#pragma omp declare reduction(min_nan : f32 : omp_out = min_nan(omp_out, omp_in)) initializer(omp_priv = __builtin_inff())
#pragma omp declare reduction(max_nan : f64 : omp_out = max_nan(omp_out, omp_in)) initializer(omp_priv = -__builtin_inf())
#pragma omp declare reduction(min_nan : f64 : omp_out = min_nan(omp_out, omp_in)) initializer(omp_priv = __builtin_inf())

// exp to within one unit in the last place: -inf -> 0, +inf -> inf, nan -> nan, subnormal results kept.
static inline f32 fn_exp(f32 x) {
  f32 t = fused(x, 1.44269504f, 12583038.0f);  // 1.5 * 2^23 + 126: the low bits hold round(x / ln 2) + 126
  f32 n = t - 12583038.0f;
  f32 r = fused(n, -0.693145752f, x);
  r = fused(n, -1.42860677e-6f, r);
  f32 p = 0.00138145406f;
  p = fused(p, r, 0.00836874545f);
  p = fused(p, r, 0.041668389f);
  p = fused(p, r, 0.166665211f);
  p = fused(p, r, 0.49999994f);
  p = fused(p, r, 1.0f);
  p = fused(p, r, 1.0f);
  u32 low = x < -86.0f ? 64u : 0u;  // scaled in two steps where the result may be subnormal
  f32 y = (p + p) * as_float((as_bits(t) + low) << 23);
  y = x < -86.0f ? y * 5.42101086e-20f : y;
  y = x < -104.0f ? 0.0f : y;
  return x > 88.7228394f ? __builtin_inff() : y;
}
static inline f64 fn_exp(f64 x) { return __builtin_exp(x); }

// e^(x - m) for finite m and x at most 16 above it; results below 2^-126 are 0, nan stays. The difference x - m is rounded once, so
// 2^(log2(e) * d) with one rounding more is as good as it gets, and two steps shorter than fn_exp.
static inline f32 fn_exp_near(f32 x, f32 m) {
  f32 d = x - m;
  d = -88.0296919f > d ? -88.0296919f : d;  // -127 ln 2: from there on the scale below is 0
  f32 t = fused(d, 1.44269504f, 12583039.0f);  // 1.5 * 2^23 + 127
  f32 r = fused(d, 1.44269504f, 12583039.0f - t);
  f32 p = 0.00132647273f;
  p = fused(p, r, 0.00967151299f);
  p = fused(p, r, 0.0555073358f);
  p = fused(p, r, 0.240222424f);
  p = fused(p, r, 0.693147004f);
  p = fused(p, r, 1.0f);
  return p * as_float(as_bits(t) << 23);
}
// The same for results of sixteen bits, to 2^-18.
static inline f32 fn_exp_rough(f32 x, f32 m) {
  f32 d = x - m;
  d = -88.0296919f > d ? -88.0296919f : d;
  f32 t = fused(d, 1.44269504f, 12583039.0f);
  f32 r = fused(d, 1.44269504f, 12583039.0f - t);
  f32 p = 0.00958285322f;
  p = fused(p, r, 0.0559064262f);
  p = fused(p, r, 0.240240986f);
  p = fused(p, r, 0.693124193f);
  p = fused(p, r, 1.0f);
  return p * as_float(as_bits(t) << 23);
}
// An integer that increases with x - m, from which `fn_too_high` determines later whether some x was more than 16 above m, or m was not
// finite. (The maximum of integers is one instruction.)
static inline i32 fn_height(f32 x, f32 m) { return (i32)as_bits(fused(x - m, 1.44269504f, 12583039.0f)); }
static inline i32 fn_too_high(i32 height, f32 m) {
  return !((height <= (i32)as_bits(12583039.0f + 23.0f)) & (__builtin_fabsf(m) <= 3.40282347e38f));
}
// And 1 where both are equal, even if infinite.
static inline f32 fn_exp_below(f32 x, f32 m) { return fn_exp_near(x, m); }
static inline f64 fn_exp_below(f64 x, f64 m) { return __builtin_exp(x - m); }
static inline f32 fn_exp_diff(f32 x, f32 m) { return x == m ? 1.0f : fn_exp_near(x, m); }
static inline f64 fn_exp_diff(f64 x, f64 m) { return x == m ? 1.0 : __builtin_exp(x - m); }

// Natural logarithm to within two units in the last place, by the exponent and a polynomial of the mantissa.
static inline f32 fn_log(f32 x) {
  f32 scaled = x < 1.17549435e-38f ? x * 8388608.0f : x;
  f32 shift = x < 1.17549435e-38f ? -23.0f : 0.0f;
  u32 bits = as_bits(scaled) - 0x3f2aaaabu;
  f32 e = (f32)((i32)bits >> 23) + shift;
  f32 m = as_float((bits & 0x007fffffu) + 0x3f2aaaabu) - 1.0f;
  f32 s = m * m;
  f32 p = -0.130310059f;
  p = fused(p, m, 0.140869141f);
  p = fused(p, m, -0.121483892f);
  p = fused(p, m, 0.139814854f);
  p = fused(p, m, -0.166846126f);
  p = fused(p, m, 0.200120345f);
  p = fused(p, m, -0.249996200f);
  p = fused(p, m, 0.333331972f);
  p = fused(p, m, -0.5f);
  f32 y = fused(p, s, m);
  y = fused(e, 0.693147182f, y);
  y = x == 0.0f ? -__builtin_inff() : y;
  y = x < 0.0f ? __builtin_nanf("") : y;
  y = x == __builtin_inff() ? x : y;
  return x != x ? x : y;
}
static inline f64 fn_log(f64 x) { return __builtin_log(x); }

static inline f32 fn_tanh(f32 x) {
  f32 a = __builtin_fabsf(x), s = a * a;
  f32 e = fn_exp(-2.0f * a);
  f32 far = (1.0f - e) / (1.0f + e);
  f32 p = -0.00570498872f;
  p = fused(p, s, 0.0206390887f);
  p = fused(p, s, -0.0537397087f);
  p = fused(p, s, 0.133314422f);
  p = fused(p, s, -0.333332819f);
  f32 near = fused(a * s, p, a);
  f32 y = a < 0.625f ? near : far;
  return __builtin_copysignf(y, x);
}
static inline f64 fn_tanh(f64 x) { return __builtin_tanh(x); }

template <class T> static inline T fn_sigmoid(T x) { return (T)1 / ((T)1 + fn_exp(-x)); }
template <class T> static inline T fn_silu(T x) { return x / ((T)1 + fn_exp(-x)); }
static inline f32 fn_sqrt(f32 x) { return __builtin_sqrtf(x); }
static inline f64 fn_sqrt(f64 x) { return __builtin_sqrt(x); }
// The error function to within two units in the last place. Least-squares fits at Chebyshev nodes: of erf(x)/x - 1 in x*x up to 1,
// and of log(1 - erf(x))/x from there to 4, past which it is 1.
static inline f32 fn_erf(f32 x) {
  f32 a = __builtin_fabsf(x), t = a < 4.0f ? a : 4.0f, s = x * x;
  f32 r = fused(-9.63739736e-06f, s, 0.000112554921f);
  r = fused(r, s, -0.000848262631f);
  r = fused(r, s, 0.00522093143f);
  r = fused(r, s, -0.0268653951f);
  r = fused(r, s, 0.112837819f);
  r = fused(r, s, -0.376126384f);
  r = fused(r, s, 0.128379167f);
  f32 p = fused(-5.12675465e-07f, t, 1.04358273e-05f);
  p = fused(p, t, -9.26644014e-05f);
  p = fused(p, t, 0.000451970266f);
  p = fused(p, t, -0.00110476795f);
  p = fused(p, t, -0.000832119499f);
  p = fused(p, t, 0.0202235836f);
  p = fused(p, t, -0.103483038f);
  p = fused(p, t, -0.636356401f);
  p = fused(p, t, -1.128422f);
  f32 far = __builtin_copysignf(1.0f - fn_exp(p * t), x), near = fused(r, x, x);
  f32 y = a > 1.0f ? far : near;
  return x != x ? x : y;
}
static inline f64 fn_erf(f64 x) { return __builtin_erf(x); }
template <class T> static inline T fn_gelu(T x) { return x * (T)0.5 * ((T)1 + fn_erf(x * (T)0.7071067811865476)); }
static inline f32 fn_abs(f32 x) { return __builtin_fabsf(x); }
static inline f64 fn_abs(f64 x) { return __builtin_fabs(x); }
template <class T> static inline T fn_abs(T x) { return x < 0 ? (T)-x : x; }
template <class T> static inline T fn_relu(T x) { return x < 0 ? (T)0 : x; }
static inline f32 fn_floor(f32 x) { return __builtin_floorf(x); }
static inline f64 fn_floor(f64 x) { return __builtin_floor(x); }
static inline f32 fn_ceil(f32 x) { return __builtin_ceilf(x); }
static inline f64 fn_ceil(f64 x) { return __builtin_ceil(x); }
template <class T> static inline T fn_floor(T x) { return x; }
template <class T> static inline T fn_ceil(T x) { return x; }
static inline f32 fn_sin(f32 x) { return __builtin_sinf(x); }
static inline f64 fn_sin(f64 x) { return __builtin_sin(x); }
static inline f32 fn_cos(f32 x) { return __builtin_cosf(x); }
static inline f64 fn_cos(f64 x) { return __builtin_cos(x); }
// Functions of the C library under their own names.
#define LIBRARY_UNARY(name) \
  static inline f32 fn_##name(f32 x) { return __builtin_##name##f(x); } \
  static inline f64 fn_##name(f64 x) { return __builtin_##name(x); }
#define LIBRARY_BINARY(name) \
  static inline f32 fn_##name(f32 x, f32 y) { return __builtin_##name##f(x, y); } \
  static inline f64 fn_##name(f64 x, f64 y) { return __builtin_##name(x, y); }
LIBRARY_UNARY(tan) LIBRARY_UNARY(atan) LIBRARY_UNARY(asin) LIBRARY_UNARY(acos) LIBRARY_UNARY(sinh) LIBRARY_UNARY(cosh)
LIBRARY_UNARY(asinh) LIBRARY_UNARY(acosh) LIBRARY_UNARY(atanh) LIBRARY_UNARY(erfc)
LIBRARY_BINARY(atan2) LIBRARY_BINARY(hypot) LIBRARY_BINARY(copysign)
// lgamma writes the sign to a global variable, which would be a data race.
static inline f64 fn_lgamma(f64 x) { int sign; return __builtin_lgamma_r(x, &sign); }
static inline f32 fn_lgamma(f32 x) { int sign; return __builtin_lgammaf_r(x, &sign); }
// Upwards by psi(x) = psi(x + 1) - 1/x to where the asymptotic series holds; negative numbers by reflection.
static inline f64 fn_digamma(f64 x) {
  if (x == 0) return __builtin_copysign(__builtin_inf(), -x);
  f64 sum = 0;
  if (x < 0) {
    if (x == __builtin_trunc(x)) return __builtin_nan("");
    sum = -3.14159265358979323846 / __builtin_tan(3.14159265358979323846 * (x - __builtin_trunc(x)));
    x = 1 - x;
  }
  for (; x < 10; x += 1) sum -= 1 / x;
  f64 z = 1 / (x * x);
  f64 p = ((((((8.33333333333333333e-2 * z - 2.10927960927960928e-2) * z + 7.57575757575757576e-3) * z - 4.16666666666666667e-3) * z
             + 3.96825396825396825e-3) * z - 8.33333333333333333e-3) * z + 8.33333333333333333e-2) * z;
  return sum + __builtin_log(x) - 0.5 / x - p;
}
static inline f32 fn_digamma(f32 x) { return (f32)fn_digamma((f64)x); }
// A rational approximation, refined by two Newton steps.
static inline f64 fn_erfinv(f64 y) {
  f64 a = __builtin_fabs(y), x;
  if (!(a < 1)) return a == 1 ? __builtin_copysign(__builtin_inf(), y) : __builtin_nan("");
  if (a <= 0.7) {
    f64 z = y * y;
    x = y * (((-0.140543331 * z + 0.914624893) * z - 1.645349621) * z + 0.886226899)
      / ((((0.012229801 * z - 0.329097515) * z + 1.442710462) * z - 2.118377725) * z + 1);
  } else {
    f64 z = __builtin_sqrt(-__builtin_log((1 - a) / 2));
    x = __builtin_copysign((((1.641345311 * z + 3.429567803) * z - 1.624906493) * z - 1.970840454)
                           / ((1.637067800 * z + 3.543889200) * z + 1), y);
  }
  for (int k = 0; k < 2; k++) x -= (__builtin_erf(x) - y) / (1.1283791670955126 * __builtin_exp(-x * x));
  return x;
}
static inline f32 fn_erfinv(f32 y) { return (f32)fn_erfinv((f64)y); }
// Shifts by any count: bits shifted out at the top leave 0, those shifted out at the bottom leave the sign.
template <class T> static inline T fn_shl(T x, T by) {
  return by < 0 || (i64)by >= (i64)(8 * sizeof(T)) ? (T)0 : (T)((unsigned long long)x << by);
}
template <class T> static inline T fn_shr(T x, T by) {
  return by < 0 || (i64)by >= (i64)(8 * sizeof(T)) ? (T)(x < 0 ? -1 : 0) : (T)(x >> by);
}
template <class T> static inline T fn_gcd(T a, T b) {
  while (b != 0) { T rest = (T)-1 < 0 && b == (T)-1 ? (T)0 : (T)(a % b); a = b; b = rest; }
  return a < 0 ? (T)(0ULL - (unsigned long long)a) : a;
}

// Random bits: Philox4x32-10. One counter, of a block of four positions and a word, yields the bits of these four positions.
static inline void philox(u32 to[4], i64 seed, u32 word, i64 block) {
  u32 a = (u32)block, b = (u32)(block >> 32), c = word, d = 0, x = (u32)seed, y = (u32)(seed >> 32);
  for (int round = 0; round < 10; round++, x += 0x9E3779B9u, y += 0xBB67AE85u) {
    const u64 p = (u64)a * 0xD2511F53u, q = (u64)c * 0xCD9E8D57u;
    a = (u32)(q >> 32) ^ b ^ x; b = (u32)q; c = (u32)(p >> 32) ^ d ^ y; d = (u32)p;
  }
  to[0] = a; to[1] = b; to[2] = c; to[3] = d;
}
static inline i32 random_bits(i64 seed, i64 word, i64 position) {
  u32 four[4];
  philox(four, seed, (u32)word, position >> 2);
  return (i32)four[position & 3];
}
// The bits of `count` positions from `first` on, contiguous; returns where they begin in `to`, which needs room for 67 more.
static inline const i32* random_run(u32* __restrict to, i64 seed, i64 word, i64 first, i64 count) {
  const i64 blocks = ((first & 3) + count + 3) >> 2, begin = first >> 2;
  i64 i = 0;
#if defined(__AVX2__) && !defined(__clang__) && __has_builtin(__builtin_shufflevector)
  // 32 bits in lanes of 64: a product is then one instruction, which ignores the upper halves. Two vectors at a time hide the latency
  // of the rounds, which depend on each other.
#if defined(__AVX512F__)
  enum { W = 8 };
  typedef u64 lanes __attribute__((vector_size(64)));
  typedef u64 stored __attribute__((vector_size(64), aligned(4), may_alias));
  typedef i32 ints __attribute__((vector_size(64)));
  typedef i64 longs __attribute__((vector_size(64)));
  const lanes step = {0, 1, 2, 3, 4, 5, 6, 7};
#define HALVES(x, by) (lanes)__builtin_ia32_pmuludq512_mask((ints)(x), (ints)(lanes{} + (u64)by), longs{}, (u8)-1)
#define PAIRED_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define PAIRED_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
  enum { W = 4 };
  typedef u64 lanes __attribute__((vector_size(32)));
  typedef u64 stored __attribute__((vector_size(32), aligned(4), may_alias));
  typedef i32 ints __attribute__((vector_size(32)));
  const lanes step = {0, 1, 2, 3};
#define HALVES(x, by) (lanes)__builtin_ia32_pmuludq256((ints)(x), (ints)(lanes{} + (u64)by))
#define PAIRED_LOW 0, 4, 1, 5
#define PAIRED_HIGH 2, 6, 3, 7
#endif
  for (; i < blocks; i += 2 * W) {
    lanes a[2], b[2], c[2], d[2];
    for (int v = 0; v < 2; v++) {
      a[v] = step + (u64)(begin + i + v * W);
      b[v] = a[v] >> 32;
      c[v] = lanes{} + (u64)(u32)word;
      d[v] = lanes{};
    }
    u32 x = (u32)seed, y = (u32)(seed >> 32);
#pragma GCC unroll 10
    for (int round = 0; round < 10; round++, x += 0x9E3779B9u, y += 0xBB67AE85u)
#pragma GCC unroll 2
      for (int v = 0; v < 2; v++) {
        const lanes p = HALVES(a[v], 0xD2511F53u), q = HALVES(c[v], 0xCD9E8D57u);
        a[v] = (q >> 32) ^ b[v] ^ (u64)x; b[v] = q; c[v] = (p >> 32) ^ d[v] ^ (u64)y; d[v] = p;
      }
    for (int v = 0; v < 2; v++) {
      const lanes e = (a[v] & 0xffffffffull) | b[v] << 32, f = (c[v] & 0xffffffffull) | d[v] << 32;
      stored* out = (stored*)(to + 4 * (i + v * W));
      out[0] = __builtin_shufflevector(e, f, PAIRED_LOW);
      out[1] = __builtin_shufflevector(e, f, PAIRED_HIGH);
    }
  }
#undef HALVES
#undef PAIRED_LOW
#undef PAIRED_HIGH
#else
  for (; i < blocks; i++) philox(to + 4 * i, seed, (u32)word, begin + i);
#endif
  return (const i32*)to + (first & 3);
}
static inline f32 fn_fmod(f32 x, f32 y) { return __builtin_fmodf(x, y); }
static inline f64 fn_fmod(f64 x, f64 y) { return __builtin_fmod(x, y); }
// Integers divided rounding down; a divisor of 0 gives 0, and the smallest integer by -1 wraps.
template <class T> static inline T whole_div(T a, T b) {
  if (b == 0) return 0;
  if ((T)-1 < 0 && b == (T)-1) return (T)(0ULL - (unsigned long long)a);
  return (T)(a / b - (a % b != 0 && (a < 0) != (b < 0)));
}
template <class T> static inline T whole_rem(T a, T b) {
  if (b == 0 || ((T)-1 < 0 && b == (T)-1)) return 0;
  T rest = (T)(a % b);
  return rest != 0 && (rest < 0) != (b < 0) ? (T)(rest + b) : rest;
}
static inline f32 fn_pow(f32 x, f32 y) { return __builtin_powf(x, y); }
static inline f64 fn_pow(f64 x, f64 y) { return __builtin_pow(x, y); }
template <class T> static inline T fn_pow(T x, T y) {
  i64 b = x, r = 1;
  for (i64 e = y; e > 0; e >>= 1) { if (e & 1) r = (i64)((unsigned long long)r * (unsigned long long)b); b = (i64)((unsigned long long)b * (unsigned long long)b); }
  return y < 0 ? (T)(x == 1 ? 1 : x == -1 ? (y & 1 ? -1 : 1) : 0) : (T)r;
}
// a / b rounded down and its rest, for b > 0; the language rounds towards zero.
static inline i64 floor_divide(i64 a, i64 b) { return a / b - (a % b < 0); }
static inline i64 floor_rest(i64 a, i64 b) { i64 rest = a % b; return rest < 0 ? rest + b : rest; }
// An element of an array that others may overwrite, clamped to 0 .. most. It is nearly always in range, so a predicted branch is
// cheaper than two selects in the dependency chain.
static inline i64 clamped(i64 x, i64 most) {
  if (__builtin_expect((unsigned long long)x > (unsigned long long)most, 0)) return x < 0 || most < 0 ? 0 : most;
  return x;
}

// The component that owns a position: the last c < count with offsets[c] <= position.
template <class T> static inline i64 owner(const T* offsets, i64 count, i64 position) {
  i64 low = 0, high = count;
  while (low < high) {
    i64 middle = (low + high) >> 1;
    if ((i64)offsets[middle + 1] <= position) low = middle + 1; else high = middle;
  }
  return low < count ? low : larger(count - 1, (i64)0);
}

// Distributes grid positions over threads. In the order `blocked`, each thread starts with an equal share of neighbouring positions,
// because one thread reads neighbouring rows fastest and uses its own prefetches. It takes a few positions at a time from the front;
// when its share is empty, it steals the back half of the largest remaining share. In the order `interleaved`, neighbouring threads
// take neighbouring groups; in the order `shared`, all threads take the next group from one counter.
enum { blocked, interleaved, shared };
struct Run { i64 begin, end; };
struct alignas(64) Part { u64 left; };  // of groups of positions: the first in the lower half, one past the last in the upper
struct Runs {
  Part* const parts;
  const int threads;
  const i64 positions, together;
  const int order;
  Runs(Part* parts, int threads, i64 positions, i64 most, int order = blocked)
      : parts(parts), threads(threads), positions(positions),
        together(larger<i64>(larger<i64>(1, positions >> 31), smaller<i64>(most, positions / (threads * 16)))), order(order) {
    const i64 groups = larger<i64>(0, (positions + together - 1) / together);
    for (int k = 0; k < threads; k++)
      parts[k].left = order == blocked       ? packed(groups * k / threads, groups * (k + 1) / threads)
                      : order == interleaved ? packed(0, (groups - k + threads - 1) / threads)
                                             : packed(0, k ? 0 : groups);
  }
  bool take(Run& run) const {
    const int first = order == shared ? 0 : omp_get_thread_num();
    if (order == interleaved) {
      for (int k = 0; k < threads; k++) {
        const int part = (first + k) % threads;
        if (take(run, parts[part].left, threads, part)) return true;
      }
      return false;
    }
    u64& own = parts[first].left;
    do
      if (take(run, own, 1, 0)) return true;
    while (order == blocked && refill(own));
    return false;
  }

 private:
  // The next group of a share: for the n-th, the group `n * factor + offset`.
  bool take(Run& run, u64& left, i64 factor, i64 offset) const {
    u64 seen = __atomic_load_n(&left, __ATOMIC_RELAXED);
    while (count(seen))
      if (exchange(left, seen, seen + 1)) {
        run.begin = ((i64)(u32)seen * factor + offset) * together;
        run.end = smaller<i64>(run.begin + together, positions);
        return true;
      }
    return false;
  }
  static u64 packed(u64 begin, u64 end) { return end << 32 | begin; }
  static u32 count(u64 left) { return (u32)(left >> 32) - (u32)left; }
  static bool exchange(u64& left, u64& seen, u64 to) {
    return __atomic_compare_exchange_n(&left, &seen, to, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  }
  // False if nothing is left. A thread may miss positions that another thread is taking at this moment; that thread processes them.
  bool refill(u64& own) const {
    while (true) {
      int from = 0;
      u64 most = 0;
      for (int k = 0; k < threads; k++) {
        const u64 seen = __atomic_load_n(&parts[k].left, __ATOMIC_RELAXED);
        if (count(seen) > count(most)) most = seen, from = k;
      }
      if (!count(most)) return false;
      const u32 end = (u32)(most >> 32), middle = end - (count(most) + 1) / 2;
      if (exchange(parts[from].left, most, packed((u32)most, middle))) {
        __atomic_store_n(&own, packed(middle, end), __ATOMIC_RELAXED);
        return true;
      }
    }
  }
};

// Results that bypass the cache, one stream per thread and tensor. Whole cache lines are written; the end of a block waits in `line`
// for the adjacent next block (rows seldom end at a line boundary), else `flush` writes it. A fence follows at the end.
struct Stream {
#if defined(__AVX512F__)
  enum { W = 64 };
#else
  enum { W = 32 };
#endif
  alignas(64) char line[W];
  char* next = nullptr;
  i64 waiting = 0;

  void flush() {
    if (waiting) __builtin_memcpy(next - waiting, line, waiting);
    waiting = 0;
  }
  // `Ahead`: the prefetch distance in bytes if `from` is not in the cache; hardware prefetchers stop at the end of a page.
  template <int Ahead = 0> void copy(void* to, const void* from, i64 bytes) {
    char* d = (char*)to;
    const char* s = (const char*)from;
#if defined(__AVX512F__) || defined(__AVX__)
    typedef f32 vec __attribute__((vector_size(W), aligned(1), may_alias));
    if (d != next) flush();
    const i64 head = smaller<i64>((W - ((unsigned long long)d & (W - 1))) & (W - 1), bytes);
    if (waiting) {
      __builtin_memcpy(line + waiting, s, head);
      waiting += head;
      if (waiting == W) store(d + head - W, *(const vec*)line), waiting = 0;
    } else {
      __builtin_memcpy(d, s, head);
    }
    d += head, s += head, bytes -= head;
    i64 i = 0;
    for (; Ahead && i + W + Ahead <= bytes; i += W) {
      __builtin_prefetch(s + i + Ahead, 0, 2);
      store(d + i, *(const vec*)(s + i));
    }
    for (; i + W <= bytes; i += W) store(d + i, *(const vec*)(s + i));
    if (i < bytes) __builtin_memcpy(line, s + i, waiting = bytes - i);
    next = d + bytes;
#else
    __builtin_memcpy(d, s, bytes);
#endif
  }
  // Positions `begin` to `end` of the block at `to`, as `some(to, first, count)` computes them: a line at a time if they bypass the
  // cache, so that reads and writes alternate, else all at once.
  template <class T, class F> __attribute__((always_inline)) void each(T* to, i64 begin, i64 end, bool past, F some) {
    if (begin >= end) return;
    i64 first = begin;
#if defined(__AVX512F__) || defined(__AVX__)
    typedef f32 vec __attribute__((vector_size(W), may_alias));
    enum { N = W / sizeof(T) };
    if (past && (char*)(to + first) != next) flush();
    while (first < end) {
      const i64 before = ((unsigned long long)(to + first) & (W - 1)) / sizeof(T);
      if (past && !before) {
        for (; first + N <= end; first += N) {
          alignas(W) T whole[N];
          some(whole, first, N);
          store((char*)(to + first), *(const vec*)whole);
        }
        if (first == end) break;
      }
      const bool waits = past && (waiting || !before);
      const i64 count = past ? smaller<i64>(N - before, end - first) : end - first;
      some(waits ? (T*)line + before : to + first, first, count);
      first += count;
      if (waits && (waiting = (before + count) * sizeof(T)) == W) {
        store((char*)(to + first) - W, *(const vec*)line);
        waiting = 0;
      }
    }
    next = (char*)(to + end);
#else
    some(to + first, first, end - first);
#endif
  }

 private:
#if defined(__AVX__) && defined(__clang__)
  template <class V> static void store(char* to, V x) {
    typedef f32 whole __attribute__((vector_size(W), may_alias));
    __builtin_nontemporal_store((whole)x, (whole*)to);
  }
#elif defined(__AVX512F__)
  template <class V> static void store(char* to, V x) { __builtin_ia32_movntps512((f32*)to, x); }
#elif defined(__AVX__)
  template <class V> static void store(char* to, V x) { __builtin_ia32_movntps256((f32*)to, x); }
#endif
};
static inline void stream_fence() {
#if defined(__x86_64__)
  __builtin_ia32_sfence();
#endif
}

// A private block that is too large for the stack.
extern "C" void* aligned_alloc(decltype(sizeof(0)), decltype(sizeof(0)));
extern "C" void free(void*);
template <class T> struct Heap {
  T* at;
  Heap(i64 count) : at((T*)aligned_alloc(64, (count * sizeof(T) + 63) / 64 * 64)) {}
  ~Heap() { free(at); }
};

// A staging buffer for a stream. A load stalls on an earlier store whose address has the same last twelve bits (4K aliasing), so the
// buffer needs another page offset than the block that is read meanwhile. This separates blocks of up to 1 KB; larger ones overlap in
// part.
template <class T, int N> struct Stage {
  alignas(64) T room[N + 2048 / sizeof(T)];
  T* apart_from(const void* from) {
    return room + (((unsigned long long)from + 1024 - (unsigned long long)room) & 1984) / sizeof(T);
  }
};

template <class T, class V> static inline T stored(V value) {
  T to;
  store(to, value);
  return to;
}
template <class T> static inline void fill_with(Stream& past, T* to, T value, i64 count, bool stream) {
  if (!stream) {
    for (i64 k = 0; k < count; k++) to[k] = value;
    return;
  }
  enum { N = 2048 / sizeof(T) };
  alignas(64) T same[N];
  for (i64 k = 0; k < smaller<i64>(count, N); k++) same[k] = value;
  for (i64 k = 0; k < count; k += N) past.copy(to + k, same, smaller<i64>(count - k, N) * sizeof(T));
}
static inline void copy_bytes(Stream& past, void* to, const void* from, i64 bytes, bool stream) {
  if (stream) {
    past.copy<4096>(to, from, bytes);
  } else {
    __builtin_memcpy(to, from, bytes);
  }
}

// to[i][j] = from[j][i] for i below `rows`, j below `columns`; rows are `ld` apart in `to` and `stride` apart in `from`. The remainder
// of a block is moved element by element: it is small, and vector code for it would take longer to compile than the program.
template <class T> __attribute__((noinline, optimize("no-tree-vectorize"))) static void turned_rest(T* __restrict to, i64 ld, const T* __restrict from, i64 stride, i64 rows, i64 columns) {
  for (i64 j = 0; j < columns; j++)
    for (i64 i = 0; i < rows; i++) to[i * ld + j] = from[j * stride + i];
}
template <class T> struct Moved { typedef T kind; };
template <> struct Moved<bf16> { typedef u16 kind; };  // vectors have plain numbers
template <class T> __attribute__((noinline)) static void turned(T* __restrict to, i64 ld, const T* __restrict from, i64 stride, i64 rows, i64 columns) {
  enum { W = 16 };
  typedef typename Moved<T>::kind number;
  typedef number vec __attribute__((vector_size(W * sizeof(T)), aligned(sizeof(T)), may_alias));
  i64 j = 0;
  for (; j + W <= columns; j += W) {
    i64 i = 0;
    for (; i + W <= rows; i += W) {
      vec a[W], b[W];
#pragma GCC unroll 16
      for (int k = 0; k < W; k++) a[k] = *(const vec*)(from + (j + k) * stride + i);
#pragma GCC unroll 4
      for (int step = 0; step < 4; step++) {
        vec* x = step % 2 ? b : a;
        vec* y = step % 2 ? a : b;
#pragma GCC unroll 8
        for (int k = 0; k < W / 2; k++) {
          y[2 * k] = __builtin_shufflevector(x[k], x[k + W / 2], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
          y[2 * k + 1] = __builtin_shufflevector(x[k], x[k + W / 2], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
        }
      }
#pragma GCC unroll 16
      for (int k = 0; k < W; k++) *(vec*)(to + (i + k) * ld + j) = a[k];
    }
    turned_rest(to + i * ld + j, ld, from + j * stride + i, stride, rows - i, W);
  }
  turned_rest(to + j, ld, from + j * stride, stride, rows, columns - j);
}

// Rows that are needed soon.
static inline void fetch_rows(const void* from, i64 stride, i64 bytes, i64 rows) {
  for (const char* row = (const char*)from; rows > 0; rows--, row += stride)
    for (i64 line = 0; line < bytes; line += 64) __builtin_prefetch(row + line, 0, 2);
}

// acc[m][n] += a[m][k] * b[k][n]: rows of a are `am` apart, rows of b `bk` apart, columns of b contiguous.
// Not inlined: the cost of a call is negligible, and a single copy is compiled once.
template <int M, int W, int NV, class T> __attribute__((noinline)) static void dot_rows(T* __restrict acc, i64 ld, const T* __restrict a, i64 am, const T* __restrict b, i64 bk, i64 depth) {
  typedef T vec __attribute__((vector_size(W * sizeof(T)), aligned(sizeof(T)), may_alias));
  vec c[M][NV];
#pragma GCC unroll 16
  for (int i = 0; i < M; i++)
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) c[i][j] = *(const vec*)(acc + i * ld + j * W);
  for (i64 k = 0; k < depth; k++) {
    vec y[NV];
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) y[j] = *(const vec*)(b + k * bk + j * W);
#pragma GCC unroll 16
    for (int i = 0; i < M; i++) {
      // Broadcasts one number to all lanes: in the loop over lanes, g++ would load one number per lane and then use only the first.
      const vec x = a[i * am + k] - vec{};
#pragma GCC unroll 4
      for (int j = 0; j < NV; j++) c[i][j] = fused_lanes<T, vec>(x, y[j], c[i][j]);
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < M; i++)
#pragma GCC unroll 4
    for (int j = 0; j < NV; j++) *(vec*)(acc + i * ld + j * W) = c[i][j];
}
template <int M, int W, int NV, class T> static inline void dot_panel(T* __restrict acc, i64 ld, const T* __restrict a, i64 am, const T* __restrict b, i64 bk, i64 rows, i64 depth) {
  i64 i = 0;
  for (; i + M <= rows; i += M) dot_rows<M, W, NV>(acc + i * ld, ld, a + i * am, am, b, bk, depth);
  for (; i + 2 <= rows; i += 2) dot_rows<2, W, NV>(acc + i * ld, ld, a + i * am, am, b, bk, depth);
  if (i < rows) dot_rows<1, W, NV>(acc + i * ld, ld, a + i * am, am, b, bk, depth);
}
// With `across`, b is transposed: its columns are contiguous, `bk` apart. One function for both cases, not inlined, so that programs
// with several products compile it once.
template <class T> __attribute__((noinline)) static void dot(bool across, T* __restrict acc, i64 ld, const T* __restrict a, i64 am, const T* __restrict b, i64 bk, i64 rows, i64 columns, i64 depth) {
#if defined(__AVX512F__)
  enum { W = 64 / sizeof(T), M = 8 };
#else
  enum { W = 32 / sizeof(T), M = 6 };
#endif
  // Columns that are processed together are packed in a copy, padded with zeros: rows of b may be any distance apart.
  enum { N = 2 * W, DEPTH = 128 };
  alignas(64) T panel[DEPTH * N], sums[M * N];
  for (i64 j = 0; j < columns; j += N) {
    const i64 here = smaller<i64>(N, columns - j);
    for (i64 begin = 0; begin < depth; begin += DEPTH) {
      const i64 some = smaller<i64>(DEPTH, depth - begin);
      const T* from = a + begin;
      const T* by = across ? b + begin + j * bk : b + begin * bk + j;
      i64 step = bk;
      if (across || rows >= 2 * M || here < N) {
        if (here < N) __builtin_memset(panel, 0, sizeof(T) * some * N);
        if (across) turned(panel, N, by, bk, some, here);
        else if (here == N)
          for (i64 k = 0; k < some; k++) __builtin_memcpy(panel + k * N, by + k * bk, sizeof(T) * N);
        else
          for (i64 k = 0; k < some; k++) __builtin_memcpy(panel + k * N, by + k * bk, sizeof(T) * here);
        by = panel, step = N;
      }
      if (here == N) {
        dot_panel<M, W, 2>(acc + j, ld, from, am, by, step, rows, some);
        continue;
      }
      for (i64 i = 0; i < rows; i += M) {
        const i64 few = smaller<i64>(M, rows - i);
        for (i64 m = 0; m < few; m++) __builtin_memcpy(sums + m * N, acc + (i + m) * ld + j, sizeof(T) * here);
        if (here <= W) dot_panel<M, W, 1>(sums, N, from + i * am, am, by, step, few, some);
        else dot_panel<M, W, 2>(sums, N, from + i * am, am, by, step, few, some);
        for (i64 m = 0; m < few; m++) __builtin_memcpy(acc + (i + m) * ld + j, sums + m * N, sizeof(T) * here);
      }
    }
  }
}

// The same for bf16, summed in float32, in blocks of 32 columns: two products at a time where the CPU has an instruction for that,
// to which subnormal numbers (below 2^-126) are 0.
#if defined(__AVX512BF16__)
template <int M> __attribute__((noinline)) static void dot_pairs_rows(f32* __restrict acc, i64 ld, const bf16* __restrict a, i64 am, const u32* __restrict b, i64 pairs) {
  typedef f32 vec __attribute__((vector_size(64), aligned(4), may_alias));
  typedef u32 same __attribute__((vector_size(64)));
  vec c[M][2];
#pragma GCC unroll 16
  for (int i = 0; i < M; i++) c[i][0] = *(const vec*)(acc + i * ld), c[i][1] = *(const vec*)(acc + i * ld + 16);
  for (i64 k = 0; k < pairs; k++) {
    const vec left = *(const vec*)(b + 32 * k), right = *(const vec*)(b + 32 * k + 16);
#pragma GCC unroll 16
    for (int i = 0; i < M; i++) {
      u32 pair;
      __builtin_memcpy(&pair, a + i * am + 2 * k, 4);
      const same x = pair - same{};
      asm("vdpbf16ps %2, %1, %0" : "+v"(c[i][0]) : "v"(left), "v"(x));
      asm("vdpbf16ps %2, %1, %0" : "+v"(c[i][1]) : "v"(right), "v"(x));
    }
  }
#pragma GCC unroll 16
  for (int i = 0; i < M; i++) *(vec*)(acc + i * ld) = c[i][0], *(vec*)(acc + i * ld + 16) = c[i][1];
}
// Pairs of columns that are not aligned to words: rare, so they are built one by one.
__attribute__((noinline, optimize("no-tree-vectorize"))) static void paired_columns(u32* __restrict pairs, const bf16* __restrict b, i64 bk, i64 columns, i64 depth) {
  for (i64 n = 0; n < columns; n++)
    for (i64 k = 0; k < depth; k += 2) pairs[16 * k + n] = b[n * bk + k].bits | (k + 1 < depth ? (u32)b[n * bk + k + 1].bits << 16 : 0);
}
#endif
// With `across`, b is transposed: its columns are contiguous, `bk` apart.
template <int R, int K, bool across> static void dot_pairs(f32* __restrict acc, i64 ld, const bf16* __restrict a, i64 am, const bf16* __restrict b, i64 bk, i64 rows, i64 columns, i64 depth) {
  for (i64 j = 0; j < columns; j += 32, acc += 32, b += across ? 32 * bk : 32) {
    const i64 here = smaller<i64>(32, columns - j);
#if defined(__AVX512BF16__)
    // Rows 2k and 2k + 1 of b interleaved, as the instruction requires; missing columns are 0.
    alignas(64) static thread_local u32 pairs[(K / 2 + 1) * 32];
    const i64 half = (depth + 1) / 2;
    static const bf16 none[32] = {};
    if (across && bk % 2 == 0 && (unsigned long)b % 4 == 0) {
      turned<u32>(pairs, 32, (const u32*)b, bk / 2, depth / 2, here);
      if (depth % 2)
        for (i64 n = 0; n < here; n++) pairs[32 * (half - 1) + n] = b[n * bk + depth - 1].bits;
    } else if (across) {
      paired_columns(pairs, b, bk, here, depth);
    } else {
      for (i64 k = 0; k < half; k++) {
        const bf16* first = b + 2 * k * bk;
        const bf16* second = 2 * k + 1 == depth ? none : first + bk;
#pragma omp simd
        for (i64 n = 0; n < here; n++) pairs[32 * k + n] = first[n].bits | (u32)second[n].bits << 16;
      }
    }
    if (here < 32)
      for (i64 k = 0; k < half; k++)
        for (i64 n = here; n < 32; n++) pairs[32 * k + n] = 0;
    // An odd row of a ends in the middle of a pair: the last pair is built from a copy.
    i64 i = 0;
    for (; i + 8 <= rows; i += 8) dot_pairs_rows<8>(acc + i * ld, ld, a + i * am, am, pairs, depth / 2);
    for (; i + 2 <= rows; i += 2) dot_pairs_rows<2>(acc + i * ld, ld, a + i * am, am, pairs, depth / 2);
    if (i < rows) dot_pairs_rows<1>(acc + i * ld, ld, a + i * am, am, pairs, depth / 2);
    if (depth % 2)
      for (i = 0; i < rows; i++) {
        const bf16 last[2] = {a[i * am + depth - 1], {0}};
        dot_pairs_rows<1>(acc + i * ld, ld, last, 0, pairs + 32 * (half - 1), 1);
      }
#else
    static thread_local f32 wide_a[R * K], wide_b[K * 32];
    for (i64 i = 0; i < rows; i++)
      for (i64 k = 0; k < depth; k++) wide_a[i * K + k] = load(a[i * am + k]);
    for (i64 k = 0; k < depth; k++)
      for (i64 n = 0; n < here; n++) wide_b[k * 32 + n] = load(across ? b[n * bk + k] : b[k * bk + n]);
    dot<f32>(false, acc, ld, wide_a, K, wide_b, 32, rows, here, depth);
#endif
  }
}
