// Resizes RGB pictures with the same result as Pillow, bit by bit, on one thread.
//
// Pillow weighs the samples of each line with coefficients of 22 bits, rounds to 8 bits, and then does the same from
// line to line. So does this file, one channel after the other and with vectors. The second of two resizes in a row
// takes lines as the first one makes them, so that the picture between, which may be large, is never there as a whole.
//
// Processors multiply and add four samples at once. So both passes make quads first: four samples that follow each other
// along a line, of a block of lines, or from line to line, of a block of columns. One function then weighs the quads.
// Every sum is exact, so the order of additions does not matter.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <utility>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

constexpr int kPrecision = 22;  // bits of a coefficient behind the point
constexpr int32_t kHalf = 1 << (kPrecision - 1);
constexpr int64_t kAlignment = 64;

#if defined(__AVX512BW__) && defined(__AVX512VNNI__)
#define SNAPCAP_AVX512
constexpr int kLanes = 16;  // sums in a vector
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kBlock = 4 * kLanes;  // neighbours that are weighed at a time, and bytes of a vector

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

typedef uint8_t Bytes __attribute__((vector_size(kBlock)));
typedef int32_t Sums __attribute__((vector_size(kBlock)));
typedef int32_t Four __attribute__((vector_size(16)));

template <class Vector>
Vector loaded(const void* memory) {
  Vector vector;
  std::memcpy(&vector, memory, sizeof vector);
  return vector;
}

inline Sums all_of(int32_t value) { return value - Sums{}; }

// Each instruction set has its own
//   Quads         a vector of quads, ready to be multiplied
//   Coefficients  of the four samples of a quad
//   Accumulator   sums of quads times coefficients, with a half to round them
//   store         writes four vectors of rounded sums as samples, in the order of the vectors that `transpose` makes
//   joined        a vector of pieces of 16 bytes
#if defined(SNAPCAP_AVX512)
struct Quads {
  Sums samples;  // bytes

  Quads() = default;
  explicit Quads(Sums quads) : samples(quads) {}
};

// The instruction multiplies bytes, so a coefficient, which is less than 2, is three signed digits of 8 bits.
struct Coefficients {
  Four digits;  // the lowest digits of four samples, the middle ones, the highest ones, and nothing

  explicit Coefficients(Four weights) {
    const Four each = (weights + 0x808080) ^ 0x808080;  // digits plus 128 are the bytes of the sum
    digits = (Four)_mm_shuffle_epi8((__m128i)each, _mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
  }
};

struct Accumulator {
  Sums sums[3] = {all_of(kHalf)};

  void add(const Quads& quads, const Coefficients& by) {
    for (int digit = 0; digit < 3; ++digit)
      sums[digit] = (Sums)_mm512_dpbusd_epi32((__m512i)sums[digit], (__m512i)quads.samples,
                                              (__m512i)all_of(by.digits[digit]));
  }
  Sums rounded() const { return ((((sums[2] << 8) + sums[1]) << 8) + sums[0]) >> kPrecision; }
};

inline void store(uint8_t* samples, const Sums (&rounded)[4]) {
  const __m512i first = _mm512_packs_epi32((__m512i)rounded[0], (__m512i)rounded[1]);
  const __m512i second = _mm512_packs_epi32((__m512i)rounded[2], (__m512i)rounded[3]);
  _mm512_storeu_si512(samples, _mm512_packus_epi16(first, second));
}

template <class Place>
Sums joined(Place place) {
  const auto piece = [&](int number) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(place(number))); };
  const __m512i two = _mm512_inserti32x4(_mm512_castsi128_si512(piece(0)), piece(1), 1);
  return (Sums)_mm512_inserti32x4(_mm512_inserti32x4(two, piece(2), 2), piece(3), 3);
}
#elif defined(__AVX2__)
struct Quads {
  Sums even, odd;  // numbers of 16 bits

  Quads() = default;
  explicit Quads(Sums quads) : even(quads & 0x00ff00ff), odd((Sums)_mm256_srli_epi16((__m256i)quads, 8)) {}
};

// The instruction multiplies pairs of numbers of 16 bits, so a coefficient has two halves.
struct Coefficients {
  static constexpr int kLowBits = 12;
  int16_t high[2][2], low[2][2];  // of the even samples, and of the odd ones

  explicit Coefficients(Four weights) {
    for (int sample = 0; sample < 4; ++sample) {
      const int32_t half = (weights[sample] + (1 << (kLowBits - 1))) >> kLowBits;
      high[sample % 2][sample / 2] = static_cast<int16_t>(half);
      low[sample % 2][sample / 2] = static_cast<int16_t>(weights[sample] - half * (1 << kLowBits));
    }
  }
};

struct Accumulator {
  Sums high = {}, low = all_of(kHalf);

  void add(const Quads& quads, const Coefficients& by) {
    const auto products = [&](const int16_t (&half)[2][2]) {
      return (Sums)_mm256_madd_epi16((__m256i)quads.even, (__m256i)all_of(loaded<int32_t>(half[0]))) +
             (Sums)_mm256_madd_epi16((__m256i)quads.odd, (__m256i)all_of(loaded<int32_t>(half[1])));
    };
    high += products(by.high);
    low += products(by.low);
  }
  Sums rounded() const { return ((high << Coefficients::kLowBits) + low) >> kPrecision; }
};

inline void store(uint8_t* samples, const Sums (&rounded)[4]) {
  const __m256i first = _mm256_packs_epi32((__m256i)rounded[0], (__m256i)rounded[1]);
  const __m256i second = _mm256_packs_epi32((__m256i)rounded[2], (__m256i)rounded[3]);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(samples), _mm256_packus_epi16(first, second));
}

template <class Place>
Sums joined(Place place) {
  return (Sums)_mm256_loadu2_m128i(reinterpret_cast<const __m128i*>(place(1)),
                                   reinterpret_cast<const __m128i*>(place(0)));
}
#else
struct Quads {
  Sums samples[4];

  Quads() = default;
  explicit Quads(Sums quads) : samples{quads & 255, quads >> 8 & 255, quads >> 16 & 255, quads >> 24 & 255} {}
};

struct Coefficients {
  Four weights;

  explicit Coefficients(Four weights) : weights(weights) {}
};

struct Accumulator {
  Sums sums = all_of(kHalf);

  void add(const Quads& quads, const Coefficients& by) {
    for (int sample = 0; sample < 4; ++sample) sums += quads.samples[sample] * by.weights[sample];
  }
  Sums rounded() const { return sums >> kPrecision; }
};

inline void store(uint8_t* samples, const Sums (&rounded)[4]) {
  for (const Sums& each : rounded)
    for (int lane = 0; lane < kLanes; ++lane) *samples++ = static_cast<uint8_t>(std::clamp(each[lane], 0, 255));
}

template <class Place>
Sums joined(Place place) {
  return loaded<Sums>(place(0));
}
#endif

// The samples that one result is made of: quads from a place, and the place of their coefficients.
struct Taps {
  int32_t first, quads;
  int64_t coefficients;
};

// How a length becomes another. Along lines, a quad begins at every fourth sample. From line to line, a result has quads
// from its first sample on, or those of the result before.
struct Table {
  bool across;
  int64_t most = 0;  // the quads of the result that has most
  std::vector<Taps> taps;
  std::vector<Coefficients> coefficients;

  explicit Table(bool across) : across(across) {}
  int64_t outputs() const { return static_cast<int64_t>(taps.size()); }
};

typedef double Doubles __attribute__((vector_size(kBlock)));
constexpr int kDoubles = kBlock / 8;

// Lanczos' weights of samples that follow each other. A table needs fifty thousand sines, and the C library takes ten
// times as long for one. So sines are made from the sine and cosine of one sample's angle, and from those of the angles
// between samples. The error is that of a few roundings.
class Lanczos {
 public:
  Lanczos(double step, int most) : most_(most) {
    for (int number = -most; number < most + kDoubles; ++number) {  // the last ones fill a vector
      const double angle = number * step * M_PI;
      sines_.push_back(std::sin(angle));
      cosines_.push_back(std::cos(angle));
      third_sines_.push_back(std::sin(angle / 3));
      third_cosines_.push_back(std::cos(angle / 3));
    }
  }

  // Makes weights of distances. Sample number `known` of the row has this distance.
  void weigh(std::vector<Doubles>& row, double distance, int known) const {
    const double angle = distance * M_PI / 3, third_sine = std::sin(angle), third_cosine = std::cos(angle);
    const double sine = third_sine * (3 - 4 * third_sine * third_sine);
    const double cosine = third_cosine * (4 * third_cosine * third_cosine - 3);
    int turn = most_ - known;
    for (Doubles& x : row) {
      const auto turned = [&](double sine, double cosine, const auto& sines, const auto& cosines) {
        return loaded<Doubles>(&cosines[turn]) * sine + loaded<Doubles>(&sines[turn]) * cosine;
      };
      const Doubles weights = turned(sine, cosine, sines_, cosines_) *
                              turned(third_sine, third_cosine, third_sines_, third_cosines_) /
                              (x * M_PI * (x * M_PI) / 3);
      x = x == 0.0 ? Doubles{} + 1.0 : (x >= -3.0) & (x < 3.0) ? weights : Doubles{};
      turn += kDoubles;
    }
  }

 private:
  int most_;
  std::vector<double> sines_, cosines_, third_sines_, third_cosines_;
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
    case kBilinear:
      return distance < 1.0 ? 1.0 - distance : 0.0;
    case kBicubic:  // Keys' kernel with a = -1/2
      if (distance < 1.0) return (1.5 * distance - 2.5) * distance * distance + 1;
      return distance < 2.0 ? (((distance - 5) * distance + 8) * distance - 4) * -0.5 : 0.0;
    case kBox:
      return x > -0.5 && x <= 0.5 ? 1.0 : 0.0;
    case kHamming:
      if (distance >= 1.0) return 0.0;
      if (distance == 0.0) return 1.0;
      return std::sin(distance * M_PI) / (distance * M_PI) * (0.54f + 0.46f * std::cos(distance * M_PI));
    default:  // Lanczos' are made by `Lanczos`
      return 0.0;
  }
}

// Adds the taps of one result, without coefficients of 0 at both ends. Beyond both ends `weights` has zeros.
void add_taps(Table& table, int first, int count, const int32_t* weights) {
  int begin = 0;
  while (count > 0 && weights[count - 1] == 0) --count;
  while (begin < count && weights[begin] == 0) ++begin;
  if (table.across) {
    begin -= (first + begin) % 4;
  } else if (!table.taps.empty()) {
    const Taps& before = table.taps.back();  // its quads are taken if they have all samples
    const int earlier = before.first - first;
    if (earlier <= begin && count <= earlier + 4 * before.quads) begin = earlier;
  }
  const int quads = count == 0 ? 0 : (count - begin + 3) / 4;
  table.most = std::max<int64_t>(table.most, quads);
  table.taps.push_back({first + begin, quads, static_cast<int64_t>(table.coefficients.size())});
  for (int quad = 0; quad < quads; ++quad) table.coefficients.emplace_back(loaded<Four>(weights + begin + 4 * quad));
}

// The table of a length, of which the part from `begin` to `end` becomes `outputs` samples.
Table make_table(bool across, int length, float begin, float end, int64_t outputs, Filter filter) {
  const double scale = static_cast<double>(end - begin) / static_cast<double>(outputs);
  const double widening = std::max(scale, 1.0), support = reach(filter) * widening, narrowing = 1.0 / widening;
  Table table(across);
  table.taps.reserve(outputs);
  table.coefficients.reserve(outputs * (static_cast<int64_t>(support / 2) + 2));
  Doubles steps;
  for (int step = 0; step < kDoubles; ++step) steps[step] = step;
  std::vector<Doubles> row;
  const int longest = 2 * static_cast<int>(std::ceil(support)) + 1;
  std::vector<int32_t> memory(3 * (longest + 8));
  int32_t* weights = &memory[longest + 8];
  const Lanczos lanczos(narrowing, filter == kLanczos ? longest : 0);
  for (int64_t output = 0; output < outputs; ++output) {
    const double center = begin + (static_cast<double>(output) + 0.5) * scale;
    const int first = std::max(static_cast<int>(center - support + 0.5), 0);
    const int last = std::min(static_cast<int>(center + support + 0.5), length), count = std::max(last - first, 0);
    row.clear();
    for (int sample = first; sample < last; sample += kDoubles)
      row.push_back((steps + sample - center + 0.5) * narrowing);
    if (filter == kLanczos) {
      const int nearest = std::clamp(static_cast<int>(center), first, std::max(first, last - 1));
      lanczos.weigh(row, (nearest - center + 0.5) * narrowing, nearest - first);
    } else {
      for (Doubles& each : row)
        for (int sample = 0; sample < kDoubles; ++sample) each[sample] = weight(filter, each[sample]);
    }
    double total = 0.0;
    for (int sample = 0; sample < count; ++sample) total += row[sample / kDoubles][sample % kDoubles];
    for (size_t number = 0; number < row.size(); ++number) {
      const Doubles shares = row[number] / (total != 0.0 ? total : 1.0) * (1 << kPrecision);
      typedef int32_t Integers __attribute__((vector_size(kBlock / 2)));
      const Doubles halves = shares < 0.0 ? Doubles{} - 0.5 : Doubles{} + 0.5;
      const Integers rounded = __builtin_convertvector(shares + halves, Integers);
      std::memcpy(weights + number * kDoubles, &rounded, sizeof rounded);
    }
    std::fill_n(weights + count, 4, 0);
    add_taps(table, first, count, weights);
  }
  return table;
}

// The first or the second halves of two vectors, element by element in turn, in each 16 bytes apart.
template <bool kSecond, class Vector, size_t... kPlaces>
Vector zipped(Vector a, Vector b, std::index_sequence<kPlaces...>) {
  constexpr size_t kPart = 16 / sizeof(a[0]);
#if defined(__clang__)
#define SNAPCAP_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else  // g++ has the other name since version 12
#define SNAPCAP_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Vector{__VA_ARGS__})
#endif
  return SNAPCAP_SHUFFLE(a, b, (kPlaces % 2 * sizeof...(kPlaces) + kPlaces / kPart * kPart + kPlaces % kPart / 2 +
                                (kSecond ? kPart / 2 : 0))...);
}

// Turns rows into columns, in each 16 bytes apart. Of four rows of bytes it makes quads.
template <class Vector, size_t kCount>
void transpose(std::array<Vector, kCount>& rows) {
  constexpr auto kPlaces = std::make_index_sequence<sizeof(Vector) / sizeof(rows[0][0])>();
  for (size_t step = 1; step < kCount; step *= 2) {
    std::array<Vector, kCount> next;
    for (size_t row = 0; row < kCount / 2; ++row) {
      next[2 * row] = zipped<false>(rows[row], rows[row + kCount / 2], kPlaces);
      next[2 * row + 1] = zipped<true>(rows[row], rows[row + kCount / 2], kPlaces);
    }
    rows = next;
  }
}

// A result of each of `kBlock` neighbours, from [count][4] vectors of their quads.
[[gnu::always_inline]] inline void weigh(const Quads* quads, const Coefficients* coefficients, int64_t count,
                                         uint8_t* results) {
  Accumulator sums[4];
  for (int64_t quad = 0; quad < count; ++quad)
    for (int part = 0; part < 4; ++part) sums[part].add(quads[4 * quad + part], coefficients[quad]);
  store(results, {sums[0].rounded(), sums[1].rounded(), sums[2].rounded(), sums[3].rounded()});
}

// Quads of 16 samples that follow each other, of each of `count` lines: [4][4].
[[gnu::always_inline]] inline void gather(const uint8_t* source, int64_t step, int64_t count, Quads* quads) {
  for (int part = 0; part < 4; ++part) {
    std::array<Sums, 4> rows;
    for (int row = 0; row < 4; ++row)
      rows[row] = joined([&](int64_t of) { return source + std::min(16 * of + 4 * part + row, count - 1) * step; });
    transpose(rows);
    for (int quad = 0; quad < 4; ++quad) quads[4 * quad + part] = Quads(rows[quad]);
  }
}

// Puts [16 samples][kBlock lines] at their places in `count` lines.
void scatter(std::array<Bytes, 16> rows, uint8_t* target, int64_t step, int64_t count) {
  transpose(rows);
  for (int piece = 0; piece < kBlock / 16; ++piece)
    for (int row = 0; row < 16; ++row)
      if (16 * piece + row < count)
        std::memcpy(target + (16 * piece + row) * step, reinterpret_cast<const uint8_t*>(&rows[row]) + 16 * piece, 16);
}

// A strip of `count` lines, as quads, to lines of the table's length, in whole blocks of 16 samples.
void pass_across(const Quads* quads, int64_t count, const Table& table, uint8_t* target, int64_t step) {
  std::array<Bytes, 16> block;
  const int64_t outputs = table.outputs();
  for (int64_t x = 0; x < outputs; ++x) {
    const Taps& taps = table.taps[x];
    weigh(quads + taps.first, table.coefficients.data() + taps.coefficients, taps.quads,
          reinterpret_cast<uint8_t*>(&block[x % 16]));
    if (x % 16 == 15 || x + 1 == outputs) scatter(block, target + x / 16 * 16, step, count);
  }
}

// Quads of samples from line to line: `count` in each of `kBlock` columns, [count][4]. The function is not inlined, so
// that `pass_down` has enough registers.
[[gnu::noinline]] void gather_lines(const uint8_t* source, int64_t step, int64_t count, Quads* quads) {
  for (; count > 0; --count, source += 4 * step, quads += 4) {
    std::array<Bytes, 4> lines;
    for (int line = 0; line < 4; ++line) lines[line] = loaded<Bytes>(source + line * step);
    transpose(lines);
    for (int part = 0; part < 4; ++part) quads[part] = Quads((Sums)lines[part]);
  }
}

// Lines `begin` to `end` of the table, in `kBlock` columns.
void pass_down(const uint8_t* source, int64_t source_step, const Table& table, int64_t begin, int64_t end,
               uint8_t* target, int64_t target_step, Quads* quads) {
  int64_t first = -1, made = 0;
  const Coefficients* coefficients = table.coefficients.data() + table.taps[begin].coefficients;
  for (const Taps* taps = &table.taps[begin]; begin < end; ++begin, ++taps, target += target_step) {
    if (taps->first != first) made = 0;
    first = taps->first;
    if (made < taps->quads) {
      gather_lines(source + (first + 4 * made) * source_step, source_step, taps->quads - made, quads + 4 * made);
      made = taps->quads;
    }
    weigh(quads, coefficients, taps->quads, target);
    coefficients += taps->quads;
  }
}

// Lines of one channel, whose memory reaches beyond each line, and three lines beyond the last one. Lines are an odd
// number of cache lines apart. A power of 2 would put a column of all lines into few places of a cache.
struct Lines {
  int64_t step;
  Buffer buffer;

  Lines(int64_t width, int64_t count) : step(rounded_up(width) | kAlignment), buffer(step * (count + 3)) {}
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
        across(make_table(true, from.width, box[0], box[2], to.width, filter)),
        down(make_table(false, from.height, box[1], box[3], to.height, filter)),
        down_first(begins_down(from, to, may_begin_down)) {}
};

struct Resizer {
  const std::vector<Resize> resizes;  // one or two
  std::vector<Quads> of_lines, of_columns;

  static Quads* grown(std::vector<Quads>& quads, int64_t samples) {
    quads.resize(std::max<size_t>(quads.size(), (samples / kBlock + 1) * kBlock));
    return quads.data();
  }

  // Lines of `width` samples to as many lines of the table's length.
  void across(const uint8_t* source, int64_t step, int64_t lines, int64_t width, const Table& table,
              const Lines& target) {
    Quads* quads = grown(of_lines, width);
    for (int64_t line = 0; line < lines; line += kBlock) {
      const int64_t count = std::min<int64_t>(kBlock, lines - line);
      int64_t x = 0;
      for (; x + 16 <= width; x += 16) gather(source + line * step + x, step, count, quads + x);
      uint8_t ends[kBlock][16] = {};  // nothing is read beyond the last sample
      for (int64_t of = 0; of < count; ++of) std::memcpy(ends[of], source + (line + of) * step + x, width - x);
      gather(ends[0], 16, count, quads + x);
      pass_across(quads, count, table, target.line(line), target.step);
    }
  }

  // Lines of `width` samples to all lines of the table.
  void down(const Lines& source, int64_t width, const Table& table, const Lines& target) {
    Quads* quads = grown(of_columns, 4 * table.most);
    for (int64_t begin = 0; begin < table.outputs(); begin += kBlock) {
      const int64_t end = std::min<int64_t>(begin + kBlock, table.outputs());
      for (int64_t x = 0; x < width; x += kBlock)
        pass_down(source.line(0) + x, source.step, table, begin, end, target.line(begin) + x, target.step, quads);
    }
  }

  Lines resized(const uint8_t* source, int64_t step, const Resize& resize) {
    const Size from = resize.from, to = resize.to;
    Lines result(to.width, to.height);
    if (resize.down_first) {
      Lines whole(from.width, from.height), lower(from.width, to.height);
      for (int64_t line = 0; line < from.height; ++line) std::memcpy(whole.line(line), source + line * step, from.width);
      down(whole, from.width, resize.down, lower);
      across(lower.buffer.data(), lower.step, to.height, from.width, resize.across, result);
    } else {
      Lines narrower(to.width, from.height);
      across(source, step, from.height, from.width, resize.across, narrower);
      down(narrower, to.width, resize.down, result);
    }
    return result;
  }

  // Both resizes of one channel, without the picture between.
  Lines resized_twice(const uint8_t* channel, const Resize& first, const Resize& second) {
    const int64_t width = first.to.width, height = first.to.height;
    Lines wide(width, first.from.height), narrow(second.to.width, height), result(second.to.width, second.to.height);
    across(channel, first.from.width, first.from.height, first.from.width, first.across, wide);
    Quads *quads = grown(of_lines, width), *lines = grown(of_columns, 4 * first.down.most);
    alignas(kAlignment) uint8_t block[kBlock * kBlock] = {};
    for (int64_t begin = 0; begin < height; begin += kBlock) {
      const int64_t end = std::min<int64_t>(begin + kBlock, height);
      for (int64_t x = 0; x < width; x += kBlock) {
        pass_down(wide.line(0) + x, wide.step, first.down, begin, end, block, kBlock, lines);
        for (int column = 0; column < kBlock; column += 16) gather(block + column, kBlock, kBlock, quads + x + column);
      }
      pass_across(quads, end - begin, second.across, narrow.line(begin), narrow.step);
    }
    down(narrow, second.to.width, second.down, result);
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
    Resizer resizer{std::move(resizes), {}, {}};
    std::vector<Lines> results;
    for (int channel = 0; channel < 3; ++channel) results.push_back(resizer.run(channels[channel]));
    join(results, result.width, result.height, rgb);
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}
