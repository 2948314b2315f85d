"""llama.cpp's own API: its endpoints and answers; `/tokenize` and `/detokenize` take its fields too."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import octavo
from octavo.engine.outputs import CompletionOutput, RequestOutput
from octavo.errors import RequestError
from octavo.request import FinishReason
from octavo.sampling_params import SamplingParams
from octavo.server.access import client_of
from octavo.server.answer_json import dumps, event, json_pieces, weight_of
from octavo.server.answers.generation import Answer, Job, Usage, seconds_of
from octavo.server.answers.logprobs import chat_logprobs
from octavo.server.apis import LLAMACPP_DEFAULTS
from octavo.server.bodies.local_bodies import InfillBody, LlamaCppBody
from octavo.server.bodies.read_bodies import CompletionRequest
from octavo.server.engine_client import EngineClient
from octavo.server.handling import Handling
from octavo.server.route import Handlers, get, json_response, post


class LlamaCppAnswer(Answer[CompletionRequest]):
    """One completion; several prompts become a list of answers."""

    def __init__(self, job: Job[CompletionRequest]) -> None:
        super().__init__(job)
        assert isinstance(job.read.origin, LlamaCppBody)
        self._body = job.read.origin
        self._usages = [Usage([prompt]) for prompt in job.read.prompts]

    def weight(self, output: RequestOutput) -> int:
        # The last part repeats the prompt.
        return weight_of(output) + len(output.prompt_ids) * output.finished

    def assemble(self, outputs: list[RequestOutput]) -> list[bytes]:
        answers = []
        for index, output in enumerate(outputs):
            self._count(index, output)
            (completion,) = output.outputs
            answers.append(json_pieces({**self._payload(index, completion), **self._ending(index, output, completion)}))
        if len(answers) == 1:
            return answers[0]
        parted = [piece for index, pieces in enumerate(answers) for piece in (b"," if index else b"[", *pieces)]
        return [*parted, b"]"]

    def render(self, index: int, output: RequestOutput) -> bytes:
        self._count(index, output)
        events = []
        for completion in output.outputs:
            payload = {**self._payload(index, completion), **self._counts(index)}
            if completion.text or completion.token_ids:
                events.append(event(dumps({**payload, "stop": False})))
            if output.finished:
                ending = {"content": "", "tokens": [], **self._ending(index, output, completion)}
                events.append(event(dumps({"index": index, **ending})))
        return "".join(events).encode()

    def _count(self, index: int, output: RequestOutput) -> None:
        self.usage.add(index, output)
        self._usages[index].add(0, output)

    def _payload(self, index: int, completion: CompletionOutput) -> dict[str, Any]:
        payload: dict[str, Any] = {
            "index": index,
            "content": completion.text,
            "tokens": completion.token_ids if self._body.return_tokens else [],
            "id_slot": -1,
        }
        if completion.logprobs is not None:
            payload["completion_probabilities"] = self._probabilities(completion)
        return payload

    def _probabilities(self, completion: CompletionOutput) -> list[dict[str, Any]]:
        given = completion.logprobs or []
        entries = chat_logprobs(self.job.texts, completion.token_ids, given)["content"] or []
        for token_id, logprobs, entry in zip(completion.token_ids, given, entries, strict=True):
            entry["id"] = token_id
            for (other, _), alternative in zip(logprobs.top, entry["top_logprobs"], strict=True):
                alternative["id"] = other
        return entries

    def _counts(self, index: int) -> dict[str, int]:
        usage = self._usages[index]
        return {"tokens_predicted": usage.completion_tokens, "tokens_evaluated": usage.prompt_tokens}

    def _ending(self, index: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        prompt = self.job.read.prompts[index]
        text = prompt.text
        if text is None:
            text = self.job.engine.tokenizer.decode(list(prompt.token_ids), False)
        word = completion.stop_reason if isinstance(completion.stop_reason, str) else ""
        return {
            "id_slot": -1,
            "stop": True,
            "model": self.job.read.model,
            **self._counts(index),
            "tokens_cached": self._usages[index].cached_tokens,
            "generation_settings": settings(self.job.read.params),
            "prompt": text,
            "truncated": False,
            "stop_type": _stop_type(completion, word),
            "stopping_word": word,
            "timings": timings(output, self._usages[index]),
        }


def _stop_type(completion: CompletionOutput, word: str) -> str:
    if completion.finish_reason is FinishReason.LENGTH:
        return "limit"
    if completion.finish_reason is FinishReason.STOP:
        return "word" if word else "eos"
    return "none"


def settings(params: SamplingParams) -> dict[str, Any]:
    """Return sampling parameters under llama.cpp's names."""
    return {
        "n_predict": -1 if params.max_tokens is None else params.max_tokens,
        "seed": -1 if params.seed is None else params.seed,
        "temperature": params.temperature,
        "top_k": params.top_k,
        "top_p": params.top_p,
        "min_p": params.min_p,
        "repeat_penalty": params.repetition_penalty,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "stop": list(params.stop),
        "ignore_eos": params.ignore_eos,
        "n_probs": params.logprobs or 0,
    }


def timings(output: RequestOutput, usage: Usage) -> dict[str, float]:
    """Return the speeds of an answer that has ended."""
    computed = usage.prompt_tokens - usage.cached_tokens
    prompt_ms, predicted_ms = (1e3 * seconds for seconds in seconds_of(output))
    return {
        "cache_n": usage.cached_tokens,
        **_speed("prompt", computed, prompt_ms),
        **_speed("predicted", usage.completion_tokens, predicted_ms),
    }


def _speed(what: str, count: int, milliseconds: float) -> dict[str, float]:
    return {
        f"{what}_n": count,
        f"{what}_ms": milliseconds,
        f"{what}_per_token_ms": milliseconds / max(1, count),
        f"{what}_per_second": count * 1e3 / milliseconds if milliseconds else 0.0,
    }


class LlamaCppApi(Handlers):
    """The request handlers."""

    def __init__(self, engine: EngineClient, handling: Handling) -> None:
        self._engine = engine
        self._handling = handling

    @post("/completion", "LlamaCppCompletion", LlamaCppBody)
    @post("/completions", "LlamaCppCompletion", LlamaCppBody)
    async def create_completion(self, request: Request) -> Response:
        """Continue a prompt, by llama.cpp's API."""
        return await self._handling.answer(request, "llamacpp_completion", "cmpl", LlamaCppAnswer)

    @post("/infill", "LlamaCppCompletion", InfillBody)
    async def fill_in(self, request: Request) -> Response:
        """Text between a prefix and a suffix, by llama.cpp's API."""
        return await self._handling.answer(request, "llamacpp_infill", "cmpl", LlamaCppAnswer)

    @get("/slots", "LlamaCppSlots")
    async def list_slots(self, request: Request) -> Response:
        """Number of sequences that can run, and of the client's tenant's that do."""
        tenant, info = client_of(request.scope).tenant, self._engine.info
        running = await self._engine.ask(
            lambda core: sum(seq.request.tenant == tenant for seq in core.scheduler.running)
        )
        numbers = range(info.max_num_seqs)
        return json_response([{"id": i, "n_ctx": info.max_model_len, "is_processing": i < running} for i in numbers])

    @get("/props", "LlamaCppProperties")
    async def show_properties(self, request: Request) -> Response:
        """The served model, in llama.cpp's form."""
        try:
            template = self._engine.tokenizer.chat_template_text
        except RequestError:  # no tokenizer
            template = ""
        info = self._engine.info
        defaults = SamplingParams(**{**LLAMACPP_DEFAULTS, **info.default_sampling, "max_tokens": None})
        properties = {
            "default_generation_settings": {"n_ctx": info.max_model_len, "params": settings(defaults)},
            "model_alias": self._handling.names[0],
            "chat_template": template,
            "modalities": {"vision": False, "audio": False},
            "build_info": f"octavo {octavo.__version__}",
        }
        return json_response(properties)
