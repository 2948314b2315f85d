// Which instruction-set level this translation unit is: level/isa_*.cpp say. What is compiled without them is portable.
#pragma once

#ifndef OCTAVO_LEVEL
#define OCTAVO_LEVEL portable
#define OCTAVO_SIMD "level/simd/portable.h"
#endif
