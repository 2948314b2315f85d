// The instruction-set levels: their names, and which of them a CPU can run. Needs no kernels, so that the build can ask
// it which to compile.
#pragma once

namespace octavo {

// From slowest to fastest. The emulated level runs AMX's tile arithmetic on any machine, for tests; it is never chosen
// automatically.
// clang-format off
enum Isa {
    kPortable, kAmxEmulated,
    kAvx2, kAvx2Vnni, kAvx512, kAvx512Vnni, kAvx512Bf16, kAmx,  // x86-64
    kNeon, kNeonBf16,                                           // Arm, 64 bits
    kNumIsas
};
// clang-format on

const char* isa_name(Isa isa);
Isa isa_from_name(const char* name);  // kNumIsas: unknown
bool cpu_supports(Isa isa);
// The fastest level on this CPU of those that `usable` accepts; it must accept kPortable.
Isa fastest_isa(bool (*usable)(Isa));

}  // namespace octavo
