#include "cuda/update.h"

#include <algorithm>
#include <initializer_list>
#include <memory>

#include "core/chunks.h"
#include "cuda/arrivals.h"
#include "cuda/fill_table.h"
#include "cuda/kernels.h"
#include "cuda/stats.h"
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
  bool extras_apart = false;
  bool stochastic_moments = false;  // with low-precision ones, as stochastic_params
  bool stochastic_params = false;
  bool has_lr_scales = false;
  bool has_strides = false;
  LeafClass leaf_class = LeafClass::kFloat32;

  bool has_nu_max() const { return options.amsgrad != Amsgrad::kOff; }
  bool has_noise() const { return stochastic_moments || stochastic_params; }
  int num_extras() const { return (options.has_copies ? 1 : 0) + (options.has_ema ? 1 : 0); }
  int num_buffers() const {
    const int moments = has_nu_max() ? 3 : 2;
    return 2 + (options.zero_moments ? 0 : moments) + num_extras() + (out_apart ? 1 : 0) +
           (moments_apart ? moments : 0) + (extras_apart ? num_extras() : 0);
  }
  int noise_slot() const { return num_buffers() + (has_lr_scales ? 1 : 0); }
  int row_words() const {
    const int strides = has_strides ? kIndexStrides * kStrideWords : 0;
    return noise_slot() + (has_noise() ? 1 + strides : 0);
  }
  KernelName Kernel(Grid grid) const {
    return {grid, leaf_class, options.amsgrad, options.nesterov};
  }
};

// The class of a call's leaves: the widest that one of them needs.
LeafClass ClassOf(const Leaves& leaves, const UpdateOptions& options) {
  if (options.is_float64()) return LeafClass::kFloat64;
  if (options.zero_moments) return LeafClass::kFirstStep;
  const auto any_leaf = [&](const auto& property) {
    return std::any_of(leaves.begin(), leaves.end(), property);
  };
  const bool is_common = !any_leaf([](const LeafOperands& leaf) {
    return leaf.param_dtype != DType::kFloat32 || leaf.grad_dtype == DType::kFloat16;
  });
  const bool copies_are_common = !any_leaf([&](const LeafOperands& leaf) {
    return options.has_copies && leaf.copy_dtype != DType::kBfloat16;
  });
  const bool has_extras = options.has_copies || options.has_ema;
  const auto moments_are = [&](DType dtype) {
    return options.mu_dtype == dtype && options.nu_dtype == dtype;
  };
  const bool stochastic_params = options.stochastic_params && options.write_params;
  if (moments_are(DType::kFloat32)) {
    if (is_common && copies_are_common) {
      return has_extras ? LeafClass::kFloat32Extras : LeafClass::kFloat32;
    }
    if (!has_extras && !stochastic_params) return LeafClass::kAnyDType;
  }
  const bool is_bf16 = moments_are(DType::kBfloat16) && is_common && !has_extras;
  return is_bf16 ? LeafClass::kBf16Moments : LeafClass::kGeneral;
}

Plan MakePlan(const Leaves& leaves, const UpdateOptions& options) {
  Plan plan{options};
  plan.leaf_class = ClassOf(leaves, options);
  plan.moments_apart = options.zero_moments;
  bool has_bf16_params = false;
  for (const LeafOperands& leaf : leaves) {
    plan.out_apart |= leaf.out != leaf.param;
    plan.moments_apart |=
        leaf.mu_out != leaf.mu || leaf.nu_out != leaf.nu || leaf.nu_max_out != leaf.nu_max;
    plan.extras_apart |= leaf.copy_out != leaf.copy || leaf.ema_out != leaf.ema;
    plan.has_lr_scales |= leaf.lr_scale != 1.0;
    plan.has_strides |= leaf.has_strides();
    has_bf16_params |= leaf.param_dtype == DType::kBfloat16;
  }
  plan.stochastic_moments = options.stochastic_moments && (options.mu_dtype != DType::kFloat32 ||
                                                           options.nu_dtype != DType::kFloat32);
  plan.stochastic_params = options.stochastic_params && options.write_params && has_bf16_params;
  return plan;
}

// The row of the call's leaf `index`, in the order of cuda/table.h.
std::vector<Word64> RowOf(const LeafOperands& leaf, std::size_t index, const Plan& plan) {
  std::vector<Word64> row;
  const auto add = [&](bool is_there, const void* buffer) {
    if (is_there) row.push_back(PointerWord(buffer));
  };
  const bool reads_moments = !plan.options.zero_moments;
  add(true, leaf.param);
  add(true, leaf.grad);
  add(reads_moments, leaf.mu);
  add(reads_moments, leaf.nu);
  add(reads_moments && plan.has_nu_max(), leaf.nu_max);
  add(plan.options.has_copies, leaf.copy);
  add(plan.options.has_ema, leaf.ema);
  add(plan.out_apart, leaf.out);
  add(plan.moments_apart, leaf.mu_out);
  add(plan.moments_apart, leaf.nu_out);
  add(plan.moments_apart && plan.has_nu_max(), leaf.nu_max_out);
  add(plan.extras_apart && plan.options.has_copies, leaf.copy_out);
  add(plan.extras_apart && plan.options.has_ema, leaf.ema_out);
  if (plan.has_lr_scales) row.push_back(DoubleToBits(leaf.lr_scale));
  if (!plan.has_noise()) return row;
  row.push_back(leaf.leaf_id | static_cast<Word64>(index) << 32);
  if (!plan.has_strides) return row;
  for (const IndexStride& stride : leaf.strides) {
    row.insert(row.end(), {stride.divisor, stride.extra, stride.reciprocal});
  }
  return row;
}

bool LeafIsAligned(const LeafOperands& leaf, const Plan& plan) {
  const UpdateOptions& options = plan.options;
  const struct {
    DType dtype;
    std::initializer_list<const void*> pointers;
  } arrays[] = {{leaf.param_dtype, {leaf.param, leaf.out}},
                {leaf.grad_dtype, {leaf.grad}},
                {options.mu_dtype, {leaf.mu, leaf.mu_out}},
                {options.nu_dtype, {leaf.nu, leaf.nu_max, leaf.nu_out, leaf.nu_max_out}},
                {leaf.copy_dtype, {leaf.copy, leaf.copy_out}},
                {ArithmeticOf(leaf.param_dtype), {leaf.ema, leaf.ema_out}}};
  bool aligned = MembersAreAligned(leaf.num_elements, options.members);
  for (const auto& array : arrays) {
    for (const void* pointer : array.pointers) aligned &= IsAligned(pointer, array.dtype);
  }
  return aligned;
}

// What is the same for every leaf.
LaunchOptions LaunchOptionsOf(const Plan& plan, int arrival_counter) {
  LaunchOptions launch;
  launch.arrival_counter = arrival_counter;
  launch.clip = plan.options.clip;
  launch.maximize = plan.options.maximize;
  launch.write_params = plan.options.write_params;
  launch.out_apart = plan.out_apart;
  launch.moments_apart = plan.moments_apart;
  launch.extras_apart = plan.extras_apart;
  launch.has_copies = plan.options.has_copies;
  launch.has_ema = plan.options.has_ema;
  launch.stochastic_moments = plan.stochastic_moments;
  launch.stochastic_params = plan.stochastic_params;
  launch.zero_moments = plan.options.zero_moments;
  launch.mu_dtype = plan.options.mu_dtype;
  launch.nu_dtype = plan.options.nu_dtype;
  launch.lr_scale_slot = plan.has_lr_scales ? plan.num_buffers() : -1;
  launch.noise_slot = plan.noise_slot();
  launch.strides_slot = plan.has_strides ? plan.noise_slot() + 1 : -1;
  return launch;
}

// Takes one table of leaves from *next on. Returns the number of the table's blocks.
template <int kWords>
unsigned FillArguments(const StepOperands& operands, const Leaves& leaves, const Plan& plan,
                       int arrival_counter, long long block_elements, std::size_t* next,
                       UpdateArguments<kWords>* args) {
  args->step = operands;
  args->options = LaunchOptionsOf(plan, arrival_counter);
  const auto size_of = [&](std::size_t i) { return leaves[i].num_elements; };
  const auto describe = [&](std::size_t i) {
    const LeafOperands& leaf = leaves[i];
    const LeafFlags flags{leaf.param_dtype, leaf.grad_dtype, leaf.decays, LeafIsAligned(leaf, plan),
                          leaf.copy_dtype};
    return TableLeaf{RowOf(leaf, i, plan), leaf.num_elements, flags};
  };
  return FillTable(leaves.size(), plan.row_words(), plan.options.members, block_elements, size_of,
                   describe, next, &args->table);
}

// Launches one table of leaves from *next on.
template <int kWords>
std::string LaunchTable(CuStream stream, const StepOperands& operands, const Leaves& leaves,
                        const Plan& plan, int arrival_counter, std::size_t* next) {
  constexpr Grid kGrid = kWords == kSmallTableWords ? Grid::kSmall : Grid::kLarge;
  const Kernel kernel = GetKernel(plan.Kernel(kGrid));
  if (!kernel.ok()) return kernel.error;
  auto args = std::make_unique<UpdateArguments<kWords>>();
  const unsigned blocks = FillArguments(operands, leaves, plan, arrival_counter,
                                        ChunkElements(kGrid, plan.leaf_class), next, args.get());
  if (blocks == 0) return EmptyTableError(leaves.size(), *next);
  void* parameters[] = {args.get()};
  return Launch(stream, kernel, blocks, parameters);
}

std::string LaunchCountStep(CuStream stream, const StepOperands& operands, const Plan& plan) {
  const Kernel kernel = GetCountStepKernel(plan.Kernel(Grid::kLarge));
  if (!kernel.ok()) return kernel.error;
  StepOperands step = operands;
  long long num_counts = operands.num_counts(plan.options.members);
  void* parameters[] = {&step, &num_counts};
  return Launch(stream, kernel, CeilDivide(num_counts, kThreads), parameters);
}

bool IsSmallGrid(const Leaves& leaves, const Plan& plan) {
  const int capacity = LeafTable<kSmallTableWords>::Capacity(plan.row_words());
  if (leaves.size() > static_cast<std::size_t>(capacity)) return false;
  const long long members = plan.options.members;
  long long blocks = 0;
  for (const LeafOperands& leaf : leaves) {
    blocks += BlocksInLeaf(members, leaf.num_elements / members, kChunk);
  }
  return 0 < blocks && blocks <= kSmallGridBlocks;
}

// Whether the kernel that analyses too can do all of it, its blocks running at the same time.
bool FitsOneLaunch(const StepOperands& operands, const StepAnalysis& analysis, const Leaves& leaves,
                   const Plan& plan, const Kernel& kernel) {
  const std::size_t capacity = LeafTable<kSmallTableWords>::Capacity(plan.row_words());
  const long long tiles = analysis.gradients.RowsPerMember();
  return plan.leaf_class == LeafClass::kFloat32 && plan.options.members == 1 &&
         operands.counts_step() && leaves.size() <= capacity && tiles > 0 && tiles <= kMergeFanIn &&
         analysis.gradients.chunk_elements == kStatsTileElements &&
         kTileBlocks * tiles <= ResidentBlocks(kernel, kTileLanes);
}

std::string LaunchAnalyzeAndUpdate(CuStream stream, const StepOperands& operands,
                                   const StepAnalysis& analysis, const Leaves& leaves,
                                   const Plan& plan, const Kernel& kernel, int arrival_counter,
                                   bool* refused) {
  auto args = std::make_unique<AnalyzeAndUpdateArguments>();
  std::size_t next = 0;
  const long long tiles = FillArguments<kSmallTableWords>(operands, leaves, plan, arrival_counter,
                                                          kStatsTileElements, &next, args.get());
  args->analysis = {analysis.gradients.gradient_scale, MergeBuffersOf(analysis.report),
                    analysis.gradients.rows, analysis.skip_nonfinite};
  void* parameters[] = {args.get()};
  return LaunchTogether(stream, kernel, kTileBlocks * tiles, parameters, kTileLanes, refused);
}

}  // namespace

std::string PrepareUpdate(const Leaves& leaves, const UpdateOptions& options) {
  const Plan plan = MakePlan(leaves, options);
  for (const Grid grid : {Grid::kLarge, Grid::kSmall}) {
    const Kernel kernel = GetKernel(plan.Kernel(grid));
    if (!kernel.ok()) return kernel.error;
  }
  return GetCountStepKernel(plan.Kernel(Grid::kLarge)).error;
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

std::string PrepareAnalyzeAndUpdate(const Leaves& leaves, const UpdateOptions& options) {
  const Plan plan = MakePlan(leaves, options);
  std::string error = PrepareStats();
  if (error.empty()) error = PrepareUpdate(leaves, options);
  if (!error.empty() || plan.leaf_class != LeafClass::kFloat32) return error;
  const Kernel kernel = GetKernel(plan.Kernel(Grid::kAnalyzing));
  if (kernel.ok()) ResidentBlocks(kernel, kTileLanes);
  return kernel.error;
}

std::string AnalyzeAndUpdate(CuStream stream, const StepOperands& operands,
                             const StepAnalysis& analysis, const Leaves& leaves,
                             const UpdateOptions& options) {
  const Plan plan = MakePlan(leaves, options);
  if (plan.leaf_class == LeafClass::kFloat32) {
    const Kernel kernel = GetKernel(plan.Kernel(Grid::kAnalyzing));
    if (!kernel.ok()) return kernel.error;
    const int counter = FitsOneLaunch(operands, analysis, leaves, plan, kernel)
                            ? ArrivalCounterOf(operands.new_counts.count)
                            : -1;
    bool refused = false;
    if (counter >= 0) {
      const std::string error = LaunchAnalyzeAndUpdate(stream, operands, analysis, leaves, plan,
                                                       kernel, counter, &refused);
      if (!refused) return error;
    }
  }
  const std::string error = AnalyzeAndMerge(stream, analysis.gradients, analysis.report);
  if (!error.empty()) return error;
  return Update(stream, analysis.Inform(operands, options.clip), leaves, options);
}

}  // namespace jfa::cuda
