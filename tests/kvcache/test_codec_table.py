"""A table of codecs by layer becomes a dtype that says all of it, and its blocks have just the bytes of its layers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.kvcache.formats import KV_FORMATS, kv_dtype, kv_format, layer_formats, write_table
from octavo.kvcache.spec import KVCacheSpec, LayerKVSpec


def table(folder: Path, text: str) -> str:
    path = folder / "table.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("text", "dtype"),
    [
        ('keys = "int8"\nvalues = "int4"', "k8v4"),
        ('keys = ["int8", "int8", "int4"]\nvalues = ["int4", "int4", "int4"]', "k8v4*2,int4"),
        ('keys = ["fp8", "auto", "auto"]\nvalues = ["int8", "auto", "int4"]', "fp8_e4m3/int8,bfloat16,bfloat16/int4"),
        ('keys = "auto"\nvalues = "bf16"\nmodel = "m"\n[measured]\nkl = 1', "bfloat16"),
    ],
)
def test_a_table_is_spelled_as_one_dtype(tmp_path: Path, text: str, dtype: str) -> None:
    found = kv_dtype(table(tmp_path, text), "bfloat16", 3)
    assert found == dtype
    assert len(layer_formats(found, 3)) == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('keys = ["int8"]\nvalues = "int4"', "keys of 1 layers, the model has 3 layers"),
        ('keys = "int8"', "values must be a codec's name or a list"),
        ('keys = "int3"\nvalues = "int4"', "keys in 'int3'; a codec of one side is one of auto, bfloat16"),
        ('keys = "k8v4"\nvalues = "int4"', "keys in 'k8v4'"),
        ('keys = "int8"\nvalues = "int4"\nlayers = 3', "unknown entry 'layers'"),
        ("keys = int8", "is not valid TOML"),
    ],
)
def test_a_table_that_cannot_be_followed_is_refused_with_what_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        kv_dtype(table(tmp_path, text), "bfloat16", 3)


def test_a_table_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"cannot read the codec table none\.toml"):
        kv_dtype("none.toml", "bfloat16", 3)


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "written.toml"
    write_table(path, ["int8", "int4"], ["int4", "int4"], 'a "model"', ["kl = 0.25"])
    assert kv_dtype(str(path), "bfloat16", 2) == "k8v4,int4"


def test_a_blocks_bytes_are_those_of_its_layers_each_on_a_cache_line() -> None:
    layers = [LayerKVSpec(1, 24, 24)] * 3
    spec = KVCacheSpec.build(layers, 4, "bfloat16,k8v4,int8/fp8_e4m3")
    parts = [4 * 2 * 24 * 2, 4 * (26 + 15), 4 * (26 + 24)]
    assert [spec.layer_bytes(i) for i in range(3)] == [-(-part // 64) * 64 for part in parts]
    assert spec.block_bytes == sum(-(-part // 64) * 64 for part in parts)
    assert spec.bytes_per_token == sum(parts) // 4
    # Floats alone lie end to end.
    assert KVCacheSpec.build(layers, 4, "bfloat16*2,float32").layer_bytes(0) == parts[0]


def test_every_pair_of_codes_has_a_name_that_says_it() -> None:
    for name, format in KV_FORMATS.items():
        assert kv_format(f"{format.keys.name}/{format.values.name}").name == name
    assert kv_format("int4/int8").name == "int4/int8"
    with pytest.raises(ConfigError, match="of 2 layers, the model has 3"):
        layer_formats("int8,int4", 3)
