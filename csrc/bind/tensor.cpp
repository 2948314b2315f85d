#include "bind/tensor.h"

#include <mutex>

namespace nb = nanobind;

namespace octavo {
namespace {

// The beginning of DLPackExchangeAPI, up to the only function that is used.
struct ExchangeApi {
    struct {
        uint32_t major, minor;
    } version;
    void* previous;
    void* managed_tensor_allocator;
    void* managed_tensor_from_py_object;
    void* managed_tensor_to_py_object;
    int (*dltensor_from_py_object)(void* object, DLTensor* out);
};

const ExchangeApi* exchange_api(PyTypeObject* type) {
    // Parameters are tensors of a subclass, so there is more than one type; guarded by the GIL.
    static PyTypeObject* known_type[4] = {};
    static const ExchangeApi* known_api[4] = {};
    static int next = 0;
    for (int i = 0; i < 4; ++i)
        if (known_type[i] == type) return known_api[i];
    PyObject* capsule = PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), "__dlpack_c_exchange_api__");
    const ExchangeApi* api = nullptr;
    if (capsule) {
        api = static_cast<const ExchangeApi*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
        Py_DECREF(capsule);
    }
    PyErr_Clear();
    if (!api || api->version.major != 1 || !api->dltensor_from_py_object) return nullptr;
    Py_INCREF(type);  // a cached type must not be freed and its address reused by another
    Py_XDECREF(known_type[next]);
    known_type[next] = type;
    known_api[next] = api;
    next = (next + 1) % 4;
    return api;
}

DType dtype_of(const DLTensor& t) {
    if (t.dtype.lanes != 1) return DType::other;
    switch (t.dtype.code << 8 | t.dtype.bits) {
        case 0 << 8 | 8: return DType::i8;
        case 0 << 8 | 32: return DType::i32;
        case 0 << 8 | 64: return DType::i64;
        case 1 << 8 | 8: return DType::u8;
        case 2 << 8 | 16: return DType::f16;
        case 2 << 8 | 32: return DType::f32;
        case 2 << 8 | 64: return DType::f64;
        case 4 << 8 | 16: return DType::bf16;
        default: return DType::other;
    }
}

}  // namespace

const char* dtype_name(DType dtype) {
    static const char* names[] = {"bfloat16", "float32", "float16", "float64", "int32",
                                  "int64",    "int8",    "uint8",   "another dtype"};
    return names[static_cast<int>(dtype)];
}

int dtype_bytes(DType dtype) {
    static const int bytes[] = {2, 4, 2, 8, 4, 8, 1, 1, 1};
    return bytes[static_cast<int>(dtype)];
}

std::string Tensor::describe() const {
    if (is_null()) return "None";
    std::string text = std::string(dtype_name(dtype)) + " [";
    for (int i = 0; i < ndim; ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
    return text + "]";
}

bool borrow_tensor(PyObject* object, Tensor* out) {
    const ExchangeApi* api = exchange_api(Py_TYPE(object));
    if (!api) return false;
    DLTensor t;
    if (api->dltensor_from_py_object(object, &t) != 0) {
        PyErr_Clear();
        return false;
    }
    constexpr int kCpu = 1;
    if (t.device.type != kCpu || t.ndim < 1 || t.ndim > 6) return false;
    out->base = static_cast<char*>(t.data) + t.byte_offset;
    out->dtype = dtype_of(t);
    out->ndim = t.ndim;
    int64_t dense = 1;
    for (int i = t.ndim; i-- > 0;) {
        out->shape[i] = t.shape[i];
        out->stride[i] = t.strides ? t.strides[i] : dense;
        dense *= t.shape[i];
    }
    return true;
}

void require(bool condition, const std::string& message) {
    if (!condition) throw nb::value_error(message.c_str());
}

void check_dtype(const Tensor& tensor, const char* name, DType expected) {
    if (tensor.dtype != expected)
        require(false, std::string(name) + " must be " + dtype_name(expected) + ", got " + tensor.describe());
}

void check_shape(const Tensor& tensor, const char* name, std::initializer_list<int64_t> expected) {
    bool same = tensor.ndim == static_cast<int>(expected.size());
    int axis = 0;
    for (int64_t size : expected) {
        same = same && (size < 0 || tensor.shape[axis] == size);
        ++axis;
    }
    if (same) return;
    std::string wanted;
    for (int64_t size : expected) wanted += (wanted.empty() ? "" : ", ") + (size < 0 ? "*" : std::to_string(size));
    require(false, std::string(name) + " must have shape [" + wanted + "], got " + tensor.describe());
}

void check_rows(const Tensor& tensor, const char* name, int ndim) {
    const bool dense = tensor.ndim == ndim && (tensor.shape[ndim - 1] <= 1 || tensor.stride[ndim - 1] == 1);
    if (!dense)
        require(false, std::string(name) + " must have " + std::to_string(ndim) +
                           " dimensions, the last one contiguous, got " + tensor.describe());
}

void check_dense(const Tensor& tensor, const char* name, DType dtype, std::initializer_list<int64_t> shape) {
    check_shape(tensor, name, shape);
    check_dtype(tensor, name, dtype);
    int64_t expected = 1;
    for (int axis = tensor.ndim; axis-- > 0;) {
        if (tensor.shape[axis] > 1) require(tensor.stride[axis] == expected, std::string(name) + " must be contiguous");
        expected *= tensor.shape[axis];
    }
}

}  // namespace octavo
