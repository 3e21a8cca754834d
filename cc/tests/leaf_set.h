// Trees of the update's harness.
#ifndef JAX_FUSED_ADAMW_CC_TESTS_LEAF_SET_H_
#define JAX_FUSED_ADAMW_CC_TESTS_LEAF_SET_H_

#include <array>
#include <iterator>
#include <vector>

#include "core/leaf.h"
#include "tests/buffers.h"
#include "tests/cases.h"

namespace jfa::tests {

// Many leaves in one allocation, laid out alike in host and device memory; the bytes between the
// arrays are canaries. Not an allocation for each array, to stay quick under compute-sanitizer.
class LeafSet {
 public:
  explicit LeafSet(const std::vector<Case>& cases) : cases_(cases), places_(cases.size()) {
    std::size_t end = 0;
    ForEachArray([&](std::size_t leaf, int array) {
      const Case& c = cases_[leaf];
      const std::size_t begin = (end + 2 * kAlignment - 1) / kAlignment * kAlignment;
      places_[leaf][array] = begin + c.offset * ElementBytes(c, array);
      end = places_[leaf][array] + ArrayBytes(c, array);
    });
    image_.assign(end + kAlignment, kCanary);
    ForEachArray([&](std::size_t leaf, int array) {
      if (!IsInput(array)) return;
      FillInput(&image_[places_[leaf][array]], cases_[leaf], array, static_cast<unsigned>(leaf));
    });
  }

  // What the allocation holds before an update.
  const std::vector<unsigned char>& image() const { return image_; }

  // The leaves of these indices, in an allocation that begins at `base`.
  std::vector<LeafOperands> Leaves(const std::vector<std::size_t>& indices,
                                   unsigned char* base) const {
    std::vector<LeafOperands> leaves;
    for (const std::size_t i : indices) {
      leaves.push_back(MakeLeaf(cases_[i], [&](int array) { return base + places_[i][array]; }));
      leaves.back().decays = i % 3 != 0;
      if (cases_[i].lr_scale != 1.0) leaves.back().lr_scale *= static_cast<double>(i % 4) / 3.0;
      leaves.back().leaf_id = static_cast<Word32>(i);
    }
    return leaves;
  }

 private:
  static constexpr std::size_t kAlignment = 16;

  template <typename Function>
  void ForEachArray(const Function& function) const {
    for (std::size_t leaf = 0; leaf < cases_.size(); ++leaf) {
      for (int array = 0; array < kNumArrays; ++array) {
        if (HasArray(cases_[leaf], array)) function(leaf, array);
      }
    }
  }

  std::vector<Case> cases_;
  std::vector<std::array<std::size_t, kNumArrays>> places_;  // bytes from the allocation's begin
  std::vector<unsigned char> image_;
};

// `count` leaves like `c` and then an empty one. float32 parameters with float32 and bfloat16
// gradients, which have kernels of their own, or all dtypes of float32 arithmetic; of float64 ones
// all gradients.
inline LeafSet MakeLeafSet(const Case& c, std::size_t count, bool any_dtype) {
  const std::size_t sizes[] = {1, 2, 3, 5, 8, 31, 128, 300, 511, 513, 1100};
  std::vector<Case> cases(count + 1, c);
  for (std::size_t i = 0; i < count; ++i) {
    cases[i].n = sizes[i % std::size(sizes)];
    cases[i].offset = i % 5 == 0 ? 1 : 0;
    const bool is_float64 = c.param_dtype == DType::kFloat64;
    cases[i].grad_dtype = kAllDTypes[i % (is_float64 ? 4 : any_dtype ? 3 : 2)];
    if (any_dtype) cases[i].param_dtype = kDTypes[i / 3 % 3];
  }
  cases[count].n = 0;
  return LeafSet(cases);
}

}  // namespace jfa::tests

#endif  // JAX_FUSED_ADAMW_CC_TESTS_LEAF_SET_H_
