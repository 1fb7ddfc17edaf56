// Multiplies float32 by weights of int8, which have a scale for each output: torch's _weight_int8pack_mm.
//
// Each row of the left matrix is rounded to whole steps. A step is 1/127 of a bound that few numbers of the row exceed,
// so most numbers fit into int8. The rest of a larger number is kept beside the row, as in LLM.int8() (Dettmers et
// al., 2022), so a few large inputs do not make the steps of the others coarse. Products of integers are added exactly
// in int32, so a row's result is the same with any number of rows and threads.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>

#include "matrix.h"
#include "team.h"
#include "tensor.h"
#include "vector.h"

using namespace snapcap;

namespace {

#if defined(__AVX512F__)
constexpr int kTileRows = 12;  // with two vectors each 24 of 32 registers
#else
constexpr int kTileRows = 6;  // 12 of 16
#endif
constexpr int kTileVectors = 2;
constexpr int64_t kColumns = kTileVectors * kWidth;
constexpr int64_t kDepth = 1024;  // of a panel, which then is 32 KiB at most
constexpr int kFewRows = 8;  // that nothing is packed for
constexpr int64_t kFewColumns = 32;  // that a thread takes at least
constexpr int64_t kPartsEach = 3;  // jobs of a product for each thread, so that all threads end together

typedef int8_t Bytes __attribute__((vector_size(4 * kWidth)));  // quads of numbers, one after the other in depth

// A number of a row that int8 does not hold: where it is, and how many steps are missing.
struct Rest {
  int32_t at, steps;
};

struct Row {
  float step;     // what an integer stands for
  int32_t total;  // of the row's numbers in int8
  const Rest *begin, *end;
};

struct Quantised {
  int64_t rows, columns, depth, width;  // `width`: bytes of a left row, whole vectors
  const int8_t* left;                   // [rows, width], zeros behind the depth
  const Row* row;                       // [rows]
  const int8_t* right;                  // [columns, depth], from -127 to 127
  const float* scale;                   // [columns]
  float* result;                        // [rows, columns]
};

constexpr int kMost = 127;  // so that a number and its negative are both there
constexpr int64_t kDeepest = 1 << 16;  // so that 255 * 127 * depth is below 2^31

constexpr int64_t most_rests(int64_t depth) { return depth / 128; }

// The instruction for quads takes unsigned numbers on one side: weights plus 128.
#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
constexpr int kAdded = 128;
#else
constexpr int kAdded = 0;
#endif

// Adds the products of the four numbers of each quad. `right`: weights `with_added`; the caller subtracts what that
// adds.
inline Integers add_quads(Integers sums, Bytes left, Bytes right) {
#if defined(__AVX512VNNI__)
  return (Integers)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)right, (__m512i)left);
#elif defined(__AVX512BW__)
  const __m512i ones = _mm512_set1_epi16(1), size = _mm512_abs_epi8((__m512i)left), weights = (__m512i)right;
  const __m512i turned = _mm512_mask_sub_epi8(weights, _mm512_movepi8_mask((__m512i)left), _mm512_setzero_si512(), weights);
  return sums + (Integers)_mm512_madd_epi16(_mm512_maddubs_epi16(size, turned), ones);
#elif defined(__AVXVNNI__) && !defined(__AVX512F__)
  return (Integers)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)right, (__m256i)left);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  const __m256i ones = _mm256_set1_epi16(1), size = _mm256_abs_epi8((__m256i)left);
  const __m256i turned = _mm256_sign_epi8((__m256i)right, (__m256i)left);
  return sums + (Integers)_mm256_madd_epi16(_mm256_maddubs_epi16(size, turned), ones);
#elif defined(__ARM_FEATURE_DOTPROD)
  return (Integers)vdotq_s32((int32x4_t)sums, (int8x16_t)left, (int8x16_t)right);
#else
  for (int lane = 0; lane < kWidth; ++lane)
    for (int k = 4 * lane; k < 4 * lane + 4; ++k) sums[lane] += left[k] * right[k];
  return sums;
#endif
}

// Weights as `add_quads` takes them.
inline Bytes with_added(Bytes weights) { return weights ^ static_cast<int8_t>(kAdded); }

template <class Many>
Many load_many(const void* from) {
  Many vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

inline Vector size_of(Vector x) { return x < 0.0f ? -x : x; }

// The numbers of a row, a vector at a time; zeros behind its end.
template <class Body>
inline void each_vector(const float* row, int64_t depth, const Body& body) {
  int64_t k = 0;
  for (; k + kWidth <= depth; k += kWidth) body(k, load(row + k));
  if (k == depth) return;
  Vector end{};
  std::memcpy(&end, row + k, (depth - k) * sizeof(float));
  body(k, end);
}

// The total and the maximum of a row's absolute values up to a bound. `above`: how many values exceed it.
struct Sizes {
  float total, largest, above;
};

Sizes sizes_up_to(float bound, const float* row, int64_t depth) {
  Vector total{}, largest{}, above{};
  each_vector(row, depth, [&](int64_t, Vector x) {
    const Vector size = size_of(x), within = size > bound ? all_of(0) : size;
    total += within;
    largest = within > largest ? within : largest;
    above += size > bound ? all_of(1) : all_of(0);
  });
  return {sum_of(total), largest_of(largest), sum_of(above)};
}

// The step of a row: 1/127 of a bound that at most `most_rests` numbers exceed. The bound is 3.76 times the mean size
// of the numbers below it, which is three standard deviations of normal ones, or the largest number if that is less.
// NaN if a number is NaN, or the sum of the sizes is infinite.
float step_of(const float* row, int64_t depth) {
  constexpr float kDeviations = 3.76f;   // three standard deviations / the mean size of normally distributed numbers
  constexpr float kGrowth = 1.25f;
  constexpr float kMostSteps = 1 << 22;  // in a row, so that its sums with weights of int8 stay below 2^31
  constexpr float kLeast = std::numeric_limits<float>::min();  // whose inverse is finite
  const float most = static_cast<float>(most_rests(depth)), infinite = std::numeric_limits<float>::infinity();
  const auto bound_of = [&](const Sizes& sizes) {
    return std::max(std::min(kDeviations * sizes.total / (depth - sizes.above), sizes.largest), kMost * kLeast);
  };
  const Sizes all = sizes_up_to(infinite, row, depth);
  if (!(all.total < infinite)) return std::numeric_limits<float>::quiet_NaN();
  float bound = bound_of(all);
  Sizes sizes = sizes_up_to(bound, row, depth);
  while (sizes.above > 0 && sizes.above <= most && bound_of(sizes) * kGrowth < bound) {
    bound = bound_of(sizes);
    sizes = sizes_up_to(bound, row, depth);
  }
  for (; sizes.above > most; sizes = sizes_up_to(bound, row, depth)) bound = std::min(bound * kGrowth, all.largest);
  return std::max(bound / kMost, all.total / kMostSteps);
}

// Rounds a row to int8 and rests, in steps. Zeros follow the row's end.
Row round_row(const float* from, int64_t depth, int8_t* to, int64_t width, Rest* rest) {
  typedef int8_t Numbers __attribute__((vector_size(kWidth)));
  constexpr float kToInteger = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to an integer
  std::memset(to + depth, 0, width - depth);
  const float step = step_of(from, depth), factor = 1 / step;
  Integers totals{};
  Rest* next = rest;
  each_vector(from, depth, [&](int64_t k, Vector x) {
    const Integers whole = step == step ? (Integers)(x * factor + kToInteger) - (Integers)all_of(kToInteger) : Integers{};
    const Integers held = whole > kMost ? Integers{} + kMost : (whole < -kMost ? Integers{} - kMost : whole);
    const Integers missing = whole - held;
    const Numbers rounded = __builtin_convertvector(held, Numbers);
    std::memcpy(to + k, &rounded, sizeof rounded);
    totals += held;
    if (any_of(missing))
      for (int lane = 0; lane < kWidth; ++lane)
        if (missing[lane] != 0) *next++ = {static_cast<int32_t>(k + lane), missing[lane]};
  });
  int32_t total = 0;
  for (int lane = 0; lane < kWidth; ++lane) total += totals[lane];
  return {step, total, rest, next};
}

// Multiplies rows by a panel, whose rows are kColumns quads.
template <int kRows>
struct Tile {
  static void run(const Quantised& of, int64_t row, int64_t k, int64_t quads, int64_t column, int64_t columns,
                  const int8_t* panel) {
    const bool first = k == 0, last = k + 4 * quads >= of.depth;
    Integers sums[kRows][kTileVectors];
    for (int i = 0; i < kRows; ++i)
      for (int j = 0; j < kTileVectors; ++j)
        sums[i][j] = first ? Integers{} - kAdded * of.row[row + i].total : kept(of, row + i, column + j * kWidth, columns - j * kWidth);
    const int8_t* left = of.left + row * of.width + k;
    const int8_t* right = panel;
    for (int64_t quad = 0; quad < quads; ++quad, right += 4 * kColumns) {
      Bytes b[kTileVectors];
      for (int j = 0; j < kTileVectors; ++j) b[j] = load_many<Bytes>(right + j * 4 * kWidth);
      for (int i = 0; i < kRows; ++i) {
        int32_t four;
        std::memcpy(&four, left + i * of.width + 4 * quad, sizeof four);
        const Bytes a = (Bytes)(Integers{} + four);
        for (int j = 0; j < kTileVectors; ++j) sums[i][j] = add_quads(sums[i][j], a, b[j]);
      }
    }
    for (int i = 0; i < kRows; ++i) {
      for (const Rest* each = of.row[row + i].begin; each < of.row[row + i].end; ++each) {
        const int64_t at = each->at - k;
        if (at < 0 || at >= 4 * quads) continue;
        for (int j = 0; j < kTileVectors; ++j) {
          const Integers quad = load_many<Integers>(panel + (at / 4 * kColumns + j * kWidth) * 4);
          sums[i][j] += (((quad << (24 - 8 * (at % 4))) ^ (kAdded << 24)) >> 24) * each->steps;
        }
      }
      for (int j = 0; j < kTileVectors; ++j) put(of, row + i, column + j * kWidth, columns - j * kWidth, sums[i][j], last);
    }
  }

  // Between two chunks of the depth, the result's memory holds the sums as integers.
  static Integers kept(const Quantised& of, int64_t row, int64_t column, int64_t columns) {
    Integers sums{};
    if (columns > 0) std::memcpy(&sums, of.result + row * of.columns + column, std::min<int64_t>(columns, kWidth) * 4);
    return sums;
  }

  static void put(const Quantised& of, int64_t row, int64_t column, int64_t columns, Integers sums, bool last) {
    if (columns <= 0) return;
    float* to = of.result + row * of.columns + column;
    Vector found = (Vector)sums;
    if (columns >= kWidth) {
      store(to, last ? __builtin_convertvector(sums, Vector) * (of.row[row].step * load(of.scale + column)) : found);
      return;
    }
    if (last)
      for (int64_t lane = 0; lane < columns; ++lane) found[lane] = static_cast<float>(sums[lane]) * (of.row[row].step * of.scale[column + lane]);
    std::memcpy(to, &found, columns * sizeof(float));
  }
};

// Numbers [k, k + 4 * quads) of some columns, as rows of kColumns quads.
void pack(const Quantised& of, int64_t k, int64_t quads, int64_t column, int64_t columns, int8_t* panel) {
  const int64_t depth = std::min(4 * quads, of.depth - k);
  for (int64_t part = 0; part < kColumns; part += kWidth) {
    const int8_t* from[kWidth];  // of a column that is not there the last one again
    for (int j = 0; j < kWidth; ++j) from[j] = of.right + (column + std::min(part + j, columns - 1)) * of.depth + k;
    int8_t* to = panel + 4 * part;
    int64_t at = 0;
    for (; at + 4 * kWidth <= depth; at += 4 * kWidth) {
      Vector square[kWidth];  // whose lanes are quads
      for (int j = 0; j < kWidth; ++j) square[j] = (Vector)with_added(load_many<Bytes>(from[j] + at));
      turn(square);
      for (int i = 0; i < kWidth; ++i) std::memcpy(to + (at + 4 * i) * kColumns, &square[i], sizeof square[i]);
    }
    for (; at < 4 * quads; ++at)
      for (int j = 0; j < kWidth; ++j) to[at / 4 * 4 * kColumns + 4 * j + at % 4] = (at < depth ? from[j][at] : int8_t{0}) ^ kAdded;
  }
}

void multiply_panel(const Quantised& of, int64_t begin, int64_t end, int64_t column, int64_t columns) {
  auto* panel = reinterpret_cast<int8_t*>(scratch(kPanel, kDepth * kColumns / 4));
  for (int64_t k = 0; k < of.depth; k += kDepth) {
    const int64_t quads = ceiling(std::min(kDepth, of.depth - k), 4);
    pack(of, k, quads, column, columns, panel);
    in_groups(begin, end, kTileRows, [&](int64_t row, int64_t after) {
      with_rows<Tile, kTileRows>(after - row, of, row, k, quads, column, columns, panel);
    });
  }
}

// Multiplies a few rows by columns [begin, end). Weights are not packed but read once, column by column, because a
// processor fetches ahead of one stream of reads. So threads read far from each other: two that took 32 columns in turn
// read no faster than one.
template <int kRows>
struct Columns {
  static void run(const Quantised& of, int64_t begin, int64_t end) {
    constexpr int kFours = (kRows + 3) / 4;
    for (int64_t column = begin; column < end; ++column) {
      const int8_t* right = of.right + column * of.depth;
      Integers sums[4 * kFours] = {};
      int64_t k = 0;
      for (; k + 4 * kWidth <= of.depth; k += 4 * kWidth) {
        const Bytes b = with_added(load_many<Bytes>(right + k));
        for (int i = 0; i < kRows; ++i) sums[i] = add_quads(sums[i], load_many<Bytes>(of.left + i * of.width + k), b);
      }
      if (k < of.depth) {
        Bytes b{};
        std::memcpy(&b, right + k, of.depth - k);
        b = with_added(b);
        for (int i = 0; i < kRows; ++i) sums[i] = add_quads(sums[i], load_many<Bytes>(of.left + i * of.width + k), b);
      }
      FourIntegers totals[kFours];
      for (int i = 0; i < kFours; ++i)
        totals[i] = sums_of<FourIntegers>(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
      for (int i = 0; i < kRows; ++i) {
        int32_t total = totals[i / 4][i % 4] - kAdded * of.row[i].total;
        for (const Rest *each = of.row[i].begin; each < of.row[i].end; ++each) total += each->steps * right[each->at];
        of.result[i * of.columns + column] = static_cast<float>(total) * (of.row[i].step * of.scale[column]);
      }
    }
  }
};

void multiply_columns(const Quantised& of, int threads) {
  const int helpers = helpers_for(threads, of.rows * of.columns * of.depth);
  const int64_t each = std::max(ceiling(of.columns, kPartsEach * (helpers + 1)), kFewColumns);
  share_out(ceiling(of.columns, each), helpers, [&](int64_t job) {
    with_rows<Columns, kFewRows>(of.rows, of, job * each, std::min(of.columns, (job + 1) * each));
  });
}

void multiply_panels(const Quantised& of, int threads) {
  const int64_t panels = ceiling(of.columns, kColumns);
  const int helpers = helpers_for(threads, of.rows * of.columns * of.depth);
  const int64_t parts = helpers == 0 ? 1 : std::clamp<int64_t>(ceiling(kPartsEach * (helpers + 1), panels), 1, ceiling(of.rows, kTileRows));
  share_out(panels * parts, helpers, [&](int64_t job) {
    const int64_t column = job / parts * kColumns, part = job % parts;
    multiply_panel(of, of.rows * part / parts, of.rows * (part + 1) / parts, column, std::min(kColumns, of.columns - column));
  });
}

}  // namespace

SNAPCAP_C AOTITorchError aoti_torch_cpu__weight_int8pack_mm(AtenTensorHandle self, AtenTensorHandle weight,
                                                            AtenTensorHandle scales, AtenTensorHandle* result) {
  return guarded(__func__, [&] {
    require(self->dims == 2 && weight->dims == 2 && scales->dims == 1, "a product by int8 has two dimensions");
    require(self->dtype == kFloat32 && weight->dtype == kInt8 && scales->dtype == kFloat32 && weight->row_major() &&
                scales->row_major() && self->strides[1] == 1,
            "products by int8 are served of float32, row by row");
    const int64_t rows = self->sizes[0], depth = self->sizes[1], columns = weight->sizes[0];
    require(weight->sizes[1] == depth && scales->sizes[0] == columns && depth > 0 && depth <= kDeepest,
            "the shapes of a product by int8 do not fit");
    const int64_t shape[2] = {rows, columns};
    std::unique_ptr<Tensor> made(make_tensor(2, shape, kFloat32));
    const int64_t width = ceiling(depth, 4 * kWidth) * 4 * kWidth, rests = most_rests(depth);
    auto* row = reinterpret_cast<Row*>(scratch(kLeft, ceiling(rows * (sizeof(Row) + rests * sizeof(Rest) + width), 4)));
    auto* rest = reinterpret_cast<Rest*>(row + rows);
    auto* left = reinterpret_cast<int8_t*>(rest + rows * rests);
    const int threads = thread_count();
    share_out(ceiling(rows, 16), helpers_for(threads, rows * depth), [&](int64_t part) {
      for (int64_t i = part * 16; i < std::min(rows, part * 16 + 16); ++i)
        row[i] = round_row(self->data<float>() + i * self->strides[0], depth, left + i * width, width, rest + i * rests);
    });
    const Quantised of{rows, columns, depth, width, left, row, weight->data<int8_t>(), scales->data<float>(), made->data<float>()};
    if (rows <= kFewRows) {
      multiply_columns(of, threads);
    } else {
      multiply_panels(of, threads);
    }
    *result = made.release();
  });
}
