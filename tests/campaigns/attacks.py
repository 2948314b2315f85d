"""Attack a real server with one valid key, and measure what another tenant notices.

    python -m tests.campaigns.attacks [--only PART] [--rows FILE] [--out FILE]

Writes attacks.md in the folder of this machine's results; takes about 20 minutes. Exits with 1 if the server failed: an
answer was a 500, or the other tenant's stream or /health broke off. `octavo serve` runs in a separate process; another
tenant's stream decodes all the time, and /health is requested every 20 ms (`watched_server.py`). Reported for each
attack: how it was answered, the longest wait of that stream between two tokens and of /health, and the memory of the
server and of its processes afterwards.

The longest wait of a run also holds what other work on the same machine and host does: an attack after which it is over
80 ms, or half as long again as with no attack, is run three times, and the processor time that the host took is
reported. Two rows have no attack: nothing at
all, and as many streams as an attack has, which are read. Then the attacks that need the most memory are run over and
over.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import this_machine
from tests.campaigns.attacks_by_strangers import stranger_attacks
from tests.campaigns.attacks_on_grammars import grammar_attacks
from tests.campaigns.attacks_on_the_wire import wire_attacks
from tests.campaigns.watched_server import Answer, Stalls, Watched, as_json, head, post, stolen, watched_server

COMPLETIONS, CHAT, TOKENIZE, DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
SECONDS = 3.0
# An attack whose stream waited longer than this, in seconds, is run so often in all.
AGAIN_OVER, RUNS = 0.08, 3
# What is waited for before an attack, in seconds: a stall shorter than this, at most so long.
QUIET, PATIENCE = 0.1, 10.0
# A place for the watched stream beside attacks of n = 64, which would wait for its end otherwise.
SERVER = ["--max-num-seqs", "65", "--kv-cache-memory", "1GiB", "--itl-slo-ms", "50"]
# Short, so that attacks on timeouts do not take half a minute.
TIMEOUTS = "header_timeout=3,body_timeout=3,write_timeout=3"

Attack = Callable[[int], Coroutine[Any, Any, list[Answer]]]


def bodies(*given: tuple[str, Any], at_once: int = 1) -> Attack:
    """Send bodies, `at_once` at a time."""

    async def run(port: int) -> list[Answer]:
        free = asyncio.Semaphore(at_once)

        async def send(path: str, body: Any) -> Answer:
            async with free:
                return await post(port, path, as_json(body), SECONDS)

        return list(await asyncio.gather(*(send(path, body) for path, body in given)))

    return run


def completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"prompt": [5] * 5, "max_tokens": 16, "ignore_eos": True, **fields}


async def trickle(port: int, pieces: Iterable[bytes], pause: float, patience: float) -> Answer:
    """Send pieces with a pause after each until an answer comes, then wait for it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = asyncio.ensure_future(reader.read(4096))
    try:
        for piece in pieces:
            if answer.done():
                break
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(pause)
        return Answer(int((await asyncio.wait_for(answer, patience))[9:12] or 0))
    except TimeoutError:
        return Answer(-1)
    except ConnectionError:
        return Answer(0)
    finally:
        answer.cancel()
        writer.transport.abort()


async def stalled_bodies(port: int) -> list[Answer]:
    """A hundred bodies of 15 MB that all stop before their end."""
    content = b" " * 1_000_000
    pieces = [head(COMPLETIONS, 15 * len(content) + 100, keep=True), *[content] * 15]
    return list(await asyncio.gather(*(trickle(port, pieces, 0, SECONDS) for _ in range(100))))


async def slow_headers(port: int) -> list[Answer]:
    """Two hundred headers that arrive slowly."""
    pieces = [b"POST /v1/completions HTTP/1.1\r\n", *(b"X-Slow-%d: 1\r\n" % number for number in range(20))]
    return list(await asyncio.gather(*(trickle(port, pieces, 0.25, 1) for _ in range(200))))


async def nothing(port: int) -> list[Answer]:
    """No attack."""
    await asyncio.sleep(8)
    return []


UNREAD = as_json(completion(n=8, logprobs=5, stream=True, max_tokens=2000)[1])


async def read_streams(port: int) -> list[Answer]:
    """The same streams as below, which are read: no attack."""
    return list(await asyncio.gather(*(post(port, COMPLETIONS, UNREAD, 8) for _ in range(8))))


async def unread_streams(port: int) -> list[Answer]:
    """Eight streams of logprobs that nobody reads."""
    held = []
    for _ in range(8):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", port))
        connection.sendall(head(COMPLETIONS, len(UNREAD)) + UNREAD)
        held.append(connection)
    await asyncio.sleep(8)
    for connection in held:
        connection.close()
    return [Answer(-1)] * len(held)


async def leaving_clients(port: int) -> list[Answer]:
    """Sixteen bodies of 64 prompts each, whose clients leave at once."""
    body = as_json(completion(prompt=[[i, 7] for i in range(64)], n=16, max_tokens=200)[1])
    connections = []
    for _ in range(16):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(head(COMPLETIONS, len(body)) + body)
        connections.append(connection)
    await asyncio.sleep(2)
    for connection in connections:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()
    await asyncio.sleep(1)
    return [Answer(-1)] * len(connections)


async def too_many_connections(port: int) -> list[Answer]:
    """Connections beyond the limit, held open."""
    with ExitStack() as held:
        answers = []
        for _ in range(1100):
            connection = held.enter_context(socket.create_connection(("127.0.0.1", port)))
            connection.setblocking(False)
            answers.append(connection)
            await asyncio.sleep(0)
        await asyncio.sleep(1)
        found = []
        for connection in answers:
            try:
                found.append(Answer(int(connection.recv(4096)[9:12] or 0)))
            except BlockingIOError:
                found.append(Answer(-1))
            except ConnectionError:
                found.append(Answer(0))
        return found


def attacks() -> Iterator[tuple[str, Attack]]:
    """Yield (name, attack), in the order of the report."""
    vocabulary = range(49152)
    text = "the blocks of the cache are read and written by the model " * 200_000
    yield "nothing, for 8 s", nothing
    yield "a small body", bodies(completion())
    yield (
        "beams: `best_of` 4, `logprobs` 1, 48,000 `stop_token_ids`",
        bodies(completion(use_beam_search=True, best_of=4, logprobs=1, stop_token_ids=list(vocabulary[:48000]))),
    )
    yield "300,000 empty messages", bodies((CHAT, {"messages": [{}] * 300_000}))
    yield "/tokenize, `return_token_strs`, 11 MB", bodies((TOKENIZE, {"prompt": text, "return_token_strs": True}))
    yield "/tokenize, 15 MB of one letter", bodies((TOKENIZE, {"prompt": "a" * 15_000_000}))
    yield "/tokenize, 500 kB of one letter × 8", bodies(*[(TOKENIZE, {"prompt": "a" * 500_000})] * 8, at_once=8)
    yield "/detokenize, 3 million ids", bodies((DETOKENIZE, {"tokens": [7] * 3_000_000}))
    yield "2,048 prompts, n = 64", bodies(completion(prompt=["a"] * 2048, n=64))
    yield "1,024 prompts", bodies(completion(prompt=["a"] * 1024, max_tokens=1))
    yield "200 prompts in 1 kB, 20 bodies", bodies(*[completion(prompt=["a"] * 200, max_tokens=1)] * 20, at_once=20)
    yield "100 prompts of 8,000 ids, n = 64", bodies(completion(prompt=[[i] * 8000 for i in range(100)], n=64))
    yield "16 prompts of 8,000 ids, n = 64", bodies(completion(prompt=[[i] * 8000 for i in range(16)], n=64))
    yield "`priority` -10⁹, 300 bodies", bodies(*[completion(priority=-(10**9))] * 300, at_once=32)
    yield "`priority` 0, 300 bodies", bodies(*[completion(priority=0)] * 300, at_once=300)
    yield (
        "`prompt_logprobs` 20 over 4,000 tokens, n = 8",
        bodies(completion(prompt=list(range(4000)), prompt_logprobs=20, n=8)),
    )
    yield "49,152 `logit_bias`, n = 64", bodies(completion(logit_bias={str(i): 1 for i in vocabulary}, n=64))
    yield "1,024 `logit_bias`, n = 64", bodies(completion(logit_bias={str(i): 1 for i in vocabulary[:1024]}, n=64))
    yield "a stop string of 4 MB", bodies(completion(stop="s" * 4_000_000))
    yield "a `cache_salt` of 8 MB, 60 bodies", bodies(*[completion(cache_salt="s" * 8_000_000)] * 60, at_once=4)
    yield "a `model` of 10 MB", bodies(completion(model="m" * 10_000_000))
    yield "a `role` of 10 MB", bodies((CHAT, {"messages": [{"role": "r" * 10_000_000, "content": "x"}]}))
    yield (
        "`stop_token_ids`: the vocabulary, with `min_tokens`",
        bodies(completion(stop_token_ids=list(vocabulary), min_tokens=16)),
    )
    yield "`metadata` of 15 MB", bodies(completion(metadata={"m": "x" * 15_000_000}))
    yield "a million unknown fields", bodies((COMPLETIONS, {f"f{i}": 1 for i in range(1_000_000)}))
    yield "5,000 unknown fields, 60 kB", bodies((COMPLETIONS, {f"f{i}": 1 for i in range(5000)}))
    yield "16 MB of [", bodies((COMPLETIONS, b"[" * 16_000_000))
    yield "5 million empty objects", bodies((COMPLETIONS, b'{"prompt": [' + b"{}," * 5_000_000 + b"{}]}"))
    yield "2.5 million ids", bodies((COMPLETIONS, {"prompt": [1234] * 2_500_000}))
    yield "32 beams, `logprobs` 20", bodies(completion(use_beam_search=True, temperature=0, best_of=32, logprobs=20))
    yield "a million content parts", bodies((CHAT, {"messages": [{"role": "user", "content": [{}] * 1_000_000}]}))
    yield "bodies of 20 MB × 20", bodies(*[(COMPLETIONS, b" " * 20_000_000)] * 20, at_once=20)
    yield "100 stalled bodies of 15 MB", stalled_bodies
    yield "200 headers that trickle", slow_headers
    yield "no attack: 8 streams of 8 × `logprobs` 5", read_streams
    yield "8 streams of 8 × `logprobs` 5 that nobody reads", unread_streams
    yield "16 clients leave 64 prompts × n = 16 each", leaving_clients
    yield "1,100 connections", too_many_connections
    yield from wire_attacks()
    yield from grammar_attacks()
    yield from stranger_attacks()


def template_attacks() -> Iterator[tuple[str, Attack]]:
    """The same, for a model whose chat template does what the client tells it to."""

    def chat(**variables: Any) -> tuple[str, Any]:
        messages = [{"role": "user", "content": "x"}]
        return CHAT, {"messages": messages, "chat_template_kwargs": variables, "max_tokens": 1}

    yield "a template that does nothing", bodies(chat())
    yield "a template that loops 10⁹ times, × 4", bodies(*[chat(loops=99_999)] * 4, at_once=4)
    yield "a template that formats 10⁹ characters", bodies(chat(width=999_999_999))
    yield "a template that writes 10¹⁰ characters", bodies(chat(writes=99_999))


TEMPLATE = (
    "{% for i in range(loops | default(0)) %}{% for j in range(loops) %}{% endfor %}{% endfor %}"
    "{{ '%*d' % (width | default(1), 1) }}"
    "{% for i in range(writes | default(0)) %}{{ 'x' * 99999 }}{% endfor %}"
)


def write_model(folder: Path, template: str, **config: Any) -> None:
    """Write a tiny random model of 256 tokens, one per byte, with a chat template; the same each time."""
    import torch
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    sizes = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
    }
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | config)).save_pretrained(folder)


@dataclass(frozen=True)
class Run:
    """One run of an attack; `stolen` is the processor time that the host took meanwhile, in seconds."""

    answers: list[Answer]
    seen: Stalls
    stolen: float


def run_once(server: Watched, attack: Attack, usual: float) -> Run:
    server.settle(max(QUIET, 1.5 * usual), PATIENCE)
    server.stalls()
    before = stolen()
    answers = asyncio.run(attack(server.port))
    seen = server.stalls()
    return Run(answers, seen, stolen() - before)


def attack_all(server: Watched, found: Iterable[tuple[str, Attack]], rows: Rows) -> None:
    """Run the attacks that `rows` has no row of, and add them."""
    usual = run_once(server, nothing, 0).seen.stream
    for name, attack in found:
        if name in rows:
            continue
        runs = [run_once(server, attack, usual)]
        while runs[0].seen.stream > max(AGAIN_OVER, 1.5 * usual) and len(runs) < RUNS:
            runs.append(run_once(server, attack, usual))
        server.settle(max(QUIET, 1.5 * usual), PATIENCE)
        rows.add(name, row_of(name, runs, str(server.memory())), has_failed(runs))


class Rows:
    """The rows of the report so far, kept in a file so that an interrupted campaign goes on where it ended.

    Args:
        path: the file; None to keep them nowhere.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._rows: dict[str, tuple[str, bool]] = {}
        if path is not None and path.exists():
            self._rows = {name: (row, failed) for name, (row, failed) in json.loads(path.read_text()).items()}

    def __contains__(self, name: str) -> bool:
        return name in self._rows

    def add(self, name: str, row: str, failed: bool) -> None:
        print(row, flush=True)
        self._rows[name] = row, failed
        if self._path is not None:
            self._path.write_text(json.dumps(self._rows))

    @property
    def lines(self) -> list[str]:
        return [row for row, _ in self._rows.values()]

    @property
    def failed(self) -> list[str]:
        return [name for name, (_, failed) in self._rows.items() if failed]


def has_failed(runs: list[Run]) -> bool:
    return any(run.seen.errors or any(answer.status == 500 for answer in run.answers) for run in runs)


def row_of(name: str, runs: list[Run], memory: str) -> str:
    counts = Counter(map(str, runs[0].answers))
    told = ", ".join(f"{status} × {count}" if count > 1 else status for status, count in counts.items())
    errors = sum(run.seen.errors for run in runs)
    slowest = max((answer.seconds for run in runs for answer in run.answers), default=0.0)
    waits = sorted(run.seen.stream * 1e3 for run in runs)
    stream = f"{waits[len(waits) // 2]:.0f}"
    if len(waits) > 1:
        stream += f" ({', '.join(f'{wait:.0f}' for wait in waits)})"
    first, health, host = (
        max(values) * 1e3
        for values in zip(*((run.seen.first, run.seen.health, run.stolen) for run in runs), strict=True)
    )
    stalls = f"{stream} | {f'{first:.0f}' if first else '—'} | {health:.0f} | {host:.0f}"
    return f"| {name} | {told or '—'}{f' ({errors} errors)' if errors else ''} | {slowest:.2f} | {stalls} | {memory} |"


# Seconds in which a server has returned freed memory.
RETURNED_AFTER = 31
# Those after which the table had shown the most memory.
HEAVY = (
    *("/detokenize, 3 million ids", "1,024 prompts", "a `cache_salt`", "a million unknown", "stalled bodies"),
    *("nobody reads", "clients leave 64", "follow-ups"),
)


def memory_rounds(server: Watched, count: int) -> list[str]:
    """Run the attacks that need the most memory `count` times over, and return a table of what is resident then."""
    rows = ["| round | KV cache | server besides | processes that read bodies |", "|---|---:|---:|---:|"]
    for number in range(count + 1):
        for _, attack in chosen(attacks(), HEAVY) if number else ():
            asyncio.run(attack(server.port))
        server.settle(at_most=PATIENCE)
        time.sleep(RETURNED_AFTER if number else 0)
        rows.append(f"| {number or 'before'} | {server.memory()} |")
        print(rows[-1], flush=True)
    return rows


def chosen(found: Iterable[tuple[str, Attack]], only: Sequence[str] | None) -> list[tuple[str, Attack]]:
    return [(name, attack) for name, attack in found if not only or any(part in name for part in only)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", help="attacks whose name holds this; may be given several times")
    parser.add_argument("--rows", type=Path, help="JSON file of rows: attacks that it has are not run again")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the attacks that need the most memory; or 0")
    parser.add_argument(
        "--out", type=this_machine.output_file, default=str(this_machine.results_folder() / "attacks.md")
    )
    args = parser.parse_args()
    rows = Rows(args.rows)
    rounds: list[str] = []
    if some := chosen(attacks(), args.only):
        with watched_server([*SERVER, "--server-limits", TIMEOUTS]) as server:
            attack_all(server, some, rows)
    if some := chosen(template_attacks(), args.only):
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder), TEMPLATE)
            model = ["--model", folder, "--dtype", "float32", "--num-blocks", "2048"]
            with watched_server([*model, "--server-limits", f"max_body_seconds=2,{TIMEOUTS}"]) as server:
                attack_all(server, some, rows)
    if args.rounds:
        with watched_server([*SERVER, "--server-limits", TIMEOUTS]) as server:
            rounds = [MEMORY, *memory_rounds(server, args.rounds)]
    # What people wrote below the tables stays.
    _, heading, notes = (args.out.read_text() if args.out.exists() else "").partition(NOTES)
    args.out.write_text(
        HEAD.format(machine=this_machine.name()) + "\n".join(rows.lines + rounds) + "\n" + heading + notes
    )
    print(*(f"failed: {name}" for name in rows.failed), sep="\n", file=sys.stderr)
    return int(bool(rows.failed))


NOTES = "\n## What took over 100 ms\n"


HEAD = """# Attacks with one valid key

`python -m tests.campaigns.attacks` on {machine}: SmolLM2-135M behind `octavo serve --max-num-seqs 65
--kv-cache-memory 1GiB --itl-slo-ms 50`, attacker, watcher and server on the same two cores. Another tenant's stream
decodes all the time.

- answer: status codes; "given up": the client left after 3 s, while its request was served; "closed": by the server.
- stream, /health: the longest time that the other tenant waited between two tokens, and for an answer of /health. Where
  the stream waited for long, the attack was run three times: the median, and all three. A step of 64 sequences
  takes 50 to 80 ms by itself.
- first: how long it waited for a first token, where its stream of 4,000 tokens ended meanwhile and began anew.
- stolen: the processor time that the host took from both cores together for other machines; the most of any run.
- MiB: resident memory afterwards. The KV cache of 1 GiB becomes resident as its blocks are first written to.

| attack | answer | slowest answer, s | stream, ms | first, ms | /health, ms | stolen, ms | KV cache, MiB \
| server besides, MiB | processes that read bodies, MiB |
|---|---|---:|---:|---:|---:|---:|---:|---:|---:|
"""

MEMORY = """
## Memory

The attacks that need the most memory, over and over, in a new server; MiB 31 s after each round. A server returns freed
memory to the system every 30 s, and a process that reads bodies after each large one; one that still keeps 64 MiB more
than at its start is replaced. There are six such processes at most: two for large bodies, two for chats, and one more
of each for a tenant of which none is being read.
"""

if __name__ == "__main__":
    sys.exit(main())
