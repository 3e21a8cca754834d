#include "cuda/kernel_cache.h"

#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>

namespace jfa::cuda {
namespace {

// FNV-1a: against truncation and stray bytes, not against an adversary who can write the folder.
std::uint64_t Checksum(const std::vector<char>& bytes) {
  std::uint64_t hash = 14695981039346656037u;
  for (const char byte : bytes) hash = (hash ^ static_cast<unsigned char>(byte)) * 1099511628211u;
  return hash;
}

std::filesystem::path PathOf(const std::string& key) {
  return std::filesystem::path(KernelCacheDirectory()) / (key + ".cubin");
}

}  // namespace

std::string KernelCacheDirectory() {
  if (const char* own = std::getenv("JAX_FUSED_ADAMW_CACHE_DIR")) return own;
  if (const char* xdg = std::getenv("XDG_CACHE_HOME"); xdg != nullptr && *xdg != '\0') {
    return std::string(xdg) + "/jax_fused_adamw";
  }
  if (const char* home = std::getenv("HOME"); home != nullptr && *home != '\0') {
    return std::string(home) + "/.cache/jax_fused_adamw";
  }
  return "";
}

std::vector<char> ReadCachedKernel(const std::string& key) {
  if (KernelCacheDirectory().empty()) return {};
  std::ifstream file(PathOf(key), std::ios::binary);
  std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  std::uint64_t expected = 0;
  if (bytes.size() <= sizeof(expected)) return {};
  std::memcpy(&expected, bytes.data(), sizeof(expected));
  bytes.erase(bytes.begin(), bytes.begin() + sizeof(expected));
  if (Checksum(bytes) != expected) return {};
  return bytes;
}

void WriteCachedKernel(const std::string& key, const std::vector<char>& cubin) {
  if (KernelCacheDirectory().empty()) return;
  std::error_code ignored;
  std::filesystem::create_directories(KernelCacheDirectory(), ignored);
  // A name of its own, then a rename: readers see a whole file or none.
  const std::filesystem::path temporary = PathOf(key + "." + std::to_string(getpid()));
  {
    std::ofstream file(temporary, std::ios::binary);
    const std::uint64_t checksum = Checksum(cubin);
    file.write(reinterpret_cast<const char*>(&checksum), sizeof(checksum));
    file.write(cubin.data(), static_cast<std::streamsize>(cubin.size()));
    if (!file.good()) {
      file.close();
      std::filesystem::remove(temporary, ignored);
      return;
    }
  }
  std::filesystem::rename(temporary, PathOf(key), ignored);
}

}  // namespace jfa::cuda
