"""Models of the hub, fetched from a stand-in for it on this machine."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import gguf
import numpy as np
import pytest

from octavo.checkpoint.gguf_file import GGUFFile
from octavo.checkpoint.hub import choose_gguf
from octavo.checkpoint.model_source import load_model_config, model_fingerprint, model_of, resolve_model, tokenizer_of
from octavo.config import EngineConfig
from octavo.errors import ConfigError, CorruptModelError, ModelNotFoundError
from octavo.text.tokenizer_loading import load_tokenizer
from tests.models import tiny

COMMIT = "c" * 40
TOKEN = "hf_a_token_of_a_test"


class StandIn(ThreadingHTTPServer):
    """A hub with one revision of some repositories; `asked` holds revisions and tokens of requests."""

    daemon_threads = True

    def __init__(self, files: dict[str, dict[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = files
        self.asked: list[tuple[str, str | None]] = []


class Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_GET(self) -> None:
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        self.server.asked.append((self.path, self.headers.get("Authorization")))
        if parts[:2] == ["api", "models"]:
            repository = self.server.files.get("/".join(parts[2:4]))
            if repository is None:
                self.answer(404, b"{}", **{"X-Error-Code": "RepoNotFound"})
            elif parts[4:5] == ["tree"]:
                tree = [{"type": "file", "path": k, "size": len(v), "oid": "0"} for k, v in repository.items()]
                self.answer(200, json.dumps(tree).encode())
            else:
                siblings = [{"rfilename": name} for name in repository]
                about = {"id": "/".join(parts[2:4]), "sha": COMMIT, "siblings": siblings, "private": False}
                self.answer(200, json.dumps(about).encode())
            return
        content = self.server.files["/".join(parts[:2])]["/".join(parts[4:])]
        headers = {"ETag": hashlib.sha1(content).hexdigest(), "X-Repo-Commit": COMMIT}
        self.answer(200, content, **headers)

    do_HEAD = do_GET  # noqa: N815

    def answer(self, status: int, content: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), "Content-Type": "application/json", **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def hub() -> Iterator[StandIn]:
    quants = {f"model-{kind}.gguf": b"GGUF" + kind.encode() for kind in ("Q4_K_M", "Q4_K_S", "Q8_0")}
    shards = {f"big/model-Q6_K-{i:05}-of-00002.gguf": b"GGUF" + bytes([i]) for i in (1, 2)}
    server = StandIn(
        {
            "org/quants": {**quants, **shards, "mmproj-Q8_0.gguf": b"GGUF", "README.md": b"no model"},
            "org/folder": {"config.json": b"{}", "model.safetensors": b"weights", "model-Q8_0.gguf": b"GGUF"},
        }
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def resolved(hub: StandIn, cache: Path, call: str) -> tuple[str, str]:
    """Run a call of `resolve_model` in a process whose hub is the stand-in; return its path and its errors."""
    code = f"""if True:
        from octavo.checkpoint.model_source import resolve_model
        from octavo.errors import OctavoError
        try:
            print({call}.path)
        except OctavoError as error:
            print(f"{{type(error).__name__}}: {{error}}")
    """
    url = f"http://127.0.0.1:{hub.server_port}"
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_") or "OFFLINE" in name}
    environment = {**kept, "HF_ENDPOINT": url, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "*"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip(), done.stderr


@pytest.mark.slow
def test_a_type_behind_a_colon_names_a_gguf_file_of_a_repository(
    hub: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = resolved(hub, tmp_path, 'resolve_model("org/quants:q4_k_m")')
    assert Path(path).read_bytes() == b"GGUFQ4_K_M"
    # llama.cpp's default, and Ollama's way to write the same.
    for name in ("org/quants", "hf.co/org/quants:latest"):
        assert resolved(hub, tmp_path, f"resolve_model({name!r})")[0] == path
    for call in ('resolve_model("org/quants", hf_file="model-Q8_0.gguf")', 'resolve_model("org/quants:Q8_0")'):
        assert Path(resolved(hub, tmp_path, call)[0]).read_bytes() == b"GGUFQ8_0"
    missing, _ = resolved(hub, tmp_path, 'resolve_model("org/quants:Q2_K")')
    assert missing.startswith("ModelNotFoundError: org/quants on the hub: no GGUF file matches 'Q2_K'; there are: big/")
    hub.server_close()
    assert "Connection refused" in resolved(hub, tmp_path, 'resolve_model("org/other:Q4_K_M")')[0]
    for offline in ("0", "1"):
        monkeypatch.setenv("HF_HUB_OFFLINE", offline)
        assert resolved(hub, tmp_path, 'resolve_model("org/quants:Q4_K_M")')[0] == path


@pytest.mark.slow
def test_a_sharded_file_is_fetched_whole(hub: StandIn, tmp_path: Path) -> None:
    path, _ = resolved(hub, tmp_path, 'resolve_model("org/quants:Q6_K")')
    assert [each.name[-19:] for each in sorted(Path(path).parent.iterdir())] == [
        "-00001-of-00002.gguf"[-19:],
        "-00002-of-00002.gguf"[-19:],
    ]


@pytest.mark.slow
def test_revision_and_token_go_to_the_hub_and_safetensors_come_before_gguf(hub: StandIn, tmp_path: Path) -> None:
    path, _ = resolved(hub, tmp_path, f'resolve_model("org/folder", revision="v2", token={TOKEN!r})')
    assert {each.name for each in Path(path).iterdir()} == {"config.json", "model.safetensors"}
    assert any("/revision/v2" in asked and key == f"Bearer {TOKEN}" for asked, key in hub.asked)
    path, _ = resolved(hub, tmp_path, 'resolve_model("org/folder", gguf=True)')
    assert Path(path).name == "model-Q8_0.gguf"
    assert (
        "ModelNotFoundError: there is no local folder 'org/none'"
        in resolved(hub, tmp_path, 'resolve_model("org/none")')[0]
    )


def test_a_type_is_a_word_of_a_files_name() -> None:
    names = ["m-Q4_K.gguf", "m-Q4_K_M.gguf", "m.UD-Q4_K_XL.gguf", "m-IQ4_XS.gguf", "F16/m-F16-00001-of-00009.gguf"]
    for wanted, name in [("Q4_K", 0), ("q4_k_m", 1), ("UD-Q4_K_XL", 2), ("IQ4_XS", 3), ("F16", 4)]:
        assert choose_gguf(names, wanted, file=False, where="here") == names[name]
    with pytest.raises(ModelNotFoundError, match="2 GGUF files match 'Q8_0'"):
        choose_gguf(["a-Q8_0.gguf", "b-Q8_0.gguf"], "Q8_0", file=False, where="here")


def write_shards(folder: Path, model: Any, num_first: int) -> Path:
    """Write a tiny GGUF file and the same cut into two, with `num_first` tensors in the first; return the whole one."""
    whole = folder / "whole.gguf"
    tiny.write_gguf(whole, model)
    reader = gguf.GGUFReader(whole)
    for number, tensors in enumerate((reader.tensors[:num_first], reader.tensors[num_first:])):
        path = folder / f"model-{number + 1:05}-of-00002.gguf"
        writer = gguf.GGUFWriter(path, str(reader.fields["general.architecture"].contents()))
        for name, field in reader.fields.items():
            if number == 0 and not name.startswith("GGUF.") and name != "general.architecture":
                sub_type = field.types[-1] if len(field.types) > 1 else None
                writer.add_key_value(name, field.contents(), field.types[0], sub_type)
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in tensors:
            writer.add_tensor(tensor.name, np.ascontiguousarray(tensor.data), raw_dtype=tensor.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return whole


@pytest.mark.parametrize("num_first", [0, 9])
def test_a_sharded_file_has_the_tensors_of_all_shards(num_first: int, tmp_path: Path) -> None:
    whole = GGUFFile(write_shards(tmp_path, tiny.make_model("Llama"), num_first))
    (tmp_path / "whole.gguf").rename(tmp_path / "whole.kept")
    source = resolve_model(str(tmp_path))
    assert source.path.name == "model-00001-of-00002.gguf"
    cut = GGUFFile(source.path)
    assert cut.tensors.keys() == whole.tensors.keys()
    for name in whole.tensors:
        np.testing.assert_array_equal(cut.raw(name), whole.raw(name))
        np.testing.assert_array_equal(cut.dequantize(name), whole.dequantize(name))
        cut.release(name)
    second = tmp_path / "model-00002-of-00002.gguf"
    with pytest.raises(ModelNotFoundError, match=r"name the first, which ends in -00001-of-00002\.gguf"):
        GGUFFile(second)
    before = model_fingerprint(source.path)
    second.write_bytes(second.read_bytes()[:-1] + b"\x01")
    assert model_fingerprint(source.path) != before
    second.unlink()
    with pytest.raises((ModelNotFoundError, CorruptModelError)):
        GGUFFile(source.path)


def test_options_about_a_model_reach_its_source(tmp_path: Path) -> None:
    folder, file = tmp_path / "folder", tmp_path / "files" / "model.gguf"
    file.parent.mkdir()
    model = tiny.write_hf_model(folder, "Llama", tokenizer=True)
    tiny.write_gguf(file, model)
    overrides = {"rope_parameters": {"rope_theta": 5.0}}
    source = model_of(EngineConfig(model=str(folder), hf_overrides=overrides, model_impl="transformers"))
    config = load_model_config(source)
    assert (config.rope.theta, config.transformers_reason) == (5.0, "--model-impl transformers")
    assert model_of(EngineConfig(model=str(file.parent), hf_file="model.gguf")).path == file
    for options, name in [
        ({"load_format": "safetensors"}, "load_format"),
        ({"hf_overrides": '{"rope_theta": 5}'}, "hf_overrides"),
        ({"model_impl": "transformers"}, "model_impl"),
    ]:
        with pytest.raises(ConfigError, match=name):
            model_of(EngineConfig.from_options({"model": str(file), **options}))
    with pytest.raises(ConfigError, match="load_format is 'gguf', but"):
        model_of(EngineConfig(model=str(folder), load_format="gguf"))
    only_tokenizer = tmp_path / "tokenizer"
    only_tokenizer.mkdir()
    (folder / "tokenizer.json").rename(only_tokenizer / "tokenizer.json")
    assert tokenizer_of(EngineConfig(model=str(folder), tokenizer=str(only_tokenizer))).path == only_tokenizer
    with pytest.raises(ModelNotFoundError, match="no file or folder /nowhere"):
        load_tokenizer(EngineConfig(model=str(folder), tokenizer="/nowhere"))
    for wrong in ("[1]", "{", '"text"'):
        with pytest.raises(ConfigError, match="hf_overrides must be a JSON object"):
            EngineConfig(hf_overrides=wrong)
