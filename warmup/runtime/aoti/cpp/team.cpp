#include "team.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include <pthread.h>

namespace snapcap {
namespace {

// How long a thread looks for something to do before it sleeps: longer than what a package computes between two
// products. It yields meanwhile, so that whoever wants the CPU has it.
constexpr std::chrono::microseconds kPatience(100);

class Team {
 public:
  void run(const Loop& loop, int helpers) {
    const std::unique_lock<std::mutex> only(caller_, std::try_to_lock);
    if (!only.owns_lock() || loop.count > kMost) {
      for (int64_t index = 0; index < loop.count; ++index) loop.pass(loop.body, index);
      return;
    }
    hire(helpers);
    loop_ = loop;
    ended_.store(0, std::memory_order_relaxed);
    passes_.store(static_cast<uint64_t>(loop.count) << kBits);
    if (sleeping_.load() > 0) {
      { const std::lock_guard<std::mutex> after_its_last_look(mutex_); }
      for (int helper = 0; helper < helpers; ++helper) wake_.notify_one();
    }
    while (take()) {
    }
    wait_for(loop.count);
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
    try {
      loop_.pass(loop_.body, static_cast<int64_t>(passes & kMost));
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!failure_) failure_ = std::current_exception();
    }
    const uint64_t count = passes >> kBits;
    if (ended_.fetch_add(1) + 1 == count && caller_sleeps_.load()) {
      const std::lock_guard<std::mutex> after_its_last_look(mutex_);
      all_ended_.notify_one();
    }
    return true;
  }

  // What others have begun.
  void wait_for(int64_t count) {
    const auto all = [&] { return ended_.load() == static_cast<uint64_t>(count); };
    const auto until = std::chrono::steady_clock::now() + kPatience;
    while (!all()) {
      if (std::chrono::steady_clock::now() < until) {
        std::this_thread::yield();
        continue;
      }
      std::unique_lock<std::mutex> lock(mutex_);
      caller_sleeps_.store(true);
      all_ended_.wait(lock, all);
      caller_sleeps_.store(false);
    }
  }

  void hire(int helpers) {
    try {
      for (; hired_ < helpers; ++hired_) std::thread([this] { help(); }).detach();
    } catch (const std::exception&) {  // this process can have no more: it goes without
      hired_ = helpers;
    }
  }

  [[noreturn]] void help() {
    for (;;) {
      const auto until = std::chrono::steady_clock::now() + kPatience;
      bool busy = false;
      while (!(busy = take()) && std::chrono::steady_clock::now() < until) std::this_thread::yield();
      if (busy) continue;
      std::unique_lock<std::mutex> lock(mutex_);
      ++sleeping_;
      wake_.wait(lock, [this] { return any(passes_.load()); });
      --sleeping_;
    }
  }

  std::mutex caller_, mutex_;
  std::condition_variable wake_, all_ended_;
  Loop loop_{};
  std::exception_ptr failure_;
  std::atomic<uint64_t> passes_{0};  // how many there are, and in the lower half how many have been taken
  std::atomic<uint64_t> ended_{0};
  std::atomic<int> sleeping_{0};
  std::atomic<bool> caller_sleeps_{false};
  int hired_ = 0;
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
