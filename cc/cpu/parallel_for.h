// A parallel loop over XLA's thread pool that cannot deadlock.
//
// A handler may itself run on the only thread of the pool, so it must never wait for a task that
// has not started. Here the caller works too: tasks and caller draw indices from one counter, and
// the caller waits only for indices that a running task has already drawn. A task that starts late
// finds the counter exhausted and touches nothing but the shared state it keeps alive.
#ifndef JAX_FUSED_ADAMW_CC_CPU_PARALLEL_FOR_H_
#define JAX_FUSED_ADAMW_CC_CPU_PARALLEL_FOR_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

namespace jfa::cpu {

// Pool has Schedule(callable). `body(index)` must not throw; it is called once for each index in
// [0, count), by at most num_helpers + 1 threads, each of which holds a WorkerScope meanwhile.
template <typename WorkerScope, typename Pool, typename Body>
void ParallelFor(Pool& pool, std::int64_t num_helpers, std::int64_t count, const Body& body) {
  struct Shared {
    std::atomic<std::int64_t> next{0};
    std::mutex mutex;
    std::condition_variable all_finished;
    std::int64_t finished = 0;
  };
  auto shared = std::make_shared<Shared>();
  // Valid while any index is unfinished, because the caller does not return before that.
  const Body* const shared_body = &body;
  const auto work = [shared, shared_body, count] {
    std::int64_t done = 0;
    {
      const WorkerScope scope;
      for (std::int64_t i; (i = shared->next.fetch_add(1, std::memory_order_relaxed)) < count;) {
        (*shared_body)(i);
        ++done;
      }
    }
    if (done == 0) return;
    const std::lock_guard<std::mutex> lock(shared->mutex);
    shared->finished += done;
    if (shared->finished == count) shared->all_finished.notify_one();
  };
  for (std::int64_t h = 0; h < num_helpers; ++h) {
    auto helper = work;  // Schedule takes rvalues only
    pool.Schedule(std::move(helper));
  }
  work();
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->all_finished.wait(lock, [&] { return shared->finished == count; });
}

}  // namespace jfa::cpu

#endif  // JAX_FUSED_ADAMW_CC_CPU_PARALLEL_FOR_H_
