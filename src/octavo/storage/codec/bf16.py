"""bfloat16: the upper half of a float32.

    code    | s eeeeeeee mmmmmmm |
    fields  none

Read by the C++ kernels (for models of the same type), the Triton kernels and the reference.
"""

from octavo.storage.codec.floats import FloatCodec

BF16 = FloatCodec("bfloat16")
