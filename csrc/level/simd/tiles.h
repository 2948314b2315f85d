// The level's tiles, or those in plain C++ if compiled without a level.
#pragma once

#include "level/simd/types.h"

#ifndef OCTAVO_TILES
#define OCTAVO_TILES "level/simd/amx_emulated.h"
#endif
#include OCTAVO_TILES
