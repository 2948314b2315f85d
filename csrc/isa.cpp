#include "isa.h"

#include <cstring>

#ifdef OCTAVO_X86
#include <cpuid.h>
#endif
#if defined(OCTAVO_ARM) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(OCTAVO_ARM) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif
#if defined(OCTAVO_X86) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace octavo {
namespace {

#ifdef OCTAVO_X86
struct Registers {
    unsigned a = 0, b = 0, c = 0, d = 0;
};
Registers cpuid(unsigned leaf, unsigned subleaf) {
    Registers r;
    __get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d);
    return r;
}

bool is_intel() {
    const Registers r = cpuid(0, 0);
    return r.b == signature_INTEL_ebx && r.c == signature_INTEL_ecx && r.d == signature_INTEL_edx;
}

// Linux saves the state of tiles only for a process that has asked for it, and may refuse: if a signal stack is too
// small for them, or a sandbox filters the call.
bool may_use_tiles() {
#ifdef __linux__
    const unsigned features = cpuid(7, 0).d;
    constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
    if (!(features & kAmxBf16) || !(features & kAmxTile)) return false;
    unsigned low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    constexpr unsigned kTileState = 3u << 17;
    if ((low & kTileState) != kTileState) return false;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}
#endif

#ifdef OCTAVO_ARM
// And half precision, without which GCC 12 still writes its constants, and the assembler refuses them.
bool has_bf16_and_i8mm() {
#if defined(__linux__)
    constexpr unsigned long kHalves = 1ul << 10, kI8mm = 1ul << 13, kBf16Products = 1ul << 14;
    const unsigned long features = getauxval(AT_HWCAP2);
    return (getauxval(AT_HWCAP) & kHalves) && (features & kI8mm) && (features & kBf16Products);
#elif defined(__APPLE__)
    const auto has = [](const char* name) {
        int value = 0;
        size_t size = sizeof value;
        return sysctlbyname(name, &value, &size, nullptr, 0) == 0 && value != 0;
    };
    return has("hw.optional.arm.FEAT_FP16") && has("hw.optional.arm.FEAT_BF16") && has("hw.optional.arm.FEAT_I8MM");
#else
    return false;
#endif
}
#endif

}  // namespace

bool cpu_supports(Isa isa) {
    if (isa == kPortable || isa == kAmxEmulated) return true;
#ifdef OCTAVO_X86
    // libgcc asks the operating system too: wide registers that it does not save count as absent.
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#ifdef OCTAVO_EMULATED_AVX512
    if (isa == kAvx512Vnni) return avx2;
#endif
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    const bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
    static const bool avx_vnni = cpuid(7, 1).a & 1u << 4;
    static const bool tiles = may_use_tiles();
    switch (isa) {
        case kAvx2: return avx2;
        case kAvx2Vnni: return avx2 && avx_vnni;
        case kAvx512: return avx512;
        case kAvx512Vnni: return vnni;
        case kAvx512Bf16: return vnni && __builtin_cpu_supports("avx512bf16");
        case kAmx:
            return vnni && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi") && tiles;
        default: return false;
    }
#elif defined(OCTAVO_ARM)
    static const bool bf16_and_i8mm = has_bf16_and_i8mm();
    return isa == kNeon || (isa == kNeonBf16 && bf16_and_i8mm);
#else
    return false;
#endif
}

const char* isa_name(Isa isa) {
    static const char* names[kNumIsas] = {"portable",    "amx_emulated", "avx2", "avx2_vnni", "avx512",
                                          "avx512_vnni", "avx512_bf16",  "amx",  "neon",      "neon_bf16"};
    return names[isa];
}

Isa isa_from_name(const char* name) {
    for (int isa = 0; isa < kNumIsas; ++isa)
        if (std::strcmp(isa_name(static_cast<Isa>(isa)), name) == 0) return static_cast<Isa>(isa);
    return kNumIsas;
}

Isa fastest_isa(bool (*usable)(Isa)) {
    int isa = kNumIsas - 1;
    while (isa == kAmxEmulated || !usable(static_cast<Isa>(isa))) --isa;
#ifdef OCTAVO_X86
    // Intel's cores take two cycles per vdpbf16ps: two float multiply-adds are as fast, and round less.
    if (isa == kAvx512Bf16 && is_intel() && usable(kAvx512Vnni)) isa = kAvx512Vnni;
#endif
    return static_cast<Isa>(isa);
}

}  // namespace octavo
