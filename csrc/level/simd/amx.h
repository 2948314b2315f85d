// Tiles of up to 16 rows of 64 bytes, as Intel's AMX has them (Architecture Instruction Set Extensions, chapter 3).
// The compiler does not know about tiles: it must neither keep in registers what a tile is to read from memory, nor
// move its stores past a tile's, so loads and stores are barriers.
#pragma once

#include "level/simd/avx512.h"
#include "level/simd/tile_config.h"

namespace octavo::OCTAVO_LEVEL {

// Also zeroes every tile.
inline void load_tile_config(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config) : "memory"); }
// If a thread does not release its tiles, the system saves 8 KiB at each context switch.
inline void release_tiles() { asm volatile("tilerelease" ::: "memory"); }
template <int T> inline void tile_zero() { asm volatile("tilezero %%tmm%c0" ::"i"(T)); }
template <int T> inline void tile_load(const void* from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T> inline void tile_store(void* to, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}
// sums[m][n] += sum over units of a[m][unit] . b[unit][n], pairs of bf16. Even and odd inputs are summed separately,
// in order, then added to each other and to the sum; subnormal numbers count as zero.
template <int Sums, int A, int B> inline void tile_dot_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(Sums), "i"(A), "i"(B));
}

}  // namespace octavo::OCTAVO_LEVEL
