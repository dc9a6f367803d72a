# Sourced by setup.sh, build_llama_cpp.sh and release.sh: what g++ has to be told to compile llama.cpp right on this processor.

# Of AMX's tile configuration GCC 12 takes 8 of the 64 bytes to be read (_tile_loadconfig), and leaves out the stores of the others, so
# that q8_0 and q4_0 files end the process ("Segmentation fault"). Prints the options without which it does; nothing where the processor
# has no AMX, or the compiler no such fault.
amx_cxxflags() {
    grep -qsw amx_tile "${CPUINFO:-/proc/cpuinfo}" && command -v g++ >/dev/null || return 0
    local assembly
    assembly="$(g++ -O3 -mamx-tile -x c++ -S -o - - 2>/dev/null <<'END'
#include <immintrin.h>
struct alignas(64) Config { unsigned char bytes[64]; };
void load() { Config config = {}; config.bytes[0] = 1; config.bytes[48] = 37; _tile_loadconfig(&config); }
END
)" || return 0
    grep -q '\$37' <<<"$assembly" || echo "-fno-tree-dse -fno-dse"
}
