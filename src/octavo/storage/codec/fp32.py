"""float32: IEEE 754 binary32.

    code    | s eeeeeeee mmmmmmmmmmmmmmmmmmmmmmm |
    fields  none

Read by the C++ kernels (for models of the same type), the Triton kernels and the reference.
"""

from octavo.storage.codec.floats import FloatCodec

FP32 = FloatCodec("float32")
