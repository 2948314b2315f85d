import subprocess
import sys
from array import array
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.kvcache.block import BlockHash
from octavo.kvcache.hashing import DIGEST_BYTES, FullBlocks, TokenChain, chain_hashes, root_hash, token_bytes
from tests.kvcache.caches import extend


def test_keys_are_the_same_in_another_process() -> None:
    code = (
        "from octavo.kvcache.hashing import *;"
        "print(chain_hashes(root_hash('model','bf16','salt'), token_bytes([1,2,3]), 3).hex())"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    here = chain_hashes(root_hash("model", "bf16", "salt"), token_bytes([1, 2, 3]), 3)
    assert here.hex() == other
    assert len(here) == DIGEST_BYTES


def test_keys_are_hashed_from_little_endian_tokens_on_every_machine() -> None:
    root, tokens = root_hash("m"), [1, 70_000, 3, 4]
    packed = b"".join(token.to_bytes(4, "little") for token in tokens)
    expected = blake2b(root + packed, digest_size=DIGEST_BYTES).digest()
    for given_as in (tokens, array("i", tokens)):
        assert token_bytes(given_as) == packed
        assert FullBlocks.of(root, 4, given_as).keys == expected


def test_a_machine_of_the_other_byte_order_swaps_what_it_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    swapped = array("i", [1, 70_000])
    swapped.byteswap()
    monkeypatch.setattr(sys, "byteorder", "big")
    assert token_bytes(array("i", [1, 70_000])) == swapped.tobytes()


def test_parts_of_a_root_do_not_run_together() -> None:
    assert root_hash("ab", "c") != root_hash("a", "bc") != root_hash("abc")


def chain_of(tokens: list[int], size: int, prompt: int = 0) -> TokenChain:
    """Of all the tokens, the first `prompt` of them hashed as a prompt."""
    chain = TokenChain(FullBlocks.of(root_hash("m"), size, tokens[:prompt]))
    extend(chain, tokens)
    return chain


def keys(chain: TokenChain) -> list[bytes]:
    return [chain.key(length) for length in range(len(chain) + 1)]


@given(st.lists(st.integers(0, 2**31 - 1), max_size=60), st.integers(1, 8), st.integers(0, 60), st.integers(0, 60))
def test_a_chain_is_the_same_however_it_was_grown(tokens: list[int], size: int, cut: int, prompt: int) -> None:
    at_once, in_steps = chain_of(tokens, size), chain_of(tokens[:cut], size, prompt)
    extend(in_steps, tokens)
    assert len(at_once) == len(in_steps) == len(tokens) // size
    assert keys(at_once) == keys(in_steps)
    expected = [root_hash("m")]
    for index in range(len(at_once)):
        packed = token_bytes(tokens[index * size : (index + 1) * size])
        expected.append(BlockHash(blake2b(expected[-1] + packed, digest_size=DIGEST_BYTES).digest()))
        assert at_once.tokens(index, index + 1) == in_steps.tokens(index, index + 1) == packed
    assert keys(at_once) == expected


@given(st.lists(st.integers(0, 99), max_size=60), st.integers(1, 4), st.integers(0, 60), st.data())
def test_any_part_of_a_chain_reads_the_same_across_prompt_and_output(
    tokens: list[int], size: int, prompt: int, data: st.DataObject
) -> None:
    chain = chain_of(tokens, size, prompt)
    start = data.draw(st.integers(0, len(chain)))
    end = data.draw(st.integers(start, len(chain)))
    assert chain.tokens(start, end) == token_bytes(tokens[start * size : end * size])
    rows = list(chain.rows(start, end))
    assert b"".join(found.tobytes() for found, _ in rows) == b"".join(keys(chain)[start + 1 : end + 1])
    assert b"".join(found.tobytes() for _, found in rows) == chain.tokens(start, end)


def test_a_copy_shares_the_prompt_and_grows_on_its_own() -> None:
    parent = chain_of([1, 2, 3, 4, 5, 6], 2, prompt=4)
    child = parent.copy()
    extend(child, [1, 2, 3, 4, 5, 6, 7, 8])
    extend(parent, [1, 2, 3, 4, 5, 6, 9, 9])
    assert keys(child) == keys(chain_of([1, 2, 3, 4, 5, 6, 7, 8], 2))
    assert keys(parent) == keys(chain_of([1, 2, 3, 4, 5, 6, 9, 9], 2))


def test_a_long_prompt_is_hashed_in_slices_that_make_one_chain() -> None:
    tokens = [i * 7919 % 50_000 for i in range(3 * 4096 + 17)]
    assert keys(chain_of(tokens, 16, prompt=len(tokens))) == keys(chain_of(tokens, 16))


@given(st.lists(st.integers(0, 100), min_size=8, max_size=32), st.data())
def test_a_changed_token_changes_every_key_from_its_block_on_and_none_before(
    tokens: list[int], data: st.DataObject
) -> None:
    position = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens]
    changed[position] += 1
    for index, (a, b) in enumerate(zip(keys(chain_of(tokens, 4))[1:], keys(chain_of(changed, 4))[1:], strict=True)):
        assert (a == b) == (index < position // 4)


def test_the_full_blocks_of_an_array_are_its_own_memory() -> None:
    prompt = array("i", range(3 * 4096 + 17))
    found = FullBlocks.of(root_hash("m"), 16, prompt)
    assert found.tokens.obj is prompt
    assert bytes(found.tokens) == token_bytes(prompt[: 3 * 4096 + 16])
    assert found == FullBlocks.of(root_hash("m"), 16, list(prompt))
