#include "cuda/update.h"

#include <memory>

#include "core/chunks.h"
#include "cuda/arrivals.h"
#include "cuda/fill_table.h"
#include "cuda/kernels.h"
#include "cuda/stats.h"
#include "cuda/table.h"
#include "cuda/tuning.h"
#include "cuda/update_plan.h"

namespace jfa::cuda {
namespace {

using Leaves = std::vector<LeafOperands>;

// Takes one table of leaves from *next on. Returns the number of the table's blocks.
template <int kWords>
unsigned FillArguments(const StepOperands& operands, const Leaves& leaves, const Plan& plan,
                       int arrival_counter, long long block_elements, std::size_t* next,
                       UpdateArguments<kWords>* args) {
  args->step = operands;
  args->options = LaunchOptionsOf(plan, arrival_counter);
  const auto size_of = [&](std::size_t i) { return leaves[i].num_elements; };
  const auto describe = [&](std::size_t i) { return DescribeLeaf(leaves[i], i, plan); };
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
  const int chunk = kGrid == Grid::kSmall ? kChunk : kChunk * plan.vectors;
  const unsigned blocks =
      FillArguments(operands, leaves, plan, arrival_counter, chunk, next, args.get());
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
                   const UpdateOptions& options, int vectors) {
  const Plan plan = MakePlan(leaves, options, vectors);
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
