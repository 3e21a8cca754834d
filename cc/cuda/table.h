// The leaves of one launch, by value: a kernel parameter, so that nothing on the device refers to
// memory of the host, and a captured launch replays by itself.
//
// Words, for n leaves with rows of r words:
//
//   rows          [n][r]   pointers. Update: param, grad [, mu, nu [, nu_max]] [, copy] [, ema],
//                          then the outputs that are not their inputs: [out]
//                          [mu_out, nu_out [, nu_max_out]] [copy_out] [ema_out].
//                          Statistics: grad
//                          Then, if a leaf scales the learning rate: lr_scale, a float64.
//                          Then, if the update rounds stochastically: leaf_id | leaf << 32, where
//                          `leaf` counts the call's; [, kIndexStrides IndexStride]
//   sizes         [n]      member_elements << 8 | LeafFlags
//   first_block   [n]      32-bit numbers, two a word: the launch's block where the leaf begins
#ifndef JAX_FUSED_ADAMW_CC_CUDA_TABLE_H_
#define JAX_FUSED_ADAMW_CC_CUDA_TABLE_H_

#include "core/clip.h"
#include "core/dtype.h"
#include "core/macros.h"
#include "core/noise.h"
#include "core/scalars.h"
#include "core/stats.h"
#include "cuda/tuning.h"

namespace jfa::cuda {

// What the leaves of a launch have in common: each class has kernels of its own.
enum class LeafClass {
  kFloat32 = 0,        // float32 parameters and moments with float32 or bfloat16 gradients
  kAnyDType = 1,       // float32 moments with any other parameters and gradients
  kFirstStep = 2,      // anything but float64, and the old moments are zero and in no buffer
  kBf16Moments = 3,    // as kFloat32, but with bfloat16 moments
  kFloat32Extras = 4,  // as kFloat32, with bfloat16 copies, averages, or both
  kGeneral = 5,        // anything but a first step or float64
  kFloat64 = 6,        // float64 parameters and moments, first steps too
};

// The kernels of a step by what bounds them: bandwidth; latency, with another launch for the
// statistics or with them in the same.
enum class Grid { kLarge, kSmall, kAnalyzing };

// Whether a thread has several vectors, as many as the launch says.
constexpr bool HasVectors(Grid grid, LeafClass leaf_class) {
  return grid == Grid::kLarge && leaf_class == LeafClass::kBf16Moments;
}

constexpr int kStrideWords = sizeof(IndexStride) / sizeof(Word64);

// Packed into the low byte of a leaf's size, two bits for a dtype.
struct LeafFlags {
  DType param_dtype;
  DType grad_dtype;
  bool decays;
  bool aligned;  // every pointer allows the vector access of its dtype
  DType copy_dtype = DType::kFloat32;

  JFA_HOST_DEVICE Word64 Pack() const {
    return static_cast<Word64>(param_dtype) | static_cast<Word64>(grad_dtype) << 2 |
           static_cast<Word64>(decays) << 4 | static_cast<Word64>(aligned) << 5 |
           static_cast<Word64>(copy_dtype) << 6;
  }
  JFA_HOST_DEVICE static LeafFlags Unpack(Word32 word) {
    return {static_cast<DType>(word & 3), static_cast<DType>(word >> 2 & 3), (word >> 4 & 1) != 0,
            (word >> 5 & 1) != 0, static_cast<DType>(word >> 6 & 3)};
  }
};

template <int kWords>
struct LeafTable {
  int num_leaves;
  int row_words;
  long long members;
  Word64 words[kWords];

  // Leaves that fit.
  JFA_HOST_DEVICE static constexpr int Capacity(int row_words) {
    return (2 * kWords - 1) / (2 * row_words + 3);
  }

  JFA_HOST_DEVICE const Word64* sizes() const { return words + num_leaves * row_words; }
  JFA_HOST_DEVICE const Word32* first_block() const {
    return reinterpret_cast<const Word32*>(sizes() + num_leaves);
  }
  JFA_HOST_DEVICE const Word64* row(int leaf) const { return words + leaf * row_words; }
  JFA_HOST_DEVICE char* buffer(int leaf, int index) const {
    return reinterpret_cast<char*>(row(leaf)[index]);
  }
};

// What is the same for every leaf of an update.
struct LaunchOptions {
  int arrival_counter;  // index of the launch's; negative if it does not count the step
  Clip clip;
  bool maximize;
  bool write_params;
  bool out_apart;      // out has a buffer of its own
  bool moments_apart;  // so have the new moments
  bool extras_apart;   // so have new copies and averages
  bool has_copies;
  bool has_ema;
  bool stochastic_moments;
  bool stochastic_params;  // with write_params only
  bool zero_moments;       // the old moments are zero and in no buffer
  int vectors;             // of a thread, in a kernel that has several
  DType mu_dtype;
  DType nu_dtype;
  int lr_scale_slot;  // in a row; negative if every leaf's is 1
  int noise_slot;     // of leaf_id and leaf in a row; not read unless something is stochastic
  int strides_slot;   // negative if there are none
};

template <int kWords>
struct UpdateArguments {
  StepOperands step;
  LaunchOptions options;
  LeafTable<kWords> table;

  JFA_HOST_DEVICE double LrScale(int leaf) const {
    return options.lr_scale_slot < 0 ? 1.0 : BitsToDouble(table.row(leaf)[options.lr_scale_slot]);
  }
};

// What a merge of rows reads and writes (core/stats_operands.h).
struct MergeBuffers {
  const StatsRow* rows;
  long long rows_per_member;
  StatsRow* scratch;
  long long scratch_per_member;
  StatsRow* merged;
  float* norm;
  float* scaled_norm;
  float* max_abs;
  int* nonfinite;
};

// An analysis in the launch of the update: one report of one row a tile.
struct TreeAnalysis {
  ScalarOperand<float> gradient_scale;
  MergeBuffers merge;
  StatsRow* rows;
  bool skip_nonfinite;
};

// The table's blocks are tiles; the grid has kTileBlocks blocks for each.
struct AnalyzeAndUpdateArguments : UpdateArguments<kSmallTableWords> {
  TreeAnalysis analysis;
};

template <int kWords>
struct AnalyzeArguments {
  ScalarOperand<float> gradient_scale;
  MergeBuffers merge;   // for the last block
  int arrival_counter;  // index of the launch's; negative if another launch merges
  StatsRow* rows;
  long long rows_per_member;
  long long first_row;  // of a member's rows, that of the launch's first leaf
  long long chunk_elements;
  LeafTable<kWords> table;
};

struct MergeEntry {
  long long first_row;
  long long num_rows;
  long long first_scratch;  // of a member's scratch rows
};

template <int kEntries>
struct MergeArguments {
  MergeBuffers buffers;
  int num_segments;   // of the call
  int first_segment;  // of the launch
  int num_entries;    // of the launch
  MergeEntry entries[kEntries];
};

static_assert(sizeof(UpdateArguments<kSmallTableWords>) <= 4096, "what CUDA before 12.1 allowed");
static_assert(sizeof(AnalyzeAndUpdateArguments) <= 4096, "likewise");
static_assert(sizeof(AnalyzeArguments<kSmallTableWords>) <= 4096, "likewise");
static_assert(sizeof(MergeArguments<kSmallMergeEntries>) <= 4096, "likewise");
static_assert(sizeof(UpdateArguments<kLargeTableWords>) <= 32764,
              "what a kernel's parameters may be");
static_assert(sizeof(AnalyzeArguments<kLargeTableWords>) <= 32764, "likewise");
static_assert(sizeof(MergeArguments<kLargeMergeEntries>) <= 32764, "likewise");

}  // namespace jfa::cuda

#endif  // JAX_FUSED_ADAMW_CC_CUDA_TABLE_H_
