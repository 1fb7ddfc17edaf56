// Defines vectors of the widest width that the processor has, and functions of them.
//
// Where a product and a sum are rounded once, `fused` says so: left to the compiler (-ffp-contract), a result would
// depend on which of its ways through this code computes it, and so on the number of threads.

#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace snapcap {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

typedef float Vector __attribute__((vector_size(4 * kWidth)));
typedef int32_t Integers __attribute__((vector_size(4 * kWidth)));

inline Vector load(const float* from) {
  Vector vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

inline void store(float* to, Vector vector) { std::memcpy(to, &vector, sizeof vector); }

// A vector from memory that stays in a register: without it the compiler loads one again for each of its uses.
inline Vector load_once(const float* from) {
  Vector vector = load(from);
#if defined(__x86_64__)
  __asm__("" : "+v"(vector));
#endif
  return vector;
}

// Has memory that is read soon come into the second-level cache. The address need not be anybody's.
inline void prefetch(const void* from) { __builtin_prefetch(from, 0, 2); }

inline Vector all_of(float value) { return value - Vector{}; }  // of which the compiler knows that it is the value

// a * b + c, rounded once where the processor can.
inline Vector fused(Vector a, Vector b, Vector c) {
#if defined(__AVX512F__)
  return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) && defined(__AVX2__)
  return (Vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Vector)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

inline Vector fused(float a, Vector b, Vector c) { return fused(all_of(a), b, c); }

typedef float Four __attribute__((vector_size(16)));
typedef int32_t FourIntegers __attribute__((vector_size(16)));

template <class Few = Four, class Many>
inline Few folded(Many vector) {
  Few parts[kWidth / 4];
  std::memcpy(parts, &vector, sizeof parts);
  for (int part = 1; part < kWidth / 4; ++part) parts[0] += parts[part];
  return parts[0];
}

inline float sum_of(Vector vector) {
  const Four four = folded(vector);
  return (four[0] + four[2]) + (four[1] + four[3]);
}

inline float largest_of(Vector vector) {
  Four parts[kWidth / 4];
  std::memcpy(parts, &vector, sizeof parts);
  for (int part = 1; part < kWidth / 4; ++part) parts[0] = parts[part] > parts[0] ? parts[part] : parts[0];
  const Four four = parts[0];
  const float first = four[0] > four[1] ? four[0] : four[1], second = four[2] > four[3] ? four[2] : four[3];
  return first > second ? first : second;
}

// Whether a lane is not 0.
inline bool any_of(Integers lanes) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes) != 0;
#elif defined(__AVX2__)
  return _mm256_testz_si256((__m256i)lanes, (__m256i)lanes) == 0;
#else
  return (lanes[0] | lanes[1] | lanes[2] | lanes[3]) != 0;
#endif
}

#if defined(__clang__)
#define SNAPCAP_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else  // GCC has that from version 12 on
#define SNAPCAP_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Places{__VA_ARGS__})
#endif

// The sum of each of four vectors, as `sum_of` adds them.
template <class Few = Four, class Many>
inline Few sums_of(Many first, Many second, Many third, Many fourth) {
  typedef FourIntegers Places __attribute__((unused));
  const Few a = folded<Few>(first), b = folded<Few>(second), c = folded<Few>(third), d = folded<Few>(fourth);
  const Few ab = SNAPCAP_SHUFFLE(a, b, 0, 4, 1, 5) + SNAPCAP_SHUFFLE(a, b, 2, 6, 3, 7);
  const Few cd = SNAPCAP_SHUFFLE(c, d, 0, 4, 1, 5) + SNAPCAP_SHUFFLE(c, d, 2, 6, 3, 7);
  return SNAPCAP_SHUFFLE(ab, cd, 0, 1, 4, 5) + SNAPCAP_SHUFFLE(ab, cd, 2, 3, 6, 7);
}

// Lanes of two vectors in turn: those of their first halves with kFrom = 0, of their second halves with kWidth / 2.
template <int kFrom, int... kLane>
inline Vector in_turn(Vector a, Vector b, std::integer_sequence<int, kLane...>) {
  typedef Integers Places __attribute__((unused));
  return SNAPCAP_SHUFFLE(a, b, (kFrom + kLane / 2 + kLane % 2 * kWidth)...);
}

// Turns a square around: lane j of vector i becomes lane i of vector j.
inline void turn(Vector (&square)[kWidth]) {
  constexpr int kHalf = kWidth / 2;
  constexpr auto kLanes = std::make_integer_sequence<int, kWidth>();
  for (int step = 1; step < kWidth; step *= 2) {
    Vector before[kWidth];
    std::memcpy(before, square, sizeof before);
    for (int i = 0; i < kHalf; ++i) {
      square[2 * i] = in_turn<0>(before[i], before[i + kHalf], kLanes);
      square[2 * i + 1] = in_turn<kHalf>(before[i], before[i + kHalf], kLanes);
    }
  }
}

// e^x to within one unit in the last place: x = n ln 2 + r with |r| <= ln 2 / 2, and a polynomial for e^r, whose
// coefficients are those of Cephes' expf (Moshier, 1989). Results below the smallest normal number are 0.
inline Vector exp(Vector x) {
  const Vector bounded = x > 89.0f ? all_of(89.0f) : (x < -88.0f ? all_of(-88.0f) : x);
  const Vector shifted = fused(1.44269504088896341f, bounded, all_of(12582912.0f));  // 1.5 * 2^23 rounds to an integer
  const Vector n = shifted - 12582912.0f;
  Vector r = fused(n, all_of(-0.693359375f), bounded);
  r = fused(n, all_of(2.12194440e-4f), r);
  Vector y = fused(1.9875691500e-4f, r, all_of(1.3981999507e-3f));
  y = fused(y, r, all_of(8.3334519073e-3f));
  y = fused(y, r, all_of(4.1665795894e-2f));
  y = fused(y, r, all_of(1.6666665459e-1f));
  y = fused(y, r, all_of(5.0000001201e-1f));
  y = fused(y, r * r, r) + 1.0f;
  // In two factors, as 2^128 is no number.
  const Integers whole = __builtin_convertvector(n, Integers);
  const Integers half = whole >> 1;
  const Integers first = (half + 127) << 23, second = (whole - half + 127) << 23;
  Vector a, b;
  std::memcpy(&a, &first, sizeof a);
  std::memcpy(&b, &second, sizeof b);
  y = y * a * b;
  y = x < -87.3365447504f ? all_of(0.0f) : y;
  return x != x ? x : y;
}

// tanh(x) to within two units in the last place, with the two formulas and the polynomial of Cephes' tanhf.
inline Vector tanh(Vector x) {
  const Vector size = x < 0.0f ? -x : x;
  const Vector far = 1.0f - 2.0f / (exp(size + size) + 1.0f);
  const Vector square = x * x;
  Vector y = fused(-5.70498872745e-3f, square, all_of(2.06390887954e-2f));
  y = fused(y, square, all_of(-5.37397155531e-2f));
  y = fused(y, square, all_of(1.33314422036e-1f));
  y = fused(y, square, all_of(-3.33332819422e-1f));
  const Vector near = fused(y * square, x, x);
  return size < 0.625f ? near : (x < 0.0f ? -far : far);
}

}  // namespace snapcap
