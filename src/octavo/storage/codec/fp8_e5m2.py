"""fp8_e5m2: two bits of mantissa, up to ±57344 times the scale: the upper half of a float16.

    code    | s eeeee mm |      2^(e-15) (1 + m/4); e = 0: 2^-14 m/4
    fields  none: one float32 scale per head, outside the blocks

Read by the C++ kernels (`csrc/level/coded_attention.h`), the Triton kernels and the reference.
"""

import torch

from octavo.kvcache.formats import E5M2
from octavo.storage.codec.fp8 import Float8Codec

FP8_E5M2 = Float8Codec(E5M2, torch.float8_e5m2)
