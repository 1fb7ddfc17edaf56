// Runs the parallel regions of packages on the team. Packages call these functions by the names of GCC's OpenMP runtime
// (libgomp_g.h), which are replaced when a package is opened.
//
// libgomp has threads of its own. Beside a product's helpers there would be more threads that look for work than CPUs,
// and those that look would take the CPUs from those that compute.

#include <atomic>
#include <cstdint>
#include <utility>

#include "matrix.h"
#include "team.h"
#include "tensor.h"

using namespace snapcap;

namespace {

struct Region {
  std::atomic<int64_t> singles{0};  // blocks that one thread runs, and that a thread has begun
  std::atomic<int64_t> arrived{0}, barriers{0};
  Event all_arrived;
};

// A thread of a region.
struct Member {
  Region* region = nullptr;
  int64_t number = 0, count = 1;
  int64_t singles = 0;  // blocks that one thread runs, and that this thread has come to
};

thread_local Member member;

}  // namespace

SNAPCAP_C void run_parallel(void (*run)(void*), void* data, unsigned threads, unsigned) {
  Region region;
  const auto pass = [&](int64_t number, int64_t count) {
    const Member before = std::exchange(member, {&region, number, count, 0});
    run(data);
    member = before;
  };
  const int most = threads == 0 ? thread_count() : static_cast<int>(threads);
  if (most == 1 || member.region != nullptr) {
    pass(0, 1);
  } else {
    run_apart(most, pass);
  }
}

SNAPCAP_C void run_barrier() {
  if (member.count == 1) return;
  Region& region = *member.region;
  const int64_t before = region.barriers.load();
  if (region.arrived.fetch_add(1) + 1 == member.count) {
    region.arrived.store(0);
    region.barriers.store(before + 1);
    region.all_arrived.tell(member.count - 1);
  } else {
    region.all_arrived.wait([&] { return region.barriers.load() != before; });
  }
}

SNAPCAP_C bool run_single_start() {
  int64_t turn = member.singles++;
  return member.count == 1 || member.region->singles.compare_exchange_strong(turn, turn + 1);
}

SNAPCAP_C int run_num_threads() { return static_cast<int>(member.count); }
SNAPCAP_C int run_thread_num() { return static_cast<int>(member.number); }
