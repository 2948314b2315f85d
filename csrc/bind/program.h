#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind/arguments.h"
#include "decoder.h"
#include "ranks.h"

namespace octavo {

// (format, packed, outputs, inputs, bias)
using PartArguments = std::tuple<std::string, nanobind::object, int64_t, int64_t, nanobind::object>;
using LinearArguments = std::vector<PartArguments>;

// active, normalised, sigmoid, corrected, scale, groups, active_groups
using ChoiceArguments = std::tuple<int, bool, bool, bool, float, int, int>;

// Where the columns begin that each rank computes, then where they end.
using ColumnArguments = std::optional<std::vector<int64_t>>;

// Weight, bias or None, eps, whether it is centred.
using NormArguments = std::tuple<nanobind::object, nanobind::object, float, bool>;

inline constexpr const char* kRegisterNames[kNumRegisters] = {"residual", "hidden",   "branch",
                                                              "qkv",      "attended", "inner"};

// What the registers hold after the instructions so far, so that no program can read what is not there.
class Contents {
  public:
    explicit Contents(int64_t hidden) { set(kResidual, hidden, false); }
    int64_t width(Register place) const {
        require(widths_[place] > 0, std::string(kRegisterNames[place]) + " is read before it is written");
        return widths_[place];
    }
    bool kept(Register place) const { return kept_[place]; }  // whether only rows that become logits are left
    void set(Register place, int64_t width, bool kept) {
        widths_[place] = width;
        kept_[place] = kept;
    }
    void check_width(Register place, int64_t expected, const char* what) const {
        require(width(place) == expected, std::string(what) + " is for " + std::to_string(expected) + " columns, " +
                                              kRegisterNames[place] + " has " + std::to_string(width(place)));
    }
    void check_alike(Register a, Register b) const {
        require(width(a) == width(b) && kept_[a] == kept_[b],
                std::string(kRegisterNames[a]) + " and " + kRegisterNames[b] + " differ in rows or columns");
    }

  private:
    int64_t widths_[kNumRegisters] = {};
    bool kept_[kNumRegisters] = {};
};

// A decoder while its program is written: every instruction is checked against what the registers hold by then. Owns
// the Python objects whose memory the program refers to.
class DecoderProgram {
  public:
    DecoderProgram(const std::string& dtype, int64_t hidden, int64_t vocab, int num_heads, int kv_heads, int key_dim,
                   int value_dim, float attention_scale, float attention_softcap, float logits_scale,
                   float logits_softcap);
    void add_norm(const std::string& source_name, const std::string& target_name,
                  const std::optional<NormArguments>& weights,
                  const std::optional<std::string>& added_name, int64_t first, int64_t width);
    void add_sum(const std::string& target, const std::string& source);
    void add_scale(const std::string& place, float factor);
    void add_product(const LinearArguments& parts, const std::string& source, const std::string& target,
                     const std::string& gate, const ColumnArguments& columns);
    // heads: the product of each.
    void add_heads(const LinearArguments& heads, const std::string& source, const std::string& target, int64_t kept,
                   const std::optional<std::string>& latent);
    void add_activation(const std::string& place, const std::string& activation, const std::vector<float>& parameters);
    // `rotation`: index of the step's rotations, or -1.
    void add_attention(int rotation, const std::optional<NormArguments>& query_norm,
                       const std::optional<NormArguments>& key_norm, bool rotates_first,
                       const nanobind::object& sinks, const ColumnArguments& columns);
    void add_scale_by_sigmoid(const LinearArguments& parts, const std::string& source, const std::string& place);
    // gate_up and down: the products of each expert.
    void add_mixture(const LinearArguments& router, const nanobind::object& bias, const ChoiceArguments& choice,
                     const LinearArguments& gate_up, const LinearArguments& down, const std::string& source,
                     const std::string& target, const std::string& gate, const ColumnArguments& inner_columns,
                     const ColumnArguments& columns);
    void keep_rows(const std::string& name);
    void add_gather(const std::string& name);
    // `ids`: the columns of the logits, hence the rows of embedding and head, that each rank has.
    void set_ranks(const std::shared_ptr<Ranks>& ranks, const std::vector<int64_t>& ids, int group);
    // The embedding is plain rows, or one packed matrix.
    void set_ends(nanobind::object embedding_rows, const LinearArguments& embedding, const LinearArguments& head);
    void set_exact(bool exact) { decoder_.exact = exact; }

  protected:
    DType dtype() const { return decoder_.shape.storage == kBf16 ? DType::bf16 : DType::f32; }

    Decoder decoder_;
    size_t num_layers_ = 0, num_rotations_ = 0;
    bool complete_ = false;

  private:
    // Keeps the object, and hence its memory, alive as long as the decoder.
    Tensor tensor(const nanobind::object& object, const char* name);
    const float* floats(const nanobind::object& object, const char* name, int64_t count);
    NormWeights norm_of(const NormArguments& arguments, const char* name, int64_t width);
    Linear product(const LinearArguments& parts, const char* name);
    Linear product(const LinearArguments& parts, const char* name, DType biases);
    // How much of the vocabulary the head covers: all of it, or a rank's share.
    int64_t own_vocab(const LinearArguments& head) const;
    std::optional<Columns> columns_of(const ColumnArguments& columns, int64_t width) const;
    Columns own_columns(const std::vector<int64_t>& begins) const;
    int64_t own_width(const Columns& columns) const;
    // A register that is about to be written; only `gather` may follow if other ranks have the other columns.
    void set(Register place, int64_t width, bool kept, const std::optional<Columns>& columns);
    // Checks that a matrix maps rows of the model's width to the vocabulary.
    void check_size(const Linear& linear, const char* name, int64_t vocab) const;

    Contents contents_;
    std::shared_ptr<Ranks> kept_ranks_;
    int64_t whole_width_[kNumRegisters] = {};  // of what must be gathered
    std::vector<nanobind::object> kept_;
};

}  // namespace octavo
