"""Options come from flags, the environment and a file, in that order, and are told with where they came from."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

import octavo.server.run
from octavo.commands.settings import Settings
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.option import options_of
from octavo.server.config import KEY_OPTIONS, ServerConfig
from tests.commands.conftest import OctavoCommand

CONFIGS = (ServerConfig, EngineConfig)


def settings(tmp_path: Path, text: str = "", environment: dict[str, str] | None = None, **flags: Any) -> Settings:
    path = tmp_path / "octavo.toml"
    path.write_text(text)
    path.chmod(0o600)
    return Settings(CONFIGS, flags, environment or {}, str(path) if text else None, [KEY_OPTIONS])


def values(found: Settings) -> dict[str, Any]:
    return {**found.given(ServerConfig), **found.given(EngineConfig)}


def test_a_flag_goes_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    text = 'port = 1\nmax_num_seqs = 1\nblock-size = 32\nhost = "::1"'
    found = settings(tmp_path, text, {"OCTAVO_PORT": "2", "OCTAVO_MAX_NUM_SEQS": "2", "HOME": "/"}, port=3)
    assert values(found) == {"port": 3, "max_num_seqs": 2, "block_size": 32, "host": "::1"}
    told = found.by_source()
    assert [told[source] for source in ("flags", "the environment", found.path or "")] == [
        {"port": 3},
        {"max_num_seqs": 2},
        {"host": "::1", "block_size": 32},
    ]
    assert told["defaults"]["max_model_len"] is None
    assert sum(map(len, told.values())) == sum(
        not option.internal for config in CONFIGS for option in options_of(config).values()
    )


def test_every_kind_of_option_is_read_alike_from_the_environment_and_the_file(tmp_path: Path) -> None:
    environment = {
        "OCTAVO_ENABLE_PREFIX_CACHING": "off",
        "OCTAVO_KV_CACHE_MEMORY": "2GiB",
        "OCTAVO_BLOCK_SIZE": "max",
        "OCTAVO_ITL_SLO_MS": "50",
        "OCTAVO_PREFIX_CACHE": "radix",
        "OCTAVO_ALLOWED_HOSTS": "a, b,",
        "OCTAVO_MODEL": "m.gguf",
        "OCTAVO_LOG_FORMAT": "json",
    }
    text = """
    enable_prefix_caching = false
    kv_cache_memory = "2GiB"
    block_size = "max"
    itl_slo_ms = 50
    prefix_cache = "radix"
    allowed_hosts = ["a", "b"]
    model = "m.gguf"
    log_format = "json"
    """
    expected = {
        "enable_prefix_caching": False,
        "kv_cache_memory": "2GiB",
        "block_size": "max",
        "itl_slo_ms": 50.0,
        "prefix_cache": "radix",
        "allowed_hosts": ("a", "b"),
        "model": "m.gguf",
        "log_format": "json",
    }
    assert values(settings(tmp_path, environment=environment)) == expected
    found = values(settings(tmp_path, text))
    assert found == expected
    assert type(found["itl_slo_ms"]) is float


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_num_seq = 3", r"unknown option 'max_num_seq'; did you mean max_num_seqs\?"),
        ("[server]\nport = 3", "unknown option 'server'; options stand at the top of the file, in no table"),
        ("port = 3\nport = 4", "is not valid TOML"),
        ("max_num_seqs = 3\nmax-num-seqs = 4", "gives max_num_seqs twice"),
        ("port = true", "port must be an integer, got True"),
        ("port = 1.5", "port must be an integer, got 1.5"),
        ('port = "x"', "port must be an integer, got 'x'"),
        ("host = 7", "host must be a string, got 7"),
        ('block_size = "min"', "block_size must be an integer or max, got 'min'"),
        ('prefix_cache = "tree"', "prefix_cache must be one of hashed, radix, got 'tree'"),
        ('eviction_policy = "cost"', "eviction_policy: 'cost' was removed; use 'adaptive'"),
        ("max_n = 3", r"'max_n'; it was removed: it is an entry of --limits, as in max_n="),
        ("kv_remote_ttl = 3", r"'kv_remote_ttl'; it was removed: add it to the address, as in --kv-remote redis://"),
        ("max_connections = 3", r"'max_connections'; it was removed: it is an entry of --server-limits"),
        ("limits = 3", "limits must be a table of values by name, got 3"),
        ("[limits]\nmax_nn = 3", r"limits: unknown option 'max_nn'; did you mean max_n\?"),
        ("deterministic = 1", "deterministic must be true or false, got 1"),
        ("api_key = []", "api_key is an empty list"),
        ("api_key = [7]", r"api_key\[0\] must be a string, got \(hidden\)"),
        ("admin_key = 77777", r"admin_key must be a string, got \(hidden\)"),
        ('shutdown_timeout = "soon"', "shutdown_timeout must be a number of seconds, got 'soon'"),
    ],
)
def test_a_file_that_says_something_else_is_refused_with_the_place(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as refused:
        settings(tmp_path, text)
    assert "octavo.toml" in str(refused.value)


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        (
            "OCTAVO_MAX_NUM_SEQ",
            "3",
            r"unknown environment variable 'OCTAVO_MAX_NUM_SEQ'; did you mean OCTAVO_MAX_NUM_SEQS\?",
        ),
        ("OCTAVO_max_num_seqs", "3", r"did you mean OCTAVO_MAX_NUM_SEQS\?"),
        ("OCTAVO_MAX_N", "3", "'OCTAVO_MAX_N'; it was removed: it is an entry of --limits"),
        (
            "OCTAVO_PIN_TENANT_SHARE",
            "1",
            "'OCTAVO_PIN_TENANT_SHARE'; it was removed: tenant_share is the share of pins",
        ),
        ("OCTAVO_EXECUTOR", "process", "'OCTAVO_EXECUTOR'; it was removed: the model runs in the engine's own"),
        (
            "OCTAVO_LIMITS",
            "max_n",
            "OCTAVO_LIMITS must be a JSON object, or a list such as max_stop_strings=1, got 'max_n'",
        ),
        ("OCTAVO_LIMITS", "max_n=x", "OCTAVO_LIMITS: max_n must be an integer, got 'x'"),
        ("OCTAVO_PORT", "x", "OCTAVO_PORT must be an integer, got 'x'"),
        ("OCTAVO_PORT", "", "OCTAVO_PORT is set but empty"),
        ("OCTAVO_API_KEY", " , ", "OCTAVO_API_KEY is set but has no key"),
        ("OCTAVO_DETERMINISTIC", "maybe", "OCTAVO_DETERMINISTIC must be true or false, got 'maybe'"),
        ("OCTAVO_PORT", "tcp://10.0.0.1:8000", "which Kubernetes sets for a service called octavo"),
    ],
)
def test_a_variable_that_means_nothing_is_refused(tmp_path: Path, variable: str, value: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        settings(tmp_path, environment={variable: value})


def test_a_router_refuses_the_options_of_servers(
    octavo_command: OctavoCommand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "octavo.toml").write_text('role = "decode"')
    code, _, err = octavo_command("route", "--config", tmp_path / "octavo.toml", "--accept-workers")
    assert (code, "octavo.toml has an unknown option 'role'; it is an option of servers only" in err) == (1, True)
    monkeypatch.setenv("OCTAVO_ROLE", "decode")
    code, _, err = octavo_command("route", "--accept-workers")
    assert (code, "unknown environment variable 'OCTAVO_ROLE'; it is an option of" in err) == (1, True)


def test_none_turns_an_option_off_that_a_command_sets(tmp_path: Path) -> None:
    for found in (
        settings(tmp_path, 'itl_slo_ms = "none"'),
        settings(tmp_path, "itl_slo_ms = 50", {"OCTAVO_ITL_SLO_MS": "none"}),
    ):
        assert values(found) == {"itl_slo_ms": None}
    with pytest.raises(ConfigError, match="OCTAVO_ITL_SLO_MS must be a number of milliseconds or none, got 'never'"):
        settings(tmp_path, environment={"OCTAVO_ITL_SLO_MS": "never"})


def test_variables_that_are_no_options_are_let_be(tmp_path: Path) -> None:
    environment = {
        "OCTAVO_ISA": "avx2",
        "OCTAVO_MEMORY_LIMIT": "8GiB",
        "OCTAVO_SERVICE_HOST": "10.0.0.1",
        "OCTAVO_PORT_8000_TCP_ADDR": "10.0.0.1",
    }
    assert values(settings(tmp_path, environment=environment)) == {}


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "o.toml"
    path.write_text("port = 5")
    assert values(Settings(CONFIGS, {}, {"OCTAVO_CONFIG": str(path)})) == {"port": 5}
    with pytest.raises(ConfigError, match=r"cannot read the options file .*none\.toml: No such file"):
        Settings(CONFIGS, {}, {"OCTAVO_CONFIG": str(tmp_path / "none.toml")})


def test_each_limit_comes_from_the_best_place_that_gives_it(tmp_path: Path) -> None:
    text = "[limits]\nmax_n = 1\nmax_tools = 1\nmax_messages = 1"
    found = settings(tmp_path, text, {"OCTAVO_LIMITS": "max_n=2, max-tools=2"}, limits={"max_n": 3})
    assert values(found) == {"limits": {"max_n": 3, "max_tools": 2, "max_messages": 1}}


def test_keys_of_a_better_place_do_away_with_those_of_a_worse_one(tmp_path: Path) -> None:
    found = settings(tmp_path, 'keys_file = "k.toml"', {"OCTAVO_API_KEY": "a,b"})
    assert values(found) == {"api_key": ("a", "b")}
    found = settings(tmp_path, 'api_key = ["c"]', {"OCTAVO_API_KEY": "a"}, keys_file="k.toml")
    assert values(found) == {"keys_file": "k.toml"}
    assert ServerConfig(**found.given(ServerConfig)).accepted_keys == ()
    with pytest.raises(ConfigError, match="give either keys_file or api_key"):
        ServerConfig(**settings(tmp_path, 'api_key = ["c"]\nkeys_file = "k.toml"').given(ServerConfig))


def test_a_file_with_keys_that_others_can_read_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "o.toml"
    path.write_text('admin_key = "sk-secret"')
    path.chmod(0o644)
    Settings(CONFIGS, {}, {}, str(path))
    assert "chmod 600" in caplog.text
    assert "sk-secret" not in caplog.text


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServerConfig]:
    calls: list[ServerConfig] = []
    monkeypatch.setattr(octavo.server.run, "serve", lambda make_engine, config, **_: calls.append(config))
    return calls


def test_serve_logs_all_options_by_source_and_no_key(
    octavo_command: OctavoCommand,
    served: list[ServerConfig],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "o.toml"
    path.write_text('admin_key = "sk-root"\nmax_num_seqs = 8')
    path.chmod(0o600)
    monkeypatch.setenv("OCTAVO_API_KEY", "sk-one,sk-two")
    caplog.set_level(logging.DEBUG, "octavo")
    argv = ["m.gguf", "--config", path, "--port", 0, "--log-level", "debug"]
    code, _, _ = octavo_command("serve", *argv)
    assert code == 0
    assert served == [ServerConfig(port=0, log_level="debug", api_key=["sk-one", "sk-two"], admin_key="sk-root")]
    told = [record for record in caplog.records if "options from" in record.getMessage()]
    lines = [record.getMessage() for record in told]
    # What nobody has just typed is told in any case; all the rest would hide it.
    assert [record.levelname for record in told] == ["DEBUG", "INFO", "INFO", "DEBUG"]
    assert lines[:3] == [
        "options from flags: port=0 log_level=debug model=m.gguf",
        "options from the environment: api_key=(hidden),(hidden)",
        f"options from {path}: admin_key=(hidden) max_num_seqs=8",
    ]
    assert lines[3].startswith("options from defaults: host=127.0.0.1 ")
    assert "sk-" not in caplog.text
