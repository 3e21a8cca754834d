#include "cuda/arrivals.h"

#include <mutex>
#include <unordered_map>

#include "cuda/tuning.h"

namespace jfa::cuda {

int ArrivalCounterOf(const void* result) {
  static std::mutex mutex;
  static auto* indices = new std::unordered_map<const void*, int>();
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = indices->find(result);
  if (found != indices->end()) return found->second;
  const int index = static_cast<int>(indices->size());
  if (index == kNumArrivalCounters) return -1;
  indices->emplace(result, index);
  return index;
}

}  // namespace jfa::cuda
