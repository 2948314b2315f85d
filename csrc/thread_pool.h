// Splits a kernel's work over threads.
//
// The threads are OpenMP's. torch loads libgomp under its plain soname, so a module linked against libgomp.so.1 gets
// the very same runtime and the same team: the workers that spin after a matrix product are the ones that run our
// kernels. A second pool would compete with those spinning workers for the same cores.
#pragma once

#include <atomic>
#include <memory>
#include <type_traits>

namespace octavo {

int num_threads();
void set_num_threads(int count);  // count >= 1
int hardware_threads();           // the cores this process may run on

namespace detail {
void run_tasks(int num_tasks, void (*task)(void* context, int index), void* context);
void with_team(void (*body)(void* context), void* context);
}  // namespace detail

// Calls body(index) for index in [0, num_tasks), each exactly once, in no particular order or thread.
template <class Body> void parallel_for(int num_tasks, Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    detail::run_tasks(
        num_tasks, [](void* context, int index) { (*static_cast<Plain*>(context))(index); },
        const_cast<void*>(static_cast<const void*>(std::addressof(body))));
}

// Calls body() once, and keeps the other threads awake for every parallel_for inside it: handing them a task then takes
// a fraction of a microsecond instead of the several that OpenMP takes to open and close a region. What body() throws
// comes out.
template <class Body> void with_team(Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    detail::with_team([](void* context) { (*static_cast<Plain*>(context))(); },
                      const_cast<void*>(static_cast<const void*>(std::addressof(body))));
}

}  // namespace octavo
