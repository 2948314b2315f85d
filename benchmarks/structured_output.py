"""Measure how often structured outputs are valid, and what they cost.

    python benchmarks/structured_output.py valid [--runs 20]     50 schemas x 20 runs at temperature 1, each validated
    python benchmarks/structured_output.py cost [--streams 64]   steps with and without grammars, alternating

The schemas are in structured_output_schemas.json, each with its source. Those of the test suite do not restrict most
values: a small model at temperature 1 continues a string, or nests objects, for thousands of tokens. In such cases
types and bounds have been added to the suite's schema, and `suite` holds the original: an output must be valid against
both. Validity is decided by `jsonschema`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema

from octavo import LLM, SamplingParams, StructuredOutputsParams
from octavo.request import FinishReason
from timed_sampler import SamplerTime

SCHEMAS = Path(__file__).with_name("structured_output_schemas.json")
MAX_TOKENS = 512


def load_schemas() -> list[dict[str, Any]]:
    return list(json.loads(SCHEMAS.read_text()))


def prompt_for(entry: dict[str, Any]) -> str:
    return f"A JSON value for the schema {json.dumps(entry['schema'])}:\n"


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
                    jsonschema.validate(json.loads(completion.text), schema, jsonschema.Draft202012Validator)
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
    sampler_time = SamplerTime(core.runner._sampler)
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


def measure_cost(llm: LLM, streams: int, rounds: int, tokens: int) -> dict[str, Any]:
    """Measure steps with and without grammars, alternating, with the same number of streams."""
    # Arrays and texts that are longer than what is measured, so that every stream runs throughout.
    word = {"type": "string", "minLength": 2, "maxLength": 40}
    item = {
        "type": "object",
        "properties": {"name": word, "age": {"type": "integer"}, "kind": {"enum": ["reader", "writer", "printer"]}},
        "required": ["name", "age", "kind"],
        "additionalProperties": False,
    }
    descriptions = [
        StructuredOutputsParams(json={"type": "array", "items": {**item, "title": str(i)}, "minItems": 100})
        for i in range(32)
    ]
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
    parser.add_argument("what", choices=["valid", "cost"])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--runs", type=int, default=20, help="outputs of each schema")
    parser.add_argument("--first", type=int, help="of the schemas, the first that is tried")
    parser.add_argument("--last", type=int, help="of the schemas, the first that is not tried any more")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64, help="of each stream in a round")
    args = parser.parse_args()
    with LLM(args.model, max_model_len=2048, max_num_seqs=max(64, args.streams), kv_cache_memory="2GiB") as llm:
        if args.what == "valid":
            print(json.dumps(check_validity(llm, args.runs, slice(args.first, args.last))))
        else:
            print(json.dumps(measure_cost(llm, args.streams, args.rounds, args.tokens)))


if __name__ == "__main__":
    main()
