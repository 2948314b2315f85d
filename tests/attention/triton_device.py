"""Where the tests of Triton kernels run: on a GPU where there is one, else in Triton's interpreter on the CPU.

Import this before anything that imports triton.
"""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

DEVICE = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
ON_GPU = DEVICE == "cuda"

needs_triton = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    # Masked lanes of the interpreter divide by zero and overflow, as they do unseen on a GPU.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
