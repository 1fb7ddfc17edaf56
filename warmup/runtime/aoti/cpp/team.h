// Shares the passes of a loop out among the calling thread and helpers, as far as these have a CPU.
//
// Whoever is free takes the next pass, and the caller waits for those alone that somebody has begun. So a helper that
// gets no CPU, because HTTP or the decoding of images needs it, delays nobody, as it would a team whose members are
// given a part each.

#pragma once

#include <cstdint>

namespace snapcap {

struct Loop {
  void (*pass)(const void* body, int64_t index);
  const void* body;
  int64_t count;
};

// Runs each of the passes once and returns when all have ended: on this thread and on helpers, of which so many are
// made, if they are not there yet, and woken. More that are awake join in. While another thread is here
// it goes without them; a pass shares nothing.
//
// Throws the first error of a pass.
void share(const Loop& loop, int helpers);

// How many helpers so many multiplications are worth, of `threads` with this one.
inline int helpers_for(int threads, int64_t multiplications) {
  constexpr int64_t kWorth = 1 << 20;  // that one is worth waking for
  const int64_t most = multiplications / kWorth;
  return most < threads - 1 ? static_cast<int>(most) : threads - 1;
}

// body(0) … body(count - 1), in any order.
template <class Body>
void share_out(int64_t count, int helpers, const Body& body) {
  if (helpers < 1 || count < 2) {
    for (int64_t index = 0; index < count; ++index) body(index);
    return;
  }
  share({[](const void* of, int64_t index) { (*static_cast<const Body*>(of))(index); }, &body, count}, helpers);
}

}  // namespace snapcap
