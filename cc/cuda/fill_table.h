// Fills the leaf table of a launch (cuda/table.h) on the host.
#ifndef JAX_FUSED_ADAMW_CC_CUDA_FILL_TABLE_H_
#define JAX_FUSED_ADAMW_CC_CUDA_FILL_TABLE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "core/chunks.h"
#include "cuda/table.h"

namespace jfa::cuda {

// A leaf as the table has it.
struct TableLeaf {
  std::vector<Word64> row;
  long long num_elements;  // of all members
  LeafFlags flags;
};

inline Word64 PointerWord(const void* pointer) { return reinterpret_cast<std::uintptr_t>(pointer); }

// Whether a vector access of the dtype may go there, of 16 bytes at most.
inline bool IsAligned(const void* pointer, DType dtype) {
  const auto bytes = static_cast<std::uintptr_t>(std::min(kVector * SizeOf(dtype), 16));
  return reinterpret_cast<std::uintptr_t>(pointer) % bytes == 0;
}

// A later member begins in the middle of a leaf.
inline bool MembersAreAligned(long long num_elements, long long members) {
  return members == 1 || num_elements / members % kVector == 0;
}

// Takes leaves from *next on, as many as fit, and advances *next. `describe(i)` is the TableLeaf of
// one, for which `size_of(i)` is the number of elements. Returns the number of blocks.
template <int kWords, typename SizeOf, typename Describe>
unsigned FillTable(std::size_t num_leaves, int row_words, long long members,
                   long long block_elements, const SizeOf& size_of, const Describe& describe,
                   std::size_t* next, LeafTable<kWords>* table) {
  const std::size_t capacity = LeafTable<kWords>::Capacity(row_words);
  std::vector<TableLeaf> chosen;
  std::vector<Word32> first_block;
  long long blocks = 0;
  constexpr long long kMaxBlocks = 0x7fffffff;
  for (; *next < num_leaves && chosen.size() < capacity; ++*next) {
    const long long more = BlocksInLeaf(members, size_of(*next) / members, block_elements);
    if (blocks + more > kMaxBlocks) break;
    if (more == 0) continue;
    chosen.push_back(describe(*next));
    first_block.push_back(static_cast<Word32>(blocks));
    blocks += more;
  }
  table->num_leaves = static_cast<int>(chosen.size());
  table->row_words = row_words;
  table->members = members;
  Word64* word = table->words;
  for (const TableLeaf& leaf : chosen) {
    for (const Word64 entry : leaf.row) *word++ = entry;
  }
  for (const TableLeaf& leaf : chosen) {
    const Word64 elements = static_cast<Word64>(leaf.num_elements / members);
    *word++ = elements << 8 | leaf.flags.Pack();
  }
  for (std::size_t i = 0; i < first_block.size(); i += 2) {
    const Word64 high = i + 1 < first_block.size() ? first_block[i + 1] : 0;
    *word++ = first_block[i] | high << 32;
  }
  return static_cast<unsigned>(blocks);
}

// Of a table without blocks: whether the next leaf was too large for it.
inline const char* EmptyTableError(std::size_t num_leaves, std::size_t next) {
  return next < num_leaves ? "a leaf has more blocks than one launch can number" : "";
}

}  // namespace jfa::cuda

#endif  // JAX_FUSED_ADAMW_CC_CUDA_FILL_TABLE_H_
