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

// Runs each of the passes once and returns when all have ended: on this thread and on `helpers` threads, which are
// made when they are first asked for. While another thread is here, it goes without them. A pass shares nothing.
//
// Throws the first error of a pass.
void share(const Loop& loop, int helpers);

// body(0) … body(count - 1), which together are `work` multiplications, on up to so many threads.
template <class Body>
void share_out(int64_t count, int threads, int64_t work, const Body& body) {
  constexpr int64_t kWorth = 1 << 20;  // multiplications that a thread is worth waking for
  const int64_t most = work / kWorth < threads - 1 ? work / kWorth : threads - 1;
  if (most < 1 || count < 2) {
    for (int64_t index = 0; index < count; ++index) body(index);
    return;
  }
  share({[](const void* of, int64_t index) { (*static_cast<const Body*>(of))(index); }, &body, count},
        static_cast<int>(most));
}

}  // namespace snapcap
