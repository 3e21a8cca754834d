// Thread pools of the harness.
#ifndef JAX_FUSED_ADAMW_CC_TESTS_POOLS_H_
#define JAX_FUSED_ADAMW_CC_TESTS_POOLS_H_

#include <functional>
#include <thread>
#include <utility>
#include <vector>

namespace jfa::tests {

// A pool with the interface that ParallelFor needs.
struct ThreadPool {
  std::vector<std::thread> threads;

  template <typename Task>
  void Schedule(Task&& task) {
    threads.emplace_back(std::forward<Task>(task));
  }
  ~ThreadPool() {
    for (std::thread& thread : threads) thread.join();
  }
};

// A pool that never starts anything before the loop has returned: the deadlock of a handler that
// occupies the only thread.
struct BusyPool {
  std::vector<std::function<void()>> tasks;

  template <typename Task>
  void Schedule(Task&& task) {
    tasks.emplace_back(std::forward<Task>(task));
  }
  ~BusyPool() {
    for (const auto& task : tasks) task();
  }
};

struct InlinePool {
  template <typename Task>
  void Schedule(Task&& task) {
    task();
  }
};

}  // namespace jfa::tests

#endif  // JAX_FUSED_ADAMW_CC_TESTS_POOLS_H_
