"""float16: IEEE 754 binary16, which overflows beyond 65504.

    code    | s eeeee mmmmmmmmmm |
    fields  none

Read by the Triton kernels and the reference.
"""

from octavo.storage.codec.floats import FloatCodec

FP16 = FloatCodec("float16")
