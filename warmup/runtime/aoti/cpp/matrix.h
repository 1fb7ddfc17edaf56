// Multiplies matrices of float32.

#pragma once

#include <cstdint>

namespace snapcap {

// Element (i, j) is at data[i * row_step + j * column_step].
struct Matrix {
  const float* data;
  int64_t row_step;
  int64_t column_step;
};

// result [rows, columns] = scale * left [rows, depth] · right [depth, columns] + added_scale * added, where `added`
// has the result's shape (a step of 0 repeats it) or no data. Rows of the result are contiguous, `result_step` apart.
struct Product {
  int64_t rows, columns, depth;
  Matrix left, right;
  float* result;
  int64_t result_step;
  Matrix added{nullptr, 0, 0};
  float scale = 1, added_scale = 1;
};

// On up to so many threads.
void multiply(const Product& product, int threads);

// A buffer of this thread, of at least so many floats, aligned to a cache line; it holds anything. One a purpose.
enum Purpose { kPanel, kLeft, kScores, kPurposes };
float* scratch(Purpose purpose, int64_t floats);

int thread_count();

inline int64_t ceiling(int64_t count, int64_t each) { return (count + each - 1) / each; }

// body(row, after) for rows [begin, end) in the fewest groups of up to `most` rows, which differ by one row at most.
template <class Body>
void in_groups(int64_t begin, int64_t end, int64_t most, const Body& body) {
  const int64_t rows = end - begin, groups = ceiling(rows, most);
  for (int64_t each = 0; each < groups; ++each) body(begin + rows * each / groups, begin + rows * (each + 1) / groups);
}

// The function `Of<n>::run` for n rows, of up to kMost.
template <template <int> class Of, int kMost, class... Arguments>
void with_rows(int64_t rows, const Arguments&... arguments) {
  if constexpr (kMost > 0) {
    if (rows == kMost) {
      Of<kMost>::run(arguments...);
    } else {
      with_rows<Of, kMost - 1>(rows, arguments...);
    }
  }
}

}  // namespace snapcap
