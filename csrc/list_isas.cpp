// Prints the levels that this CPU can run, the one that it is fastest at first. CMakeLists.txt runs it where only the
// building machine's levels are wanted.
#include <cstdio>

#include "isa.h"

int main() {
    const octavo::Isa fastest = octavo::fastest_isa(octavo::cpu_supports);
    std::printf("%s", octavo::isa_name(fastest));
    for (int isa = 0; isa < octavo::kNumIsas; ++isa)
        if (isa != fastest && isa != octavo::kAmxEmulated && octavo::cpu_supports(static_cast<octavo::Isa>(isa)))
            std::printf(";%s", octavo::isa_name(static_cast<octavo::Isa>(isa)));
}
