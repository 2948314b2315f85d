"""`POST /v1/chat/completions`."""

from __future__ import annotations

from typing import Any

from octavo.engine.outputs import CompletionOutput, RequestOutput
from octavo.server.answer_json import dumps, event, json_pieces, weight_of
from octavo.server.answers.choices import Block, BlockKind, CallIds, Change, ChatChoice, Grew, Opened
from octavo.server.answers.generation import Answer, Job, ResponseExtension
from octavo.server.answers.logprobs import TokenTexts, chat_logprobs, prompt_logprobs
from octavo.server.apis import DONE
from octavo.server.bodies.body_reader import ChatRequest
from octavo.server.engine_client import EngineClient
from octavo.server.tenants.keys import Client


class ChatAnswer(Answer):
    """One chat request."""

    def __init__(
        self, engine: EngineClient, texts: TokenTexts, read: ChatRequest, client: Client, traceparent: str | None
    ) -> None:
        super().__init__(engine, Job.of(read, "chatcmpl", client, traceparent))
        self._texts = texts
        self._body = body = read.body
        self._echoed = read.echoed
        # Only if the answer has a format to parse.
        ids = CallIds(read.speech.dialect)
        self._choices = [ChatChoice(read.speech, ids) for _ in range(read.params.n)] if read.speech else []
        pins = self.job.context.pins
        self._extension = ResponseExtension(1, tells_ledger=body.tells_ledger, tells_pins=bool(pins))
        # What all events begin with, formatted once, so that a token costs only a few string joins.
        self._stream_head = dumps(self._head("chat.completion.chunk"))[:-1] + ',"choices":['
        self._begun = False

    def weight(self, output: RequestOutput) -> int:
        parsed = sum(len(completion.text) for completion in output.outputs) if self._choices else 0
        repeated = len(output.prompt_ids) if self._body.return_token_ids and not self._begun else 0
        return weight_of(output) + parsed // 2 + repeated

    def assemble(self, outputs: list[RequestOutput]) -> list[bytes]:
        (output,) = outputs
        self.usage.add(0, output)
        self._extension.add(0, output)
        response: dict[str, Any] = {
            **self._head("chat.completion"),
            "choices": [self._choice(completion) for completion in output.outputs],
            "usage": self.usage.report(),
            **self._extension.report(),
        }
        if self._body.sampling.get("prompt_logprobs") is not None:
            given = output.prompt_logprobs or ()
            response["prompt_logprobs"] = prompt_logprobs(self._texts, output.prompt_ids, given)
        if self._body.return_token_ids:
            response["prompt_token_ids"] = output.prompt_token_ids
        return json_pieces(response)

    def _choice(self, completion: CompletionOutput) -> dict[str, Any]:
        payload: dict[str, Any] = {"role": "assistant", "content": self._echoed + completion.text, "refusal": None}
        if self._choices:
            choice = self._choices[completion.index]
            choice.read(completion)
            payload["content"] = self._echoed + choice.text(BlockKind.TEXT)
            if any(block.kind is BlockKind.REASONING for block in choice.blocks):
                payload["reasoning_content"] = choice.text(BlockKind.REASONING)
            if calls := [_call(block, block.text) for block in choice.blocks if block.kind is BlockKind.CALL]:
                payload |= {"content": payload["content"] or None, "tool_calls": calls}
        return {"index": completion.index, "message": payload, **self._reported(completion)}

    def _reported(self, completion: CompletionOutput) -> dict[str, Any]:
        """Return the fields of a choice other than its text, for whole answers and for chunks."""
        reported: dict[str, Any] = {
            "logprobs": None,
            "finish_reason": (
                self._choices[completion.index].finish_reason if self._choices else completion.finish_reason
            ),
            "stop_reason": completion.stop_reason,
        }
        if completion.logprobs is not None:
            reported["logprobs"] = chat_logprobs(
                self._texts,
                completion.token_ids,
                completion.logprobs,
                as_token_ids=bool(self._body.return_tokens_as_token_ids),
            )
        if self._body.return_token_ids:
            reported["token_ids"] = completion.token_ids
        return reported

    def render(self, index: int, output: RequestOutput) -> bytes:
        self.usage.add(0, output)
        self._extension.add(0, output)
        tail = "]}"
        if self._body.reports_usage:
            continuous = self._body.reports_usage_continuously
            tail = f'],"usage":{dumps(self.usage.report()) if continuous else "null"}}}'
        chunks = [] if self._begun else self._roles(self._stream_head, tail, output)
        self._begun = True
        chunks += [
            event(self._stream_head + delta + tail)
            for completion in output.outputs
            if completion.token_ids or completion.text or completion.finish_reason
            for delta in (self._parsed_deltas(completion) if self._choices else [self._delta(completion)])
        ]
        return "".join(chunks).encode()

    def last(self) -> bytes:
        """Return the end: `DONE`, after an event with usage and the `octavo` object if they were requested."""
        payload = self._extension.report()
        if self._body.reports_usage:
            payload = {"usage": self.usage.report(), **payload}
        return (event(f"{self._stream_head}],{dumps(payload)[1:]}").encode() if payload else b"") + DONE

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.job.response_id,
            "object": kind,
            "created": self.job.created,
            "model": self.job.model,
        }

    def _roles(self, head: str, tail: str, output: RequestOutput) -> list[str]:
        """Return the first event of every choice, which carries its role."""
        delta = {"role": "assistant", "content": self._echoed}
        if self._body.return_token_ids:
            tail = f'],"prompt_token_ids":{dumps(output.prompt_token_ids)}{tail[1:]}'
        choices = [
            {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            for index in range(self.job.params.n)
        ]
        return [event(head + dumps(choice) + tail) for choice in choices]

    def _parsed_deltas(self, completion: CompletionOutput) -> list[str]:
        """Return one choice object per parsed delta; the last one also carries the fields of `_reported`."""
        changes = self._choices[completion.index].read(completion)
        deltas = [delta for change in changes if (delta := _delta(change)) is not None]
        plain = {"logprobs": None, "finish_reason": None}
        says_more = completion.finish_reason or completion.logprobs is not None or self._body.return_token_ids
        chunks = [{"index": completion.index, "delta": delta, **plain} for delta in deltas]
        if says_more:
            last = chunks.pop() if chunks and completion.finish_reason is None else {"index": completion.index}
            chunks.append({"delta": {}, **last, **self._reported(completion)})
        return [dumps(chunk) for chunk in chunks]

    def _delta(self, completion: CompletionOutput) -> str:
        if completion.finish_reason is None and completion.logprobs is None and not self._body.return_token_ids:
            # The fast path: nearly every event of nearly every stream.
            content = dumps(completion.text)
            return (
                f'{{"index":{completion.index},"delta":{{"content":{content}}},"logprobs":null,"finish_reason":null}}'
            )
        delta = {"content": completion.text} if completion.text else {}
        return dumps({"index": completion.index, "delta": delta, **self._reported(completion)})


def _call(block: Block, arguments: str) -> dict[str, Any]:
    return {"id": block.call_id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


def _delta(change: Change) -> dict[str, Any] | None:
    """Return a change as OpenAI's `delta` object; None if it says nothing."""
    match change:
        case Opened(block) if block.kind is BlockKind.CALL:
            return {"tool_calls": [{"index": block.number, **_call(block, "")}]}
        case Grew(block, text) if block.kind is BlockKind.CALL:
            return {"tool_calls": [{"index": block.number, "function": {"arguments": text}}]}
        case Grew(block, text):
            return {"reasoning_content" if block.kind is BlockKind.REASONING else "content": text}
        case _:
            return None
