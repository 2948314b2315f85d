"""A workaround for Triton 3.6's interpreter, which runs the kernels on a CPU."""

from __future__ import annotations

from typing import Any


def let_loops_end_at_tensors() -> None:
    """Let `range` accept loaded numbers with NumPy 2.4, which no longer converts an array of shape [1] to an int."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch
