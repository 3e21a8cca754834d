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
    set(fatbin ${name}_fatbin)
    # By the assembler: as an array in C++, the 50 MB for seven architectures and PTX took the compiler
    # 7 GB (GCC 12, 2026-11-30).
    string(APPEND definitions
      "asm(\".section .rodata\\n.balign 16\\n.globl ${fatbin}\\n.hidden ${fatbin}\\n\"
    \"${fatbin}:\\n.incbin \\\"${path}\\\"\\n.previous\\n\");
extern \"C\" __attribute__((visibility(\"hidden\"))) const unsigned char ${fatbin}[];\n")
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
