# Writes OUTPUT, the definitions of cc/cuda/embedded.h.
#   SOURCE_DIR  cc       HEADERS  paths below it       KERNEL  path below it
#   FATBIN      a file, or empty       ARCHITECTURES  for people
set(all_text "")
set(entries "")
foreach(header IN LISTS HEADERS)
  file(READ "${SOURCE_DIR}/${header}" text)
  string(APPEND all_text "${text}")
  string(APPEND entries "    {\"${header}\", R\"jfa_text(${text})jfa_text\"},\n")
endforeach()
file(READ "${SOURCE_DIR}/${KERNEL}" kernel)
# nvrtc.cc has the options that the source is compiled with.
file(READ "${SOURCE_DIR}/cuda/nvrtc.cc" options)
string(SHA256 hash "${all_text}${kernel}${options}")
set(fatbin_definition "const unsigned char* EmbeddedFatbin() { return nullptr; }")
if(FATBIN)
  file(READ "${FATBIN}" hex HEX)
  string(REGEX REPLACE "(..)" "0x\\1," bytes "${hex}")
  set(fatbin_definition "alignas(16) static const unsigned char kFatbin[] = {${bytes}};\nconst unsigned char* EmbeddedFatbin() { return kFatbin; }")
endif()
file(WRITE "${OUTPUT}" "// Written by cmake/embed.cmake.
#include \"cuda/embedded.h\"

namespace jfa::cuda {

const EmbeddedFile* EmbeddedHeaders() {
  static const EmbeddedFile files[] = {
${entries}    {nullptr, nullptr}};
  return files;
}

const char* EmbeddedKernelSource() { return R\"jfa_text(${kernel})jfa_text\"; }
const char* EmbeddedSourceHash() { return \"${hash}\"; }
const char* EmbeddedFatbinArchitectures() { return \"${ARCHITECTURES}\"; }
${fatbin_definition}

}  // namespace jfa::cuda
")
