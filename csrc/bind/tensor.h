// Borrowed views of torch tensors, without linking against torch.
//
// torch.Tensor carries a table of C functions (DLPack's exchange API, __dlpack_c_exchange_api__) that fills in a
// DLTensor in some tens of nanoseconds: cheap enough to check every shape and dtype on every call. The view is valid
// during the call, while the caller holds the tensor.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>

namespace octavo {

// As in dlpack.h, version 1.x.
struct DLTensor {
    void* data;
    struct {
        int32_t type, id;
    } device;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t* shape;
    int64_t* strides;  // in elements
    uint64_t byte_offset;
};

enum class DType : uint8_t { bf16, f32, f16, f64, i32, i64, i8, u8, other };

const char* dtype_name(DType dtype);
int dtype_bytes(DType dtype);

// A tensor argument of one call; null if Python passed None for an optional one.
struct Tensor {
    char* base = nullptr;
    DType dtype = DType::other;
    int ndim = 0;
    int64_t shape[6] = {};
    int64_t stride[6] = {};  // in elements

    bool is_null() const { return ndim == 0; }
    template <class T> T* data() const { return reinterpret_cast<T*>(base); }
    int64_t stride_bytes(int axis) const { return stride[axis] * dtype_bytes(dtype); }
    std::string describe() const;  // "bfloat16 [4, 576]"
};

// False, with no Python error set, when `object` is not a dense CPU tensor of at most six dimensions.
bool borrow_tensor(PyObject* object, Tensor* out);

// Raise nanobind::value_error with the argument's name, what it is and what it must be.
void require(bool condition, const std::string& message);
void check_dtype(const Tensor& tensor, const char* name, DType expected);
void check_shape(const Tensor& tensor, const char* name, std::initializer_list<int64_t> expected);  // -1: any
// The last dimension must be contiguous.
void check_rows(const Tensor& tensor, const char* name, int ndim);

}  // namespace octavo

namespace nanobind::detail {
template <> struct type_caster<octavo::Tensor> {
    NB_TYPE_CASTER(octavo::Tensor, const_name("torch.Tensor"))
    bool from_python(handle source, uint8_t, cleanup_list*) noexcept {
        if (source.is_none()) {
            value = {};
            return true;
        }
        return octavo::borrow_tensor(source.ptr(), &value);
    }
    static handle from_cpp(const octavo::Tensor&, rv_policy, cleanup_list*) noexcept { return handle(); }
};
}  // namespace nanobind::detail
