// The kernel, the inverse and a convolution's gradient for CPUs, float32; see native.py.
//
// Vectors of eight floats by the compiler's own extension (GCC 12, Clang 15), so that one source
// serves all CPUs. Every function treats each matrix alone; threads share the matrices or tokens.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

typedef float Floats __attribute__((vector_size(32)));
typedef int32_t Ints __attribute__((vector_size(32)));

constexpr long LANES = 8;
constexpr long TOKENS = 2 * LANES;  // that are compared at once
constexpr int LANDMARKS = 6;        // with so many: 12 sums, which leave 4 registers

inline Floats load(const float* from) {
  Floats x;
  std::memcpy(&x, from, sizeof x);
  return x;
}

inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

inline Floats all(float x) { return Floats{} + x; }

// 2^min(e, 0), within an ulp or two; 0 below 2^-126; NaN stays NaN.
inline Floats exp2_of_nonpositive(Floats e) {
  e = e > 0.0f ? Floats{} : e;
  Floats kept = e < -126.0f ? all(-126.0f) : e;
  Floats shifted = kept + 0x1.8p23f;  // the nearest integer, in the low bits; of a NaN those are 0
  Floats f = kept - (shifted - 0x1.8p23f);
  Floats p = all(1.53444096e-4f);
  p = p * f + 1.34055922e-3f;
  p = p * f + 9.61854495e-3f;
  p = p * f + 5.55031262e-2f;
  p = p * f + 2.40226462e-1f;
  p = p * f + 6.93147242e-1f;
  p = p * f + 1.0f;
  Ints bits = (Ints)p + ((Ints)shifted << 23);
  return (Floats)(bits & ~(e < -126.0f));
}

#define INTERLEAVE_LOW(a, b) __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13)
#define INTERLEAVE_HIGH(a, b) __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15)
#define PAIRS_LOW(a, b) __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13)
#define PAIRS_HIGH(a, b) __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15)
#define HALVES_LOW(a, b) __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11)
#define HALVES_HIGH(a, b) __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15)

// Eight rows of eight floats to eight columns, `step` floats apart.
inline void transpose(const Floats* r, float* to, long step) {
  Floats a0 = INTERLEAVE_LOW(r[0], r[1]), a1 = INTERLEAVE_HIGH(r[0], r[1]);
  Floats a2 = INTERLEAVE_LOW(r[2], r[3]), a3 = INTERLEAVE_HIGH(r[2], r[3]);
  Floats a4 = INTERLEAVE_LOW(r[4], r[5]), a5 = INTERLEAVE_HIGH(r[4], r[5]);
  Floats a6 = INTERLEAVE_LOW(r[6], r[7]), a7 = INTERLEAVE_HIGH(r[6], r[7]);
  Floats b0 = PAIRS_LOW(a0, a2), b1 = PAIRS_HIGH(a0, a2);
  Floats b2 = PAIRS_LOW(a1, a3), b3 = PAIRS_HIGH(a1, a3);
  Floats b4 = PAIRS_LOW(a4, a6), b5 = PAIRS_HIGH(a4, a6);
  Floats b6 = PAIRS_LOW(a5, a7), b7 = PAIRS_HIGH(a5, a7);
  store(to, HALVES_LOW(b0, b4));
  store(to + step, HALVES_LOW(b1, b5));
  store(to + 2 * step, HALVES_LOW(b2, b6));
  store(to + 3 * step, HALVES_LOW(b3, b7));
  store(to + 4 * step, HALVES_HIGH(b0, b4));
  store(to + 5 * step, HALVES_HIGH(b1, b5));
  store(to + 6 * step, HALVES_HIGH(b2, b6));
  store(to + 7 * step, HALVES_HIGH(b3, b7));
}

// x = token - centre, kept within the bound, of TOKENS tokens: (d, TOKENS).
inline void measure(const float* tokens, long stride, const float* centre, long count, long d,
                    float bound, float* x) {
  auto bounded = [&](Floats v) {
    v = v < -bound ? all(-bound) : v;
    return v > bound ? all(bound) : v;
  };
  long whole = count == TOKENS ? d / LANES * LANES : 0;
  for (long i = 0; i < whole; i += LANES) {
    Floats rows[LANES], c = load(centre + i);
    for (long half = 0; half < TOKENS; half += LANES) {
      for (long t = 0; t < LANES; t++)
        rows[t] = bounded(load(tokens + (half + t) * stride + i) - c);
      transpose(rows, x + i * TOKENS + half, TOKENS);
    }
  }
  for (long i = whole; i < d; i++)
    for (long t = 0; t < TOKENS; t++) {
      float v = t < count ? tokens[t * stride + i] - centre[i] : 0.0f;
      v = v < -bound ? -bound : v;
      x[i * TOKENS + t] = v > bound ? bound : v;
    }
}

// Kernel values of TOKENS tokens and N landmarks. A column is [y, -|y|^2 / 2, -1 / 2], times the
// square of a scale.
template <int N>
inline void compare(const float* x, Floats norm0, Floats norm1, const float* columns, long d,
                    float* out, long step) {
  Floats sum0[N], sum1[N];
  for (int j = 0; j < N; j++) {
    float own = columns[j * (d + 2) + d], factor = columns[j * (d + 2) + d + 1];
    sum0[j] = own + factor * norm0;
    sum1[j] = own + factor * norm1;
  }
  for (long i = 0; i < d; i++) {
    Floats x0 = load(x + i * TOKENS), x1 = load(x + i * TOKENS + LANES);
    for (int j = 0; j < N; j++) {
      Floats y = all(columns[j * (d + 2) + i]);
      sum0[j] += y * x0;
      sum1[j] += y * x1;
    }
  }
  for (int j = 0; j < N; j++) {
    store(out + j * step, exp2_of_nonpositive(sum0[j]));
    store(out + j * step + LANES, exp2_of_nonpositive(sum1[j]));
  }
}

using Compare = void (*)(const float*, Floats, Floats, const float*, long, float*, long);
const Compare COMPARE[LANDMARKS + 1] = {nullptr,    compare<1>, compare<2>, compare<3>,
                                        compare<4>, compare<5>, compare<6>};

// One row of a symmetric kernel matrix: of landmark x with all others, as y (d, width).
template <int VECTORS>
void compare_all(const float* x, const float* y, long d, long width, float scale, float* row) {
  Floats sum[VECTORS] = {};
  for (long i = 0; i < d; i++)
    for (int v = 0; v < VECTORS; v++) {
      Floats difference = load(y + i * width + v * LANES) - x[i];
      sum[v] += difference * difference;
    }
  for (int v = 0; v < VECTORS; v++)
    store(row + v * LANES, exp2_of_nonpositive(sum[v] * (-0.5f * scale * scale)));
}

// row -= factor * other, from one vector up to another.
inline void eliminate(float* row, const float* other, float factor, long from, long to) {
  for (long j = from; j < to; j += LANES) store(row + j, load(row + j) - factor * load(other + j));
}

// The inverse of the positive definite a (m, width) by A = L L^T: W = L^-1 comes of the same steps
// on the identity, and A^-1 = W^T W is left in a. False where a pivot is not positive.
template <int VECTORS>
bool invert(float* a, float* w, long m, long width) {
  std::memset(w, 0, m * width * sizeof(float));
  for (long k = 0; k < m; k++) {
    float *pivots = a + k * width, *inverses = w + k * width;
    if (!(pivots[k] > 0)) return false;
    float factor = 1 / std::sqrt(pivots[k]);
    inverses[k] = 1;
    long here = k / LANES * LANES, next = here + LANES;
    for (long j = here; j < width; j += LANES) store(pivots + j, load(pivots + j) * factor);
    for (long j = 0; j < next; j += LANES) store(inverses + j, load(inverses + j) * factor);
    for (long i = k + 1; i < m; i++) {
      eliminate(a + i * width, pivots, pivots[i], i / LANES * LANES, width);
      eliminate(w + i * width, inverses, pivots[i], 0, next);
    }
  }
  for (long i = 0; i < m; i++) {
    Floats sum[VECTORS] = {};
    for (long k = i; k < m; k++)
      for (int v = 0; v < VECTORS; v++) sum[v] += w[k * width + i] * load(w + k * width + v * LANES);
    for (int v = 0; v < VECTORS; v++) store(a + i * width + v * LANES, sum[v]);
  }
  return true;
}

using CompareAll = void (*)(const float*, const float*, long, long, float, float*);
using Invert = bool (*)(float*, float*, long, long);
constexpr int MOST_VECTORS = 8;  // of a row that stays in registers

template <int VECTORS>
CompareAll compare_of(long vectors) {
  if constexpr (VECTORS > 1)
    if (vectors < VECTORS) return compare_of<VECTORS - 1>(vectors);
  return compare_all<VECTORS>;
}

template <int VECTORS>
Invert invert_of(long vectors) {
  if constexpr (VECTORS > 1)
    if (vectors < VECTORS) return invert_of<VECTORS - 1>(vectors);
  return invert<VECTORS>;
}

// The share of a standard normal variable below x (Abramowitz and Stegun 7.1.26), its density.
inline void normal(Floats x, Floats& share, Floats& density) {
  Floats size = x < 0.0f ? -x : x;
  Floats power = exp2_of_nonpositive(x * x * -0.72134752f);  // exp(-x^2 / 2)
  Floats t = 1.0f / (1.0f + 0.23164190f * size);
  Floats p = t * 1.061405429f - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  Floats tail = 0.5f * p * t * power;
  share = x < 0.0f ? tail : 1.0f - tail;
  density = power * 0.39894228f;
}

constexpr float LINEAR = 1.59576912f, CUBIC = 0.071354816f;  // 2 sqrt(2 / pi), and x 0.044715

// sigmoid(2u), u = sqrt(2 / pi) (x + 0.044715 x^3).
inline Floats gate(Floats x) {
  Floats twice = x * (LINEAR + CUBIC * x * x);
  Floats size = twice < 0.0f ? -twice : twice;
  Floats power = exp2_of_nonpositive(size * -1.44269504f);
  Floats inverse = 1.0f / (1.0f + power);
  return twice < 0.0f ? power * inverse : inverse;
}

template <bool TANH>
inline Floats gelu(Floats x) {
  if (TANH) return x * gate(x);
  Floats share, density;
  normal(x, share, density);
  return x * share;
}

template <bool TANH>
inline Floats gelu_slope(Floats x) {
  if (TANH) {
    Floats g = gate(x);
    return g * (1.0f + x * (1.0f - g) * (LINEAR + 3.0f * CUBIC * x * x));
  }
  Floats share, density;
  normal(x, share, density);
  return share + x * density;
}

// to[i] = function(from[i]) for whole vectors, and for what is left in one that is not full.
template <typename Function>
void map(long n, int threads, const Function& function) {
  long whole = n / LANES * LANES;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (long i = 0; i < whole; i += LANES) function(i, LANES);
  if (whole < n) function(whole, n - whole);
}

inline Floats load_some(const float* from, long count) {
  if (count == LANES) return load(from);
  Floats x{};
  std::memcpy(&x, from, count * sizeof(float));
  return x;
}

inline void store_some(float* to, Floats x, long count) {
  if (count == LANES) return store(to, x);
  std::memcpy(to, &x, count * sizeof(float));
}

// Sums over rows x of g[x] v[x + j - K / 2], j < K, of `channels` numbers each.
template <int K>
void correlate(const float* g, const float* v, long length, long step, long channels,
               float* sums) {
  Floats sum[K] = {};
  for (long c = 0; c < channels; c += LANES)
    for (long x = 0; x < length; x++) {
      Floats own = load(g + x * step + c);
      const float* others = v + (x - K / 2) * step + c;
      if (x >= K / 2 && x < length - K / 2) {
        for (int j = 0; j < K; j++) sum[j] += own * load(others + j * step);
      } else {
        for (int j = 0; j < K; j++)
          if (x + j >= K / 2 && x + j < length + K / 2) sum[j] += own * load(others + j * step);
      }
    }
  for (int j = 0; j < K; j++)
    for (int lane = 0; lane < LANES; lane++) sums[j] += sum[j][lane];
}

}  // namespace

extern "C" {

// The kernel of tokens (b, n, d), rows `token_step` apart, and landmarks, as columns
// (b, m, d + 2): out (b, m, n), matrices `out_stack` apart.
void softmaxfree_kernel_of_tokens(const float* tokens, long token_stack, long token_step,
                                  const float* centre, const float* columns, float* out,
                                  long out_stack, long b, long n, long m, long d, float bound,
                                  int threads) {
  long blocks = (n + TOKENS - 1) / TOKENS;
  long groups = (m + LANDMARKS - 1) / LANDMARKS;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<float> x(d * TOKENS), rest(m * TOKENS);
#pragma omp for
    for (long task = 0; task < b * blocks; task++) {
      long matrix = task / blocks, first = task % blocks * TOKENS;
      long count = n - first < TOKENS ? n - first : TOKENS;
      const float* from = tokens + matrix * token_stack + first * token_step;
      measure(from, token_step, centre + matrix * d, count, d, bound, x.data());
      Floats norm0{}, norm1{};
      for (long i = 0; i < d; i++) {
        Floats x0 = load(&x[i * TOKENS]), x1 = load(&x[i * TOKENS + LANES]);
        norm0 += x0 * x0;
        norm1 += x1 * x1;
      }
      float* to = out + matrix * out_stack + first;
      float* values = count == TOKENS ? to : rest.data();
      long step = count == TOKENS ? n : TOKENS;
      for (long g = 0; g < groups; g++) {  // of nearly equal size
        long j = g * m / groups, next = (g + 1) * m / groups;
        COMPARE[next - j](x.data(), norm0, norm1, columns + (matrix * m + j) * (d + 2), d,
                          values + j * step, step);
      }
      if (count < TOKENS)
        for (long j = 0; j < m; j++)
          std::memcpy(to + j * n, &rest[j * TOKENS], count * sizeof(float));
    }
  }
}

// How many landmarks the two functions below take at most.
long softmaxfree_most_landmarks() { return MOST_VECTORS * LANES; }

// The kernel of landmarks (b, m, d) with themselves, from their differences: out (b, m, m).
void softmaxfree_kernel_matrix(const float* landmarks, float* out, long b, long m, long d,
                               float scale, int threads) {
  long vectors = (m + LANES - 1) / LANES, width = vectors * LANES;
  CompareAll compare = compare_of<MOST_VECTORS>(vectors);
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<float> y(d * width), row(width);
#pragma omp for
    for (long matrix = 0; matrix < b; matrix++) {
      const float* x = landmarks + matrix * m * d;
      for (long j = 0; j < m; j++)
        for (long i = 0; i < d; i++) y[i * width + j] = x[j * d + i];
      for (long k = 0; k < m; k++) {
        compare(x + k * d, y.data(), d, width, scale, row.data());
        row[k] = 1;
        std::memcpy(out + (matrix * m + k) * m, row.data(), m * sizeof(float));
      }
    }
  }
}

// The inverses of positive definite matrices (b, m, m) with a ridge: out (b, m, m). Returns how
// many turned out not to be definite; what is written for those means nothing.
int softmaxfree_inverse(const float* matrices, float* out, long b, long m, float ridge,
                        int threads) {
  long vectors = (m + LANES - 1) / LANES, width = vectors * LANES;
  Invert invert = invert_of<MOST_VECTORS>(vectors);
  int failed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
  {
    std::vector<float> a(m * width), w(m * width);
#pragma omp for reduction(+ : failed)
    for (long matrix = 0; matrix < b; matrix++) {
      for (long i = 0; i < m; i++) {
        std::memcpy(&a[i * width], matrices + (matrix * m + i) * m, m * sizeof(float));
        a[i * width + i] += ridge;
      }
      failed += !invert(a.data(), w.data(), m, width);
      for (long i = 0; i < m; i++)
        for (long j = 0; j <= i; j++)
          out[(matrix * m + i) * m + j] = out[(matrix * m + j) * m + i] = a[i * width + j];
    }
  }
  return failed;
}

// GELU of n numbers, in its exact form or its tanh form.
void softmaxfree_gelu(const float* x, float* out, long n, int tanh, int threads) {
  map(n, threads, [=](long i, long count) {
    Floats own = load_some(x + i, count);
    store_some(out + i, tanh ? gelu<true>(own) : gelu<false>(own), count);
  });
}

// The gradient of x, of that of the result; it may be written over the latter.
void softmaxfree_gelu_backward(const float* grad, const float* x, float* out, long n, int tanh,
                               int threads) {
  map(n, threads, [=](long i, long count) {
    Floats own = load_some(x + i, count);
    Floats slope = tanh ? gelu_slope<true>(own) : gelu_slope<false>(own);
    store_some(out + i, slope * load_some(grad + i, count), count);
  });
}

// The gradient (heads, k, k) of the kernels of a convolution in which all `channels` of a head
// share one: of values v and results g, images (b, height, width, heads * channels), rows `step`
// and images `stack` apart. Returns 0 where there is no code for this k.
int softmaxfree_kernel_gradient(const float* v, long v_stack, long v_step, const float* g,
                                long g_stack, long g_step, float* out, long b, long height,
                                long width, long heads, long channels, long k, int threads) {
  decltype(&correlate<3>) correlate_rows = k == 3   ? correlate<3>
                                           : k == 5 ? correlate<5>
                                           : k == 7 ? correlate<7>
                                           : k == 9 ? correlate<9>
                                                    : nullptr;
  if (!correlate_rows || v_step != g_step || channels % LANES) return 0;
#pragma omp parallel for num_threads(threads) if (threads > 1)
  for (long task = 0; task < heads * k; task++) {
    long head = task / k, dy = task % k - k / 2;
    std::vector<double> total(k);
    for (long image = 0; image < b; image++)
      for (long y = dy < 0 ? -dy : 0; y < height - (dy > 0 ? dy : 0); y++) {
        float sums[9] = {};
        correlate_rows(g + image * g_stack + y * width * g_step + head * channels,
                       v + image * v_stack + (y + dy) * width * v_step + head * channels, width,
                       g_step, channels, sums);
        for (long j = 0; j < k; j++) total[j] += sums[j];
      }
    for (long j = 0; j < k; j++) out[task * k + j] = total[j];
  }
  return 1;
}

}  // extern "C"
