// Does the pool of kernels_ext/cpu/threads/parallel.h share out every item once, from several threads at a time, and after fork?
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "parallel.h"

namespace {

void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::abort();
}

// Five times: every a gains 1, every b gains an a of another piece. So each share has to wait for the one before.
void region(int threads, int64_t items, int64_t grain) {
  std::vector<int64_t> a(items), b(items);
  int64_t sum = 0;
  mlspec::run(threads, [&](mlspec::Team& team) {
    for (int round = 0; round < 5; ++round) {
      team.share(items, grain, [&](int64_t i, int64_t end) {
        for (; i < end; ++i) ++a[i];
      });
      team.share(items, grain + 1, [&](int64_t i, int64_t end) {
        for (; i < end; ++i) b[i] += a[items - 1 - i];
      });
      if (team.index() == 0)
        for (int64_t value : b) sum += value;
      team.barrier();
    }
    mlspec::run(4, [](mlspec::Team& inner) { check(inner.size() == 1 && inner.index() == 0, "an inner region is alone"); });
  });
  check(sum == items * (1 + 3 + 6 + 10 + 15), "every item once, in order");
}

}  // namespace

int main(int count, char** words) {
  const int regions = std::atoi(words[1]);
  std::vector<std::thread> callers;
  for (int k = 0; k < 3; ++k)
    callers.emplace_back([=] {
      for (int r = 0; r < regions; ++r) {
        region(1 + (r + k) % 5, r % 37, r % 4);
        if (r % 50 == 0) usleep(200);  // long enough for workers to fall asleep
      }
    });
  for (std::thread& caller : callers) caller.join();
  for (int f = 0; count < 3 && f < 10; ++f) {  // a third word: no fork, which ThreadSanitizer does not follow
    const pid_t child = fork();
    if (child == 0) {
      for (int i = 0; i < 20; ++i) region(2, 20, 1);
      _exit(0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    check(status == 0, "a child has a pool of its own");
    region(2, 10, 1);
  }
  return 0;
}
