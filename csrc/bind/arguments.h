// Argument checks shared by the bindings. They raise nanobind::value_error, with the numbers.
#pragma once

#include <nanobind/nanobind.h>

#include <span>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

#include "bind/tensor.h"
#include "kernels.h"
#include "linear.h"
#include "ops.h"
#include "sparse_reads.h"

namespace octavo {

// Which of `names` a name is; raises with all of them if it is none.
int index_of(const std::string& name, const char* what, std::span<const char* const> names);
Storage storage_of(const Tensor& tensor, const char* name);
Matrix matrix(const Tensor& tensor, const char* name, DType dtype);
// Frequencies of rotary embeddings, for heads of `key_dim`; returns how many dimensions rotate.
int check_rotation(const Tensor& cos, const Tensor& sin, int key_dim);
// The keys or the values of a layer: floats, or (codec, codes, scales of vectors, zero points, scales of heads), with
// None for what the codec does not have.
using CodedArguments = std::tuple<std::string, Tensor, Tensor, Tensor, Tensor>;
using SideArguments = std::variant<Tensor, CodedArguments>;
// `dtype` is that of queries, of new keys and values, and of the output. It is the cache's unless that is coded, which
// remains for the caller to check.
LayerKV layer_kv(const SideArguments& keys, const SideArguments& values, DType dtype);
// Raises unless `copies` may be the copies of a layer's first and most recent blocks.
void check_copies(const LayerKV& kv, const LayerKV& copies, int first_blocks, int recent_blocks);
// Raises unless `budgets` [num_seqs] are 0, or tokens of which more than the first `sink_tokens` are kept.
void check_budgets(const Tensor& budgets, int64_t num_seqs, int sink_tokens);
// The bounds [blocks][kv_heads][2][key_dim] of a layer's keys, and a step's reads of it: blocks that each sequence
// reads, the most recent ones among them, and for each group the blocks whose bounds are to be computed first.
using SparseArguments = std::tuple<Tensor, Tensor, std::vector<Tensor>>;
SparseReads bounds_of(const LayerKV& kv, const Tensor& bounds);
void check_sparse(const Tensor& num_read, const Tensor& num_recent, int64_t num_layers, int64_t num_seqs);
// Where the mass of each sequence's blocks begins (-1: not measured), and the mass [groups][blocks]; see MassReads.
using MassArguments = std::tuple<Tensor, Tensor>;
// Raises unless `begins` are -1, or leave room for the blocks of each sequence of `context_lens` tokens.
void check_measured(const MassArguments& measured, int64_t num_groups, const Tensor& context_lens, int block_size);
void check_completed(const Tensor& completed, int64_t num_blocks);
void require_threads(int count);
void check_range(const int64_t* x, int64_t count, int64_t end, const char* name, int64_t begin = 0);
// `count` dense numbers in [begin, end).
const int64_t* indices(const Tensor& tensor, const char* name, int64_t count, int64_t end, int64_t begin = 0);
Weight weight_of(const std::string& format, const Tensor& packed, int64_t outputs, int64_t inputs);
// A norm of `width` columns of `dtype`. RMS weights are of `dtype` or float32, which decides where it rounds; weights
// and bias of a `centred` norm (LayerNorm) are float32. No norm if `weight` is null.
NormWeights norm_weights(const Tensor& weight, const Tensor& bias, float eps, bool centred, const char* name,
                         DType dtype, int64_t width);
Activation activation_of(const std::string& name);
Activation gate_of(const std::string& name);  // an activation without parameters
Epilogue epilogue_of(const std::string& activation);  // of the gate; "" for none

void bind_linear(nanobind::module_& m);
void bind_decoder(nanobind::module_& m);
void bind_ranks(nanobind::module_& m);
void bind_sampling(nanobind::module_& m);
void bind_vocabulary(nanobind::module_& m);

}  // namespace octavo
