"""KV events on the wire: vLLM's bytes, and readers that miss, repeat and restart."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from octavo.config import EngineConfig
from octavo.config_tables import KVEventsConfig
from octavo.engine.kv_events import KVEventPublisher, encoded_event
from octavo.errors import ConfigError
from octavo.kvcache.events import BlocksRemoved, BlocksStored, Event
from octavo.kvcache.manager import KVCacheManager
from octavo.request import RequestContext
from octavo.sampling_params import SamplingParams
from tests.engine.tiny_engine import tiny_core
from tests.kvcache.caches import admit_and_compute, make_manager, make_sequence
from tests.kvcache.event_index import EventIndex, findable
from tests.ports import free_port

msgspec: Any = pytest.importorskip("msgspec")
zmq: Any = pytest.importorskip("zmq")

SIZE = 4
END = (-1).to_bytes(8, "big", signed=True)


# The structures of vLLM's vllm/distributed/kv_events.py: events are maps on its main branch of 2026, and arrays in its
# releases; a batch is an array.
STORED_FIELDS: list[Any] = [
    ("block_hashes", list[int]),
    ("parent_block_hash", int | None),
    ("token_ids", list[int]),
    ("block_size", int),
    ("lora_id", int | None),
    ("medium", str | None),
    ("lora_name", str | None),
    ("extra_keys", list[tuple[Any, ...] | None] | None, None),
]
REMOVED_FIELDS: list[Any] = [("block_hashes", list[int]), ("medium", str | None)]


def vllms(tag: str, fields: list[Any], form: str) -> Any:
    """The class of an event of vLLM's."""
    return msgspec.defstruct(tag, fields, array_like=form == "array", omit_defaults=True, gc=False, tag=True)


def batch(*events: Any) -> Any:
    fields: list[Any] = [("ts", float), ("events", list[Any]), ("data_parallel_rank", int | None, None)]
    return msgspec.defstruct("Batch", fields, array_like=True, omit_defaults=True, gc=False)(1.5, list(events), 0)


KEYS: list[Any] = [("dynamo-cache-salt:s",), None]
STORED: tuple[Any, ...] = ([2**64 - 1, 7], 5, [1, 2, 3, 4, 5, 6, 7, 8], SIZE, None, "GPU", None)


@pytest.mark.parametrize("form", ["array", "map"])
@pytest.mark.parametrize(
    ("event", "tag", "fields", "values"),
    [
        (BlocksStored(STORED[0], STORED[1], STORED[2], ""), "BlockStored", STORED_FIELDS, STORED),
        (BlocksStored(STORED[0], STORED[1], STORED[2], "s"), "BlockStored", STORED_FIELDS, (*STORED, KEYS)),
        (
            BlocksStored([3], None, [1, 2, 3, 4], ""),
            "BlockStored",
            STORED_FIELDS,
            ([3], None, [1, 2, 3, 4], *STORED[3:]),
        ),
        (BlocksRemoved([1, 2]), "BlockRemoved", REMOVED_FIELDS, ([1, 2], "GPU")),
    ],
)
def test_events_have_the_bytes_of_vllms(form: str, event: Event, tag: str, fields: list[Any], values: Any) -> None:
    ours = msgspec.msgpack.encode([1.5, [encoded_event(event, SIZE, form)], 0])
    assert ours == msgspec.msgpack.encode(batch(vllms(tag, fields, form)(*values)))


def decoded(payload: bytes) -> list[Event | None]:
    """The events of a batch; None for `AllBlocksCleared`."""
    events: list[Event | None] = []
    for tag, *fields in msgspec.msgpack.decode(payload)[1]:
        if tag == "BlockStored":
            scope = "" if (keys := fields[7]) is None else keys[0][0].removeprefix("dynamo-cache-salt:")
            events.append(BlocksStored(fields[0], fields[1], fields[2], scope))
        else:
            events.append(BlocksRemoved(fields[0]) if tag == "BlockRemoved" else None)
    return events


class Reader:
    """Reads as vLLM's documentation says: in order of the numbers, asking for those that are missing."""

    def __init__(self, config: KVEventsConfig, subscribes: bool = True) -> None:
        context = zmq.Context.instance()
        self.live: Any = context.socket(zmq.SUB)
        self.live.connect(config.endpoint)
        if subscribes:
            self.live.subscribe(b"")
        self.replay: Any = context.socket(zmq.DEALER)
        self.replay.connect(config.replay_endpoint or "")
        self.index = EventIndex(SIZE)
        self.next = 0
        self.num_asked = self.num_cleared = 0

    def close(self) -> None:
        self.live.close(0)
        self.replay.close(0)

    def ask(self, number: int) -> list[tuple[int, bytes]]:
        self.num_asked += 1
        self.replay.send_multipart([b"", number.to_bytes(8, "big")])
        batches: list[tuple[int, bytes]] = []
        while self.replay.poll(10_000):
            _, name, payload = self.replay.recv_multipart()
            if name == END:
                return batches
            batches.append((int.from_bytes(name, "big"), payload))
        raise AssertionError("no answer within ten seconds")

    def take(self, number: int, payload: bytes) -> None:
        if number < self.next:
            return  # a live batch that was in the answer to a question too
        for event in decoded(payload):
            if event is None:
                self.index.blocks.clear()
                self.num_cleared += 1
            else:
                self.index.apply([event])
        self.next = number + 1

    def receive(self, number: int, payload: bytes) -> None:
        if number > self.next:
            for missed in self.ask(self.next):
                self.take(*missed)
        self.take(number, payload)

    def read(self, until: Any, seconds: float = 30.0) -> None:
        """Read what comes until a condition holds."""
        deadline = time.monotonic() + seconds
        while not until():
            assert time.monotonic() < deadline, "it did not come to hold"
            if self.live.poll(20):
                _, number, payload = self.live.recv_multipart()
                self.receive(int.from_bytes(number, "big"), payload)


@contextmanager
def published(manager: KVCacheManager, **options: Any) -> Iterator[tuple[KVEventPublisher, KVEventsConfig]]:
    ports = options.pop("ports", None) or (free_port(), free_port())
    first, second = (f"tcp://127.0.0.1:{port}" for port in ports)
    config = KVEventsConfig(enable_kv_cache_events=True, endpoint=first, replay_endpoint=second, **options)
    assert manager.events is not None
    publisher = KVEventPublisher(config, manager.events, SIZE)
    try:
        yield publisher, config
    finally:
        publisher.close()


# Numbers of steps for `work` that no test names.
LATER = itertools.count(1000)


def work(manager: KVCacheManager, publisher: KVEventPublisher, start: int = 0, count: int = 1) -> None:
    """Steps that each compute a prompt of its own, which evict older ones."""
    for number in range(start, start + count):
        seq = make_sequence([number * 100 + place for place in range(9)], tenant="t")
        admit_and_compute(manager, seq)
        manager.forget(seq)
        publisher.publish()


def knows_all(reader: Reader, manager: KVCacheManager) -> Any:
    return lambda: reader.index.blocks == findable(manager)


def test_a_reader_that_comes_late_asks_for_all_and_a_live_batch_that_was_in_the_answer_changes_nothing() -> None:
    manager = make_manager(num_blocks=12, logs_events=True)
    with published(manager) as (publisher, config):
        work(manager, publisher, count=20)
        reader = Reader(config)
        try:
            deadline = time.monotonic() + 30
            while not reader.live.poll(20):  # until the subscription has arrived
                work(manager, publisher, start=next(LATER))
                assert time.monotonic() < deadline
            work(manager, publisher, start=10, count=30)
            reader.read(knows_all(reader, manager))
            assert reader.num_asked == 1
            assert len(reader.index.blocks) > 4
            # An older batch that arrives again, behind newer ones, must bring nothing back.
            before = dict(reader.index.blocks)
            number, payload = reader.ask(0)[1]
            reader.receive(number, payload)
            assert reader.index.blocks == before
        finally:
            reader.close()


def test_a_gap_is_filled_from_the_buffer() -> None:
    manager = make_manager(num_blocks=12, logs_events=True)
    with published(manager) as (publisher, config):
        reader = Reader(config)
        try:
            _connect(reader, manager, publisher)
            for number in range(5, 15):
                work(manager, publisher, start=number)
                assert reader.live.poll(10_000)
                missed = reader.live.recv_multipart()  # noqa: F841 (as if it had been lost on the way)
            work(manager, publisher, start=20)
            reader.read(knows_all(reader, manager))
            assert reader.num_asked == 2
            before = reader.next
            work(manager, publisher, start=30)
            assert reader.live.poll(10_000)
            reader.live.recv_multipart()  # the last one, which nothing follows
            reader.read(lambda: reader.next > before and knows_all(reader, manager)())
        finally:
            reader.close()


def test_a_reader_behind_the_buffer_is_told_all_blocks_anew() -> None:
    manager = make_manager(num_blocks=40, logs_events=True)
    with published(manager, buffer_steps=4) as (publisher, config):
        publisher.on_wanted = publisher.publish  # no step is due; nothing else changes the cache meanwhile
        work(manager, publisher, count=12)
        reader = Reader(config)
        try:
            _connect(reader, manager, publisher)
            reader.read(lambda: reader.num_cleared >= 1 and knows_all(reader, manager)())
            assert len(reader.index.blocks) > 20
        finally:
            reader.close()


def test_after_a_restart_at_the_same_addresses_a_reader_forgets_what_was_before() -> None:
    ports = free_port(), free_port()
    manager = make_manager(num_blocks=12, logs_events=True)
    with published(manager, ports=ports) as (publisher, config):
        reader = Reader(config)
        _connect(reader, manager, publisher)
        reader.read(knows_all(reader, manager))
    again = make_manager(num_blocks=12, logs_events=True)
    try:
        with published(again, ports=ports) as (publisher, _):
            work(again, publisher, start=500)
            deadline = time.monotonic() + 30
            while not reader.live.poll(20):
                work(again, publisher, start=next(LATER))
                assert time.monotonic() < deadline
            reader.read(knows_all(reader, again))
            assert reader.index.blocks
    finally:
        reader.close()


def test_a_full_queue_drops_events_without_blocking_and_all_blocks_follow() -> None:
    manager = make_manager(num_blocks=40, logs_events=True)
    with published(manager, max_queue_size=2) as (publisher, config):
        reader = Reader(config)
        try:
            _connect(reader, manager, publisher)
            publisher.on_wanted = publisher.publish
            send, publisher._send_batch = publisher._send_batch, lambda batch: time.sleep(0.05)
            work(manager, publisher, start=30, count=6)
            assert publisher.num_dropped >= 1
            publisher._send_batch = send
            reader.read(knows_all(reader, manager))
        finally:
            reader.close()


def _connect(reader: Reader, manager: KVCacheManager, publisher: KVEventPublisher) -> None:
    """Work until the reader's subscription has arrived, and read what has come."""
    deadline = time.monotonic() + 30
    while not reader.live.poll(20):
        work(manager, publisher, start=next(LATER))
        assert time.monotonic() < deadline
    while reader.live.poll(100):
        _, number, payload = reader.live.recv_multipart()
        reader.receive(int.from_bytes(number, "big"), payload)


@pytest.mark.slow
def test_an_engine_publishes_what_its_steps_store_and_evict() -> None:
    ports = free_port(), free_port()
    given = {
        "enable_kv_cache_events": True,
        "endpoint": f"tcp://127.0.0.1:{ports[0]}",
        "replay_endpoint": f"tcp://127.0.0.1:{ports[1]}",
    }
    with tiny_core(num_blocks=24, block_size=SIZE, kv_events_config=given) as core:
        reader = Reader(KVEventsConfig(**given))  # type: ignore[arg-type]
        try:
            for number in range(12):
                prompt = [3 + (number * 31 + place) % 200 for place in range(18)]
                context = RequestContext(tenant="ab"[number % 2])
                core.add(core.inputs.make(prompt, SamplingParams(max_tokens=6, ignore_eos=True), context))
                while core.has_work:
                    core.step()
            for missed in reader.ask(0):
                reader.take(*missed)
            reader.read(lambda: reader.index.blocks == findable(core.scheduler.kv))
            assert {scope for _, _, scope in reader.index.blocks.values()} - {""}
            assert core.reset_prefix_cache()
            for missed in reader.ask(reader.next):
                reader.take(*missed)
            reader.read(lambda: not reader.index.blocks)
        finally:
            reader.close()
            core.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("[1]", "kv_events_config must be a JSON object"),
        ('{"endpoints": "x"}', "did you mean endpoint"),
        ('{"enable_kv_cache_events": true, "format": "json"}', "format must be one of array, map"),
        ({"buffer_steps": 0}, "buffer_steps must be at least 1"),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(kv_events_config=given)


def test_nothing_is_published_unless_it_is_switched_on_as_in_vllm() -> None:
    assert EngineConfig.from_options({"kv_events_config": "{}"}).kv_events is None
    assert (
        EngineConfig(kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null")).kv_events is None
    )
    with pytest.raises(ConfigError, match="enable_prefix_caching is off"):
        EngineConfig(kv_events_config=KVEventsConfig(enable_kv_cache_events=True), enable_prefix_caching=False)


def test_an_address_that_is_taken_is_an_error_with_the_address() -> None:
    manager = make_manager(logs_events=True)
    assert manager.events is not None
    with published(manager) as (_, config), pytest.raises(ConfigError, match=config.endpoint):
        KVEventPublisher(config, manager.events, SIZE)
