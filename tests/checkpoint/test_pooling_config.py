"""Which pooling a model's makers meant."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from octavo.checkpoint.model_source import ModelFormat, ModelSource
from octavo.checkpoint.pooling_config import model_pooling
from octavo.pooling import Pooling


def source(folder: Path, modes: dict[str, bool] | None) -> ModelSource:
    if modes is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 8, **modes}))
    return ModelSource("m", folder, ModelFormat.HUGGINGFACE)


@pytest.mark.parametrize(
    ("modes", "expected", "warned"),
    [
        (None, Pooling.LAST, False),
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, Pooling.LAST, False),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, Pooling.MEAN, False),
        ({"pooling_mode_cls_token": True}, Pooling.LAST, True),
    ],
)
def test_the_models_own_file_decides_unless_an_option_does(
    modes: dict[str, bool] | None, expected: Pooling, warned: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = source(tmp_path, modes)
    assert model_pooling("auto", model) is expected
    assert ("pooling_mode_cls_token, which Octavo does not" in caplog.text) == warned
    assert model_pooling("mean", model) is Pooling.MEAN
