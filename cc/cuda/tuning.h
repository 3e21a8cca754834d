// Launch constants of the CUDA kernel, each with its evidence.
#ifndef JAX_FUSED_ADAMW_CC_CUDA_TUNING_H_
#define JAX_FUSED_ADAMW_CC_CUDA_TUNING_H_

namespace jfa::cuda {

// Threads a block. 128 was best or equal on every shape, 256 within 1 %, 512 and 1024 cost 4-5 %
// (H200, prototype, profiler).
constexpr int kThreads = 128;

// Elements a thread: one 16-byte vector of float32. Two or four vectors cost 1-3 % (same runs).
constexpr int kVector = 4;

// With bfloat16 moments a thread of a large grid has several vectors and loads two at once: 2 of
// them in a tree of fewer elements than the first limit, 4 up to the second, then 8. There
// instructions are the bound, and those of a block (its place, the scalars) are shared by more
// elements, while a small tree needs the blocks. With 2, 4, 8 vectors a leaf of 0.6 M elements took
// 9.2, 11.5, 13.5 us; 2 M 17.9, 17.6, 18.3; 8 M 47.3, 46.0, 49.1; 32 M 165, 159, 163; GPT-2, of
// 124 M, 667, 618, 609. One at once took 664 and 641 for GPT-2 with 4 and 8; four at once, which
// leaves 4 blocks on a multiprocessor, 820 (H200, 2026-11-30; the limit for GPT-2 is 580).
constexpr int kVectorsAtOnce = 2;
constexpr long long kElementsForTwiceTheVectors[] = {1 << 21, 1 << 26};

// One block for each chunk of this size; a persistent grid cost 5-9 % (same runs).
constexpr int kChunk = kThreads * kVector;

// 64-bit words of the two leaf tables. A kernel's parameters may be 32,764 bytes since CUDA 12.1
// (sm_70 and newer); the small table stays inside 4 KB. Leaves that they hold, by words of a row
// (cuda/table.h): 727 and 72 in place, of 4; 319 and 31 of float64 at its widest, of 11; 275 and
// 27 of the others without noise, of 13; 163 and 16 with noise and the strides of shards, of 23.
// Where leaves scale the learning rate, a row has one word more: then 615 and 61 in place.
constexpr int kSmallTableWords = 400;
constexpr int kLargeTableWords = 4000;

// Blocks of AnalyzeGradient on a multiprocessor at least, which decides registers. A tile by 256
// threads with 6 blocks (40 registers) took 117 us for GPT-2's gradients (4,240 GB/s), with 5
// blocks 124; by 128 threads with 8 blocks 123; by 512 threads 189 and more. Reading the gradient
// scale before the loads cost 40 us (H200, CUDA events, 2026-11-29).
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int kAnalyzeBlocks = 4;  // a multiprocessor of sm_75 holds 1024 threads
#else
constexpr int kAnalyzeBlocks = 6;
#endif

// Segments of the two tables of a merge of statistics: one report, or one a leaf.
constexpr int kSmallMergeEntries = 1;
constexpr int kLargeMergeEntries = 1024;

// Threads that merge rows, a warp for 1024 of them at a time: one warp where there are no more.
constexpr int kMergeThreads = 1024;

// A launch of at most this many blocks that fits the small table is bound by latency: its kernel
// counts the step too, which costs each block an atomic addition and saves a launch. About one
// wave of a large GPU (132 multiprocessors with 9 of these blocks each on an H200), where all
// blocks wait at the same time; 16 leaves in 80 blocks took 5.3 us in three launches, of which XLA
// made two, and 4.2 us in one (H200, 2026-11-29).
constexpr int kSmallGridBlocks = 1024;

// Blocks of AnalyzeAndUpdate for a tile of the statistics: of a thread for each lane of the tile,
// with one vector each.
constexpr int kTileBlocks = 4;

// Blocks of it on a multiprocessor at least. They all run at the same time, so that is what limits
// its trees: 3 allow 80 registers, and on an H200's 132 multiprocessors 99 tiles.
constexpr int kAnalyzeAndUpdateBlocks = 3;

// Arrival counters, one for each address where a new count or a report has been written: 1 MiB of
// the device's memory. When they run out, which a process that reuses its memory does not reach, a
// kernel of its own counts, or merges. They must not: a launch more is another graph, and a
// captured call then fails when XLA updates it.
constexpr int kNumArrivalCounters = 1 << 18;

}  // namespace jfa::cuda

#endif  // JAX_FUSED_ADAMW_CC_CUDA_TUNING_H_
