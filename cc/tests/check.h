// Counts what failed.
#ifndef JAX_FUSED_ADAMW_CC_TESTS_CHECK_H_
#define JAX_FUSED_ADAMW_CC_TESTS_CHECK_H_

#include <cstdio>
#include <string>

namespace jfa::tests {

inline int failures = 0;

inline void Check(bool ok, const std::string& what) {
  if (ok) return;
  ++failures;
  std::printf("FAILED: %s\n", what.c_str());
}

}  // namespace jfa::tests

#endif  // JAX_FUSED_ADAMW_CC_TESTS_CHECK_H_
