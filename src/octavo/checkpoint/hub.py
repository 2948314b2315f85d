"""Download models from the Hugging Face hub: a repository's files in its own format, or one GGUF file of it.

huggingface-hub keeps them in its cache, resumes broken downloads and shows their progress.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from octavo.errors import ModelNotFoundError

TOKENIZER_FILES = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
# Weights other than safetensors stay on the hub: they would be refused, and are as large.
MODEL_FILES = ("*.safetensors", *TOKENIZER_FILES)
# llama.cpp's choice where no type is named.
_DEFAULT_TYPE = "Q4_K_M"
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


# Asked once in a process, because each time the hub is asked for every file, and progress bars are shown.
@cache
def download(hub_id: str, revision: str | None, token: str | None, patterns: tuple[str, ...]) -> Path:
    """Download the files of a repository that match `patterns`, and return their folder.

    Raises:
        OSError, ValueError: it could not be fetched; the hub's own errors are among these.
    """
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(hub_id, revision=revision, token=token, allow_patterns=list(patterns)))


def download_gguf(hub_id: str, revision: str | None, token: str | None, wanted: str | None, *, file: bool) -> Path:
    """Download one GGUF file of a repository with all its shards, and return the path of the first.

    Args:
        wanted: the quantisation in its name, such as "Q4_K_M", or with `file` its name; None: Q4_K_M, or the only one.

    Raises:
        ModelNotFoundError: there is no such file; the message lists those that are there.
        OSError, ValueError: the hub could not be asked.
    """
    names = _gguf_names(hub_id, revision, token)
    chosen = choose_gguf(names, wanted, file=file, where=f"{hub_id} on the hub")
    stem = _SHARD.sub("", chosen)
    patterns = (chosen,) if stem == chosen else (f"{stem}-*-of-*.gguf",)
    return download(hub_id, revision, token, patterns) / chosen


def choose_gguf(names: Sequence[str], wanted: str | None, *, file: bool, where: str) -> str:
    """Return the GGUF file, or the first shard of it, that `wanted` names; see `download_gguf`.

    Raises:
        ModelNotFoundError: none or several match; the message lists all.
    """
    models = first_shards(names)
    if file:
        found = [name for name in names if wanted in (name, Path(name).name)]
    elif wanted is None:
        found = models if len(models) == 1 else _of_type(models, _DEFAULT_TYPE)
    else:
        found = _of_type(models, wanted)
    if len(found) == 1:
        return found[0]
    listed = ", ".join(found or models) or "none"
    problem = f"{len(found)} GGUF files match" if found else "no GGUF file matches"
    asked = f"{wanted!r}" if wanted else f"the default {_DEFAULT_TYPE!r}"
    raise ModelNotFoundError(f"{where}: {problem} {asked}; there are: {listed}. Name one with --hf-file")


def first_shards(names: Sequence[str]) -> list[str]:
    """Return the GGUF files of models: of several shards the first, and no projectors of images."""
    kept = []
    for name in sorted(names):
        shard = _SHARD.search(name)
        if name.endswith(".gguf") and "mmproj" not in name.lower() and (shard is None or int(shard[1]) == 1):
            kept.append(name)
    return kept


def shards(path: Path, count: int) -> list[Path]:
    """Return the paths of all shards of a GGUF file whose first is `path`.

    Raises:
        ModelNotFoundError: the name does not say that it is the first of `count`.
    """
    shard = _SHARD.search(path.name)
    if shard is None or (int(shard[1]), int(shard[2])) != (1, count):
        raise ModelNotFoundError(
            f"{path} is one of {count} parts of a model: name the first, which ends in -00001-of-{count:05}.gguf"
        )
    stem = _SHARD.sub("", path.name)
    return [path.with_name(f"{stem}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]


def files_of(path: Path) -> list[Path]:
    """Return a GGUF file, or all shards of one, in order."""
    stem = _SHARD.sub("", path.name)
    return [path] if stem == path.name else sorted(path.parent.glob(f"{glob.escape(stem)}-*-of-*.gguf"))


def _of_type(names: Sequence[str], wanted: str) -> list[str]:
    """Return the names in which the quantisation `wanted` stands as a word of its own."""
    word = re.compile(rf"(?<![A-Za-z0-9]){re.escape(wanted)}(?![A-Za-z0-9_])", re.IGNORECASE)
    return [name for name in names if word.search(_SHARD.sub("", name).removesuffix(".gguf"))]


def _gguf_names(hub_id: str, revision: str | None, token: str | None) -> list[str]:
    """Return the names of a repository's GGUF files; without network of those in the cache."""
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # of httpx or httpx2
    from huggingface_hub.file_download import repo_folder_name

    try:
        # list_repo_files() repeats a failed request for 20 seconds.
        about = HfApi(token=token).model_info(hub_id, revision=revision)
        names = [file.rfilename for file in about.siblings or ()]
    except (OSError, ValueError, HTTPError) as error:
        # snapshot_download() would miss the files of the repository that were never asked for.
        cached = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=hub_id, repo_type="model")
        ref = cached / "refs" / (revision or "main")
        folder = cached / "snapshots" / (ref.read_text().strip() if ref.is_file() else str(revision))
        names = [str(path.relative_to(folder)) for path in folder.rglob("*.gguf")]
        if not names:
            raise OSError(str(error)) from error
    return [name for name in names if name.endswith(".gguf")]
