# Writes OUTPUT, the definitions of cc/cuda/embedded.h.
#   SOURCE_DIR  cc       HEADERS, KERNELS  paths below it
#   FATBINS     one for each of KERNELS, or none       ARCHITECTURES  for people
set(all_text "")
set(entries "")
foreach(header IN LISTS HEADERS)
  file(READ "${SOURCE_DIR}/${header}" text)
  string(APPEND all_text "${text}")
  string(APPEND entries "    {\"${header}\", R\"jfa_text(${text})jfa_text\"},\n")
endforeach()
# nvrtc.cc has the options that the sources are compiled with.
file(READ "${SOURCE_DIR}/cuda/nvrtc.cc" options)
set(definitions "")
foreach(kernel IN LISTS KERNELS)
  file(READ "${SOURCE_DIR}/${kernel}" source)
  string(SHA256 hash "${all_text}${source}${options}")
  get_filename_component(file ${kernel} NAME)
  get_filename_component(name ${kernel} NAME_WE)
  set(fatbin nullptr)
  if(FATBINS)
    list(POP_FRONT FATBINS path)
    file(READ "${path}" hex HEX)
    string(REGEX REPLACE "(..)" "0x\\1," bytes "${hex}")
    set(fatbin ${name}_fatbin)
    string(APPEND definitions
      "alignas(16) static const unsigned char ${fatbin}[] = {${bytes}};\n")
  endif()
  string(APPEND definitions "const EmbeddedKernels ${name} = {
    \"${file}\", R\"jfa_text(${source})jfa_text\",
    \"${hash}\", ${fatbin}};\n")
endforeach()
file(WRITE "${OUTPUT}" "// Written by cmake/embed.cmake.
#include \"cuda/embedded.h\"

namespace jfa::cuda {

const EmbeddedFile* EmbeddedHeaders() {
  static const EmbeddedFile files[] = {
${entries}    {nullptr, nullptr}};
  return files;
}

const char* EmbeddedFatbinArchitectures() { return \"${ARCHITECTURES}\"; }

namespace embedded {
${definitions}}  // namespace embedded

}  // namespace jfa::cuda
")
