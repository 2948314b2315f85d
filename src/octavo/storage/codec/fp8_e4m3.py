"""fp8_e4m3: three bits of mantissa, up to ±448 times the scale; `float8_e4m3fn`, not the ±240 of its `fnuz` variant.

    code    | s eeee mmm |      2^(e-7) (1 + m/8); e = 0: 2^-6 m/8
    fields  none: one float32 scale per head, outside the blocks

Read by the C++ kernels (`csrc/level/coded_attention.h`), the Triton kernels and the reference.
"""

import torch

from octavo.kvcache.formats import E4M3
from octavo.storage.codec.fp8 import Float8Codec

FP8_E4M3 = Float8Codec(E4M3, torch.float8_e4m3fn)
