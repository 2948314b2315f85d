#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind/arguments.h"
#include "rank_steps.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

nb::object view(char* memory, int64_t bytes) {
    return nb::steal(PyMemoryView_FromMemory(memory, bytes, PyBUF_WRITE));
}

// What Python raises becomes the reason of a failure, without the traceback.
template <class... Views> void call(const nb::callable& function, Views... views) {
    try {
        function(views...);
    } catch (const nb::python_error& error) {
        throw std::runtime_error(nb::cast<std::string>(nb::str(error.value())));
    }
}

MachineLink link(const nb::callable& gather, const nb::callable& broadcast, int machines) {
    return {[=](char* own, char* all, int64_t bytes) {
                nb::gil_scoped_acquire gil;
                call(gather, view(own, bytes), view(all, machines * bytes));
            },
            [=](char* message, int64_t bytes) {
                nb::gil_scoped_acquire gil;
                call(broadcast, view(message, bytes));
            }};
}

}  // namespace

void bind_ranks(nb::module_& m) {
    using Ids = std::vector<std::pair<int64_t, int64_t>>;
    m.def("rank_memory_bytes", [](int64_t message_bytes, int64_t slot_bytes, int64_t logits_bytes) {
        return Ranks::bytes({message_bytes, kNumRegisters + 1, slot_bytes, logits_bytes});
    });
    m.def("step_message_bytes", &step_message_bytes, "num_tokens"_a, "num_seqs"_a, "num_groups"_a, "max_blocks"_a,
          "rotation_bytes"_a);
    nb::class_<Ranks>(m, "Ranks")
        .def(
            "__init__",
            [](Ranks* self, int file, int64_t message_bytes, int64_t slot_bytes, int64_t logits_bytes, int rank,
               int count, int machines, double timeout_seconds) {
                require(machines >= 1 && count >= machines && count % machines == 0 && count <= kMostRanks &&
                            rank >= 0 && rank < count,
                        "rank " + std::to_string(rank) + " of " + std::to_string(count) + " on " +
                            std::to_string(machines) + " machines, at most " + std::to_string(kMostRanks));
                const int each = count / machines;
                new (self) Ranks(file, {message_bytes, kNumRegisters + 1, slot_bytes, logits_bytes},
                                 {rank % each, each, rank / each, machines}, timeout_seconds);
            },
            "file"_a, "message_bytes"_a, "slot_bytes"_a, "logits_bytes"_a, "rank"_a, "count"_a, "machines"_a,
            "timeout_seconds"_a)
        .def(
            "set_link",
            [](Ranks& ranks, const nb::callable& gather, const nb::callable& broadcast) {
                ranks.set_link(link(gather, broadcast, ranks.place().machines));
            },
            "gather"_a, "broadcast"_a)
        .def(
            "copy",
            [](Ranks& ranks, bool from_host, bool to_host, const Ids& ids) {
                send_copies(ranks, from_host ? kOnHost : kOnDevice, to_host ? kOnHost : kOnDevice, ids);
            },
            "from_host"_a, "to_host"_a, "ids"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("fail", &Ranks::fail, "reason"_a)
        .def("reset", &Ranks::reset)
        .def_rw("timeout_seconds", &Ranks::timeout_seconds)
        .def_prop_rw(
            "num_threads", &Ranks::threads,
            [](Ranks& ranks, int count) {
                require_threads(count);
                ranks.set_threads(count);
            })
        .def_prop_ro("failure", &Ranks::failure);
}

}  // namespace octavo
