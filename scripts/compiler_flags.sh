# Sourced by setup.sh, build_llama_cpp.sh and release.sh: what gcc and g++ have to be told to compile llama.cpp for this processor.

# llama.cpp configures AMX's tiles once in a thread. PyTorch releases them after each of its own products in bfloat16, so that the next
# q8_0 or q4_0 product in that thread ends the process ("Illegal instruction"); GCC 12 does not even compile the configuration right
# ("Segmentation fault"). So llama.cpp does without AMX where the processor has it.
without_amx() {
    ! grep -qsw amx_tile "${CPUINFO:-/proc/cpuinfo}" || echo "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
}
