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
constexpr int64_t kFewRows = 8;  // that nothing is packed for
constexpr int kColumnRows = 4;      // that take a column at once
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
#if defined(__AVX2__) && !defined(__AVX512F__)  // which the compiler would do in halves
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
  alignas(64) int16_t wide[kDepth];
  const int64_t depth = std::min(2 * pairs, of.depth - k);
  for (int64_t j = 0; j < kColumns; ++j) {
    int16_t* to = panel + 2 * j;
    if (j < columns) {
      const int8_t* from = of.right + (column + j) * of.depth + k;
      for (int64_t i = 0; i < depth; ++i) wide[i] = from[i];
      if (depth < 2 * pairs) wide[depth] = 0;
    } else {
      std::fill(wide, wide + 2 * pairs, int16_t{0});
    }
    for (int64_t pair = 0; pair < pairs; ++pair) std::memcpy(to + pair * 2 * kColumns, wide + 2 * pair, 4);
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

inline int32_t total_of(Integers vector) {
  int32_t total = 0;
  for (int lane = 0; lane < kWidth; ++lane) total += vector[lane];
  return total;
}

// kRows rows by one column or two, whose weights are read once, from one end to the other, and not packed.
template <int kRows>
struct Columns {
  static constexpr int kOf = kRows == 1 ? 1 : 2;

  static void run(const Quantised& of, int64_t row, int64_t begin, int64_t end) {
    for (int64_t column = begin; column < end; column += kOf) columns(of, row, column, std::min<int64_t>(kOf, end - column));
  }

  static void columns(const Quantised& of, int64_t row, int64_t column, int64_t count) {
    const int8_t* right[kOf];  // of a column that is not there the last one again
    for (int64_t j = 0; j < kOf; ++j) right[j] = of.right + (column + std::min(j, count - 1)) * of.depth;
    const int16_t* left = of.left + row * of.steps;
    float totals[kRows][kOf] = {};
    for (int64_t k = 0; k < of.depth; k += kDepth) {
      const int64_t end = std::min(k + kDepth, of.depth);
      Integers sums[kRows][kOf] = {};
      int64_t at = k;
      for (; at + 2 * kWidth <= end; at += 2 * kWidth) {
        Shorts b[kOf];
        for (int j = 0; j < kOf; ++j) b[j] = widened(right[j] + at);
        for (int i = 0; i < kRows; ++i) {
          const Shorts a = load_shorts(left + i * of.steps + at);
          for (int j = 0; j < kOf; ++j) sums[i][j] = add_pairs(sums[i][j], a, b[j]);
        }
      }
      for (int i = 0; i < kRows; ++i)
        for (int j = 0; j < kOf; ++j) {
          int32_t total = total_of(sums[i][j]);
          for (int64_t rest = at; rest < end; ++rest) total += left[i * of.steps + rest] * right[j][rest];
          totals[i][j] += static_cast<float>(total);
        }
    }
    for (int i = 0; i < kRows; ++i)
      for (int64_t j = 0; j < count; ++j)
        of.result[(row + i) * of.columns + column + j] =
            totals[i][j] * (of.left_scale[row + i] * of.right_scale[column + j]);
  }
};

void multiply_columns(const Quantised& of, int threads) {
  const int64_t jobs = ceiling(of.columns, kFewColumns);
  share_out(jobs, helpers_for(threads, of.rows * of.columns * of.depth), [&](int64_t job) {
    const int64_t begin = job * kFewColumns, end = std::min(of.columns, begin + kFewColumns);
    in_groups(0, of.rows, kColumnRows, [&](int64_t row, int64_t after) {
      with_rows<Columns, kColumnRows>(after - row, of, row, begin, end);
    });
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
    auto* made = make_tensor(2, shape, kFloat32);
    auto* step = scratch(kLeft, rows + ceiling(rows * steps, 2));
    auto* left = reinterpret_cast<int16_t*>(step + rows);
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
