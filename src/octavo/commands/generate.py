"""`octavo generate`: completes prompts from arguments, text or JSONL files, with one line of JSON per result."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from octavo.commands.options import add_options, add_sampling_options, given_options
from octavo.commands.prompts import PromptInput, prompts_from_arguments, read_prompts
from octavo.config import EngineConfig
from octavo.errors import ConfigError, RequestError
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.engine.outputs import CompletionOutput, RequestOutput
    from octavo.llm import LLM
    from octavo.logprobs import TokenLogprobs

# The engine's --seed and --kv-budget apply to every request without its own; second flags would only confuse.
_OMITTED = ("seed", "kv_budget")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prompts", metavar="PROMPT", nargs="*", help="prompt to complete; several are computed together"
    )
    parser.add_argument(
        "--input",
        metavar="FILE",
        help="file of prompts: one per line, or, if its name ends in .jsonl, one JSON object per line with 'prompt', "
        "'prompt_token_ids' or 'messages' and any sampling options; '-': standard input, in either format",
    )
    parser.add_argument("--output", metavar="FILE", help="file to write the results to (default: standard output)")
    parser.add_argument("--quiet", action="store_true", help="do not show a progress bar")
    add_sampling_options(parser, omit=_OMITTED)
    add_options(parser, EngineConfig)


def run(args: argparse.Namespace) -> int:
    params = given_options(args, SamplingParams, omit=_OMITTED)
    SamplingParams(**params)
    engine = given_options(args, EngineConfig)
    if bool(args.prompts) == bool(args.input):
        raise ConfigError("give prompts either as arguments or with --input FILE ('-' for stdin)")
    prompts = read_prompts(args.input, params) if args.input else prompts_from_arguments(args.prompts, params)
    if args.output and not Path(args.output).absolute().parent.is_dir():
        raise ConfigError(f"cannot write {args.output}: its folder does not exist")
    if not prompts:
        raise ConfigError(f"{args.input} has no prompt")

    from octavo import LLM

    with LLM(**engine) as llm:
        outputs = _generate(llm, prompts, use_tqdm=sys.stderr.isatty() and not args.quiet)
    with _open_output(args.output) as out:
        for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            print(json.dumps(_as_json(index, prompt, output), ensure_ascii=False), file=out)
    return 0


def _generate(llm: LLM, prompts: list[PromptInput], *, use_tqdm: bool) -> list[RequestOutput]:
    """Return all results in the prompts' order; conversations are one batch, and plain prompts another."""
    chats = [i for i, prompt in enumerate(prompts) if prompt.messages is not None]
    plain = [i for i, prompt in enumerate(prompts) if prompt.messages is None]
    results: dict[int, RequestOutput] = {}
    for indices, generate in ((plain, _complete), (chats, _answer)):
        batch = [prompts[i] for i in indices]
        if not batch:
            continue
        try:
            outputs = generate(llm, batch, use_tqdm)
        except RequestError as error:
            raise _with_source(error, batch) from error
        results.update(zip(indices, outputs, strict=True))
    return [results[i] for i in range(len(prompts))]


def _complete(llm: LLM, batch: list[PromptInput], use_tqdm: bool) -> list[RequestOutput]:
    return llm.generate([one.engine_prompt for one in batch], [one.params for one in batch], use_tqdm=use_tqdm)


def _answer(llm: LLM, batch: list[PromptInput], use_tqdm: bool) -> list[RequestOutput]:
    return llm.chat([one.messages or [] for one in batch], [one.params for one in batch], use_tqdm=use_tqdm)


def _with_source(error: RequestError, batch: list[PromptInput]) -> RequestError:
    """Return the error with the file's line number in place of the index that begins `LLM`'s message."""
    match = re.match(r"prompt ([0-9]+): ", str(error))
    index, message = (int(match[1]), str(error)[match.end() :]) if match else (0, str(error))
    named = match or len(batch) == 1
    return RequestError(f"{batch[index].source}: {message}" if named and batch[index].source else str(error))


@contextmanager
def _open_output(path: str | None) -> Iterator[TextIO]:
    if path is None:
        if sys.stdout is None:
            raise ConfigError("standard output is closed: give --output FILE")
        yield sys.stdout
        sys.stdout.flush()
        return
    try:
        file = open(path, "w", encoding="utf-8")  # noqa: SIM115 (closed below; only the opening may raise ConfigError)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
    try:
        with file:
            yield file
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def _as_json(index: int, prompt: PromptInput, output: RequestOutput) -> dict[str, Any]:
    """Return the request's fields and those of its completion; several completions are listed under 'outputs'."""
    result: dict[str, Any] = {"index": index, "prompt": prompt.given}
    result.update(_completion(output.outputs[0]))
    result["num_prompt_tokens"] = len(output.prompt_token_ids)
    result["num_cached_tokens"] = output.num_cached_tokens
    if output.prompt_logprobs is not None:
        result["prompt_logprobs"] = [entry and _as_fields(entry) for entry in output.prompt_logprobs]
    if len(output.outputs) > 1:
        result["outputs"] = [{"index": one.index, **_completion(one)} for one in output.outputs]
    return result


def _completion(one: CompletionOutput) -> dict[str, Any]:
    fields: dict[str, Any] = {"text": one.text, "token_ids": one.token_ids, "finish_reason": one.finish_reason}
    if one.logprobs is not None:
        fields["logprobs"] = [_as_fields(entry) for entry in one.logprobs]
    return fields


def _as_fields(entry: TokenLogprobs) -> dict[str, Any]:
    return {**asdict(entry), "top": [list(pair) for pair in entry.top]}
