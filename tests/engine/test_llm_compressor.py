"""Checkpoints that llm-compressor wrote (scripts/llm_compressor_checkpoint.py) load natively, scales included."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from octavo import kernels
from octavo.attention.native import NativeAttention
from octavo.models.decoder import Decoder
from octavo.planner.sources import find_shape
from octavo.sampling_params import SamplingParams
from tests.conftest import MakeLLM

FOLDER = Path(__file__).parents[1] / "models" / "llm_compressor"
PROMPT = {"prompt_token_ids": [5, 9, 33, 60, 12, 7, 41, 8, 22, 19, 3, 50, 14, 27, 36, 44, 58, 6]}


def copied(strategy: str, folder: Path) -> Path:
    return Path(shutil.copytree(FOLDER / strategy, folder / strategy))


@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
def test_the_cache_follows_the_checkpoint_and_its_scales_reach_the_kernel(
    make_llm: MakeLLM, tmp_path: Path, strategy: str
) -> None:
    folder = copied(strategy, tmp_path)
    llm = make_llm(folder)
    runner = llm.core.runner
    assert isinstance(runner.model, Decoder)
    assert runner.arena.spec.dtype == "fp8_e4m3"
    assert find_shape(str(folder)).kv_dtype("auto", "bfloat16") == "fp8_e4m3"
    stored = load_file(folder / "model.safetensors")
    for index, layer in enumerate(runner.arena.coded_layers):
        for side, name in ((layer.keys, "k"), (layer.values, "v")):
            expected = stored[f"model.layers.{index}.self_attn.{name}_scale"].float().flatten()
            # What the kernels take is the side's own tensor.
            assert torch.equal(side.for_kernels[4], expected.expand(2))
    if kernels.available():
        assert all(map(NativeAttention.supports, runner.arena.layers))
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    (coded,) = llm.generate(PROMPT, params, use_tqdm=False)
    (plain,) = make_llm(folder, kv_cache_dtype="float32").generate(PROMPT, params, use_tqdm=False)
    assert len(coded.outputs[0].token_ids) == len(plain.outputs[0].token_ids) == 8


def test_another_codec_may_be_asked_for(make_llm: MakeLLM, tmp_path: Path) -> None:
    llm = make_llm(copied("tensor", tmp_path), kv_cache_dtype="int8")
    assert llm.core.runner.arena.spec.dtype == "int8"
