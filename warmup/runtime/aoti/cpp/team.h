// Shares the passes of a loop out among the calling thread and helpers, as far as these have a CPU.
//
// Whoever is free takes the next pass, and the caller waits for those alone that somebody has begun. So a helper that
// gets no CPU, because HTTP or the decoding of images needs it, delays nobody, as it would a team whose members are
// given a part each.

#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

namespace snapcap {

// Threads wait for what another thread does. They look for it for a while, which is longer than what a package computes
// between two products, and yield meanwhile, so that whoever wants the CPU has it. Then they sleep.
class Event {
 public:
  // Returns when `came()`, which is true from then on until all threads that wait have seen it.
  template <class Came>
  void wait(const Came& came) {
    if (came()) return;
    const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(100);
    while (!came()) {
      if (std::chrono::steady_clock::now() < until) {
        std::this_thread::yield();
        continue;
      }
      std::unique_lock<std::mutex> lock(mutex_);
      ++sleeping_;
      came_.wait(lock, came);
      --sleeping_;
    }
  }

  // Wakes up to `most` of the threads that sleep. Called after what they wait for.
  void tell(int64_t most = 1) {
    if (sleeping_.load() == 0) return;
    { const std::lock_guard<std::mutex> after_its_last_look(mutex_); }
    for (int64_t each = 0; each < most; ++each) came_.notify_one();
  }

 private:
  std::mutex mutex_;
  std::condition_variable came_;
  std::atomic<int> sleeping_{0};
};

struct Loop {
  void (*pass)(const void* body, int64_t index, int64_t count);
  const void* body;
  int64_t count;
  bool apart = false;  // passes wait for each other: there are no more than threads, and each has its own
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
  share({[](const void* of, int64_t index, int64_t) { (*static_cast<const Body*>(of))(index); }, &body, count}, helpers);
}

// body(0, count) … body(count - 1, count), each on a thread of its own if one waits for another. `count`: up to
// `threads`, or 1 while another thread shares something.
template <class Body>
void run_apart(int threads, const Body& body) {
  share({[](const void* of, int64_t index, int64_t count) { (*static_cast<const Body*>(of))(index, count); }, &body, threads, true},
        threads - 1);
}

}  // namespace snapcap
