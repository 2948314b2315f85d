"""GGUF files: metadata and tensors as the gguf package's own reader sees them, and refusals that name the cause."""

from __future__ import annotations

import errno
import importlib.util
import mmap
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.checkpoint.gguf_config import gguf_model_config
from octavo.checkpoint.gguf_file import GGUFFile, strings_in_python
from octavo.checkpoint.tensor_names import TensorNames
from octavo.errors import CorruptModelError, ModelNotFoundError, UnsupportedModelError
from octavo.llm import LLM
from tests.models import tiny


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    tiny.write_gguf(path, tiny.make_model("Llama"), quantization="Q8_0")
    return path


def test_metadata_and_tensors_are_those_the_gguf_package_reads(path: Path) -> None:
    ours, theirs = GGUFFile(path), gguf.GGUFReader(path)
    stated = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert {key: ours.get(key) for key in ours.keys()} == stated  # noqa: SIM118
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        assert ours.tensors[tensor.name].shape == tuple(reversed(tensor.shape.tolist()))
        assert ours.raw(tensor.name).tobytes() == tensor.data.tobytes()


def test_every_scalar_and_array_type_is_read(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "types.gguf", "llama")
    values: dict[str, Any] = {"uint8": 200, "int8": -3, "uint16": 60000, "int16": -300, "uint32": 2**31, "int32": -5}
    values |= {"uint64": 2**40, "int64": -(2**40), "float32": 0.5, "float64": 0.1, "bool": True, "string": "ö"}
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(f"test.{kind}", value)
    writer.add_array("test.strings", ["", "a", "日本"])
    writer.add_array("test.ints", [1, -2, 3])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "types.gguf")
    assert {kind: file.get(f"test.{kind}") for kind in values} == values
    assert file.get("test.strings") == ["", "a", "日本"]
    assert file.get("test.ints") == [1, -2, 3]
    assert (file.length("test.strings"), file.length("test.ints"), file.length("no.such")) == (3, 3, 0)


def test_a_file_that_was_replaced_is_read_again(path: Path, tmp_path: Path) -> None:
    replaced = tmp_path / "replaced.gguf"
    replaced.write_bytes(path.read_bytes())
    assert GGUFFile(replaced).is_quantised
    tiny.write_gguf(replaced, tiny.make_model("Llama"), quantization="F16")
    assert not GGUFFile(replaced).is_quantised
    assert GGUFFile(path).is_quantised


@pytest.mark.skipif(not importlib.util.find_spec("octavo._native"), reason="needs the compiled library")
@given(st.lists(st.binary(max_size=6) | st.text(max_size=4).map(str.encode), min_size=1), st.integers(1, 20))
def test_the_library_reads_the_strings_that_python_does_and_refuses_cut_ones(strings: list[bytes], cut: int) -> None:
    from octavo._native import read_strings

    stored = b"".join(struct.pack("<Q", len(string)) + string for string in strings)
    assert read_strings(stored, len(strings)) == strings_in_python(stored, len(strings))
    with pytest.raises(ValueError, match=r"past the end|strings in"):
        read_strings(stored[: -min(cut, len(stored))], len(strings))


def test_a_missing_key_is_named_unless_there_is_a_default(path: Path) -> None:
    file = GGUFFile(path)
    assert file.get("no.such", 7) == 7
    with pytest.raises(CorruptModelError, match=r"has no no\.such"):
        file.get("no.such")


def test_a_missing_tensor_is_named(path: Path) -> None:
    with pytest.raises(CorruptModelError, match="has no tensor nothing"):
        GGUFFile(path).raw("nothing")


def test_a_file_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no GGUF file"):
        GGUFFile(tmp_path / "none.gguf")


@pytest.mark.parametrize("content", [b"", b"GGU", b"GGML" + bytes(100), bytes(30)])
def test_a_file_that_does_not_begin_as_gguf_is_corrupt(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(CorruptModelError, match="is not a GGUF file"):
        GGUFFile(tmp_path / "x.gguf")


@pytest.mark.parametrize(("version", "words"), [(1, "version 1"), (9, "version 9"), (0x03000000, "big-endian")])
def test_another_version_or_byte_order_is_refused(version: int, words: str, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
    with pytest.raises(UnsupportedModelError, match=words):
        GGUFFile(tmp_path / "x.gguf")


@pytest.mark.parametrize("share", [0.0, 0.001, 0.01, 0.03, 0.1, 0.3, 0.9, 0.999])
def test_a_file_cut_short_anywhere_is_corrupt(share: float, path: Path, tmp_path: Path) -> None:
    content = path.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(content[: max(4, int(len(content) * share))])
    with pytest.raises(CorruptModelError, match="truncated or corrupt"):
        GGUFFile(tmp_path / "cut.gguf")


def test_a_file_larger_than_memory_can_still_be_read_about(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = mmap.mmap

    def limited(descriptor: int, length: int, access: int) -> mmap.mmap:
        if access == mmap.ACCESS_COPY:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        return real(descriptor, length, access=access)

    expected = GGUFFile(path).dequantize("token_embd.weight")
    monkeypatch.setattr(mmap, "mmap", limited)
    assert np.array_equal(GGUFFile(path).dequantize("token_embd.weight"), expected)


def test_absurd_counts_are_corrupt_and_allocate_nothing(tmp_path: Path) -> None:
    array = struct.pack("<Q1sIIQ", 1, b"k", gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.FLOAT64, 2**60)
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + array)
    with pytest.raises(CorruptModelError, match="the header needs"):
        GGUFFile(tmp_path / "x.gguf")


@pytest.mark.parametrize("length", [2**63 - 9, 2**63, 2**64 - 8, 2**64 - 1, 100])
@pytest.mark.parametrize("count", [1, 2])
def test_a_string_that_runs_past_the_end_is_corrupt(length: int, count: int, tmp_path: Path) -> None:
    array = struct.pack("<Q1sIIQ", 1, b"k", gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.STRING, count)
    strings = struct.pack("<Q", length) + struct.pack("<Q", 0) * (count - 1)
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + array + strings)
    with pytest.raises(CorruptModelError, match="a string array runs past the end"):
        GGUFFile(tmp_path / "x.gguf")
    single = struct.pack("<Q1sI", 1, b"k", gguf.GGUFValueType.STRING) + struct.pack("<Q", length)
    (tmp_path / "y.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + single)
    with pytest.raises(CorruptModelError, match="the header needs"):
        GGUFFile(tmp_path / "y.gguf")


def test_the_configuration_comes_from_the_metadata(path: Path) -> None:
    config = gguf_model_config(GGUFFile(path))
    assert config.architecture == "LlamaForCausalLM"
    assert config.runs_natively
    assert (config.vocab_size, config.hidden_size, config.intermediate_size, config.num_layers) == (320, 64, 96, 2)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.value_dim) == (4, 2, 16, 16)
    assert (config.bos_token_id, config.eos_token_ids) == (1, frozenset({2}))
    assert not config.tie_word_embeddings


def test_a_qwen3_file_has_norms_on_queries_and_keys_and_its_own_head_dim(tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "x.gguf", tiny.make_model("Qwen3", head_dim=32, tie_word_embeddings=True))
    config = gguf_model_config(GGUFFile(tmp_path / "x.gguf"))
    assert (config.architecture, config.layer.qk_norm, config.head_dim) == ("Qwen3ForCausalLM", "head", 32)
    assert config.tie_word_embeddings


def test_a_qwen2_file_has_biases_on_queries_keys_and_values_only(tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "x.gguf", tiny.make_model("Qwen2"))
    config = gguf_model_config(GGUFFile(tmp_path / "x.gguf"))
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (True, False, False)


def test_the_end_of_a_turn_ends_a_generation_too(tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 6}
    tiny.write_gguf(tmp_path / "x.gguf", tiny.make_model("Llama"), keys=keys)
    assert gguf_model_config(GGUFFile(tmp_path / "x.gguf")).eos_token_ids == {2, 5, 6}


def test_llama3_frequency_factors_reach_the_configuration(tmp_path: Path) -> None:
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    tiny.write_gguf(tmp_path / "x.gguf", tiny.make_model("Llama"), tensors={"rope_freqs.weight": factors})
    assert gguf_model_config(GGUFFile(tmp_path / "x.gguf")).rope.frequency_factors == tuple(factors.tolist())


def test_frequency_factors_of_another_head_size_are_corrupt(tmp_path: Path) -> None:
    tensors = {"rope_freqs.weight": np.ones(5, dtype=np.float32)}
    tiny.write_gguf(tmp_path / "x.gguf", tiny.make_model("Llama"), tensors=tensors)
    with pytest.raises(CorruptModelError, match="5 factors for 8 frequencies"):
        gguf_model_config(GGUFFile(tmp_path / "x.gguf"))


def test_linear_scaling_is_read(tmp_path: Path) -> None:
    keys = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    tiny.write_gguf(tmp_path / "x.gguf", tiny.make_model("Llama"), keys=keys)
    rope = gguf_model_config(GGUFFile(tmp_path / "x.gguf")).rope
    assert (rope.kind, rope.factor) == ("linear", 4.0)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"llama.rope.scaling.type": "longrope"}, "RoPE scaling 'longrope'"),
        ({"llama.rope.dimension_count": 8}, "8 of 16 dimensions"),
        ({"llama.attention.temperature_scale": 0.1, "llama.rope.scaling.original_context_length": 64}, "beyond 64 pos"),
        ({"llama.expert_count": 8, "llama.expert_used_count": 2}, "experts in one tensor"),
    ],
)
def test_what_the_decoder_cannot_compute_is_refused_by_name(keys: dict[str, Any], words: str, tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "x.gguf", tiny.make_model("Llama"), keys=keys)
    with pytest.raises(UnsupportedModelError, match=words):
        gguf_model_config(GGUFFile(tmp_path / "x.gguf"))


def test_a_gguf_of_an_unsupported_architecture_is_refused_by_name(tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "x.gguf", tiny.make_model("Llama"), architecture="refact")
    with pytest.raises(UnsupportedModelError, match=r"'refact' is not supported \(apertus, .*llama, .*\)"):
        gguf_model_config(GGUFFile(tmp_path / "x.gguf"))


def test_a_file_without_its_last_layer_is_corrupt_however_many_it_states(tmp_path: Path) -> None:
    tiny.write_gguf(tmp_path / "x.gguf", tiny.make_model("Llama"), keys={"llama.block_count": 10**6})
    with pytest.raises(CorruptModelError, match=r"block_count of 1000000, but has no tensor blk\.999999\."):
        gguf_model_config(GGUFFile(tmp_path / "x.gguf"))


def with_tensor(path: Path, name: str, at: int, layout: str, value: int) -> bytes:
    """The file's bytes with one number changed, `at` bytes behind a tensor's name in the header."""
    content = bytearray(path.read_bytes())
    start = content.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
    struct.pack_into(layout, content, start + at, value)
    return bytes(content)


@pytest.mark.parametrize("at", [4, 12])
def test_a_tensor_without_elements_is_corrupt(path: Path, tmp_path: Path, at: int) -> None:
    (tmp_path / "x.gguf").write_bytes(with_tensor(path, "token_embd.weight", at, "<Q", 0))
    with pytest.raises(CorruptModelError, match=r"tensor token_embd\.weight has no elements"):
        GGUFFile(tmp_path / "x.gguf")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("type_id", [2, 7])
def test_a_tensor_whose_type_was_changed_is_corrupt_where_its_scales_are_no_numbers(
    path: Path, tmp_path: Path, type_id: int
) -> None:
    (tmp_path / "x.gguf").write_bytes(with_tensor(path, "blk.0.attn_q.weight", 20, "<I", type_id))
    with pytest.raises(CorruptModelError, match=r"model\.layers\.0\.self_attn\.q_proj\.weight: row .* is damaged"):
        LLM(str(tmp_path / "x.gguf"), num_blocks=20, max_model_len=64)


def test_names_follow_hugging_face() -> None:
    names = TensorNames()
    assert names.from_gguf("blk.12.ffn_down.weight") == "model.layers.12.mlp.down_proj.weight"
    assert names.from_gguf("blk.0.attn_q.bias") == "model.layers.0.self_attn.q_proj.bias"
    assert names.from_gguf("output.weight") == "lm_head.weight"
    assert names.from_gguf("rope_freqs.weight") is None
    assert names.from_gguf("blk.0.ffn_gate_exps.weight") == "model.layers.0.mlp.experts.*.gate_proj.weight"
