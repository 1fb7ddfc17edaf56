// Multiplies float32 by weights of int8, which have a scale for each output: torch's _weight_int8pack_mm.
//
// Each row of the left matrix is rounded to 16-bit integers, in steps of its largest number, so that what a result
// loses comes from the weights. Products of integers are added exactly in int32, kDepth of them at a time, and these
// sums are added in float32, one after the other. So a row's result is the same with any number of rows and threads.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

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
constexpr int64_t kDepth = 512;  // 512 * 127 * 32767 is below 2^31
constexpr int kFewRows = 8;  // that nothing is packed for
constexpr int64_t kFewColumns = 32;  // of what a thread takes then
constexpr float kMost = 32767;

typedef int16_t Shorts __attribute__((vector_size(4 * kWidth)));  // pairs of numbers, one after the other in depth

struct Quantised {
  int64_t rows, columns, depth, steps;  // `steps`: between rows, even
  const int16_t* left;                  // [rows, steps], zeros behind the depth
  const float* left_scale;              // [rows]
  const int8_t* right;                  // [columns, depth]
  const float* right_scale;             // [columns]
  float* result;                        // [rows, columns]
};

Shorts load_shorts(const int16_t* from) {
  Shorts vector;
  std::memcpy(&vector, from, sizeof vector);
  return vector;
}

// Adds the products of both numbers of each pair.
inline Integers add_pairs(Integers sums, Shorts a, Shorts b) {
#if defined(__AVX512VNNI__)
  return (Integers)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__)
  return sums + (Integers)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return sums + (Integers)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
  for (int lane = 0; lane < kWidth; ++lane) sums[lane] += a[2 * lane] * b[2 * lane] + a[2 * lane + 1] * b[2 * lane + 1];
  return sums;
#endif
}

// 2 * kWidth numbers of int8.
inline Shorts widened(const int8_t* from) {
  typedef int8_t Bytes __attribute__((vector_size(2 * kWidth)));
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
#if defined(__AVX512BW__)  // which the compiler would do in halves
  return (Shorts)_mm512_cvtepi8_epi16((__m256i)bytes);
#elif defined(__AVX2__) && !defined(__AVX512F__)
  return (Shorts)_mm256_cvtepi8_epi16((__m128i)bytes);
#else
  return __builtin_convertvector(bytes, Shorts);
#endif
}

// A row as integers; returns what one of them stands for. A row of zeros stays zero, and a row with a number that is
// none, or infinite, has a step that is none.
float round_row(const float* from, int64_t depth, int16_t* to, int64_t steps) {
  typedef int16_t Halves __attribute__((vector_size(2 * kWidth)));
  constexpr float kToInteger = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to an integer
  const int64_t whole = depth / kWidth * kWidth;
  Vector most{}, none{};
  for (int64_t k = 0; k < whole; k += kWidth) {
    const Vector x = load(from + k), size = x < 0.0f ? -x : x;
    most = size > most ? size : most;
    none += x * 0.0f;
  }
  float largest = largest_of(most), is_none = sum_of(none);
  for (int64_t k = whole; k < depth; ++k) {
    largest = std::max(largest, std::fabs(from[k]));
    is_none += from[k] * 0.0f;
  }
  const float step = largest / kMost + is_none, factor = step > 0 ? kMost / largest : 0;
  for (int64_t k = 0; k < whole; k += kWidth) {
    const Vector shifted = load(from + k) * factor + kToInteger;
    const Integers bits = (Integers)shifted - (Integers)all_of(kToInteger);
    const Halves rounded = __builtin_convertvector(bits, Halves);
    std::memcpy(to + k, &rounded, sizeof rounded);
  }
  for (int64_t k = whole; k < depth; ++k) to[k] = static_cast<int16_t>(std::nearbyint(from[k] * factor));
  std::fill(to + depth, to + steps, int16_t{0});
  return step;
}

// Adds the sums of a chunk of the depth to those of the chunks before it, and after the last one scales the result.
inline void put(const Quantised& of, int64_t row, int64_t k, int64_t column, int64_t columns, Integers sums) {
  float* to = of.result + row * of.columns + column;
  const bool first = k == 0, last = k + kDepth >= of.depth;
  Vector found = __builtin_convertvector(sums, Vector);
  if (columns >= kWidth) {
    if (!first) found += load(to);
    store(to, last ? found * (of.left_scale[row] * load(of.right_scale + column)) : found);
    return;
  }
  for (int64_t lane = 0; lane < columns; ++lane) {
    if (!first) found[lane] += to[lane];
    to[lane] = last ? found[lane] * (of.left_scale[row] * of.right_scale[column + lane]) : found[lane];
  }
}

// Rows of a chunk of the depth: `panel` has pairs, kColumns of them a row.
template <int kRows>
struct Tile {
  static void run(const Quantised& of, int64_t row, int64_t k, int64_t pairs, int64_t column, int64_t columns,
                  const int16_t* panel) {
    Integers sums[kRows][kTileVectors] = {};
    const int16_t* left = of.left + row * of.steps + k;
    for (int64_t pair = 0; pair < pairs; ++pair, panel += 2 * kColumns) {
      Shorts b[kTileVectors];
      for (int j = 0; j < kTileVectors; ++j) b[j] = load_shorts(panel + j * 2 * kWidth);
      for (int i = 0; i < kRows; ++i) {
        int32_t both;
        std::memcpy(&both, left + i * of.steps + 2 * pair, sizeof both);
        const Integers a = Integers{} + both;
        for (int j = 0; j < kTileVectors; ++j) sums[i][j] = add_pairs(sums[i][j], (Shorts)a, b[j]);
      }
    }
    for (int i = 0; i < kRows; ++i)
      for (int j = 0; j < kTileVectors; ++j) put(of, row + i, k, column + j * kWidth, columns - j * kWidth, sums[i][j]);
  }
};

// Numbers [k, k + 2 * pairs) of some columns, as rows of kColumns pairs.
void pack(const Quantised& of, int64_t k, int64_t pairs, int64_t column, int64_t columns, int16_t* panel) {
  const int64_t depth = std::min(2 * pairs, of.depth - k);
  for (int64_t part = 0; part < kColumns; part += kWidth) {
    const int8_t* from[kWidth];  // of a column that is not there the last one again
    for (int j = 0; j < kWidth; ++j) from[j] = of.right + (column + std::min(part + j, columns - 1)) * of.depth + k;
    int16_t* to = panel + 2 * part;
    int64_t at = 0;
    for (; at + 2 * kWidth <= depth; at += 2 * kWidth) {
      Vector square[kWidth];  // whose lanes are pairs
      for (int j = 0; j < kWidth; ++j) square[j] = (Vector)widened(from[j] + at);
      turn(square);
      for (int i = 0; i < kWidth; ++i) std::memcpy(to + (at + 2 * i) * kColumns, &square[i], sizeof square[i]);
    }
    for (; at < 2 * pairs; ++at)
      for (int j = 0; j < kWidth; ++j) to[at / 2 * 2 * kColumns + 2 * j + at % 2] = at < depth ? from[j][at] : int16_t{0};
  }
}

void multiply_panel(const Quantised& of, int64_t begin, int64_t end, int64_t column, int64_t columns) {
  auto* panel = reinterpret_cast<int16_t*>(scratch(kPanel, kDepth * kColumns / 2));
  for (int64_t k = 0; k < of.depth; k += kDepth) {
    const int64_t pairs = ceiling(std::min(kDepth, of.depth - k), 2);
    pack(of, k, pairs, column, columns, panel);
    in_groups(begin, end, kTileRows, [&](int64_t row, int64_t after) {
      with_rows<Tile, kTileRows>(after - row, of, row, k, pairs, column, columns, panel);
    });
  }
}

// The products' sum of some numbers at the end of a row, which fill no vector.
__attribute__((noinline)) int32_t sum_of(const int16_t* left, const int8_t* right, int64_t begin, int64_t end) {
  int32_t sum = 0;
  for (int64_t k = begin; k < end; ++k) sum += left[k] * right[k];
  return sum;
}

// A few rows by columns [begin, end), whose weights are read once, from one end to the other, and not packed: column by
// column, as a processor fetches ahead of one stream of reads.
template <int kRows>
struct Columns {
  static void run(const Quantised& of, int64_t begin, int64_t end) {
    constexpr int kFours = (kRows + 3) / 4;
    for (int64_t column = begin; column < end; ++column) {
      const int8_t* right = of.right + column * of.depth;
      Four totals[kFours] = {};
      for (int64_t k = 0; k < of.depth; k += kDepth) {
        const int64_t after = std::min(k + kDepth, of.depth);
        Integers sums[4 * kFours] = {};
        int64_t at = k;
        for (; at + 2 * kWidth <= after; at += 2 * kWidth) {
          const Shorts b = widened(right + at);
          for (int i = 0; i < kRows; ++i) sums[i] = add_pairs(sums[i], load_shorts(of.left + i * of.steps + at), b);
        }
        FourIntegers fours[kFours];
        for (int i = 0; i < kFours; ++i)
          fours[i] = sums_of<FourIntegers>(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]);
        if (at < after)
          for (int i = 0; i < kRows; ++i) fours[i / 4][i % 4] += sum_of(of.left + i * of.steps, right, at, after);
        for (int i = 0; i < kFours; ++i) totals[i] += __builtin_convertvector(fours[i], Four);
      }
      for (int i = 0; i < kRows; ++i)
        of.result[i * of.columns + column] = totals[i / 4][i % 4] * (of.left_scale[i] * of.right_scale[column]);
    }
  }
};

void multiply_columns(const Quantised& of, int threads) {
  const int64_t jobs = ceiling(of.columns, kFewColumns);
  share_out(jobs, helpers_for(threads, of.rows * of.columns * of.depth), [&](int64_t job) {
    const int64_t begin = job * kFewColumns, end = std::min(of.columns, begin + kFewColumns);
    with_rows<Columns, kFewRows>(of.rows, of, begin, end);
  });
}

void multiply_panels(const Quantised& of, int threads) {
  const int64_t panels = ceiling(of.columns, kColumns);
  const int helpers = helpers_for(threads, of.rows * of.columns * of.depth);
  const int64_t parts = helpers == 0 ? 1 : std::clamp<int64_t>(ceiling(3 * (helpers + 1), panels), 1, ceiling(of.rows, kTileRows));
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
    require(weight->sizes[1] == depth && scales->sizes[0] == columns, "the shapes of a product by int8 do not fit");
    const int64_t shape[2] = {rows, columns}, steps = depth + depth % 2;
    const int64_t padded = ceiling(rows, kWidth) * kWidth;
    auto* made = make_tensor(2, shape, kFloat32);
    auto* step = scratch(kLeft, padded + ceiling(rows * steps, 2));
    auto* left = reinterpret_cast<int16_t*>(step + padded);
    const int threads = thread_count();
    const int64_t parts = ceiling(rows, 16);
    share_out(parts, helpers_for(threads, rows * depth), [&](int64_t part) {
      for (int64_t row = part * 16; row < std::min(rows, part * 16 + 16); ++row)
        step[row] = round_row(self->data<float>() + row * self->strides[0], depth, left + row * steps, steps);
    });
    const Quantised of{rows, columns, depth, steps, left, step, weight->data<int8_t>(), scales->data<float>(), made->data<float>()};
    if (rows <= kFewRows) {
      multiply_columns(of, threads);
    } else {
      multiply_panels(of, threads);
    }
    *result = made;
  });
}
