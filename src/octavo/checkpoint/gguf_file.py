"""Read GGUF files: metadata, and tensors as the bytes stored in the file.

The types, block sizes and dequantisation are those of llama.cpp's own `gguf` package. Its GGUFReader makes a numpy
view of every string, which takes 2.6 s for a vocabulary of 49,152. So the header is parsed here, in one pass that skips
arrays until they are needed.

Layout (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), little-endian:

    "GGUF" | version u32 | tensors u64 | pairs u64 | pairs: key, type u32, value | tensor infos | padding | data
    string: length u64, UTF-8      array: element type u32, count u64, elements
    tensor info: name, dims u32, dim u64 × dims (fastest first), ggml type u32, offset into data u64
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from octavo.checkpoint.hub import shards
from octavo.errors import CorruptModelError, ModelNotFoundError, UnsupportedModelError

# Those that the kernels multiply, in the order of `kernels.WeightFormat`, and those that are converted for them.
KERNEL_TYPE_NAMES = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"),
)
_CONVERTED_TYPE_NAMES = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0")
_TYPE_NAMES = ("F32", "F16", "BF16", *KERNEL_TYPE_NAMES, *_CONVERTED_TYPE_NAMES)
SUPPORTED_TENSOR_TYPES = tuple(gguf.GGMLQuantizationType[name] for name in _TYPE_NAMES)

FLOAT_TYPES = frozenset({"F32", "F16", "BF16"})

_VERSIONS = (2, 3)
_STRING, _ARRAY = gguf.GGUFValueType.STRING, gguf.GGUFValueType.ARRAY
_SCALARS = {
    gguf.GGUFValueType.UINT8: "B",
    gguf.GGUFValueType.INT8: "b",
    gguf.GGUFValueType.UINT16: "H",
    gguf.GGUFValueType.INT16: "h",
    gguf.GGUFValueType.UINT32: "I",
    gguf.GGUFValueType.INT32: "i",
    gguf.GGUFValueType.FLOAT32: "f",
    gguf.GGUFValueType.BOOL: "?",
    gguf.GGUFValueType.UINT64: "Q",
    gguf.GGUFValueType.INT64: "q",
    gguf.GGUFValueType.FLOAT64: "d",
}
_LENGTH = struct.Struct("<Q")
_REQUIRED = object()


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """The location of one tensor. `shape` is in torch's order (rows first); `type` is a gguf.GGMLQuantizationType."""

    name: str
    shape: tuple[int, ...]
    type: Any
    start: int
    num_bytes: int

    @property
    def row_bytes(self) -> int:
        """Return the bytes of one row (the last dimension); blocks never span two rows."""
        return self.num_bytes // max(1, prod(self.shape[:-1]))


@dataclass(frozen=True, slots=True)
class _Array:
    """The location of an array's elements, which end before `end`; `code` is that of a scalar, "" for strings."""

    start: int
    end: int
    count: int
    code: str = ""


# The header of the file that was opened last, by its path, inode, size and time of modification.
_headers: dict[tuple[Path, int, int, int], tuple[dict[str, Any], dict[str, GGUFTensor]]] = {}


def _mapped(descriptor: int) -> mmap.mmap:
    """Map a file copy-on-write, so that numpy and torch may treat views of it as ordinary, writable memory."""
    try:
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        # Linux maps no more writable memory than it has. Such a model is refused once its parts have been added up.
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)


class GGUFFile:
    """One GGUF file, mapped into memory: cheap to open, with tensors that are only read when needed.

    Raises:
        ModelNotFoundError: there is no such file.
        CorruptModelError: the file is not GGUF, or truncated; the message has the position and the size.
        UnsupportedModelError: an unsupported GGUF version or byte order.
    """

    def __init__(self, path: Path, *, with_shards: bool = True) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                self.size = status.st_size
                if file.read(4) != b"GGUF":
                    raise CorruptModelError(f"{path} is not a GGUF file: it does not begin with the bytes 'GGUF'")
                self._map = _mapped(file.fileno())
        except (FileNotFoundError, IsADirectoryError) as error:
            raise ModelNotFoundError(f"there is no GGUF file at {path}") from error
        # Starting a server opens the file five times.
        stamp = path.absolute(), status.st_ino, status.st_size, status.st_mtime_ns
        self._metadata: dict[str, Any] = {}
        header = _headers.get(stamp) or self._read_header()
        _headers.clear()
        _headers[stamp] = header
        self._metadata, self.tensors = header
        self._others: dict[str, GGUFFile] = {}  # the shards that hold tensors of other files
        if with_shards and (count := int(self._metadata.get("split.count", 0))) > 1:
            self._open_shards(count)

    @property
    def is_quantised(self) -> bool:
        """Whether any tensor is stored in fewer bits than a float."""
        return any(tensor.type.name not in FLOAT_TYPES for tensor in self.tensors.values())

    def _open_shards(self, count: int) -> None:
        """Add the tensors of the other files of a model that is cut into `count`."""
        tensors = dict(self.tensors)
        for path in shards(self.path, count)[1:]:
            shard = GGUFFile(path, with_shards=False)
            tensors |= shard.tensors
            self._others |= dict.fromkeys(shard.tensors, shard)
        wanted = int(self._metadata.get("split.tensors.count", len(tensors)))
        if len(tensors) != wanted:
            raise CorruptModelError(f"{self.path} and its shards have {len(tensors)} tensors, but should have {wanted}")
        self.tensors = tensors

    def _read_header(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        """Read all metadata and where tensors are; arrays are only located."""
        self._position = 4
        (version,) = self._unpack("I")
        if version not in _VERSIONS:
            hint = "it is big-endian" if version & 0xFFFF == 0 else f"it is version {version}"
            raise UnsupportedModelError(f"{self.path}: {hint}; Octavo reads little-endian GGUF versions 2 and 3")
        num_tensors, num_pairs = self._unpack("QQ")
        for _ in range(num_pairs):
            key = self._string()
            (value_type,) = self._unpack("I")
            self._metadata[key] = self._value(value_type)
        return self._metadata, {tensor.name: tensor for tensor in self._read_tensors(num_tensors)}

    def __contains__(self, key: str) -> bool:
        return key in self._metadata

    def keys(self) -> list[str]:
        return list(self._metadata)

    def get(self, key: str, default: Any = _REQUIRED) -> Any:
        """Return a metadata value: a scalar, a string, or a list.

        Raises:
            CorruptModelError: there is neither the key nor a default.
        """
        value = self._metadata.get(key, default)
        if value is _REQUIRED:
            raise CorruptModelError(f"{self.path} has no {key}")
        return self._elements(value) if isinstance(value, _Array) else value

    def length(self, key: str) -> int:
        """Return the length of the array under `key` without reading it; 0 if there is no such key."""
        value = self._metadata.get(key, ())
        return value.count if isinstance(value, _Array) else len(value)

    def raw(self, name: str) -> npt.NDArray[np.uint8]:
        """Return a tensor's stored bytes, `[rows, row_bytes]` uint8: a view of the file's copy-on-write mapping.

        Raises:
            CorruptModelError: there is no such tensor.
        """
        if (shard := self._others.get(name)) is not None:
            return shard.raw(name)
        tensor = self._tensor(name)
        flat = np.frombuffer(self._map, dtype=np.uint8, count=tensor.num_bytes, offset=tensor.start)
        return flat.reshape(prod(tensor.shape[:-1]), tensor.row_bytes)

    def release(self, name: str) -> None:
        """Take a tensor's pages out of this process's memory, where the system can; the next read maps them again."""
        if (shard := self._others.get(name)) is not None:
            return shard.release(name)
        tensor = self._tensor(name)
        start = tensor.start // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, start, tensor.start + tensor.num_bytes - start)

    def dequantize(self, name: str) -> npt.NDArray[np.float32]:
        """Return a tensor in float32, dequantised by the `gguf` package.

        Raises:
            UnsupportedModelError: its type is not supported.
        """
        tensor = self._tensor(name)
        check_tensor_type(tensor, self.path)
        values: npt.NDArray[np.float32] = gguf.dequantize(self.raw(name), tensor.type)
        return values.reshape(tensor.shape)

    def _tensor(self, name: str) -> GGUFTensor:
        try:
            return self.tensors[name]
        except KeyError:
            raise CorruptModelError(f"{self.path} has no tensor {name}") from None

    def _read_tensors(self, count: int) -> Iterator[GGUFTensor]:
        infos = []
        for _ in range(count):
            name = self._string()
            (num_dims,) = self._unpack("I")
            if num_dims > 8:
                raise self._corrupt(f"tensor {name} has {num_dims} dimensions")
            dims = self._unpack(f"{num_dims}Q")
            if 0 in dims:
                raise self._corrupt(f"tensor {name} has no elements: its dimensions are {', '.join(map(str, dims))}")
            infos.append((name, tuple(reversed(dims)), *self._unpack("IQ")))
        alignment = self._metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise self._corrupt(f"general.alignment is {alignment!r}")
        data_start = -(-self._position // alignment) * alignment
        for name, shape, type_id, offset in infos:
            try:
                tensor_type = gguf.GGMLQuantizationType(type_id)
            except ValueError:
                raise UnsupportedModelError(
                    f"{self.path}: tensor {name} has ggml type {type_id}; {_supported()}"
                ) from None
            block_size, block_bytes = gguf.GGML_QUANT_SIZES[tensor_type]
            if shape and shape[-1] % block_size:
                raise self._corrupt(
                    f"tensor {name} has rows of {shape[-1]}, {tensor_type.name} blocks have {block_size}"
                )
            tensor = GGUFTensor(name, shape, tensor_type, data_start + offset, prod(shape) // block_size * block_bytes)
            if tensor.start + tensor.num_bytes > self.size:
                raise self._corrupt(
                    f"tensor {name} ends at byte {tensor.start + tensor.num_bytes}, but the file has only {self.size}: "
                    "download it again"
                )
            yield tensor

    def _value(self, value_type: int) -> Any:
        if code := _SCALARS.get(value_type):
            return self._unpack(code)[0]
        if value_type == _STRING:
            return self._string()
        if value_type != _ARRAY:
            raise self._corrupt(f"metadata of unknown type {value_type}")
        element_type, count = self._unpack("IQ")
        if code := _SCALARS.get(element_type):
            size = count * struct.calcsize(code)
            self._need(size)
            start, self._position = self._position, self._position + size
            return _Array(start, self._position, count, code)
        if element_type != _STRING:
            raise self._corrupt(f"a metadata array of type {element_type}")
        self._need(count * _LENGTH.size)
        start = self._position
        position, unpack, mapped = self._position, _LENGTH.unpack_from, self._map
        try:
            for _ in range(count):
                position += 8 + unpack(mapped, position)[0]
        except (struct.error, OverflowError):  # a length over 2⁶³ leads past what an index can be
            raise self._corrupt("a string array runs past the end") from None
        if position > self.size:
            raise self._corrupt("a string array runs past the end")
        self._position = position
        return _Array(start, position, count)

    def _elements(self, array: _Array) -> list[Any]:
        stored = self._map[array.start : array.end]
        if array.code:
            return list(struct.unpack(f"<{array.count}{array.code}", stored))
        try:
            from octavo._native import read_strings
        except ImportError:  # not compiled
            return strings_in_python(stored, array.count)
        return read_strings(stored, array.count)

    def _string(self) -> str:
        (length,) = self._unpack("Q")
        self._need(length)
        start = self._position
        self._position += length
        return self._map[start : self._position].decode("utf-8", errors="replace")

    def _unpack(self, codes: str) -> tuple[Any, ...]:
        layout = struct.Struct("<" + codes)
        self._need(layout.size)
        values = layout.unpack_from(self._map, self._position)
        self._position += layout.size
        return values

    def _need(self, count: int) -> None:
        if self._position + count > self.size:
            raise self._corrupt(f"the header needs {count} bytes at {self._position}, the file has {self.size}")

    def _corrupt(self, what: str) -> CorruptModelError:
        return CorruptModelError(f"{self.path} is truncated or corrupt: {what}")


def strings_in_python(stored: bytes, count: int) -> list[str]:
    """Read the strings of an array as the C++ library does, where that is missing."""
    strings, position, unpack = [], 0, _LENGTH.unpack_from
    for _ in range(count):
        start = position + 8
        position = start + unpack(stored, position)[0]
        # llama.cpp's vocabularies may hold a token cut inside a character.
        strings.append(stored[start:position].decode("utf-8", "replace"))
    return strings


def check_tensor_type(tensor: GGUFTensor, path: Path) -> None:
    """Raise `UnsupportedModelError`, naming the supported types, if a tensor's type is not one of them."""
    if tensor.type not in SUPPORTED_TENSOR_TYPES:
        raise UnsupportedModelError(f"{path}: tensor {tensor.name} is stored as {tensor.type.name}; {_supported()}")


def _supported() -> str:
    return f"supported: {', '.join(kind.name for kind in SUPPORTED_TENSOR_TYPES)}"
