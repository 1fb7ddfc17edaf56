// Computes elementary functions of whole vectors, under the names of SLEEF that Inductor's vectors call.
//
// Those that a step computes many thousand times are vectorised; others take the C library's, number by number.

#include <cmath>

#include "tensor.h"
#include "vector.h"

using snapcap::kWidth;
using snapcap::Vector;

#define SNAPCAP_JOIN(a, b, c) a##b##c
#define SNAPCAP_NAME(name, width, precision) SNAPCAP_JOIN(Sleef_##name##f, width, _##precision)
#if defined(__AVX512F__)
#define SNAPCAP_WIDTH 16
#elif defined(__AVX2__)
#define SNAPCAP_WIDTH 8
#else
#define SNAPCAP_WIDTH 4
#endif

#define SNAPCAP_EACH(name, precision)                                                                  \
  SNAPCAP_C Vector SNAPCAP_NAME(name, SNAPCAP_WIDTH, precision)(Vector x) {                              \
    for (int lane = 0; lane < kWidth; ++lane) x[lane] = std::name(x[lane]);                              \
    return x;                                                                                            \
  }

SNAPCAP_C Vector SNAPCAP_NAME(exp, SNAPCAP_WIDTH, u10)(Vector x) { return snapcap::exp(x); }
SNAPCAP_C Vector SNAPCAP_NAME(tanh, SNAPCAP_WIDTH, u10)(Vector x) { return snapcap::tanh(x); }
SNAPCAP_EACH(log, u10)
SNAPCAP_EACH(log1p, u10)
SNAPCAP_EACH(expm1, u10)
SNAPCAP_EACH(erf, u10)
SNAPCAP_EACH(sin, u10)
SNAPCAP_EACH(sin, u35)
SNAPCAP_EACH(cos, u10)
SNAPCAP_EACH(cos, u35)

SNAPCAP_C Vector SNAPCAP_NAME(pow, SNAPCAP_WIDTH, u10)(Vector x, Vector y) {
  for (int lane = 0; lane < kWidth; ++lane) x[lane] = std::pow(x[lane], y[lane]);
  return x;
}
