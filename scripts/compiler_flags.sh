# Flags of gcc and g++ to compile llama.cpp for this processor. setup.sh, build_llama_cpp.sh and release.sh source this file.

# llama.cpp configures AMX's tiles once per thread. PyTorch releases them after each of its bfloat16 products, and llama.cpp's next q8_0
# or q4_0 product in that thread then ends the process ("Illegal instruction"). GCC 12 also miscompiles the configuration ("Segmentation
# fault"). Therefore llama.cpp is compiled without AMX.
without_amx() {
    ! grep -qsw amx_tile "${CPUINFO:-/proc/cpuinfo}" || echo "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
}
