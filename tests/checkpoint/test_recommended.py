"""What a model's makers recommend, and who asks for it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from octavo.checkpoint.model_source import ModelFormat, ModelSource, resolve_model
from octavo.checkpoint.recommended import model_pooling, sampling_defaults
from octavo.errors import ConfigError
from octavo.llm import LLM
from octavo.pooling import Pooling
from tests.engine.tiny_engine import NUM_BLOCKS, tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    recommended = {"temperature": 0.6, "top_k": 20, "do_sample": True, "eos_token_id": 2, "max_new_tokens": 2048}
    (tmp_path / "generation_config.json").write_text(json.dumps(recommended))
    return tmp_path


def source(folder: Path) -> ModelSource:
    return ModelSource(str(folder), folder, ModelFormat.HUGGINGFACE)


def test_the_models_own_file_says_how_to_sample(folder: Path) -> None:
    assert sampling_defaults("auto", source(folder)) == {"temperature": 0.6, "top_k": 20}
    assert sampling_defaults("vllm", source(folder)) == {}
    assert sampling_defaults(str(folder), source(folder / "elsewhere")) == {"temperature": 0.6, "top_k": 20}


def test_a_model_without_one_has_no_defaults(tmp_path: Path) -> None:
    assert sampling_defaults("auto", source(tmp_path)) == {}
    with pytest.raises(ConfigError, match="there is no generation_config"):
        sampling_defaults(str(tmp_path), source(tmp_path))


def test_a_recommendation_that_makes_no_sense_is_refused_at_the_start(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"temperature": -1}')
    with pytest.raises(ConfigError, match="temperature must be at least 0, got -1; --generation-config vllm"):
        sampling_defaults("auto", source(folder))


def test_an_engine_samples_as_its_model_recommends(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model(), folder)
    (folder / "generation_config.json").write_text('{"temperature": 0.0}')
    with LLM(str(folder), dtype="float32", num_blocks=NUM_BLOCKS, num_threads=1) as llm:
        first, second = (llm.generate({"prompt_token_ids": [1, 2, 3]})[0].outputs[0].token_ids for _ in range(2))
        assert first == second
        assert llm.core.info.default_sampling == {"temperature": 0.0}


def test_a_chat_template_may_come_from_a_file(tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text("<{{ messages[0].content }}>")
    options = {"dtype": "float32", "num_blocks": NUM_BLOCKS, "num_threads": 1}
    with LLM(str(tiny_model()), chat_template=str(template), **options) as llm:
        assert llm.tokenizer.apply_chat_template([{"role": "user", "content": "x"}]) == "<x>"
    template.write_text("{% if %}")
    for path in (template, tmp_path / "nowhere.jinja"):
        with pytest.raises(ConfigError, match=r"chat.template.* .*jinja"):
            LLM(str(tiny_model()), chat_template=str(path), **options)


def test_the_packaged_model_samples_as_its_card_advises_and_repeats_itself_less() -> None:
    packaged = resolve_model("smollm2")
    penalties = {"repetition_penalty": 1.05, "frequency_penalty": 0.2}
    assert sampling_defaults("auto", packaged) == {"temperature": 0.2, "top_p": 0.9, **penalties}
    assert sampling_defaults("vllm", packaged) == {}


@pytest.mark.parametrize(
    ("modes", "expected", "warned"),
    [
        (None, Pooling.LAST, False),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, Pooling.LAST, False),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, Pooling.MEAN, False),
        ({"pooling_mode_cls_token": True}, Pooling.LAST, True),
    ],
)
def test_the_models_own_file_says_how_to_pool_unless_an_option_does(
    modes: dict[str, bool] | None, expected: Pooling, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if modes is not None:
        (tmp_path / "1_Pooling").mkdir()
        (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 8, **modes}))
    model = source(tmp_path)
    assert model_pooling("auto", model) is expected
    assert ("pooling_mode_cls_token, which Octavo does not" in caplog.text) == warned
    assert model_pooling("mean", model) is Pooling.MEAN
