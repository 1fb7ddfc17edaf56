#include "team.h"

#include <algorithm>
#include <exception>
#include <utility>

#include <pthread.h>

namespace snapcap {
namespace {

class Team {
 public:
  void run(const Loop& loop, int helpers) {
    const std::unique_lock<std::mutex> only(caller_, std::try_to_lock);
    if (!only.owns_lock() || loop.count > kMost) {
      const int64_t count = loop.apart ? 1 : loop.count;
      for (int64_t index = 0; index < count; ++index) loop.pass(loop.body, index, count);
      return;
    }
    hire(helpers);
    loop_ = loop;
    if (loop.apart) loop_.count = std::min<int64_t>(loop.count, hired_ + 1);
    const auto count = static_cast<uint64_t>(loop_.count);
    ended_.store(0, std::memory_order_relaxed);
    passes_.store(count << kBits);
    begun_.tell(helpers);
    while (take()) {
    }
    all_ended_.wait([&] { return ended_.load() == count; });
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
  }

 private:
  static constexpr int kBits = 32;
  static constexpr int64_t kMost = (int64_t{1} << kBits) - 1;

  static bool any(uint64_t passes) { return (passes & kMost) < passes >> kBits; }

  // Runs the next pass, if there is one.
  bool take() {
    uint64_t passes = passes_.load(std::memory_order_acquire);
    do {
      if (!any(passes)) return false;
      // What is exchanged may be of a later loop than what was read, and is a pass of that one then.
    } while (!passes_.compare_exchange_weak(passes, passes + 1, std::memory_order_acq_rel, std::memory_order_acquire));
    const uint64_t count = passes >> kBits;
    try {
      loop_.pass(loop_.body, static_cast<int64_t>(passes & kMost), static_cast<int64_t>(count));
    } catch (...) {
      const std::lock_guard<std::mutex> lock(failing_);
      if (!failure_) failure_ = std::current_exception();
    }
    if (ended_.fetch_add(1) + 1 == count) all_ended_.tell();
    return true;
  }

  void hire(int helpers) {
    try {
      for (; hired_ < helpers && !alone_; ++hired_) std::thread([this] { help(); }).detach();
    } catch (const std::exception&) {  // this process can have no more: it goes without
      alone_ = true;
    }
  }

  [[noreturn]] void help() {
    for (;;) {
      begun_.wait([this] { return any(passes_.load()); });
      take();
    }
  }

  std::mutex caller_, failing_;
  Event begun_, all_ended_;
  Loop loop_{};
  std::exception_ptr failure_;
  std::atomic<uint64_t> passes_{0};  // how many there are, and in the lower half how many have been taken
  std::atomic<uint64_t> ended_{0};
  int hired_ = 0;
  bool alone_ = false;
};

}  // namespace

void share(const Loop& loop, int helpers) {
  // Never destroyed, as its helpers outlive what ends a process; a forked process has none of them.
  static std::atomic<Team*> team = [] {
    pthread_atfork(nullptr, nullptr, [] { team = new Team; });
    return new Team;
  }();
  team.load()->run(loop, helpers);
}

}  // namespace snapcap
