// How a list of leaves becomes equal work items. A leaf holds `members` consecutive slices of
// `member_elements` (one slice unless vmap batched the scalars); a slice is cut into blocks of
// `block_elements`, the last one shorter. Blocks are numbered through all leaves:
//
//   leaf            0                 1         2
//   block           0  1  2  3        (empty)   4
//   first_block     0                 4         4        (one more entry: the total, 5)
//
// An empty leaf has no block, so FindLeaf never returns it.
#ifndef JAX_FUSED_ADAMW_CC_CORE_CHUNKS_H_
#define JAX_FUSED_ADAMW_CC_CORE_CHUNKS_H_

#include "core/macros.h"

namespace jfa {

struct Block {
  long long member;
  long long begin;     // element offset inside the whole leaf
  long long offset;    // the same inside the member
  long long elements;  // at most block_elements
};

JFA_HOST_DEVICE long long CeilDivide(long long a, long long b) { return (a + b - 1) / b; }

JFA_HOST_DEVICE long long BlocksInLeaf(long long members, long long member_elements,
                                       long long block_elements) {
  return members * CeilDivide(member_elements, block_elements);
}

// The last leaf whose first block is not after `block`. Index is the table's integer type.
template <typename Index>
JFA_HOST_DEVICE int FindLeaf(const Index* first_block, int num_leaves, Index block) {
  int low = 0;
  int high = num_leaves;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (first_block[middle] <= block) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// `block_in_leaf` counts from the leaf's first block.
JFA_HOST_DEVICE Block LocateBlock(long long block_in_leaf, long long member_elements,
                                  long long members, long long block_elements) {
  long long member = 0;
  if (members > 1) {  // a GPU has no instruction for 64-bit division
    const long long blocks_in_member = CeilDivide(member_elements, block_elements);
    member = block_in_leaf / blocks_in_member;
    block_in_leaf -= member * blocks_in_member;
  }
  const long long offset = block_in_leaf * block_elements;
  const long long left = member_elements - offset;
  return {member, member * member_elements + offset, offset,
          left < block_elements ? left : block_elements};
}

}  // namespace jfa

#endif  // JAX_FUSED_ADAMW_CC_CORE_CHUNKS_H_
