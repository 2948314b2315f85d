"""The C++ kernels of `csrc/`, typed and documented.

Every function works on CPU tensors in bfloat16 or float32 (arithmetic is float32), releases the GIL, and checks shapes,
dtypes and indices on every call: a bad argument raises ValueError with the numbers, never touches foreign memory.
Rows may be strided, elements of a row may not. Functions that write into their arguments say so.

The instruction set is chosen when the library is loaded: "amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2_vnni",
"avx2", "neon_bf16", "neon" or "portable".
`OCTAVO_ISA` in the environment forces a level; one that the CPU lacks is an error.
"""

from __future__ import annotations

from octavo.kernels.functions import (
    add_rms_norm,
    argmax,
    attend,
    gate,
    make_decoder,
    rank_memory,
    ranks,
    rms_norm,
    rope_write,
    step_message_bytes,
)
from octavo.kernels.library import MAX_HEAD_DIM, available, force_isa, isa, num_threads, set_num_threads, supported_isas
from octavo.kernels.packed_weight import FLOAT_FORMATS, QUANTISED_FORMATS, Activation, PackedWeight, WeightFormat
from octavo.kernels.sampling import add_amounts, draw_tokens, penalise_repetition, score_tokens

__all__ = [
    "FLOAT_FORMATS",
    "MAX_HEAD_DIM",
    "QUANTISED_FORMATS",
    "Activation",
    "PackedWeight",
    "WeightFormat",
    "add_amounts",
    "add_rms_norm",
    "argmax",
    "attend",
    "available",
    "draw_tokens",
    "force_isa",
    "gate",
    "isa",
    "make_decoder",
    "num_threads",
    "penalise_repetition",
    "rank_memory",
    "ranks",
    "rms_norm",
    "rope_write",
    "score_tokens",
    "set_num_threads",
    "step_message_bytes",
    "supported_isas",
]
