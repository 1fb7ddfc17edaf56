// Resizes RGB pictures with the same result as Pillow, bit by bit, on one thread.
//
// Pillow weighs the samples of each line with coefficients of 22 bits, rounds to 8 bits, and then does the same from
// line to line. So does this file, one channel after the other and with vectors. Of two resizes in a row the second
// takes lines as the first one makes them, so that the picture between, which may be large, is never there as a whole.
//
// A coefficient is held in two halves of 16 bits, and samples in pairs, because processors multiply and add pairs of 16
// bits fastest. Every sum is exact, so the order of additions does not matter.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int kPrecision = 22;               // bits of a coefficient behind the point
constexpr int32_t kHalf = 1 << (kPrecision - 1);
constexpr int kLowBits = 12;                 // of a coefficient, in its low half
constexpr int64_t kAlignment = 64;
constexpr int kStrip = 16;                   // lines that are made at a time

#if defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define SNAPCAP_AVX512
constexpr int kLanes = 16;  // sums in a vector
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

int64_t rounded_up(int64_t count) { return (count + kAlignment - 1) / kAlignment * kAlignment; }

// Memory whose content is not set.
class Buffer {
 public:
  explicit Buffer(int64_t bytes) : memory_(std::aligned_alloc(kAlignment, rounded_up(bytes + 1))) {
    if (memory_ == nullptr) throw std::bad_alloc();
  }
  uint8_t* data() const { return static_cast<uint8_t*>(memory_.get()); }

 private:
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<void, Free> memory_;
};

// Two coefficients of neighbours, each as a number of 16 bits: the first one in the lower bits.
struct Coefficient {
  int32_t high, low;
};

// The samples that one result is made of: pairs from an even place, and the place of their coefficients.
struct Taps {
  int32_t first, pairs;
  int64_t coefficients;
};

// How a length becomes another.
struct Table {
  std::vector<Taps> taps;
  std::vector<Coefficient> coefficients;

  int64_t outputs() const { return static_cast<int64_t>(taps.size()); }
};

double sinc(double x) {
  if (x == 0.0) return 1.0;
  const double angle = x * M_PI;
  return std::sin(angle) / angle;
}

// Sines of angles that are a step apart, from the sine and cosine of one of them. A sine of the C library takes ten
// times as long, and a table needs fifty thousand. The error is that of a few roundings.
class Sines {
 public:
  Sines(double step, int64_t most) : most_(most) {
    for (int64_t number = -most; number <= most; ++number) {
      const double angle = static_cast<double>(number) * step;
      turns_.push_back({std::cos(angle), std::sin(angle)});
    }
  }

  void begin(double angle) { first_ = {std::cos(angle), std::sin(angle)}; }
  double at(int64_t steps) const {  // of the angle that `begin` was given
    const Turn& turn = turns_[steps + most_];
    return first_.sine * turn.cosine + first_.cosine * turn.sine;
  }

 private:
  struct Turn {
    double cosine, sine;
  };

  int64_t most_;
  std::vector<Turn> turns_;
  Turn first_{};
};

enum Filter { kLanczos = 1, kBilinear = 2, kBicubic = 3, kBox = 4, kHamming = 5 };  // Pillow's numbers

double reach(Filter filter) {
  switch (filter) {
    case kLanczos:
      return 3.0;
    case kBicubic:
      return 2.0;
    case kBox:
      return 0.5;
    default:
      return 1.0;
  }
}

double weight(Filter filter, double x) {
  const double distance = std::fabs(x);
  switch (filter) {
    case kLanczos:  // elsewhere its sines are made by `Sines`
      return x == 0.0 ? 1.0 : 0.0;
    case kBilinear:
      return distance < 1.0 ? 1.0 - distance : 0.0;
    case kBicubic:  // Keys' kernel with a = -1/2
      if (distance < 1.0) return (1.5 * distance - 2.5) * distance * distance + 1;
      return distance < 2.0 ? (((distance - 5) * distance + 8) * distance - 4) * -0.5 : 0.0;
    case kBox:
      return x > -0.5 && x <= 0.5 ? 1.0 : 0.0;
    case kHamming:
      if (distance >= 1.0) return 0.0;
      return distance == 0.0 ? 1.0 : sinc(distance) * (0.54f + 0.46f * std::cos(distance * M_PI));
  }
  return 0.0;
}

int32_t pair_of(int32_t first, int32_t second) {
  return static_cast<int32_t>(static_cast<uint32_t>(second) << 16 | (static_cast<uint32_t>(first) & 0xffff));
}

// Adds the taps of one result, without coefficients of 0 at both ends.
void add_taps(Table& table, int64_t first, const std::vector<int32_t>& weights) {
  int64_t begin = 0, end = static_cast<int64_t>(weights.size());
  while (begin < end && weights[begin] == 0) ++begin;
  while (end > begin && weights[end - 1] == 0) --end;
  const int64_t place = (first + begin) / 2 * 2, pairs = begin == end ? 0 : (first + end - place + 1) / 2;
  table.taps.push_back({static_cast<int32_t>(place), static_cast<int32_t>(pairs),
                        static_cast<int64_t>(table.coefficients.size())});
  const auto at = [&](int64_t sample) {
    return sample < first + begin || sample >= first + end ? 0 : weights[sample - first];
  };
  for (int64_t sample = place; sample < place + 2 * pairs; sample += 2) {
    int32_t high[2], low[2];
    for (int of = 0; of < 2; ++of) {
      high[of] = (at(sample + of) + (1 << (kLowBits - 1))) >> kLowBits;
      low[of] = at(sample + of) - high[of] * (1 << kLowBits);
    }
    table.coefficients.push_back({pair_of(high[0], high[1]), pair_of(low[0], low[1])});
  }
}

// The table of a length, of which the part from `begin` to `end` becomes `outputs` samples.
Table make_table(int64_t length, float begin, float end, int64_t outputs, Filter filter) {
  const double scale = static_cast<double>(end - begin) / static_cast<double>(outputs);
  const double widening = std::max(scale, 1.0), support = reach(filter) * widening, narrowing = 1.0 / widening;
  Table table;
  table.taps.reserve(outputs);
  table.coefficients.reserve(outputs * (static_cast<int64_t>(std::ceil(support)) + 1));
  std::vector<double> exact;
  std::vector<int32_t> weights;
  const int64_t most = filter == kLanczos ? 2 * static_cast<int64_t>(std::ceil(support)) + 1 : 0;
  Sines sines(M_PI * narrowing, most), thirds(M_PI * narrowing / 3, most);
  for (int64_t output = 0; output < outputs; ++output) {
    const double center = begin + (static_cast<double>(output) + 0.5) * scale;
    const int64_t first = std::max<int64_t>(static_cast<int64_t>(center - support + 0.5), 0);
    const int64_t last = std::min<int64_t>(static_cast<int64_t>(center + support + 0.5), length);
    const auto distance = [&](int64_t sample) { return (static_cast<double>(sample) - center + 0.5) * narrowing; };
    const int64_t nearest = std::clamp(static_cast<int64_t>(center), first, std::max(first, last - 1));
    if (filter == kLanczos) {
      sines.begin(distance(nearest) * M_PI);
      thirds.begin(distance(nearest) * M_PI / 3);
    }
    exact.clear();
    double total = 0.0;
    for (int64_t sample = first; sample < last; ++sample) {
      const double x = distance(sample), angle = x * M_PI;
      if (filter == kLanczos && x != 0.0 && x >= -3.0 && x < 3.0)
        exact.push_back(sines.at(sample - nearest) * thirds.at(sample - nearest) / (angle * angle / 3));
      else
        exact.push_back(weight(filter, x));
      total += exact.back();
    }
    weights.clear();
    for (const double each : exact) {
      const double share = (total != 0.0 ? each / total : each) * (1 << kPrecision);
      weights.push_back(static_cast<int32_t>(share < 0 ? share - 0.5 : share + 0.5));
    }
    add_taps(table, first, weights);
  }
  return table;
}

// Memory of the passes, which grows as needed.
class Scratch {
 public:
  uint8_t* pairs(int64_t width) { return grown(pairs_, (width / 16 + 1) * 256); }
  void* weights(int64_t bytes) { return grown(weights_, bytes); }

 private:
  struct Held {
    std::unique_ptr<Buffer> buffer;
    int64_t bytes = 0;
  };

  static uint8_t* grown(Held& held, int64_t bytes) {
    if (held.bytes < bytes) {
      held.buffer.reset();
      held.buffer = std::make_unique<Buffer>(bytes);
      held.bytes = bytes;
    }
    return held.buffer->data();
  }

  Held pairs_, weights_;
};

typedef uint8_t Sixteen __attribute__((vector_size(16)));
typedef uint16_t Eight __attribute__((vector_size(16)));

#if defined(__clang__)
#define SNAPCAP_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else  // g++ has the other name since version 12
#define SNAPCAP_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, decltype(a){__VA_ARGS__})
#endif

template <class Vector>
Vector first_halves(Vector a, Vector b) {
  if constexpr (sizeof(a[0]) == 1)
    return SNAPCAP_SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  else
    return SNAPCAP_SHUFFLE(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
}

template <class Vector>
Vector second_halves(Vector a, Vector b) {
  if constexpr (sizeof(a[0]) == 1)
    return SNAPCAP_SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  else
    return SNAPCAP_SHUFFLE(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
}

// Turns rows into columns, as many as a vector has elements.
template <class Vector, size_t kCount>
void transpose(std::array<Vector, kCount>& rows) {
  for (size_t step = 1; step < kCount; step *= 2) {
    std::array<Vector, kCount> next;
    for (size_t row = 0; row < kCount / 2; ++row) {
      next[2 * row] = first_halves(rows[row], rows[row + kCount / 2]);
      next[2 * row + 1] = second_halves(rows[row], rows[row + kCount / 2]);
    }
    rows = next;
  }
}

// The pairs of 16 samples of 16 lines: [8 pairs][16 lines][2]. Only `count` lines and `width` samples are there.
void gather_pairs(const uint8_t* source, int64_t step, int count, int64_t width, uint8_t* pairs) {
  for (int half = 0; half < 2; ++half) {
    std::array<Eight, 8> lines;
    for (int line = 0; line < 8; ++line) {
      const uint8_t* from = source + std::min(half * 8 + line, count - 1) * step;
      uint8_t part[16] = {};
      if (width < 16) from = static_cast<const uint8_t*>(std::memcpy(part, from, width));
      std::memcpy(&lines[line], from, 16);
    }
    transpose(lines);
    for (int pair = 0; pair < 8; ++pair) std::memcpy(pairs + pair * 32 + half * 16, &lines[pair], 16);
  }
}

// Puts [16 samples][16 lines] at their places in `count` lines.
void scatter_block(const uint8_t (*block)[16], uint8_t* target, int64_t step, int count) {
  std::array<Sixteen, 16> rows;
  std::memcpy(rows.data(), block, sizeof rows);
  transpose(rows);
  for (int line = 0; line < count; ++line) std::memcpy(target + line * step, &rows[line], 16);
}

typedef int32_t Sums __attribute__((vector_size(4 * kLanes)));

inline Sums all_of(int32_t value) { return value - Sums{}; }

// sums + the first of each pair · the first coefficient + the second · the second. Each number has 16 bits.
inline Sums multiply_add(Sums sums, Sums pairs, Sums coefficients) {
#if defined(SNAPCAP_AVX512)
  return (Sums)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)pairs, (__m512i)coefficients);
#elif defined(__AVX2__)
  return sums + (Sums)_mm256_madd_epi16((__m256i)pairs, (__m256i)coefficients);
#else
  return sums + (pairs & 0xffff) * (coefficients << 16 >> 16) + (pairs >> 16) * (coefficients >> 16);
#endif
}

// Samples of one line with those of the next.
inline Sums paired(const uint8_t* line, const uint8_t* next) {
#if defined(SNAPCAP_AVX512)
  const __m512i first = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(line)));
  const __m512i second = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(next)));
  return (Sums)_mm512_or_si512(first, _mm512_slli_epi32(second, 16));
#elif defined(__AVX2__)
  const __m128i first = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(line));
  const __m128i second = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(next));
  return (Sums)_mm256_cvtepu8_epi16(_mm_unpacklo_epi8(first, second));
#else
  Sums both = {};
  for (int lane = 0; lane < kLanes; ++lane) both[lane] = line[lane] | next[lane] << 16;
  return both;
#endif
}

// Samples that lie as pairs of bytes.
inline Sums widened_pairs(const uint8_t* pairs) {
#if defined(SNAPCAP_AVX512)
  return (Sums)_mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(pairs)));
#elif defined(__AVX2__)
  return (Sums)_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(pairs)));
#else
  Sums both = {};
  for (int lane = 0; lane < kLanes; ++lane) both[lane] = pairs[2 * lane] | pairs[2 * lane + 1] << 16;
  return both;
#endif
}

// Rounds sums of both halves to samples.
inline void store_samples(uint8_t* samples, Sums high, Sums low) {
  const Sums rounded = ((high << kLowBits) + low) >> kPrecision;
#if defined(SNAPCAP_AVX512)
  const __m512i positive = _mm512_max_epi32((__m512i)rounded, _mm512_setzero_si512());
  _mm_storeu_si128(reinterpret_cast<__m128i*>(samples), _mm512_cvtusepi32_epi8(positive));
#elif defined(__AVX2__)
  const __m256i sums = (__m256i)rounded;
  const __m128i shorts = _mm_packs_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(samples), _mm_packus_epi16(shorts, shorts));
#else
  for (int lane = 0; lane < kLanes; ++lane)
    samples[lane] = static_cast<uint8_t>(std::clamp<int32_t>(rounded[lane], 0, 255));
#endif
}

// `count` lines, at most 16, to as many of the table's length. Reads `width` samples of each line, and writes whole
// blocks of 16.
void pass_across(const uint8_t* source, int64_t source_step, int count, int64_t width, const Table& table, uint8_t* target,
                 int64_t target_step, Scratch& scratch) {
  uint8_t* pairs = scratch.pairs(width);
  for (int64_t begin = 0; begin < width; begin += 16)
    gather_pairs(source + begin, source_step, count, std::min<int64_t>(16, width - begin), pairs + begin * 16);
  constexpr int kVectors = 16 / kLanes;
  alignas(64) uint8_t block[16][16];
  const int64_t outputs = table.outputs();
  for (int64_t x = 0; x < outputs; ++x) {
    const Taps& taps = table.taps[x];
    const Coefficient* coefficients = &table.coefficients[taps.coefficients];
    const uint8_t* from = pairs + taps.first * 16;
    Sums high[kVectors] = {}, low[kVectors];
    for (Sums& each : low) each = all_of(kHalf);
    for (int pair = 0; pair < taps.pairs; ++pair, from += 32) {
      const Sums by_high = all_of(coefficients[pair].high), by_low = all_of(coefficients[pair].low);
      for (int vector = 0; vector < kVectors; ++vector) {
        const Sums samples = widened_pairs(from + vector * 2 * kLanes);
        high[vector] = multiply_add(high[vector], samples, by_high);
        low[vector] = multiply_add(low[vector], samples, by_low);
      }
    }
    for (int vector = 0; vector < kVectors; ++vector)
      store_samples(block[x % 16] + vector * kLanes, high[vector], low[vector]);
    if (x % 16 == 15 || x + 1 == outputs) scatter_block(block, target + x / 16 * 16, target_step, count);
  }
}

// Lines `begin` to `begin` + `kRows` of the table, but only `count` of them, from lines of `width` samples, of which
// those from `first` to the end of `pairs` pairs are weighed.
template <int kRows>
void down_rows(const uint8_t* source, int64_t source_step, int64_t width, const Table& table, int64_t begin, int count,
               int64_t first, int64_t pairs, uint8_t* target, int64_t target_step, Scratch& scratch) {
  Sums* weights = static_cast<Sums*>(scratch.weights(pairs * kRows * 2 * sizeof(Sums)));
  std::fill(weights, weights + pairs * kRows * 2, Sums{});
  for (int row = 0; row < count; ++row) {
    const Taps& taps = table.taps[begin + row];
    for (int pair = 0; pair < taps.pairs; ++pair) {
      const Coefficient& coefficient = table.coefficients[taps.coefficients + pair];
      Sums* weight = weights + (((taps.first - first) / 2 + pair) * kRows + row) * 2;
      weight[0] = all_of(coefficient.high);
      weight[1] = all_of(coefficient.low);
    }
  }
  source += first * source_step;
  for (int64_t x = 0; x < width; x += kLanes) {
    Sums high[kRows] = {}, low[kRows];
    for (Sums& each : low) each = all_of(kHalf);
    const uint8_t* from = source + x;
    const Sums* weight = weights;
    for (int64_t pair = 0; pair < pairs; ++pair, from += 2 * source_step, weight += 2 * kRows) {
      const Sums samples = paired(from, from + source_step);
      for (int row = 0; row < kRows; ++row) {
        high[row] = multiply_add(high[row], samples, weight[2 * row]);
        low[row] = multiply_add(low[row], samples, weight[2 * row + 1]);
      }
    }
    for (int row = 0; row < kRows; ++row)
      if (row < count) store_samples(target + row * target_step + x, high[row], low[row]);
  }
}

// Lines `begin` to `end` of the table. Reads and writes whole blocks of 16 samples.
void pass_down(const uint8_t* source, int64_t source_step, int64_t width, const Table& table, int64_t begin, int64_t end,
               uint8_t* target, int64_t target_step, Scratch& scratch) {
  constexpr int kRows = 4;
  while (begin < end) {
    const int count = static_cast<int>(std::min<int64_t>(kRows, end - begin));
    int64_t first = table.taps[begin].first, last = first, alone = 0;
    for (int row = 0; row < count; ++row) {
      const Taps& taps = table.taps[begin + row];
      first = std::min<int64_t>(first, taps.first);
      last = std::max<int64_t>(last, taps.first + 2 * taps.pairs);
      alone += taps.pairs;
    }
    // Pairs that lines have in common are made once. Far apart, lines have few in common.
    if ((last - first) / 2 * 5 <= alone * 2) {
      down_rows<kRows>(source, source_step, width, table, begin, count, first, (last - first) / 2, target,
                       target_step, scratch);
    } else {
      for (int row = 0; row < count; ++row) {
        const Taps& taps = table.taps[begin + row];
        down_rows<1>(source, source_step, width, table, begin + row, 1, taps.first, taps.pairs,
                     target + row * target_step, target_step, scratch);
      }
    }
    begin += count;
    target += count * target_step;
  }
}

// Lines of one channel, whose memory reaches beyond each line and beyond the last one.
struct Lines {
  int64_t step;
  Buffer buffer;

  Lines(int64_t width, int64_t count) : step(rounded_up(width)), buffer(step * (count + 2)) {}
  uint8_t* line(int64_t number) const { return buffer.data() + number * step; }
};

struct Size {
  int64_t width, height;
};

// Which pass is the first. Pillow 13 begins with that from line to line where a picture loses far more lines than
// columns.
bool begins_down(Size from, Size to, bool may_begin_down) {
  const int64_t lines = from.height - to.height;
  return may_begin_down && lines > 0 && lines > 2 * (from.width - to.width);
}

struct Resize {
  Size from, to;
  Table across, down;
  bool down_first;

  Resize(Size from, const float* box, Size to, Filter filter, bool may_begin_down)
      : from(from),
        to(to),
        across(make_table(from.width, box[0], box[2], to.width, filter)),
        down(make_table(from.height, box[1], box[3], to.height, filter)),
        down_first(begins_down(from, to, may_begin_down)) {}
};

struct Resizer {
  const std::vector<Resize> resizes;  // one or two
  Scratch scratch;

  // Lines of `width` samples to lines from number `at` on.
  void across(const uint8_t* source, int64_t step, int64_t count, int64_t width, const Table& table,
              const Lines& target, int64_t at = 0) {
    for (int64_t line = 0; line < count; line += kStrip)
      pass_across(source + line * step, step, static_cast<int>(std::min<int64_t>(kStrip, count - line)), width, table,
                  target.line(at + line), target.step, scratch);
  }

  // Lines of `width` samples to the table's lines from `begin` to `end`.
  void down(const Lines& source, int64_t width, const Table& table, int64_t begin, int64_t end, const Lines& target) {
    pass_down(source.buffer.data(), source.step, width, table, begin, end, target.buffer.data(), target.step, scratch);
  }

  Lines resized(const uint8_t* source, int64_t step, const Resize& resize) {
    const Size from = resize.from, to = resize.to;
    Lines result(to.width, to.height);
    if (resize.down_first) {
      Lines whole(from.width, from.height), lower(from.width, to.height);
      for (int64_t line = 0; line < from.height; ++line) std::memcpy(whole.line(line), source + line * step, from.width);
      down(whole, from.width, resize.down, 0, to.height, lower);
      across(lower.buffer.data(), lower.step, to.height, from.width, resize.across, result);
    } else {
      Lines narrower(to.width, from.height);
      across(source, step, from.height, from.width, resize.across, narrower);
      down(narrower, to.width, resize.down, 0, to.height, result);
    }
    return result;
  }

  // Both resizes of one channel, without the picture between.
  Lines resized_twice(const uint8_t* channel, const Resize& first, const Resize& second) {
    Lines wide(first.to.width, first.from.height), strip(first.to.width, kStrip);
    Lines narrow(second.to.width, second.from.height), result(second.to.width, second.to.height);
    across(channel, first.from.width, first.from.height, first.from.width, first.across, wide);
    for (int64_t begin = 0; begin < first.to.height; begin += kStrip) {
      const int64_t end = std::min<int64_t>(begin + kStrip, first.to.height);
      down(wide, first.to.width, first.down, begin, end, strip);
      across(strip.buffer.data(), strip.step, end - begin, first.to.width, second.across, narrow, begin);
    }
    down(narrow, second.to.width, second.down, 0, second.to.height, result);
    return result;
  }

  Lines run(const uint8_t* channel) {
    const Resize &first = resizes.front(), &second = resizes.back();
    if (resizes.size() == 1) return resized(channel, first.from.width, first);
    if (!first.down_first && !second.down_first) return resized_twice(channel, first, second);
    const Lines between = resized(channel, first.from.width, first);
    return resized(between.buffer.data(), between.step, second);
  }
};

void join(const std::vector<Lines>& channels, int64_t width, int64_t height, uint8_t* rgb) {
  for (int64_t y = 0; y < height; ++y) {
    const uint8_t *red = channels[0].line(y), *green = channels[1].line(y), *blue = channels[2].line(y);
    for (int64_t x = 0; x < width; ++x, rgb += 3) {
      rgb[0] = red[x];
      rgb[1] = green[x];
      rgb[2] = blue[x];
    }
  }
}

}  // namespace

#define SNAPCAP_C extern "C" __attribute__((visibility("default")))

// Resizes a picture once or twice. Returns 0, or 1 if memory is lacking or an argument is not served.
//
// channels: red, green and blue, each [height][width].
// box: left, top, right and bottom of the part that the first resize takes.
// filter: Pillow's number.
// sizes: width and height after the first resize, and after the second one; 0 without a second one.
// may_begin_down: 1 if Pillow chooses which pass is the first, 0 if it always begins along lines.
// rgb: the result, [height][width][3].
SNAPCAP_C int32_t snapcap_resize(const uint8_t* const* channels, int32_t width, int32_t height, const float* box,
                                 int32_t filter, const int32_t* sizes, int32_t may_begin_down, uint8_t* rgb) {
  if (filter < kLanczos || filter > kHamming || width < 1 || height < 1 || sizes[0] < 1 || sizes[1] < 1) return 1;
  try {
    const auto by = static_cast<Filter>(filter);
    const Size from{width, height}, to{sizes[0], sizes[1]}, last{sizes[2], sizes[3]};
    std::vector<Resize> resizes;
    resizes.emplace_back(from, box, to, by, may_begin_down != 0);
    if (last.width > 0) {
      const float whole[4] = {0, 0, static_cast<float>(to.width), static_cast<float>(to.height)};
      resizes.emplace_back(to, whole, last, by, may_begin_down != 0);
    }
    const Size result = resizes.back().to;
    Resizer resizer{std::move(resizes), {}};
    std::vector<Lines> results;
    for (int channel = 0; channel < 3; ++channel) results.push_back(resizer.run(channels[channel]));
    join(results, result.width, result.height, rgb);
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}
