// Counts what failed.
#ifndef JAX_FUSED_ADAMW_CC_TESTS_CHECK_H_
#define JAX_FUSED_ADAMW_CC_TESTS_CHECK_H_

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace jfa::tests {

inline int failures = 0;

inline void Check(bool ok, const std::string& what) {
  if (ok) return;
  ++failures;
  std::printf("FAILED: %s\n", what.c_str());
}

// A program's exit status. With arguments "k n", for tools that take long, it runs every n-th test
// from number k on.
inline int RunTests(const std::vector<void (*)()>& tests, int argc, char** argv) {
  const std::size_t first = argc == 3 ? std::strtoul(argv[1], nullptr, 10) : 0;
  const std::size_t step = argc == 3 ? std::strtoul(argv[2], nullptr, 10) : 1;
  if ((argc != 1 && argc != 3) || step == 0 || first >= tests.size()) {
    std::fprintf(stderr, "usage: %s [k n], 0 <= k < %zu, 1 <= n\n", argv[0], tests.size());
    return 2;
  }
  for (std::size_t i = first; i < tests.size(); i += step) tests[i]();
  std::printf("%d failures\n", failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace jfa::tests

#endif  // JAX_FUSED_ADAMW_CC_TESTS_CHECK_H_
