from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

import octavo.server.run
from octavo.config import EngineConfig
from octavo.engine.builder import build_engine
from octavo.errors import ConfigError
from octavo.server.config import ServerConfig, ServerLimits
from octavo.server.engine_options import share_among_tenants
from tests.commands.conftest import OctavoCommand


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The server options that `serve` was called with; the engine is not made."""
    calls = []
    monkeypatch.setattr(octavo.server.run, "serve", lambda make_engine, config, **_: calls.append(config))
    return calls


def test_server_options_reach_the_server(octavo_command: OctavoCommand, served: list[Any]) -> None:
    argv = [
        "--port",
        0,
        "--api-key",
        "a",
        "--api-key",
        "b",
        "--served-model-name",
        "m",
        "--server-limits",
        "max_body_size=1MiB",
    ]
    code, _, _ = octavo_command("serve", "model.gguf", *argv, "--shutdown-timeout", 1.5, "--max-num-seqs", 4)
    assert code == 0
    assert served == [
        ServerConfig(
            port=0,
            api_key=["a", "b"],
            served_model_name=["m"],
            server_limits=ServerLimits(max_body_size=2**20),
            shutdown_timeout=1.5,
        )
    ]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--port", "70000"], "port must be between 0 and 65535, got 70000"),
        (["--kv-cache-memory", "lots"], "cannot read 'lots' as a number of bytes"),
        (["--server-limits", "max_body_size=0"], "max_body_size must be at least 1, got 0"),
        (["--role", "decode"], "role decode needs kv_neighbours"),
    ],
)
def test_options_that_make_no_sense_are_told_before_the_server_starts(
    octavo_command: OctavoCommand, served: list[Any], argv: list[str], message: str
) -> None:
    code, _, err = octavo_command("serve", *argv)
    assert (code, served) == (1, [])
    assert message in err


NEEDS_PACKAGE = [
    (["--kv-remote", "redis://h"], "redis", "kv_remote needs octavo[redis]"),
    (
        ["--kv-neighbours", "h:1", "--kv-remote-secret", "s" * 16, "--kv-demotion", "all"],
        "blake3",
        "kv_neighbours needs octavo[redis]",
    ),
    (
        ["--kv-events-config", '{"enable_kv_cache_events": true}'],
        "zmq",
        "enable_kv_cache_events needs octavo[events]",
    ),
    (["--otlp-traces-endpoint", "http://h/"], "opentelemetry.sdk.trace", "otlp_traces_endpoint needs octavo[otel]"),
]


@pytest.mark.parametrize(("argv", "module", "message"), NEEDS_PACKAGE)
def test_a_missing_package_is_reported_before_the_server_starts(
    octavo_command: OctavoCommand,
    served: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    argv: list[str],
    module: str,
    message: str,
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    code, _, err = octavo_command("serve", "model.gguf", *argv)
    assert (code, served) == (1, [])
    assert message in err
    assert "run `make -C " in err


def test_a_missing_package_is_reported_before_a_model_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=r"kv_remote needs octavo\[redis\]"):
        build_engine(EngineConfig(model="no-such-model", kv_remote="redis://h"))


@pytest.mark.parametrize(
    ("keys", "given", "expected"),
    [([], None, None), (["a"], None, None), (["a", "a"], None, None), (["a", "b"], None, 0.5), (["a", "b"], 1.0, 1.0)],
)
def test_of_several_tenants_none_takes_everything_unless_it_was_said(
    keys: list[str], given: float | None, expected: float | None
) -> None:
    config = EngineConfig(tenant_share=given)
    assert share_among_tenants(config, ServerConfig(api_key=keys)).tenant_share == expected


def test_keys_of_the_environment_are_tenants_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "a,b")
    assert share_among_tenants(EngineConfig(), ServerConfig()).tenant_share == 0.5


@pytest.mark.parametrize(
    ("argv", "seed", "itl_slo_ms"),
    [
        ([], None, 500.0),
        (["--seed", 0], 0, 500.0),
        (["--seed", 7, "--itl-slo-ms", 50], 7, 50.0),
        (["--itl-slo-ms", "none"], None, None),
    ],
)
def test_a_server_has_seeds_that_nobody_can_predict_and_a_latency_target_unless_told_otherwise(
    octavo_command: OctavoCommand,
    served: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    argv: list[Any],
    seed: int | None,
    itl_slo_ms: float | None,
) -> None:
    configs = []

    def shared(config: EngineConfig, _: ServerConfig) -> EngineConfig:
        configs.append(config)
        return config

    monkeypatch.setattr("octavo.commands.serve.share_among_tenants", shared)
    octavo_command("serve", "model.gguf", *argv)
    assert [(config.seed, config.itl_slo_ms) for config in configs] == [(seed, itl_slo_ms)]


def test_offline_there_is_no_latency_target() -> None:
    assert EngineConfig().itl_slo_ms is None


MISSING = [
    (["/nowhere.gguf"], "there is no file or folder /nowhere.gguf"),
    (["smollm2", "--chat-template", "/nowhere.jinja"], "chat_template: cannot read /nowhere.jinja: No such file"),
    (["smollm2", "--kv-cache-dtype", "/nowhere.toml"], "kv_cache_dtype: cannot read /nowhere.toml: No such file"),
    (["smollm2", "--kv-disk", __file__], f"kv_disk: cannot write {__file__}: it is a file"),
    (["smollm2", "--kv-disk", f"{__file__}/kv"], f"{__file__} is a file"),
    (["smollm2", "--record-plans", "/"], "record_plans: cannot write /: it is a folder"),
    (["smollm2", "--record-plans", "/nowhere/x.plans"], "/nowhere/x.plans: there is no folder /nowhere"),
]


@pytest.mark.slow
def test_a_missing_file_is_reported_before_torch_is_imported() -> None:
    """In one process: if any of them imported torch, it would be there at the end."""
    code = "import json, sys; from octavo.cli import main\n"
    code += "for argv in json.loads(sys.argv[1]): main(['serve', '--port', '0', *argv])\n"
    code += "print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, json.dumps([options for options, _ in MISSING])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    told = [line for line in done.stderr.splitlines() if "error: " in line]
    assert [message for (_, message), line in zip(MISSING, told, strict=True) if message not in line] == []
    assert done.stdout == "False\n"
