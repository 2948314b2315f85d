from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import octavo
from octavo import cli
from octavo.commands import COMMANDS
from octavo.commands.bench import BENCHES
from octavo.errors import ConfigError

COMMAND_LINES = [[], *([name] for name in COMMANDS), *(["bench", name] for name in BENCHES)]


@pytest.mark.parametrize("argv", COMMAND_LINES, ids=" ".join)
def test_every_command_has_help(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        cli.main([*argv, "--help"])
    assert leaving.value.code == 0
    assert capsys.readouterr().out.startswith("usage: " + " ".join(["octavo", *argv]))


def test_help_begins_with_the_arguments_and_not_with_a_hundred_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    assert capsys.readouterr().out.startswith("usage: octavo serve [options] [MODEL]\n\n")
    with pytest.raises(SystemExit):
        cli.main(["cache", "--help"])
    assert capsys.readouterr().out.startswith("usage: octavo cache [-h] [--json] {info,verify,purge} DIR\n")


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        cli.main(["--version"])
    assert leaving.value.code == 0
    assert capsys.readouterr().out == f"octavo {octavo.__version__}\n"


@pytest.mark.parametrize("argv", [[], ["sing"], ["bench"], ["serve", "--port", "x"], ["serve", "--max-num-seq", "3"]])
def test_wrong_usage_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        cli.main(argv)
    assert leaving.value.code == 2
    told = capsys.readouterr().err
    assert told.startswith("octavo")
    assert told.endswith("--help)\n")
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (
            ["serve", "--max-num-sqs=3"],
            "octavo serve: error: unknown argument '--max-num-sqs=3'; did you mean --max-num-seqs? "
            "(see octavo serve --help)",
        ),
        (["serve", "-c", "4096"], "octavo serve: error: unknown argument '-c': write --max-model-len (see"),
        (
            ["serve", "smollm2", "--pipeline-parallel-size=2"],
            "octavo serve: error: unknown argument '--pipeline-parallel-size=2': Octavo serves on one device (see",
        ),
        (["list"], "octavo: error: there is no command 'list': a server has one model, which GET /v1/models names"),
        (["bench", "limits"], "octavo bench: error: there is no command 'limits': `octavo bench cpu` measures them"),
        (
            ["serve", "--max-n=3"],
            "octavo serve: error: unknown argument '--max-n=3'; it was removed: it is an entry of --limits, as in",
        ),
        (
            ["serve", "--max-body-size", "1MiB"],
            "octavo serve: error: unknown argument '--max-body-size'; it was removed: it is an entry of --server",
        ),
        # Nothing is like it: --num-blocks shares its dashes and a few letters.
        (["bench", "serve", "--port", "1"], "octavo bench serve: error: unknown argument '--port' (see octavo bench"),
    ],
)
def test_a_mistyped_flag_is_told_the_one_that_was_probably_meant(
    argv: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main(argv)
    assert capsys.readouterr().err.startswith(told)


def parser_whose_command_raises(monkeypatch: pytest.MonkeyPatch, error: ConfigError | Any) -> None:
    def run(args: argparse.Namespace) -> None:
        raise error

    parser = cli.build_parser()
    parser.set_defaults(run=run)
    monkeypatch.setattr(cli, "build_parser", lambda: parser)
    monkeypatch.setattr(parser, "parse_args", lambda argv: type("Args", (), {"run": staticmethod(run)}))


def test_an_error_of_octavos_is_one_line_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parser_whose_command_raises(monkeypatch, ConfigError("a message\nof two lines"))
    assert cli.main([]) == 1
    assert capsys.readouterr().err == "octavo: error: a message of two lines\n"


def test_a_missing_package_is_an_error_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert cli.main(["completion", "bash"]) == 1
    assert re.fullmatch(
        r"octavo: error: the package shtab is missing: run `make -C \S+ install`\n", capsys.readouterr().err
    )


def test_ctrl_c_exits_with_130_and_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parser_whose_command_raises(monkeypatch, KeyboardInterrupt())
    assert cli.main([]) == 130
    assert capsys.readouterr().err == ""


def test_an_invalid_option_of_the_engine_is_told_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--max-num-seqs", "0"]) == 1
    assert capsys.readouterr().err == "octavo: error: max_num_seqs must be at least 1, got 0\n"


def modules_after(code: str) -> set[str]:
    code = f"import sys; from octavo.cli import build_parser; {code}; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_help_imports_no_command() -> None:
    modules = modules_after("build_parser().format_help()")
    assert "octavo.commands" in modules
    assert not modules & {f"octavo.commands.{name}" for name in COMMANDS}


def test_completing_the_options_of_all_commands_imports_nothing_heavy() -> None:
    modules = modules_after("from octavo.commands.base import load_commands; load_commands(build_parser())")
    assert "octavo.commands.bench.memory" in modules
    assert not modules & {"torch", "numpy", "transformers", "fastapi", "uvicorn", "httpx", "tqdm", "tokenizers", "rich"}


def test_the_module_runs_as_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "octavo", "--version"], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"octavo \S+\n", done.stdout)


def test_ctrl_c_while_the_command_line_is_imported_ends_the_process_in_silence() -> None:
    code = "import builtins, signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    code += "real = builtins.__import__\n"
    code += "def importing(name, *rest):\n  if name == 'octavo.cli':\n    signal.raise_signal(signal.SIGINT)\n"
    code += "  return real(name, *rest)\n"
    code += "builtins.__import__ = importing\nfrom octavo.__main__ import main\nmain()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_the_entry_point_imports_nothing_before_ctrl_c_is_handled() -> None:
    code = "import sys; before = set(sys.modules); import octavo.__main__; print(*set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert {name for name in done.stdout.split() if name.startswith("octavo")} == {"octavo", "octavo.__main__"}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a disk that is always full")
@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("print('x')", "cannot write: No space left on device"),
        ("print('x' * 100000, flush=True)", "cannot write: No space left on device"),
        ("raise PermissionError(13, 'Permission denied', '/x')", "cannot open /x: Permission denied"),
    ],
)
def test_a_full_disk_or_a_missing_permission_is_an_error_in_one_line(line: str, problem: str) -> None:
    code = "import sys\nfrom octavo import cli\n"
    code += "class Parser:\n  def parse_args(self, argv):\n    return self\n"
    code += f"  def run(self, args):\n    {line}\n    return 0\n"
    code += "cli.build_parser = Parser\nsys.exit(cli.main())"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, f"octavo: error: {problem}\n")


def test_a_reader_that_leaves_ends_the_command_without_a_traceback() -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    code = "import sys\nfrom octavo import cli\n"
    code += "class Parser:\n  def parse_args(self, argv):\n    return self\n"
    code += "  def run(self, args):\n    print('x' * 100000, flush=True)\n"
    code += "cli.build_parser = Parser\nsys.exit(cli.main())"
    done = subprocess.run([sys.executable, "-c", code], stdout=write_end, stderr=subprocess.PIPE, text=True)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["serv"],
            "octavo: error: argument COMMAND: invalid choice: 'serv'; did you mean serve? (see octavo --help)\n",
        ),
        (
            ["run", "smollm2"],
            "octavo: error: argument COMMAND: invalid choice: 'run'; did you mean chat? (see octavo --help)\n",
        ),
        (
            ["serve", "--dtype", "float31"],
            "invalid choice: 'float31'; did you mean float32? (see octavo serve --help)\n",
        ),
        (["serve", "--dtype", "zzz"], "invalid choice: 'zzz' (choose from "),
    ],
)
def test_a_mistyped_choice_is_one_line_that_says_which_was_meant(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leaving:
        cli.main(argv)
    assert leaving.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
