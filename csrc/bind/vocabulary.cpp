// A vocabulary's strings, read without an object for each length; and its merges, found without one for each of the
// millions of ways to cut its pieces.
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <string_view>
#include <utility>

#include "bind/arguments.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

struct Merge {
    double score;                       // of the piece that they form
    uint32_t left_length, right_length;  // in characters
    uint32_t left, right;
};

bool begins_character(char byte) { return (static_cast<unsigned char>(byte) & 0xC0) != 0x80; }

// Pieces by their text: a table with open addressing, whose slots hold half of the hash beside the piece's number, so
// that most of the millions of look-ups read one line of memory.
class Pieces {
  public:
    explicit Pieces(const std::vector<std::string_view>& texts)
        : texts_(texts), slots_(std::bit_ceil(2 * texts.size() + 1), {0, kNone}) {
        for (uint32_t id = 0; id < texts.size(); ++id) {
            auto& slot = slots_[locate(texts[id])];
            if (slot.second == kNone) slot = {tag(std::hash<std::string_view>{}(texts[id])), id};
        }
    }

    // kNone where there is no such piece.
    uint32_t find(std::string_view text) const { return slots_[locate(text)].second; }

    static constexpr uint32_t kNone = ~uint32_t{0};

  private:
    static uint32_t tag(uint64_t hash) { return static_cast<uint32_t>(hash >> 32); }

    // The slot that holds `text`, or the free one where it would stand.
    size_t locate(std::string_view text) const {
        const uint64_t hash = std::hash<std::string_view>{}(text);
        for (size_t at = hash & (slots_.size() - 1);; at = (at + 1) & (slots_.size() - 1)) {
            const auto& [held, id] = slots_[at];
            if (id == kNone || (held == tag(hash) && texts_[id] == text)) return at;
        }
    }

    const std::vector<std::string_view>& texts_;
    std::vector<std::pair<uint32_t, uint32_t>> slots_;
};

std::vector<Merge> find_merges(const std::vector<std::string_view>& pieces, const std::vector<double>& scores) {
    const Pieces known(pieces);
    std::vector<Merge> merges;
    for (size_t id = 0; id < pieces.size(); ++id) {
        const std::string_view piece = pieces[id];
        const auto length = static_cast<uint32_t>(std::count_if(piece.begin(), piece.end(), begins_character));
        // NaN has no place in an order.
        const double score = std::isnan(scores[id]) ? -std::numeric_limits<double>::infinity() : scores[id];
        uint32_t left_length = 0;
        for (size_t cut = 0; cut < piece.size(); ++cut) {
            if (!begins_character(piece[cut]) || left_length++ == 0) continue;
            const uint32_t right = known.find(piece.substr(cut));
            const uint32_t left = right == Pieces::kNone ? right : known.find(piece.substr(0, cut));
            if (left == Pieces::kNone) continue;
            merges.push_back({score, left_length - 1, length - left_length + 1, left, right});
        }
    }
    std::stable_sort(merges.begin(), merges.end(), [](const Merge& a, const Merge& b) {
        if (a.score != b.score) return a.score > b.score;
        if (a.left_length != b.left_length) return a.left_length > b.left_length;
        return a.right_length > b.right_length;
    });
    return merges;
}

nb::list py_merges_by_score(const nb::list& pieces, const std::vector<double>& scores) {
    require(pieces.size() == scores.size(), std::to_string(scores.size()) + " scores for " +
                                                std::to_string(pieces.size()) + " pieces");
    std::vector<std::string_view> texts;
    texts.reserve(pieces.size());
    for (nb::handle piece : pieces) {
        Py_ssize_t size = 0;
        const char* text = PyUnicode_AsUTF8AndSize(piece.ptr(), &size);
        if (text == nullptr) throw nb::python_error();
        texts.emplace_back(text, static_cast<size_t>(size));
    }
    std::vector<Merge> merges;
    {
        nb::gil_scoped_release release;
        merges = find_merges(texts, scores);
    }
    nb::list pairs = nb::steal<nb::list>(PyList_New(static_cast<Py_ssize_t>(merges.size())));
    if (!pairs.is_valid()) throw nb::python_error();
    for (size_t i = 0; i < merges.size(); ++i) {
        PyObject* pair = PyTuple_Pack(2, PyList_GET_ITEM(pieces.ptr(), merges[i].left),
                                      PyList_GET_ITEM(pieces.ptr(), merges[i].right));
        if (pair == nullptr) throw nb::python_error();
        PyList_SET_ITEM(pairs.ptr(), static_cast<Py_ssize_t>(i), pair);
    }
    return pairs;
}

// The strings of a GGUF array: each is its length (u64, little-endian) and that many bytes of UTF-8.
nb::list py_read_strings(const nb::bytes& stored, size_t count) {
    const char* at = stored.c_str();
    const char* const end = at + stored.size();
    require(count <= stored.size() / 8,
            std::to_string(count) + " strings in " + std::to_string(stored.size()) + " bytes");
    nb::list strings = nb::steal<nb::list>(PyList_New(static_cast<Py_ssize_t>(count)));
    if (!strings.is_valid()) throw nb::python_error();
    for (size_t i = 0; i < count; ++i) {
        uint64_t length = ~uint64_t{0};
        if (end - at >= 8) std::memcpy(&length, at, 8);
        if (end - at < 8 || length > static_cast<uint64_t>(end - at - 8)) {
            require(false, "string " + std::to_string(i) + " of " + std::to_string(count) + " runs past the end");
        }
        PyObject* string = PyUnicode_DecodeUTF8(at + 8, static_cast<Py_ssize_t>(length), "replace");
        if (string == nullptr) throw nb::python_error();
        PyList_SET_ITEM(strings.ptr(), static_cast<Py_ssize_t>(i), string);
        at += 8 + length;
    }
    return strings;
}

}  // namespace

void bind_vocabulary(nb::module_& m) {
    m.def("merges_by_score", &py_merges_by_score, "pieces"_a, "scores"_a);
    m.def("read_strings", &py_read_strings, "stored"_a, "count"_a);
}

}  // namespace octavo
