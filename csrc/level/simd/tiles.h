// The level's tiles. What is compiled without a level has those in plain C++.
#pragma once

#include "level/simd/types.h"

#ifndef OCTAVO_TILES
#define OCTAVO_TILES "level/simd/amx_emulated.h"
#endif
#include OCTAVO_TILES
