"""Compiles Triton kernels without a GPU, to find type errors and see their use of shared memory and registers.

Triton's interpreter runs Python over NumPy, and accepts loops whose variables change their type, products of shapes
that tensor cores do not support, and tiles of any size. The compiler does not, and needs no device.

    wrapper (attend_decodes, rms_norm, …) ──launch──> compile for the target ──> Compiled         nothing is run

Import this before anything that imports triton, without TRITON_INTERPRET.
"""

from __future__ import annotations

import io
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

SHARED_MEMORY = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Maximum number of bytes of shared memory per program, by compute capability (CUDA programming guide)."""

MOST_PROGRAMS = (2**31 - 1, 65_535, 65_535)
"""Maximum number of programs along each dimension of a launch (CUDA programming guide)."""

_USED = re.compile(r"Used (\d+) registers")
_WAITED = re.compile(r"cp\.async\.wait_group\s+(\d+)")
_SPILLED = re.compile(r"(\d+) bytes spill stores")


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel, compiled for one combination of argument types.

    Attributes:
        shared: bytes of shared memory per program.
        registers: registers per thread.
        spilled: bytes per thread of registers that were spilled to memory.
        tensor_cores: whether its products use tensor cores.
        fetches_ahead: whether loads are in flight while other data is multiplied.
    """

    case: str
    kernel: str
    num_warps: int
    shared: int
    registers: int
    spilled: int
    tensor_cores: bool
    fetches_ahead: bool


class _Target:
    """A substitute for Triton's driver, which would need CUDA."""

    def __init__(self, arch: int) -> None:
        self._arch = arch
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        return self._arch  # so that kernels compiled for other targets are not reused

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_device_capability(self, device: int = 0) -> tuple[int, int]:
        return divmod(self._arch, 10)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": SHARED_MEMORY[self._arch]}


def compile_all(cases: Iterable[tuple[str, Callable[[], object]]], arch: int = 90) -> Iterator[Compiled]:
    """Call each case, and compile each kernel that it launches, for one compute capability (90 is Hopper).

    Equal launches are compiled once per process, which cannot launch kernels afterwards. No kernel is run, so the
    arguments of the cases do not change.

    Raises:
        RuntimeError: TRITON_INTERPRET is set, or a launch has more programs than a GPU accepts.
        Exception: an exception of the compiler, with the case's name in a note.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET is set: kernels are interpreted here, and cannot be compiled")
    driver.set_active(_Target(arch))
    for name, call in cases:
        found: list[Compiled] = []
        with _compiling(name, found):
            try:
                call()
            except Exception as error:
                error.add_note(f"while compiling {name!r} for sm_{arch}")
                raise
        yield from found


@contextmanager
def _compiling(case: str, found: list[Compiled]) -> Iterator[None]:
    knobs = triton.knobs

    def compile_only(self: Any, grid: Any) -> Callable[..., None]:
        if any(size > most for size, most in zip(grid, MOST_PROGRAMS, strict=False)):
            raise RuntimeError(f"{self.__name__} is launched with {grid} programs, more than {MOST_PROGRAMS}")

        def launch(*args: Any, **options: Any) -> None:
            log = io.StringIO()
            with redirect_stdout(log):
                kernel = self.run(*args, grid=grid, warmup=True, **options)
            if log.getvalue():  # empty if the kernel was compiled before
                found.append(_described(case, kernel, log.getvalue()))

        return launch

    with tempfile.TemporaryDirectory() as folder, ExitStack() as restoring:
        for part in (knobs.cache, knobs.compilation, knobs.nvidia):
            restoring.enter_context(part.scope())
        knobs.cache.dir = folder
        knobs.compilation.always_compile = knobs.nvidia.dump_ptxas_log = True
        restoring.callback(setattr, JITFunction, "__getitem__", JITFunction.__getitem__)
        JITFunction.__getitem__ = compile_only
        yield


def _described(case: str, kernel: Any, log: str) -> Compiled:
    ptx = kernel.asm["ptx"]
    used, spilled = _USED.search(log), _SPILLED.search(log)
    return Compiled(
        case,
        kernel.name,
        kernel.metadata.num_warps,
        kernel.metadata.shared,
        int(used[1]) if used else 0,
        int(spilled[1]) if spilled else 0,
        any(name in ptx for name in ("mma.sync", "wgmma", "tcgen05.mma")),
        any(int(left) for left in _WAITED.findall(ptx)),
    )
