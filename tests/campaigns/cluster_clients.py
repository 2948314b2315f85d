"""The clients of `cluster_faults.py`: what they request, and what they have received of an answer."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import h11


@dataclass(frozen=True)
class Question:
    """A body to which every answer must be the same."""

    path: str
    body: dict[str, Any]

    @property
    def streams(self) -> bool:
        """Whether the server can also answer it as a stream."""
        return not self.body.keys() & {"use_beam_search", "prompt_logprobs"}


def questions(rng: random.Random, count: int, words: Sequence[str]) -> list[Question]:
    """Requests of all kinds, many of which share beginnings."""
    families = [[rng.randrange(3, 240) for _ in range(rng.randint(20, 120))] for _ in range(8)]
    return [_question(rng, i, families, words) for i in range(count)]


def _question(rng: random.Random, i: int, families: list[list[int]], words: Sequence[str]) -> Question:
    own = [rng.randrange(3, 240) for _ in range(rng.randint(1, 150))]
    prompt: Any = rng.choice([[], [], *families[: 1 + i % 8]]) + own
    sampled = {"temperature": 0.9, "seed": i, "top_p": 0.95}
    text = " ".join(rng.choices(words, k=rng.randint(1, 30)))
    body: dict[str, Any] = {"temperature": 0, "max_tokens": rng.randint(4, 120), "ignore_eos": True, "prompt": prompt}
    match i % 10:
        case 0:
            body |= {"n": 3, **sampled}
        case 1:
            body |= {"logprobs": 2, "n": 2, **sampled}
        case 2:
            body |= {"n": 2, "use_beam_search": True, "best_of": 4, "max_tokens": rng.randint(4, 40)}
        case 3:
            body |= {"prompt": text, "stop": ["e", "zz"], "min_tokens": 5, "ignore_eos": False, **sampled}
        case 4:
            body |= {"prompt": [own, own[::-1], own[:1]], "n": 2, "max_tokens": 20, **sampled}
        case 5:
            body |= {"repetition_penalty": 1.2, "presence_penalty": 0.5, "logit_bias": {"7": 5}, **sampled}
        case 6:
            body |= {"prompt_logprobs": 1, "echo": True, "logprobs": 1}
        case 7:
            del body["prompt"]
            body["messages"] = [{"role": "user", "content": text}]
            return Question("/v1/chat/completions", body | sampled)
        case _:
            body |= sampled if i % 20 > 10 else {}
    return Question("/v1/completions", body)


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass
class Choice:
    """What has been received of one choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    finish_reason: str | None = None

    def begins(self, whole: Choice) -> bool:
        """Whether this is the beginning of `whole` or, if it has ended, equal to it."""
        if self.finish_reason is not None:
            return self == whole
        return (
            whole.text.startswith(self.text)
            and whole.token_ids[: len(self.token_ids)] == self.token_ids
            and whole.logprobs[: len(self.logprobs)] == self.logprobs
        )


@dataclass
class Reply:
    """An answer as far as it has been received.

    Attributes:
        status: 0 if none was received.
        error: the error's code, if the answer is an error or ends with one.
        is_whole: whether it was received to its end.
    """

    status: int = 0
    error: str = ""
    is_whole: bool = False
    choices: dict[int, Choice] = field(default_factory=dict)

    def add(self, answer: dict[str, Any]) -> None:
        if "error" in answer:
            self.error = answer["error"]["code"] or answer["error"]["type"]
            return
        for given in answer["choices"]:
            choice = self.choices.setdefault(given["index"], Choice())
            message = given.get("delta") or given.get("message") or {}
            choice.text += given.get("text") or message.get("content") or ""
            choice.token_ids += given.get("token_ids") or []
            logprobs = given.get("logprobs") or {}
            choice.logprobs += logprobs.get("token_logprobs") or []
            choice.finish_reason = given.get("finish_reason") or choice.finish_reason

    def is_part_of(self, whole: Reply) -> bool:
        return all(choice.begins(whole.choices[index]) for index, choice in self.choices.items())


def parse(received: bytes) -> Reply:
    """Parse the bytes received on a connection, complete or not."""
    if not received:
        return Reply()
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="POST", target="/", headers=[("Host", "x"), ("Content-Length", "0")]))
    connection.send(h11.EndOfMessage())
    connection.receive_data(received)
    reply, body, streams = Reply(), bytearray(), False
    while (event := connection.next_event()) is not h11.NEED_DATA:
        if isinstance(event, h11.Response):
            reply.status = event.status_code
            streams = (b"content-type", b"text/event-stream; charset=utf-8") in list(event.headers)
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            reply.is_whole = True
            break
    if streams:
        events = bytes(body).split(b"\n\n")
        for piece in events[:-1]:
            if piece != b"data: [DONE]":
                reply.add(json.loads(piece[6:]))
        reply.is_whole = reply.is_whole and events[-2:] == [b"data: [DONE]", b""]
    elif reply.is_whole:
        reply.add(json.loads(body))
    return reply


class Client:
    """Sends requests to one server."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._address = host, port

    async def ask(
        self, question: Question, key: str, leaves_after: float | None = None, *, stream: bool = True
    ) -> Reply:
        """Send a request on a new connection, read the answer, and leave after so many seconds."""
        body = json.dumps({**question.body, "stream": stream, "return_token_ids": True}).encode()
        lines = [
            f"POST {question.path} HTTP/1.1",
            "Host: localhost",
            "Content-Type: application/json",
            f"Authorization: Bearer {key}",
            f"Content-Length: {len(body)}",
            "Connection: close",
        ]
        connection = socket.socket()
        connection.setblocking(False)
        loop = asyncio.get_running_loop()
        received: list[bytes] = []
        try:
            async with asyncio.timeout(leaves_after):
                await loop.sock_connect(connection, self._address)
                await loop.sock_sendall(connection, "\r\n".join([*lines, "", ""]).encode() + body)
                while piece := await loop.sock_recv(connection, 65536):
                    received.append(piece)
        except OSError:  # refused, reset, unreachable, or it has left
            pass
        finally:
            connection.close()
        return parse(b"".join(received))
