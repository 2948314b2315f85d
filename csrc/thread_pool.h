// A pool of threads that kernels split their work over; the threads persist from call to call.
//
// The calling thread leads, one leader at a time, and opens rounds of tasks. Every thread has a share of them, and
// takes over what others have not begun (task_shares.h). The leader waits for the tasks that others have taken, never
// for the others themselves: a worker that the system has preempted delays none unless it is in the middle of a task.
// Then it continues on the core of the leader, which has nothing else to do. A worker that finds itself on the leader's
// core goes to another one. A worker without work spins for some tens of microseconds, longer than the time between two
// products, then sleeps and costs nothing. Workers beyond the number of threads that is set sleep until it grows: no
// round wakes them.
//
// OpenMP is not used: its threads wait for each other at the end of every region, and spin for milliseconds after it.
#pragma once

#include <memory>
#include <type_traits>

namespace octavo {

int num_threads();
void set_num_threads(int count);  // count >= 1
int hardware_threads();           // the cores this process may run on

namespace detail {
void run_tasks(int num_tasks, void (*task)(void* context, int index), void* context);
}  // namespace detail

// Calls body(index) for index in [0, num_tasks), each exactly once, in no particular order or thread. An exception
// thrown by one of them is rethrown when all have ended. Inside a task, and while another thread leads, the calling
// thread runs all of them itself.
template <class Body> void parallel_for(int num_tasks, Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    detail::run_tasks(
        num_tasks, [](void* context, int index) { (*static_cast<Plain*>(context))(index); },
        const_cast<void*>(static_cast<const void*>(std::addressof(body))));
}

// Wakes sleeping workers while the caller prepares their first tasks.
void wake_threads();

}  // namespace octavo
