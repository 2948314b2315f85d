#include <atomic>
#include <cstring>

#include "kernels.h"

namespace octavo {
namespace {

const Kernels* const kTables[kNumIsas] = {
    &kKernelsPortable,
#ifdef OCTAVO_X86
    &kKernelsAvx2,
    &kKernelsAvx512,
    &kKernelsAvx512Bf16,
#endif
};

Isa best_isa() {
    int isa = kNumIsas - 1;
    while (!isa_is_supported(static_cast<Isa>(isa))) --isa;
    return static_cast<Isa>(isa);
}

std::atomic<Isa> g_current{best_isa()};

}  // namespace

bool isa_is_supported(Isa isa) {
    if (isa == kPortable) return true;
#ifdef OCTAVO_X86
    // libgcc asks the operating system too: a CPU whose wide registers are not saved has none.
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    switch (isa) {
        case kAvx2: return avx2;
        case kAvx512: return avx512;
        case kAvx512Bf16: return avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
        default: return false;
    }
#else
    return false;
#endif
}

const char* isa_name(Isa isa) {
    static const char* names[kNumIsas] = {"portable", "avx2", "avx512", "avx512_bf16"};
    return names[isa];
}

Isa isa_from_name(const char* name) {
    for (int isa = 0; isa < kNumIsas; ++isa)
        if (std::strcmp(isa_name(static_cast<Isa>(isa)), name) == 0) return static_cast<Isa>(isa);
    return kNumIsas;
}

Isa current_isa() { return g_current.load(std::memory_order_relaxed); }
void force_isa(Isa isa) { g_current.store(isa, std::memory_order_relaxed); }
const Kernels& kernels() { return *kTables[current_isa()]; }

}  // namespace octavo
