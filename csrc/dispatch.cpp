#include <atomic>

#include "compiled_levels.h"  // written by CMakeLists.txt
#include "kernels.h"

namespace octavo {
namespace {

struct CompiledLevel {
    Isa isa;
    const Kernels* table;
};
constexpr CompiledLevel kCompiled[] = {OCTAVO_COMPILED_LEVELS};

const Kernels* table_of(Isa isa) {
    for (const CompiledLevel& level : kCompiled)
        if (level.isa == isa) return level.table;
    return nullptr;
}

std::atomic<Isa> g_current{fastest_isa(isa_is_supported)};
std::atomic<const Kernels*> g_kernels{table_of(g_current)};

}  // namespace

bool isa_is_supported(Isa isa) { return table_of(isa) != nullptr && cpu_supports(isa); }
Isa current_isa() { return g_current.load(std::memory_order_relaxed); }
void force_isa(Isa isa) {
    g_current.store(isa, std::memory_order_relaxed);
    g_kernels.store(table_of(isa), std::memory_order_relaxed);
}
const Kernels& kernels() { return *g_kernels.load(std::memory_order_relaxed); }

}  // namespace octavo
