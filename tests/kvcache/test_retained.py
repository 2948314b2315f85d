"""What decides which blocks a sequence keeps: it lets go of some only where it says that it may."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from octavo.kv_budget import KVBudget
from octavo.kvcache.attended import AttendedBlocks
from octavo.kvcache.holdings import Retention
from octavo.kvcache.spec import Window

SIZE = 4
PROMPT = 22
RETENTIONS: dict[str, Callable[[], Retention]] = {
    "a window": lambda: Window(9),
    "a window of a block": lambda: Window(SIZE),
    "a window after two blocks of sinks": lambda: Window(9, 2),
    "attention": lambda: AttendedBlocks(KVBudget(mode="bounded", tokens=4 * SIZE), 4, SIZE, PROMPT),
    "attention, of a short prompt": lambda: AttendedBlocks(KVBudget(mode="bounded", tokens=4 * SIZE), 4, SIZE, 3),
}


def let_go(retention: Retention, num_tokens: int, *, asks: bool) -> list[list[int]]:
    """The table after each token; it is asked after every one, or only where it is due."""
    table, tables, due = list[int](), list[list[int]](), 0
    for num_computed in range(1, num_tokens + 1):
        if num_computed % SIZE == 1:
            table.append(1 + num_computed // SIZE)
        kept = sum(map(bool, table))
        retention.add(np.arange(kept, dtype=np.int64) % 3)
        if asks or num_computed >= due:
            for index in retention.let_go(table, num_computed, SIZE):
                assert table[index], "no block goes twice"
                table[index] = 0
            due = retention.due_at(num_computed, SIZE)
            assert due > num_computed
        tables.append(table.copy())
    return tables


@pytest.mark.parametrize("name", RETENTIONS)
def test_blocks_go_only_where_it_is_due(name: str) -> None:
    always, when_due = (let_go(RETENTIONS[name](), 80, asks=asks) for asks in (True, False))
    assert always == when_due
    assert 0 in always[-1]


@pytest.mark.parametrize("window", [Window(1), Window(9), Window(SIZE, 1), Window(9, 2)])
def test_a_window_keeps_what_the_next_token_sees_and_the_first_blocks(window: Window) -> None:
    for num_computed, table in enumerate(let_go(window, 60, asks=True), 1):
        seen = range(num_computed - window.tokens + 1, num_computed)
        blocks = {position // SIZE for position in seen if position >= 0} | set(range(window.sink_blocks))
        kept = {index for index, block in enumerate(table) if block}
        assert blocks & set(range(len(table))) <= kept <= blocks | {num_computed // SIZE}
        assert len(kept) <= window.most_blocks(SIZE)


@pytest.mark.parametrize("prompt", [3, PROMPT])
def test_attention_keeps_as_many_blocks_as_the_budget_has_with_the_next_tokens(prompt: int) -> None:
    retention = AttendedBlocks(KVBudget(mode="bounded", tokens=4 * SIZE), 4, SIZE, prompt)
    for num_computed, table in enumerate(let_go(retention, 80, asks=True), 1):
        needed = sum(map(bool, table)) + (num_computed % SIZE == 0)
        assert needed == 4 or num_computed <= max(prompt, 4 * SIZE)


def test_attention_lets_go_of_the_blocks_with_least_mass_between_the_first_and_the_latest() -> None:
    retention = AttendedBlocks(KVBudget(mode="bounded", tokens=4 * SIZE), 4, SIZE, PROMPT)
    retention.add(np.array([0, 1, 9, 2, 0, 0]))
    assert retention.let_go([1, 2, 3, 4, 5, 6], PROMPT, SIZE) == [1, 3]
    assert (retention.tokens_let_go, retention.mass_let_go, retention.mass_kept) == (2 * SIZE, 3, 9)
