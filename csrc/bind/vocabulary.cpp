// A vocabulary's strings, read without an object for each length; and the merges that form its pieces.
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <optional>
#include <string_view>
#include <utility>

#include "bind/arguments.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

struct Merge {
    double score;                        // of the piece that they form
    uint32_t left_length, right_length;  // in characters
    uint32_t piece, left, right;

    bool precedes(const Merge& other) const {
        if (score != other.score) return score > other.score;
        if (left_length != other.left_length) return left_length > other.left_length;
        if (right_length != other.right_length) return right_length > other.right_length;
        return piece < other.piece;
    }
};

bool begins_character(char byte) { return (static_cast<unsigned char>(byte) & 0xC0) != 0x80; }

// Pieces by their text: a table with open addressing, whose slots hold half of the hash and the piece's number, so
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

// Byte-pair encoding of one piece at a time.
//
// A text in which a piece is formed is merged as the piece alone is: merges are done in one order, and none crosses the
// ends of what becomes a token. So of all the ways to cut a piece in two, only the one found here is ever merged.
class PieceEncoder {
  public:
    PieceEncoder(const std::vector<std::string_view>& pieces, const std::vector<double>& scores)
        : pieces_(pieces), scores_(scores), known_(pieces) {}

    // The merge that forms `piece`, if there is one.
    std::optional<Merge> last_merge(uint32_t piece) {
        const std::string_view text = pieces_[piece];
        symbols_.clear();
        for (size_t at = 0; at < text.size(); ++at) {
            if (begins_character(text[at])) symbols_.push_back({at, 1, Pieces::kNone, std::nullopt});
        }
        for (size_t i = 0; i < symbols_.size(); ++i) {
            const size_t begin = symbols_[i].begin;
            symbols_[i].piece = known_.find(text.substr(begin, end(text, i) - begin));
        }
        for (size_t i = 0; i + 1 < symbols_.size(); ++i) pair_with_next(text, i);
        while (symbols_.size() > 2) {
            size_t best = 0;
            for (size_t i = 1; i < symbols_.size(); ++i) {
                const auto& pair = symbols_[i].pair;
                if (pair && (!symbols_[best].pair || pair->precedes(*symbols_[best].pair))) best = i;
            }
            if (!symbols_[best].pair) return std::nullopt;
            symbols_[best].length += symbols_[best + 1].length;
            symbols_[best].piece = symbols_[best].pair->piece;
            symbols_.erase(symbols_.begin() + static_cast<std::ptrdiff_t>(best) + 1);
            pair_with_next(text, best);
            if (best > 0) pair_with_next(text, best - 1);
        }
        // A piece that occurs twice is formed as the first of them.
        const bool formed = symbols_.size() == 2 && symbols_[0].pair && symbols_[0].pair->piece == piece;
        return formed ? symbols_[0].pair : std::nullopt;
    }

  private:
    struct Symbol {
        size_t begin;
        uint32_t length;  // in characters
        uint32_t piece;
        std::optional<Merge> pair;  // with the next symbol
    };

    size_t end(std::string_view text, size_t i) const {
        return i + 1 < symbols_.size() ? symbols_[i + 1].begin : text.size();
    }

    void pair_with_next(std::string_view text, size_t i) {
        Symbol& left = symbols_[i];
        left.pair.reset();
        if (i + 1 == symbols_.size()) return;
        const Symbol& right = symbols_[i + 1];
        if (left.piece == Pieces::kNone || right.piece == Pieces::kNone) return;
        const uint32_t piece = known_.find(text.substr(left.begin, end(text, i + 1) - left.begin));
        if (piece == Pieces::kNone) return;
        // NaN has no place in an order.
        const double score = std::isnan(scores_[piece]) ? -std::numeric_limits<double>::infinity() : scores_[piece];
        left.pair = Merge{score, left.length, right.length, piece, left.piece, right.piece};
    }

    const std::vector<std::string_view>& pieces_;
    const std::vector<double>& scores_;
    const Pieces known_;
    std::vector<Symbol> symbols_;
};

std::vector<Merge> find_merges(const std::vector<std::string_view>& pieces, const std::vector<double>& scores) {
    PieceEncoder encoder(pieces, scores);
    std::vector<Merge> merges;
    for (uint32_t piece = 0; piece < pieces.size(); ++piece) {
        if (const auto merge = encoder.last_merge(piece)) merges.push_back(*merge);
    }
    std::sort(merges.begin(), merges.end(), [](const Merge& a, const Merge& b) { return a.precedes(b); });
    return merges;
}

nb::list py_merges_by_score(const nb::list& pieces, const std::vector<double>& scores) {
    require(pieces.size() == scores.size(),
            std::to_string(scores.size()) + " scores for " + std::to_string(pieces.size()) + " pieces");
    std::vector<std::string_view> texts;
    texts.reserve(pieces.size());
    for (nb::handle piece : pieces) {
        Py_ssize_t size = 0;
        const char* text = PyUnicode_AsUTF8AndSize(piece.ptr(), &size);
        if (text == nullptr) throw nb::python_error();
        texts.emplace_back(text, size);
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
