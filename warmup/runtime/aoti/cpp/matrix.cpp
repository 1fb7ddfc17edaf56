// Multiplies matrices of float32, tile by tile, as Goto and van de Geijn (2008) do: a panel of the right matrix is
// packed so that a tile of the result, which stays in registers, reads it from one end to the other.
//
// Rows of the left matrix are read where they are. With few rows nothing is packed either: a decode step reads each
// weight once, and that is all its time.

#include "matrix.h"

#include <algorithm>
#include <memory>
#include <new>
#include <utility>

#include "team.h"
#include "tensor.h"
#include "vector.h"

namespace snapcap {
namespace {

#if defined(__AVX512F__)
constexpr int kTileRows = 12;  // with two vectors each 24 of 32 registers
#elif defined(__AVX2__)
constexpr int kTileRows = 6;  // 12 of 16
#else
constexpr int kTileRows = 8;
#endif
constexpr int kTileVectors = 2;
constexpr int64_t kPanelColumns = kTileVectors * kWidth;
constexpr int64_t kDepth = 384;  // of a panel, which then is 48 KiB at most
constexpr int64_t kFewRows = 8;  // that nothing is packed for
constexpr int64_t kPartRows = 128;  // at most, of what a thread takes, so that none has much to do when others end

int64_t work_of(const Product& product) { return product.rows * product.columns * product.depth; }

// What a tile's sums become: scaled and added to, or added to what is there, of a panel before.
struct Target {
  const Product& product;
  bool first;  // of the panels of a column, so that the result holds nothing yet

  void put(int64_t row, int64_t column, Vector sums) const {
    float* at = product.result + row * product.result_step + column;
    sums *= product.scale;
    const Matrix& added = product.added;
    if (!first) {
      sums += load(at);
    } else if (added.data != nullptr) {
      const float* from = added.data + row * added.row_step + column * added.column_step;
      if (added.column_step == 1) {
        sums += load(from) * product.added_scale;
      } else {
        for (int lane = 0; lane < kWidth; ++lane) sums[lane] += from[lane * added.column_step] * product.added_scale;
      }
    }
    store(at, sums);
  }

  void put_part(int64_t row, int64_t column, Vector sums, int64_t lanes) const {
    for (int64_t lane = 0; lane < lanes; ++lane) put_one(row, column + lane, sums[lane]);
  }

  void put_one(int64_t row, int64_t column, float sum) const {
    float* at = product.result + row * product.result_step + column;
    sum *= product.scale;
    const Matrix& added = product.added;
    if (!first) {
      sum += *at;
    } else if (added.data != nullptr) {
      sum += added.data[row * added.row_step + column * added.column_step] * product.added_scale;
    }
    *at = sum;
  }

  template <int kRows, int kVectors>
  void put_tile(int64_t row, int64_t column, int64_t columns, const Vector (&sums)[kRows][kVectors]) const {
    for (int i = 0; i < kRows; ++i) {
      for (int j = 0; j < kVectors; ++j) {
        const int64_t left = columns - j * kWidth;
        if (left >= kWidth) {
          put(row + i, column + j * kWidth, sums[i][j]);
        } else if (left > 0) {
          put_part(row + i, column + j * kWidth, sums[i][j], left);
        }
      }
    }
  }
};

// left [kRows, depth], rows `left_step` apart; right: `depth` rows of kVectors vectors, `right_step` apart, which are
// packed into `panel` on the way if there is one. The rows are too far apart for a processor to foresee the next one, so
// packing asks for the columns of the panel after the next: two threads take panels in turn.
template <int kRows, int kVectors, bool kPacks = false>
inline void tile(const float* left, int64_t left_step, const float* right, int64_t right_step, int64_t depth,
                 Vector (&sums)[kRows][kVectors], float* panel = nullptr) {
  for (int i = 0; i < kRows; ++i)
    for (int j = 0; j < kVectors; ++j) sums[i][j] = Vector{};
  for (int64_t k = 0; k < depth; ++k, ++left, right += right_step) {
    Vector b[kVectors];
    for (int j = 0; j < kVectors; ++j) {
      b[j] = load_once(right + j * kWidth);
      if (kPacks) {
        prefetch(right + (2 * kVectors + j) * kWidth);
        store(panel + (k * kVectors + j) * kWidth, b[j]);
      }
    }
    for (int i = 0; i < kRows; ++i) {
      const float a = left[i * left_step];
      for (int j = 0; j < kVectors; ++j) sums[i][j] = fused(a, b[j], sums[i][j]);
    }
  }
}

// Rows [k, k + depth) and columns [column, column + columns) of the right matrix, as `depth` rows of whole vectors.
template <int kVectors>
void pack(const Matrix& right, int64_t k, int64_t depth, int64_t column, int64_t columns, float* panel) {
  constexpr int64_t kColumns = kVectors * kWidth;
  const float* from = right.data + k * right.row_step + column * right.column_step;
  int64_t begun = 0;
  if (right.row_step == 1 && columns == kColumns) {
    for (; begun + kWidth <= depth; begun += kWidth) {
      for (int64_t j = 0; j < kColumns; j += kWidth) {
        Vector square[kWidth];
        for (int i = 0; i < kWidth; ++i) square[i] = load(from + (j + i) * right.column_step + begun);
        turn(square);
        for (int i = 0; i < kWidth; ++i) store(panel + (begun + i) * kColumns + j, square[i]);
      }
    }
  }
  for (int64_t i = begun; i < depth; ++i) {
    const float* of = from + i * right.row_step;
    for (int64_t j = 0; j < kColumns; ++j) panel[i * kColumns + j] = j < columns ? of[j * right.column_step] : 0;
  }
}

// The result's rows from `row` on: of a panel that is packed, or of whole rows of the right matrix, which it packs.
template <int kVectors, bool kPacks>
struct PanelTile {
  template <int kRows>
  struct Of {
    static void run(const Target& target, int64_t row, int64_t k, int64_t depth, int64_t column, int64_t columns,
                    float* panel) {
      const Matrix &left = target.product.left, &right = target.product.right;
      const float* from = kPacks ? right.data + k * right.row_step + column : panel;
      Vector sums[kRows][kVectors];
      tile<kRows, kVectors, kPacks>(left.data + row * left.row_step + k, left.row_step, from,
                                    kPacks ? right.row_step : kVectors * kWidth, depth, sums, panel);
      target.put_tile<kRows, kVectors>(row, column, columns, sums);
    }
  };
};

// Columns [column, column + columns), at most a panel's, of rows [begin, end).
template <int kVectors>
void multiply_panel(const Product& product, int64_t begin, int64_t end, int64_t column, int64_t columns) {
  float* panel = scratch(kPanel, kDepth * kPanelColumns);
  for (int64_t k = 0; k < product.depth; k += kDepth) {
    const int64_t depth = std::min(kDepth, product.depth - k);
    const bool packs = product.right.column_step == 1 && columns == kVectors * kWidth;
    if (!packs) pack<kVectors>(product.right, k, depth, column, columns, panel);
    const Target target{product, k == 0};
    in_groups(begin, end, kTileRows, [&](int64_t row, int64_t after) {
      if (packs && row == begin) {
        with_rows<PanelTile<kVectors, true>::template Of, kTileRows>(after - row, target, row, k, depth, column, columns, panel);
      } else {
        with_rows<PanelTile<kVectors, false>::template Of, kTileRows>(after - row, target, row, k, depth, column, columns, panel);
      }
    });
  }
}

void multiply_panels(const Product& product, int threads) {
  const int64_t panels = ceiling(product.columns, kPanelColumns);
  const int helpers = helpers_for(threads, work_of(product));
  const int64_t most = std::max<int64_t>(product.rows / kTileRows, 1);
  const int64_t parts = helpers == 0 ? 1 : std::min(std::max(ceiling(3 * (helpers + 1), panels), ceiling(product.rows, kPartRows)), most);
  share_out(panels * parts, helpers, [&](int64_t job) {
    const int64_t column = job / parts * kPanelColumns, part = job % parts;
    const int64_t columns = std::min(kPanelColumns, product.columns - column);
    const int64_t begin = product.rows * part / parts, end = product.rows * (part + 1) / parts;
    if (columns <= kWidth) {
      multiply_panel<1>(product, begin, end, column, columns);
    } else {
      multiply_panel<kTileVectors>(product, begin, end, column, columns);
    }
  });
}

// Few rows, and a right matrix whose rows are contiguous, as GPT-2 stores weights: some columns, for a few rows of the
// right matrix at a time, while the next rows come from memory. A sum that stayed in a register for all of the depth
// would take one short piece of every row, and wait for it.
constexpr int64_t kWideColumns = 512;  // at most, of a job
constexpr int64_t kWideDepth = 16;

template <int kRows>
struct Wide {
  static constexpr int kVectors = kRows <= 2 ? 8 : (kRows <= 4 ? 4 : 2);

  static void run(const Product& product, int threads) {
    const int helpers = helpers_for(threads, work_of(product));
    constexpr int64_t kLeast = kVectors * kWidth;
    const int64_t each = ceiling(ceiling(product.columns, 2 * (helpers + 1)), kLeast) * kLeast;
    const int64_t most = std::min(each, kWideColumns);
    share_out(ceiling(product.columns, most), helpers, [&](int64_t job) {
      const int64_t begin = job * most, end = std::min(begin + most, product.columns);
      float* sums = scratch(kPanel, kRows * kWideColumns);
      for (int64_t k = 0; k < product.depth; k += kWideDepth) {
        int64_t column = begin;
        for (; column + kLeast <= end; column += kLeast) columns_of<kVectors>(product, k, column, sums + kRows * (column - begin));
        for (; column + kWidth <= end; column += kWidth) columns_of<1>(product, k, column, sums + kRows * (column - begin));
      }
      for (int64_t column = end - (end - begin) % kWidth; column < end; ++column) column_of({product, true}, column);
    });
  }

  // Adds rows k … k + kWideDepth of the right matrix to the sums of kOf vectors of columns, which stay in `kept` until
  // the depth is done.
  template <int kOf>
  static void columns_of(const Product& product, int64_t k, int64_t column, float* kept) {
    const int64_t depth = std::min(kWideDepth, product.depth - k), step = product.right.row_step;
    Vector sums[kRows][kOf];
    for (int i = 0; i < kRows; ++i)
      for (int j = 0; j < kOf; ++j) sums[i][j] = k == 0 ? Vector{} : load(kept + (i * kOf + j) * kWidth);
    const float* left = product.left.data + k;
    const float* right = product.right.data + k * step + column;
    for (int64_t row = 0; row < depth; ++row, ++left, right += step) {
      Vector b[kOf];
      for (int j = 0; j < kOf; ++j) {
        prefetch(right + kWideDepth * step + j * kWidth);
        b[j] = load_once(right + j * kWidth);
      }
      for (int i = 0; i < kRows; ++i) {
        const float a = left[i * product.left.row_step];
        for (int j = 0; j < kOf; ++j) sums[i][j] = fused(a, b[j], sums[i][j]);
      }
    }
    if (k + depth == product.depth) {
      Target{product, true}.put_tile<kRows, kOf>(0, column, kOf * kWidth, sums);
    } else {
      for (int i = 0; i < kRows; ++i)
        for (int j = 0; j < kOf; ++j) store(kept + (i * kOf + j) * kWidth, sums[i][j]);
    }
  }

  static void column_of(const Target& target, int64_t column) {
    const Product& product = target.product;
    for (int row = 0; row < kRows; ++row) {
      const float* left = product.left.data + row * product.left.row_step;
      float sum = 0;
      for (int64_t k = 0; k < product.depth; ++k) sum += left[k] * product.right.data[k * product.right.row_step + column];
      target.put_one(row, column, sum);
    }
  }
};

// Few rows, and a right matrix whose columns are contiguous, as torch stores a linear layer: sums over the depth, of
// some columns at a time, which are in the cache when the next rows come.
constexpr int64_t kDeepColumns = 4;
constexpr int64_t kDeepBlocks = 8;  // of so many columns, of what a thread takes
constexpr int kDeepRows = 4;

template <int kRows>
struct DeepTile {
  static void run(const Product& product, int64_t row, int64_t column) {
    const int64_t columns = std::min(kDeepColumns, product.columns - column), depth = product.depth;
    const float* left = product.left.data + row * product.left.row_step;
    const float* right[kDeepColumns];  // of columns that are not there the last one again
    for (int64_t j = 0; j < kDeepColumns; ++j)
      right[j] = product.right.data + (column + std::min(j, columns - 1)) * product.right.column_step;
    Vector sums[kRows][kDeepColumns] = {};
    int64_t k = 0;
    for (; k + kWidth <= depth; k += kWidth) {
      Vector b[kDeepColumns];
      for (int j = 0; j < kDeepColumns; ++j) b[j] = load_once(right[j] + k);
      for (int i = 0; i < kRows; ++i) {
        const Vector a = load_once(left + i * product.left.row_step + k);
        for (int j = 0; j < kDeepColumns; ++j) sums[i][j] = fused(a, b[j], sums[i][j]);
      }
    }
    const Target target{product, true};
    for (int i = 0; i < kRows; ++i) {
      Four totals = sums_of(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
      for (int64_t rest = k; rest < depth; ++rest)
        for (int j = 0; j < kDeepColumns; ++j) totals[j] += left[i * product.left.row_step + rest] * right[j][rest];
      for (int64_t j = 0; j < columns; ++j) target.put_one(row + i, column + j, totals[j]);
    }
  }
};

void multiply_deep(const Product& product, int threads) {
  const int64_t blocks = ceiling(product.columns, kDeepColumns);
  const int64_t jobs = ceiling(blocks, kDeepBlocks);
  share_out(jobs, helpers_for(threads, work_of(product)), [&](int64_t job) {
    for (int64_t block = job * kDeepBlocks; block < std::min(blocks, (job + 1) * kDeepBlocks); ++block) {
      in_groups(0, product.rows, kDeepRows, [&](int64_t row, int64_t after) {
        with_rows<DeepTile, kDeepRows>(after - row, product, row, block * kDeepColumns);
      });
    }
  });
}

// The same product, of a left matrix whose rows are contiguous.
Product with_rows_contiguous(Product product) {
  if (product.left.column_step == 1 || product.depth == 1) return product;
  float* rows = scratch(kLeft, product.rows * product.depth);
  for (int64_t i = 0; i < product.rows; ++i)
    for (int64_t k = 0; k < product.depth; ++k)
      rows[i * product.depth + k] = product.left.data[i * product.left.row_step + k * product.left.column_step];
  product.left = {rows, product.depth, 1};
  return product;
}

struct Free {
  void operator()(float* memory) const { std::free(memory); }
};

}  // namespace

float* scratch(Purpose purpose, int64_t floats) {
  thread_local std::pair<std::unique_ptr<float, Free>, int64_t> buffers[kPurposes];
  auto& [memory, size] = buffers[purpose];
  if (size < floats) {
    const size_t bytes = (static_cast<size_t>(floats) * sizeof(float) + kAlignment) / kAlignment * kAlignment;
    size = 0;
    memory.reset(static_cast<float*>(std::aligned_alloc(kAlignment, bytes)));
    if (memory == nullptr) throw std::bad_alloc();
    size = floats;
  }
  return memory.get();
}

void multiply(const Product& given, int threads) {
  if (given.rows == 0 || given.columns == 0) return;
  require(given.depth > 0, "a product of matrices without depth is not served");
  const Product product = with_rows_contiguous(given);
  if (product.right.column_step == 1 && product.rows <= kFewRows) {
    with_rows<Wide, kFewRows>(product.rows, product, threads);
  } else if (product.right.row_step == 1 && product.rows <= kFewRows) {
    multiply_deep(product, threads);
  } else {
    multiply_panels(product, threads);
  }
}

}  // namespace snapcap
