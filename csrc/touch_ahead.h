// Memory is taken from the system when it is first written, page by page, each of which the system clears: 2 MiB at a
// time where pages are huge. A thread of its own does that before a step needs them.
#pragma once

#include <cstdint>

namespace octavo {

// Has the pages of this memory taken soon, from the one that holds `begin` on, and returns at once. What they hold
// stays, and other threads may write them meanwhile. Does nothing where the system cannot (Linux before 5.14).
void touch_ahead(const char* begin, int64_t bytes);

}  // namespace octavo
