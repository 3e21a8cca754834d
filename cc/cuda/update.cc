#include "cuda/update.h"

#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "core/chunks.h"
#include "cuda/kernels.h"
#include "cuda/table.h"
#include "cuda/tuning.h"

namespace jfa::cuda {
namespace {

using Leaves = std::vector<LeafOperands>;

// What all launches of a call share.
struct Plan {
  UpdateOptions options;
  bool out_apart = false;
  bool moments_apart = false;
  LeafClass leaf_class = LeafClass::kFloat32;

  bool has_nu_max() const { return options.amsgrad != Amsgrad::kOff; }
  int num_buffers() const {
    const int moments = has_nu_max() ? 3 : 2;
    return 2 + (options.zero_moments ? 0 : moments) + (out_apart ? 1 : 0) +
           (moments_apart ? moments : 0);
  }
  KernelName Kernel(bool small_grid) const {
    return {small_grid, leaf_class, options.amsgrad, options.nesterov};
  }
};

// A parameter with its gradient that the kernels for float32 parameters have no body for.
bool NeedsAnyDType(const LeafOperands& leaf) {
  return leaf.param_dtype != DType::kFloat32 || leaf.grad_dtype == DType::kFloat16;
}

Plan MakePlan(const Leaves& leaves, const UpdateOptions& options) {
  Plan plan{options};
  plan.moments_apart = options.zero_moments;
  for (const LeafOperands& leaf : leaves) {
    plan.out_apart |= leaf.out != leaf.param;
    plan.moments_apart |=
        leaf.mu_out != leaf.mu || leaf.nu_out != leaf.nu || leaf.nu_max_out != leaf.nu_max;
    if (NeedsAnyDType(leaf)) plan.leaf_class = LeafClass::kAnyDType;
  }
  if (options.zero_moments) plan.leaf_class = LeafClass::kFirstStep;
  return plan;
}

// In the order of cuda/table.h.
std::vector<const void*> BuffersOf(const LeafOperands& leaf, const Plan& plan) {
  std::vector<const void*> buffers = {leaf.param, leaf.grad};
  if (!plan.options.zero_moments) {
    buffers.push_back(leaf.mu);
    buffers.push_back(leaf.nu);
    if (plan.has_nu_max()) buffers.push_back(leaf.nu_max);
  }
  if (plan.out_apart) buffers.push_back(leaf.out);
  if (plan.moments_apart) {
    buffers.push_back(leaf.mu_out);
    buffers.push_back(leaf.nu_out);
    if (plan.has_nu_max()) buffers.push_back(leaf.nu_max_out);
  }
  return buffers;
}

bool IsAligned(const LeafOperands& leaf, const Plan& plan) {
  const auto is_multiple = [](const void* pointer, int bytes) {
    return reinterpret_cast<std::uintptr_t>(pointer) % static_cast<std::uintptr_t>(bytes) == 0;
  };
  const int param_bytes = kVector * SizeOf(leaf.param_dtype);
  const int moment_bytes = kVector * SizeOf(DType::kFloat32);
  bool aligned = is_multiple(leaf.param, param_bytes) && is_multiple(leaf.out, param_bytes) &&
                 is_multiple(leaf.grad, kVector * SizeOf(leaf.grad_dtype));
  for (const void* moment :
       {static_cast<const void*>(leaf.mu), static_cast<const void*>(leaf.nu),
        static_cast<const void*>(leaf.nu_max), static_cast<const void*>(leaf.mu_out),
        static_cast<const void*>(leaf.nu_out), static_cast<const void*>(leaf.nu_max_out)}) {
    aligned = aligned && is_multiple(moment, moment_bytes);
  }
  // A later member begins in the middle of a leaf.
  const long long members = plan.options.members;
  return aligned && (members == 1 || leaf.num_elements / members % kVector == 0);
}

// Fills the table with leaves from *next on, as many as fit, and advances *next. Returns the
// number of blocks.
template <int kWords>
unsigned FillTable(const Leaves& leaves, const Plan& plan, std::size_t* next,
                   UpdateArguments<kWords>* args) {
  const int num_buffers = plan.num_buffers();
  const std::size_t capacity = UpdateArguments<kWords>::Capacity(num_buffers);
  std::vector<const LeafOperands*> chosen;
  std::vector<Word32> first_block;
  long long blocks = 0;
  constexpr long long kMaxBlocks = 0x7fffffff;
  for (; *next < leaves.size() && chosen.size() < capacity; ++*next) {
    const LeafOperands& leaf = leaves[*next];
    const long long members = plan.options.members;
    const long long more = BlocksInLeaf(members, leaf.num_elements / members, kChunk);
    if (blocks + more > kMaxBlocks) break;
    if (more == 0) continue;
    chosen.push_back(&leaf);
    first_block.push_back(static_cast<Word32>(blocks));
    blocks += more;
  }
  LaunchOptions& options = args->options;
  options.num_leaves = static_cast<int>(chosen.size());
  options.num_buffers = num_buffers;
  Word64* word = args->words;
  for (const LeafOperands* leaf : chosen) {
    for (const void* buffer : BuffersOf(*leaf, plan)) {
      *word++ = reinterpret_cast<std::uintptr_t>(buffer);
    }
  }
  for (const LeafOperands* leaf : chosen) {
    const LeafFlags flags{leaf->param_dtype, leaf->grad_dtype, leaf->decays,
                          IsAligned(*leaf, plan)};
    const Word64 elements = static_cast<Word64>(leaf->num_elements / plan.options.members);
    *word++ = elements << 8 | flags.Pack();
  }
  for (std::size_t i = 0; i < first_block.size(); i += 2) {
    const Word64 high = i + 1 < first_block.size() ? first_block[i + 1] : 0;
    *word++ = first_block[i] | high << 32;
  }
  return static_cast<unsigned>(blocks);
}

// Launches one table of leaves from *next on.
template <int kWords>
std::string LaunchTable(CuStream stream, const StepOperands& operands, const Leaves& leaves,
                        const Plan& plan, int arrival_counter, std::size_t* next) {
  const Kernel kernel = GetKernel(plan.Kernel(kWords == kSmallTableWords));
  if (!kernel.ok()) return kernel.error;
  auto args = std::make_unique<UpdateArguments<kWords>>();
  args->step = operands;
  args->options.arrival_counter = arrival_counter;
  args->options.maximize = plan.options.maximize;
  args->options.write_params = plan.options.write_params;
  args->options.out_apart = plan.out_apart;
  args->options.moments_apart = plan.moments_apart;
  args->options.members = plan.options.members;
  const unsigned blocks = FillTable(leaves, plan, next, args.get());
  if (blocks == 0) {
    // Only empty leaves were left, or one whose blocks a launch cannot number.
    return *next < leaves.size() ? "a leaf has more blocks than one launch can number" : "";
  }
  void* parameters[] = {args.get()};
  return Launch(stream, kernel, blocks, parameters);
}

std::string LaunchCountStep(CuStream stream, const StepOperands& operands, const Plan& plan) {
  const Kernel kernel = GetCountStepKernel(plan.Kernel(false));
  if (!kernel.ok()) return kernel.error;
  StepOperands step = operands;
  long long num_counts = operands.num_counts(plan.options.members);
  void* parameters[] = {&step, &num_counts};
  return Launch(stream, kernel, CeilDivide(num_counts, kThreads), parameters);
}

bool IsSmallGrid(const Leaves& leaves, const Plan& plan) {
  const int capacity = UpdateArguments<kSmallTableWords>::Capacity(plan.num_buffers());
  if (leaves.size() > static_cast<std::size_t>(capacity)) return false;
  const long long members = plan.options.members;
  long long blocks = 0;
  for (const LeafOperands& leaf : leaves) {
    blocks += BlocksInLeaf(members, leaf.num_elements / members, kChunk);
  }
  return 0 < blocks && blocks <= kSmallGridBlocks;
}

// The arrival counter of launches that write a new count there, or -1 when all are taken. Two such
// launches cannot run at the same time, since they write the same memory; any two others have
// different counters.
int ArrivalCounterOf(const int* new_count) {
  static std::mutex mutex;
  static auto* indices = new std::unordered_map<const int*, int>();
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = indices->find(new_count);
  if (found != indices->end()) return found->second;
  const int index = static_cast<int>(indices->size());
  if (index == kNumArrivalCounters) return -1;
  indices->emplace(new_count, index);
  return index;
}

}  // namespace

std::string PrepareUpdate(const Leaves& leaves, const UpdateOptions& options) {
  const Plan plan = MakePlan(leaves, options);
  for (const bool small_grid : {false, true}) {
    const Kernel kernel = GetKernel(plan.Kernel(small_grid));
    if (!kernel.ok()) return kernel.error;
  }
  return GetCountStepKernel(plan.Kernel(false)).error;
}

std::string Update(CuStream stream, const StepOperands& operands, const Leaves& leaves,
                   const UpdateOptions& options) {
  const Plan plan = MakePlan(leaves, options);
  const bool small = IsSmallGrid(leaves, plan);
  const bool counts_itself = small && operands.counts_step() && !operands.count.per_member;
  const int counter = counts_itself ? ArrivalCounterOf(operands.new_counts.count) : -1;
  std::string error;
  for (std::size_t next = 0; next < leaves.size() && error.empty();) {
    error = small ? LaunchTable<kSmallTableWords>(stream, operands, leaves, plan, counter, &next)
                  : LaunchTable<kLargeTableWords>(stream, operands, leaves, plan, -1, &next);
  }
  if (!error.empty() || !operands.counts_step() || counter >= 0) return error;
  return LaunchCountStep(stream, operands, plan);
}

}  // namespace jfa::cuda
