from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from octavo.sampling_params import SamplingParams
from tests.commands.conftest import OctavoCommand
from tests.commands.fake_llm import FakeLLM


def lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_prompts_as_arguments_come_back_as_json_lines_in_order(
    octavo_command: OctavoCommand, fake_llm: type[FakeLLM]
) -> None:
    code, out, _ = octavo_command("generate", "one two", "three", "--max-tokens", 2, "--max-num-seqs", 8)
    assert code == 0
    first, second = lines(out)
    assert first == {
        "index": 0,
        "prompt": "one two",
        "text": " word0 word1",
        "token_ids": [0, 1],
        "finish_reason": "length",
        "num_prompt_tokens": 2,
        "num_cached_tokens": 2,
    }
    assert (second["index"], second["prompt"]) == (1, "three")
    assert fake_llm.last.config.max_num_seqs == 8
    assert fake_llm.last.closed


def test_logprobs_come_as_lists(octavo_command: OctavoCommand, tiny_llama: Path) -> None:
    options = ("--model", tiny_llama, "--max-tokens", 3, "--ignore-eos", "--logprobs", 2, "--prompt-logprobs", 1)
    code, out, _ = octavo_command("generate", "a block", *options)
    assert code == 0
    (result,) = lines(out)
    assert [len(entry["top"]) for entry in result["logprobs"]] == [2, 2, 2]
    assert result["prompt_logprobs"][0] is None
    ((token_id, logprob),) = result["prompt_logprobs"][1]["top"]
    assert isinstance(token_id, int)
    assert logprob <= 0


def test_a_text_file_holds_one_prompt_a_line_and_empty_lines_are_skipped(
    octavo_command: OctavoCommand, fake_llm: type[FakeLLM], tmp_path: Path
) -> None:
    (tmp_path / "prompts.txt").write_text("first\n\nsecond é\n")
    code, out, _ = octavo_command("generate", "--input", tmp_path / "prompts.txt")
    assert code == 0
    assert [line["prompt"] for line in lines(out)] == ["first", "second é"]
    assert "é" in out


def test_jsonl_lines_mix_kinds_of_prompts_and_override_sampling(
    octavo_command: OctavoCommand, fake_llm: type[FakeLLM], tmp_path: Path
) -> None:
    entries = [
        {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
        {"prompt": "text", "temperature": 0.5, "logit_bias": {"3": 1.0}},
        {"prompt_token_ids": [5, 6, 7], "n": 2},
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(json.dumps(entry) for entry in entries))
    code, out, _ = octavo_command("generate", "--input", tmp_path / "in.jsonl", "--max-tokens", 3)
    assert code == 0
    chat, text, ids = lines(out)
    assert (chat["text"], text["text"]) == (" word0", " word0 word1 word2")
    assert (ids["prompt"], ids["num_prompt_tokens"]) == ([5, 6, 7], 3)
    assert [one["index"] for one in ids["outputs"]] == [0, 1]
    assert fake_llm.last.params[0] == SamplingParams(temperature=0.5, logit_bias={3: 1.0}, max_tokens=3)


@pytest.mark.parametrize("content", ["plain\n", '{"prompt": "plain"}\n'])
def test_stdin_takes_either_form(
    octavo_command: OctavoCommand, fake_llm: type[FakeLLM], monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(content))
    code, out, _ = octavo_command("generate", "--input", "-")
    assert (code, lines(out)[0]["prompt"]) == (0, "plain")


def test_results_go_to_a_file_and_nothing_to_stdout(
    octavo_command: OctavoCommand, fake_llm: type[FakeLLM], tmp_path: Path
) -> None:
    code, out, _ = octavo_command("generate", "hi", "--output", tmp_path / "out.jsonl")
    assert (code, out) == (0, "")
    assert lines((tmp_path / "out.jsonl").read_text())[0]["prompt"] == "hi"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: Expecting"),
        ('"text"', "line 2: expected a JSON object"),
        ("{}", "line 2: needs exactly one of prompt, prompt_token_ids, messages; it has none"),
        ('{"prompt": "a", "messages": []}', "line 2: needs exactly one"),
        ('{"prompt": 3}', "line 2: prompt must be a string"),
        ('{"prompt_token_ids": [true]}', "line 2: prompt_token_ids must be a list of integers"),
        ('{"messages": "hi"}', "line 2: messages must be a list of messages"),
        ('{"prompt": "a", "max_token": 3}', "line 2: unknown field 'max_token'"),
        ('{"prompt": "a", "temperature": -1}', "line 2: temperature must be at least 0"),
        ('{"prompt": "a", "logit_bias": {"x": 1}}', "line 2: logit_bias must have token ids as keys"),
        ('{"prompt": "a", "stop": 3}', "line 2: stop must be a string or a list of strings, got 3"),
    ],
)
def test_a_bad_line_is_named_by_its_number_and_no_model_is_loaded(
    octavo_command: OctavoCommand, fake_llm: type[FakeLLM], tmp_path: Path, line: str, message: str
) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "good"}\n' + line + "\n")
    code, out, err = octavo_command("generate", "--input", tmp_path / "in.jsonl")
    assert (code, out) == (1, "")
    assert err.startswith("octavo: error: ")
    assert message in err
    assert err.count("\n") == 1
    assert fake_llm.last is None


def test_further_bad_lines_are_counted(octavo_command: OctavoCommand, fake_llm: type[FakeLLM], tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("{\n{\n{\n")
    _, _, err = octavo_command("generate", "--input", tmp_path / "in.jsonl")
    assert "line 1:" in err
    assert "(and 2 more bad lines)" in err


def test_a_prompt_that_the_engine_refuses_is_named_by_its_line(
    octavo_command: OctavoCommand, fake_llm: type[FakeLLM], tmp_path: Path
) -> None:
    (tmp_path / "in.txt").write_text("fine\n\nrefuse me\n")
    code, _, err = octavo_command("generate", "--input", tmp_path / "in.txt")
    assert (code, err) == (1, f"octavo: error: {tmp_path / 'in.txt'}, line 3: too long\n")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "give prompts either as arguments or with --input"),
        (["a", "--input", "b.txt"], "give prompts either as arguments or with --input"),
        (["--input", "missing.txt"], "cannot read missing.txt: No such file"),
        (["a", "--output", "missing/out.jsonl"], "its folder does not exist"),
        (["a", "--temperature", "-1"], "temperature must be at least 0"),
    ],
)
def test_what_cannot_work_is_told_before_a_model_is_loaded(
    octavo_command: OctavoCommand, fake_llm: type[FakeLLM], argv: list[str], message: str
) -> None:
    code, _, err = octavo_command("generate", *argv)
    assert code == 1
    assert message in err
    assert fake_llm.last is None


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a disk that is always full")
def test_a_full_disk_is_told_in_one_line(octavo_command: OctavoCommand, fake_llm: type[FakeLLM]) -> None:
    code, _, err = octavo_command("generate", "hi", "--output", "/dev/full")
    assert (code, err) == (1, "octavo: error: cannot write /dev/full: No space left on device\n")


def test_an_empty_file_and_a_binary_file_are_told(
    octavo_command: OctavoCommand, fake_llm: type[FakeLLM], tmp_path: Path
) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe")
    assert "has no prompt" in octavo_command("generate", "--input", tmp_path / "empty.txt")[2]
    assert "not UTF-8" in octavo_command("generate", "--input", tmp_path / "binary.txt")[2]


def test_the_progress_bar_shows_only_on_a_terminal(octavo_command: OctavoCommand, fake_llm: type[FakeLLM]) -> None:
    octavo_command("generate", "hi")
    assert fake_llm.last.use_tqdm is False
