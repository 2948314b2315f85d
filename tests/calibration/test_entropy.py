"""The entropy of attention, and how a budget is divided by it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from octavo import cli
from octavo.calibration.entropy import entropies, layer_entropies
from octavo.errors import ConfigError
from octavo.kv_budget import KVBudget
from tests.engine.test_kv_budget import deep_model
from tests.engine.tiny_engine import tiny_core


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_it_is_minus_the_sum_of_p_ln_p_over_the_logarithm_of_the_visible_tokens(
    window: int | None, softcap: float | None
) -> None:
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(40, 6, 32, generator=generator) * 3
    key = torch.randn(2, 32, 40, generator=generator)
    found = entropies(query, key, scale=32**-0.5, window=window, softcap=softcap)
    for row in range(1, 40):
        first, of_heads = 0 if window is None else max(0, row + 1 - window), []
        for head in range(6):
            scores = query[row, head].double() @ key[head // 3, :, first : row + 1].double() * 32**-0.5
            p = (scores if softcap is None else softcap * torch.tanh(scores / softcap)).softmax(0)
            of_heads.append(-(p * p.log()).sum().item() / math.log(row + 1 - first))
        assert found[row].item() == pytest.approx(sum(of_heads) / 6, abs=1e-5)
    assert found[0].item() == pytest.approx(0, abs=1e-6)


def test_weights_that_are_equal_have_entropy_one_and_a_single_one_has_none() -> None:
    key = torch.zeros(1, 16, 30)
    assert entropies(torch.ones(5, 1, 16), key, scale=1.0).tolist() == pytest.approx([1.0] * 5)
    key[0, :, 3] = 100.0
    assert entropies(torch.ones(5, 1, 16), key, scale=1.0).tolist() == pytest.approx([0.0] * 5)


@pytest.mark.slow
def test_it_is_the_same_in_any_chunks_and_after_any_window(monkeypatch: pytest.MonkeyPatch) -> None:
    windows = [[(7 * i + j) % 90 + 3 for j in range(length)] for i, length in enumerate((40, 300, 300))]
    with tiny_core(model=deep_model()) as core:
        runner = core.runner
        together = layer_entropies(runner.model, runner.attention, windows)
        monkeypatch.setattr("octavo.calibration.entropy._CHUNK", 512)
        alone = layer_entropies(runner.model, runner.attention, windows[1:2])
    assert together[1] == pytest.approx(alone[0], rel=1e-3)
    assert len(together[0]) == 4
    assert all(0 < entropy <= 1 for of_window in together for entropy in of_window)


@pytest.mark.parametrize("layers", [(0.5, 0.5, 0.5), (0.9, 0.1, 0.33, 0.02), (1.0, 0.0001)])
@pytest.mark.parametrize("tokens", [32, 64, 500, 2048])
def test_layers_share_the_blocks_of_a_uniform_budget(layers: tuple[float, ...], tokens: int) -> None:
    uniform = KVBudget(mode="sparse_read", tokens=tokens)
    budget = KVBudget(mode="sparse_read", tokens=tokens, layers=layers)
    blocks = budget.blocks_read(16)
    assert sum(blocks) == len(layers) * (tokens // 16)
    assert min(blocks) > budget.num_recent(16)
    assert [blocks[i] for i in sorted(range(len(layers)), key=lambda i: layers[i])] == sorted(blocks)
    assert budget.reads_all_before(5, 16) == min(blocks) * 16
    assert uniform.blocks_read(16) == (tokens // 16,)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "num_layers"), [("sparse_read", 2), ("bounded", 4)])
def test_calibrate_writes_a_budget_that_a_server_reads(
    mode: str, num_layers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--entropy", "--windows", "2", "--window", "128", "--kv-budget"]
    assert cli.main(["calibrate", deep_model(), *options, f'{{"mode": "{mode}", "tokens": 64}}']) == 0
    path = Path(deep_model()) / f"kv_budget-{mode}.toml"
    assert f"--kv-budget {path}" in capsys.readouterr().out
    with tiny_core(model=deep_model(), kv_budget=str(path)) as core:
        budget = core.config.budget
    assert budget is not None
    assert (budget.mode, budget.tokens, len(budget.layers)) == (mode, 64, num_layers)
    assert cli.main(["calibrate", deep_model(), *options, str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["layers"] == list(budget.layers)
    assert cli.main(["calibrate", deep_model(), "--entropy"]) == 1


def test_a_file_that_is_no_budget_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "budget.toml"
    with pytest.raises(ConfigError, match="cannot read the KV budget"):
        KVBudget.parse(str(path))
    path.write_text('mode = "bounded"\ntokens = 64\nlayers = [2]\n')
    with pytest.raises(ConfigError, match=r"kv_budget\.layers must be above 0 and at most 1, got 2"):
        KVBudget.parse(str(path))
    with pytest.raises(ConfigError, match=r"cannot write the KV budget .*; give --output FILE"):
        KVBudget(mode="bounded", tokens=64).write(tmp_path, "a folder")
