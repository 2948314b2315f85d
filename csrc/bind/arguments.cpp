#include "bind/arguments.h"

#include <limits>

namespace octavo {

int index_of(const std::string& name, const char* what, std::span<const char* const> names) {
    std::string all;
    for (const char* const& one : names) {
        if (name == one) return static_cast<int>(&one - names.data());
        all += (all.empty() ? "" : ", ") + std::string(one);
    }
    require(false, std::string(what) + " '" + name + "' is not one of " + all);
    return 0;
}

Storage storage_of(const Tensor& tensor, const char* name) {
    if (tensor.dtype == DType::bf16) return kBf16;
    if (tensor.dtype == DType::f32) return kF32;
    require(false, std::string(name) + " must be bfloat16 or float32, got " + tensor.describe());
    return kF32;
}

Matrix matrix(const Tensor& tensor, const char* name, DType dtype) {
    check_rows(tensor, name, 2);
    check_dtype(tensor, name, dtype);
    return {tensor.base, tensor.shape[0], tensor.shape[1], tensor.stride_bytes(0)};
}

int check_rotation(const Tensor& cos, const Tensor& sin, int key_dim) {
    check_dense(cos, "cos", DType::f32, {-1, -1});
    check_dense(sin, "sin", DType::f32, {cos.shape[0], cos.shape[1]});
    require(cos.shape[1] <= key_dim / 2, "cos has " + std::to_string(cos.shape[1]) + " frequencies, a head of " +
                                             std::to_string(key_dim) + " dimensions rotates at most half as many");
    return static_cast<int>(cos.shape[1]) * 2;
}

namespace {

constexpr const char* kCodeNames[kNumCodes] = {"floats", "fp8_e4m3", "fp8_e5m2", "int8", "int4"};
Code code_of(const std::string& name) {
    return static_cast<Code>(1 + index_of(name, "codec", std::span(kCodeNames).subspan(1)));
}
bool is_fp8(Code code) { return code == kCodeE4m3 || code == kCodeE5m2; }

// Whether an axis has this stride; that of an axis of one element does not matter.
bool strided(const Tensor& tensor, int axis, int64_t stride) {
    return tensor.shape[axis] <= 1 || tensor.stride[axis] == stride;
}
// Whether the axes after that of the KV heads are dense.
bool dense_in_head(const Tensor& tensor) {
    int64_t stride = 1;
    for (int axis = tensor.ndim; axis-- > 2; stride *= tensor.shape[axis])
        if (!strided(tensor, axis, stride)) return false;
    return true;
}

// Floats have no fields; a code has one value of each field for each of [blocks, heads, block_size] vectors.
CodedSide coded_side(Code code, const SideArguments& arguments, const char* name, const LayerKV& kv,
                     int64_t code_bytes) {
    CodedSide side{};
    if (code == kCodePlain) return side;
    const auto& [_, codes, scale, zero, head_scales] = std::get<CodedArguments>(arguments);
    side.code = code;
    side.code_bytes = code_bytes;
    const auto add = [&](int index, const Tensor& field, int64_t bytes) {
        check_dtype(field, name, DType::u8);
        check_shape(field, name, {kv.num_blocks, kv.kv_heads, kv.block_size, bytes});
        require(dense_in_head(field), std::string(name) + " must have fields that are dense within a head of a block");
        side.field[index] = field.base;
        side.field_block_stride[index] = field.stride[0];
        side.field_head_stride[index] = field.stride[1];
    };
    const bool fits = scale.is_null() == is_fp8(code) && zero.is_null() == (code != kCodeInt4);
    require(fits && head_scales.is_null() != is_fp8(code), std::string(name) + " must have the fields of their codec");
    if (!scale.is_null()) add(0, scale, 2);
    if (!zero.is_null()) add(1, zero, 1);
    if (is_fp8(code)) side.head_scales = dense<float>(head_scales, name, {kv.kv_heads});
    return side;
}

}  // namespace

LayerKV layer_kv(const SideArguments& keys, const SideArguments& values, DType dtype) {
    const auto split = [](const SideArguments& side) -> std::pair<Code, const Tensor&> {
        if (const auto* floats = std::get_if<Tensor>(&side)) return {kCodePlain, *floats};
        const auto& coded = std::get<CodedArguments>(side);
        return {code_of(std::get<0>(coded)), std::get<1>(coded)};
    };
    const auto& [key_code, key] = split(keys);
    const auto& [value_code, value] = split(values);
    require(key_code == value_code || (key_code == kCodeInt8 && value_code == kCodeInt4),
            std::string("keys in ") + kCodeNames[key_code] + " do not go with values in " + kCodeNames[value_code]);
    const bool plain = key_code == kCodePlain;
    LayerKV kv{};
    kv.storage = plain ? storage_of(key, "key cache") : dtype == DType::bf16 ? kBf16 : kF32;
    const int64_t pair = kv.storage == kBf16 ? 2 : 1, byte_group = is_fp8(key_code) ? 1 : 4;
    const int64_t together = plain ? pair : byte_group;  // tokens of one dimension of a value
    check_dtype(key, "key cache", plain ? key.dtype : DType::u8);
    check_dtype(value, "value cache", key.dtype);
    if (plain)
        check_shape(key, "key cache", {-1, -1, -1, -1, pair});
    else
        check_shape(key, "key cache", {-1, -1, -1, -1, 16, byte_group});
    const int64_t block_size = plain ? key.shape[3] : key.shape[2] * 16;
    // Latents are a view of the keys' last dimensions.
    kv.latent = plain && value.base >= key.base && value.base < key.base + key.shape[2] * block_size * 4;
    if (kv.latent) {
        check_shape(value, "value cache", {key.shape[0], key.shape[1], -1, block_size, pair});
        require(value.base == key.base + (key.shape[2] - value.shape[2]) * block_size * 4,
                "values within keys must be their last dimensions");
    } else {
        check_shape(value, "value cache", {key.shape[0], key.shape[1], block_size / together, -1, together});
    }
    require(dense_in_head(key) && dense_in_head(value), "key and value cache must be dense within a head of a block");
    const int64_t key_units = plain ? key.shape[2] : key.shape[3] * byte_group;
    const auto dims = [](Code code, int64_t units) { return static_cast<int>(code == kCodeInt4 ? 2 * units : units); };
    kv.key = key.base;
    kv.value = value.base;
    kv.key_block_stride = key.stride_bytes(0);
    kv.key_head_stride = key.stride_bytes(1);
    kv.value_block_stride = value.stride_bytes(0);
    kv.value_head_stride = value.stride_bytes(1);
    kv.num_blocks = key.shape[0];
    kv.kv_heads = static_cast<int>(key.shape[1]);
    kv.key_units = dims(key_code, key_units);
    kv.value_dim = kv.latent ? static_cast<int>(value.shape[2] * pair) : dims(value_code, value.shape[3]);
    kv.block_size = static_cast<int>(block_size);
    kv.key_side = coded_side(key_code, keys, "keys", kv, key_units);
    kv.value_side = coded_side(value_code, values, "values", kv, value.shape[3]);
    require(kv.kv_heads > 0 && block_size > 0 && block_size % 16 == 0,
            "block_size must be a multiple of 16, got " + std::to_string(block_size));
    const auto check_dim = [](const char* name, int dim, int multiple) {
        require(dim > 0 && dim % multiple == 0 && dim <= kMaxHeadDim,
                std::string(name) + " must be a multiple of " + std::to_string(multiple) + " and at most " +
                    std::to_string(kMaxHeadDim) + ", got " + std::to_string(dim));
    };
    check_dim("key_dim", kv.key_dim(), plain ? static_cast<int>(pair) : 16);
    check_dim("value_dim", kv.value_dim, value_code == kCodeInt4 ? 32 : 16);
    return kv;
}

void check_copies(const LayerKV& kv, const LayerKV& copies, int first_blocks, int recent_blocks) {
    require(kv.coded() && copies.coded() && copies.kv_heads == kv.kv_heads && copies.key_units == kv.key_units &&
                copies.value_dim == kv.value_dim && copies.block_size == kv.block_size,
            "copies must have the heads and the block size of their layer, and both must be coded");
    constexpr int kMost = 1 << 20;
    require(
        int64_t{first_blocks} * kv.block_size <= std::numeric_limits<int>::max(),
        std::to_string(first_blocks) + " first blocks of " + std::to_string(kv.block_size) + " tokens are too many");
    require(first_blocks >= 0 && first_blocks <= kMost && recent_blocks > 0 && recent_blocks <= kMost,
            "copies are of 0 to " + std::to_string(kMost) + " first blocks and 1 to " + std::to_string(kMost) +
                " recent ones, got " + std::to_string(first_blocks) + " and " + std::to_string(recent_blocks));
}

void check_budgets(const Tensor& budgets, int64_t num_seqs, int sink_tokens) {
    const int32_t* each = dense<int32_t>(budgets, "budgets", {num_seqs});
    require(sink_tokens > 0, "sink_tokens must be positive, got " + std::to_string(sink_tokens));
    for (int64_t i = 0; i < num_seqs; ++i)
        require(each[i] == 0 || each[i] > sink_tokens, "a budget must be 0 for none, or more than the " +
                                                           std::to_string(sink_tokens) + " sinks, got " +
                                                           std::to_string(each[i]));
}

SparseReads bounds_of(const LayerKV& kv, const Tensor& bounds) {
    const int key_dim = kv.key_dim();
    check_dtype(bounds, "bounds", kv.storage == kBf16 ? DType::bf16 : DType::f32);
    check_shape(bounds, "bounds", {kv.num_blocks, kv.kv_heads, 2, key_dim});
    require(!kv.coded() && key_dim % 16 == 0 && strided(bounds, 3, 1) && strided(bounds, 2, key_dim),
            "bounds must be of plain keys with a multiple of 16 dimensions, and dense within a head");
    SparseReads sparse{};
    sparse.bounds = bounds.base;
    sparse.block_stride = bounds.stride_bytes(0);
    sparse.head_stride = bounds.stride_bytes(1);
    return sparse;
}

void check_sparse(const Tensor& num_read, const Tensor& num_recent, int64_t num_layers, int64_t num_seqs) {
    const int32_t *reads = dense<int32_t>(num_read, "num_read", {num_layers, num_seqs}),
                  *recents = dense<int32_t>(num_recent, "num_recent", {num_seqs});
    for (int64_t i = 0; i < num_layers * num_seqs; ++i) {
        const int read = reads[i], recent = recents[i % num_seqs];
        require(read == 0 || (recent > 0 && read > recent),
                "a sequence reads all blocks (0), or more than its most recent ones, got " + std::to_string(read) +
                    " and " + std::to_string(recent));
    }
}

void check_measured(const MassArguments& measured, int64_t num_groups, const Tensor& context_lens, int block_size) {
    const auto& [begins, mass] = measured;
    const int64_t* each = dense<int64_t>(begins, "mass begins", {context_lens.shape[0]});
    check_dense(mass, "mass", DType::i64, {num_groups, -1});
    for (int64_t i = 0; i < context_lens.shape[0]; ++i) {
        const int64_t begin = each[i], blocks = (context_lens.data<int32_t>()[i] + block_size - 1) / block_size;
        require(begin >= -1 && (begin < 0 || begin <= mass.shape[1] - blocks),
                "mass has room for " + std::to_string(mass.shape[1]) + " blocks, but sequence " + std::to_string(i) +
                    " has " + std::to_string(blocks) + " from " + std::to_string(begin));
    }
}

void check_completed(const Tensor& completed, int64_t num_blocks) {
    const int32_t* blocks = dense<int32_t>(completed, "completed", {-1});
    for (int64_t i = 0; i < completed.shape[0]; ++i)
        require(blocks[i] >= 0 && blocks[i] < num_blocks,
                "completed names block " + std::to_string(blocks[i]) + " of " + std::to_string(num_blocks));
}

NormWeights norm_weights(const Tensor& weight, const Tensor& bias, float eps, bool centred, const char* name,
                         DType dtype, int64_t width) {
    NormWeights norm{};
    if (weight.is_null()) return norm;
    const bool wide = centred || (weight.dtype == DType::f32 && dtype != DType::f32);
    check_dense(weight, name, wide ? DType::f32 : dtype, {width});
    norm.kind = centred ? kLayerNorm : wide ? kRmsNormRoundedOnce : kRmsNorm;
    norm.weight = weight.base;
    norm.eps = eps;
    if (!bias.is_null()) {
        require(centred, std::string(name) + " may have a bias only if it is centred");
        norm.bias = dense<float>(bias, name, {width});
    }
    return norm;
}

Activation activation_of(const std::string& name) {
    constexpr const char* kNames[kNumActivations] = {"silu", "gelu_pytorch_tanh", "gelu", "relu", "relu2", "xielu"};
    return static_cast<Activation>(index_of(name, "activation", kNames));
}

Activation gate_of(const std::string& name) {
    const Activation activation = activation_of(name);
    require(activation < kNumGates, "activation " + name + " has parameters, and cannot be a gate");
    return activation;
}

Epilogue epilogue_of(const std::string& activation) {
    if (activation == "clamped_swiglu") return kClampedSwiGlu;
    return activation.empty() ? kPlain : static_cast<Epilogue>(kSiluGate + static_cast<int>(gate_of(activation)));
}

void require_threads(int count) {
    require(count >= 1 && count <= 1024, "num_threads must be between 1 and 1024, got " + std::to_string(count));
}

void check_range(const int64_t* x, int64_t count, int64_t end, const char* name, int64_t begin) {
    for (int64_t i = 0; i < count; ++i)
        if (x[i] < begin || x[i] >= end)
            require(false, std::string(name) + "[" + std::to_string(i) + "] is " + std::to_string(x[i]) +
                               ", must be in [" + std::to_string(begin) + ", " + std::to_string(end) + ")");
}

const int64_t* indices(const Tensor& tensor, const char* name, int64_t count, int64_t end, int64_t begin) {
    const int64_t* each = dense<int64_t>(tensor, name, {count});
    check_range(each, tensor.shape[0], end, name, begin);
    return each;
}

}  // namespace octavo
