"""Measure how often structured outputs are valid, and what they cost.

    python -m benchmarks.structured_output valid [--runs 20]     50 schemas x 20 runs at temperature 1, each validated
    python -m benchmarks.structured_output formats [--runs 64]  strings of every format that is enforced, validated
    python -m benchmarks.structured_output compile               how long compiling takes
    python -m benchmarks.structured_output cost [--streams 64]   steps with and without grammars, alternating

The schemas are in structured_output_schemas.json, each with its source. Those of the test suite do not restrict most
values: a small model at temperature 1 continues a string, or nests objects, for thousands of tokens. In such cases
types and bounds have been added to the suite's schema, and `suite` holds the original: an output must be valid against
both. Validity is decided by `jsonschema`, formats included; for `formats` install jsonschema[format-nongpl], without
which it knows only some.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema

from benchmarks.timed_sampler import SamplerTime, in_process
from octavo import LLM, SamplingParams, StructuredOutputsParams
from octavo.grammar.compiler import CompiledGrammar
from octavo.grammar.limits import first_error
from octavo.grammar.source import to_lark
from octavo.grammar.trial import try_compiling
from octavo.request import FinishReason

SCHEMAS = Path(__file__).with_name("structured_output_schemas.json")
MAX_TOKENS = 512
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
ENDLESS = ("email", "hostname", "uri", "duration")
WORDS = (
    *("name", "age", "kind", "title", "author", "printer", "paper", "colour", "height", "width", "weight", "price"),
    *("city", "street", "country", "language", "genre", "edition", "binding", "pages", "shelf", "owner", "lender"),
)


def load_schemas() -> list[dict[str, Any]]:
    return list(json.loads(SCHEMAS.read_text()))


def prompt_for(entry: dict[str, Any]) -> str:
    return f"A JSON value for the schema {json.dumps(entry['schema'])}:\n"


def validate(value: Any, schema: Any) -> None:
    validator = jsonschema.Draft202012Validator
    validator(schema, format_checker=validator.FORMAT_CHECKER).validate(value)


def check_formats(llm: LLM, runs: int) -> dict[str, Any]:
    """Generate `runs` strings of each format at temperature 1, and validate each."""
    unknown = set(FORMATS) - set(jsonschema.Draft202012Validator.FORMAT_CHECKER.checkers)
    if unknown:
        raise SystemExit(f"jsonschema does not know {sorted(unknown)}: install jsonschema[format-nongpl]")
    found: dict[str, Any] = {}
    for form in FORMATS:
        # A small model writes names without end; the shortest of them are as hard to get right.
        schema = {"type": "string", "format": form, "maxLength": 60} if form in ENDLESS else {"format": form}
        schema |= {"type": "string"}
        params = SamplingParams(
            n=runs, temperature=1.0, seed=1, max_tokens=MAX_TOKENS,
            structured_outputs=StructuredOutputsParams(json=schema),
        )  # fmt: skip
        (output,) = llm.generate([f"A string of the format {form}, as JSON:\n"], params, use_tqdm=False)
        ended = [c.text for c in output.outputs if c.finish_reason is FinishReason.STOP]
        invalid = [text for text in ended if not _is_valid(text, schema)]
        found[form] = {"ended": len(ended), "different": len(set(ended)), "invalid": invalid}
    return found


def _is_valid(text: str, schema: Any) -> bool:
    try:
        validate(json.loads(text), schema)
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


def measure_compiling(llm: LLM, rounds: int) -> dict[str, Any]:
    """Measure how long a schema takes from a request to its compiled grammar, in which no other one is like it."""
    grammars = llm.core.inputs.grammars
    assert grammars is not None
    grammars.compile(StructuredOutputsParams(choice=["a"]))  # the tokenizer and the process are there
    found = {"tried": [], "compiled": [], "whole": []}  # type: dict[str, list[float]]
    for turn in range(rounds):
        for entry in load_schemas():
            wanted = StructuredOutputsParams(json={**entry["schema"], "title": f"{entry['name']} {turn}"})
            lark = to_lark(wanted)
            began = time.perf_counter()
            try_compiling(lark, 60.0)
            tried = time.perf_counter()
            compiled = CompiledGrammar(lark, grammars._vocabulary)
            first_error(compiled.matcher, grammars._vocabulary.eos_token_ids)
            ended = time.perf_counter()
            grammars.compile(wanted)
            found["whole"].append(time.perf_counter() - ended)
            found["tried"].append(tried - began)
            found["compiled"].append(ended - tried)
    return {
        "schemas": len(load_schemas()),
        "compilations": len(found["whole"]),
        "median_ms": {name: _ms(statistics.median(times)) for name, times in found.items()},
        "p95_ms": {name: _ms(statistics.quantiles(times, n=20)[-1]) for name, times in found.items()},
        "longest_ms": {name: _ms(max(times)) for name, times in found.items()},
    }


def check_validity(llm: LLM, runs: int, some: slice) -> dict[str, Any]:
    """Generate `runs` outputs of each schema at temperature 1, and validate each."""
    entries = load_schemas()[some]
    first = some.indices(len(load_schemas()))[0]
    reasons: Counter[str] = Counter()
    invalid: list[dict[str, Any]] = []
    cut_off: Counter[str] = Counter()
    errors: list[dict[str, Any]] = []
    num_tokens = 0
    began = time.perf_counter()
    params = [
        SamplingParams(
            n=runs, temperature=1.0, seed=1000 * (first + i), max_tokens=MAX_TOKENS,
            structured_outputs=StructuredOutputsParams(json=entry["schema"]),
        )
        for i, entry in enumerate(entries)
    ]  # fmt: skip
    outputs = llm.generate([prompt_for(entry) for entry in entries], params, use_tqdm=False)
    for entry, output in zip(entries, outputs, strict=True):
        if output.error is not None:
            errors.append({"name": entry["name"], "error": output.error, "reason": output.error_reason})
        for completion in output.outputs:
            num_tokens += len(completion.token_ids)
            reasons[str(completion.finish_reason)] += 1
            if completion.finish_reason is not FinishReason.STOP:
                cut_off[entry["name"]] += 1
                continue
            try:
                for schema in (entry["schema"], entry.get("suite", True)):
                    validate(json.loads(completion.text), schema)
            except (ValueError, jsonschema.ValidationError) as error:
                invalid.append({"name": entry["name"], "text": completion.text, "error": str(error).split("\n")[0]})
    return {
        "schemas": len(entries),
        "runs": len(entries) * runs,
        "finish_reasons": dict(reasons),
        "valid": reasons[str(FinishReason.STOP)] - len(invalid),
        "invalid": invalid,
        "incomplete": dict(cut_off),
        "errors": errors,
        "tokens": num_tokens,
        "steps": llm.core.stats.num_steps,
        "seconds": time.perf_counter() - began,
    }


@dataclass
class Steps:
    """Steps in which all streams draw a token, in the middle of their outputs.

    Attributes:
        seconds: of each step.
        sampling: seconds of each step that its draws took.
        tokens: number that each step wrote: the drawn ones, and those that grammars forced after them.
    """

    seconds: list[float] = field(default_factory=list)
    sampling: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def __iadd__(self, other: Steps) -> Steps:
        self.seconds += other.seconds
        self.sampling += other.sampling
        self.tokens += other.tokens
        return self


def timed_steps(llm: LLM, wanted: list[StructuredOutputsParams | None], tokens: int) -> Steps:
    core = llm.core
    sampler_time = SamplerTime(in_process(core.runner)._sampler)
    for i, description in enumerate(wanted):
        params = SamplingParams(
            max_tokens=tokens, ignore_eos=True, seed=i, structured_outputs=description, logprobs=None
        )
        core.add(core.make_request([100 + i, *range(200, 232)], params))
    steps = Steps()
    while core.has_work:
        all_run = core.scheduler.num_running == len(wanted)
        before = core.stats.generation_tokens
        sampler_time.take()
        began = time.perf_counter()
        core.step()
        if all_run and core.scheduler.num_running == len(wanted):
            steps.seconds.append(time.perf_counter() - began)
            steps.sampling.append(sampler_time.take())
            steps.tokens.append(core.stats.generation_tokens - before)
    return Steps(steps.seconds[8:], steps.sampling[8:], steps.tokens[8:])


def endless_schema(seed: int) -> dict[str, Any]:
    """Return a schema of lists that are longer than what is measured, so that every stream runs throughout.

    The objects in them have three to six properties of random names and types.
    """
    drawn = random.Random(seed)
    kinds: list[Callable[[], Any]] = [
        lambda: {"type": "string", "minLength": 2, "maxLength": drawn.randint(20, 60)},
        lambda: {"type": "integer", "minimum": drawn.randint(-9, 9), "maximum": drawn.randint(99, 99_999)},
        lambda: {"type": "number"},
        lambda: {"type": "boolean"},
        lambda: {"enum": drawn.sample(WORDS, drawn.randint(2, 6))},
        lambda: {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": drawn.randint(2, 5)},
        lambda: {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 30}]},
        lambda: {"type": "string", "format": drawn.choice(["date", "uuid", "ipv4"])},
    ]
    names = drawn.sample(WORDS, drawn.randint(3, 6))
    item = {
        "type": "object",
        "properties": {name: drawn.choice(kinds)() for name in names},
        "required": names,
        "additionalProperties": False,
    }
    return {"type": "array", "items": item, "minItems": 100}


def measure_cost(llm: LLM, streams: int, rounds: int, tokens: int) -> dict[str, Any]:
    """Measure steps with and without grammars, alternating, with the same number of streams."""
    descriptions = [StructuredOutputsParams(json=endless_schema(i)) for i in range(32)]
    constrained: list[StructuredOutputsParams | None] = [descriptions[i % 32] for i in range(streams)]
    free: list[StructuredOutputsParams | None] = [None] * streams
    timed_steps(llm, constrained, 16)
    found = {"free": Steps(), "structured": Steps()}
    for _ in range(rounds):
        found["free"] += timed_steps(llm, free, tokens)
        found["structured"] += timed_steps(llm, constrained, tokens)
    free_steps, structured = found["free"], found["structured"]
    more = statistics.median(structured.sampling) - statistics.median(free_steps.sampling)
    return {
        "streams": streams,
        "steps": {name: len(steps.seconds) for name, steps in found.items()},
        "median_ms": {name: _ms(statistics.median(steps.seconds)) for name, steps in found.items()},
        "quartiles_ms": {name: list(map(_ms, statistics.quantiles(s.seconds, n=4))) for name, s in found.items()},
        "sampling_ms": {name: _ms(statistics.median(steps.sampling)) for name, steps in found.items()},
        "tokens_a_step": {name: round(statistics.mean(steps.tokens), 1) for name, steps in found.items()},
        "ms_a_token": {name: _ms(sum(s.seconds) / max(1, sum(s.tokens))) for name, s in found.items()},
        "draws_cost": more / statistics.median(free_steps.seconds),
        "step_costs": statistics.median(structured.seconds) / statistics.median(free_steps.seconds) - 1,
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["valid", "formats", "compile", "cost"])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--runs", type=int, default=20, help="outputs of each schema or format")
    parser.add_argument("--first", type=int, help="of the schemas, the first that is tried")
    parser.add_argument("--last", type=int, help="of the schemas, the first that is not tried any more")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="of each stream in a round")
    args = parser.parse_args()
    with LLM(args.model, max_model_len=2048, max_num_seqs=max(64, args.streams), kv_cache_memory="2GiB") as llm:
        if args.what == "valid":
            print(json.dumps(check_validity(llm, args.runs, slice(args.first, args.last))))
        elif args.what == "formats":
            print(json.dumps(check_formats(llm, args.runs)))
        elif args.what == "compile":
            print(json.dumps(measure_compiling(llm, args.rounds)))
        else:
            print(json.dumps(measure_cost(llm, args.streams, args.rounds, args.tokens)))


if __name__ == "__main__":
    main()
