import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from octavo.kvcache.hashing import DIGEST_BYTES, HashChain, child_hash, root_hash, token_bytes


def test_keys_are_the_same_in_another_process() -> None:
    code = (
        "from octavo.kvcache.hashing import *;"
        "print(child_hash(root_hash('model','bf16','salt'), token_bytes([1,2,3])).hex())"
    )
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    here = child_hash(root_hash("model", "bf16", "salt"), token_bytes([1, 2, 3]))
    assert here.hex() == other
    assert len(here) == DIGEST_BYTES


def test_parts_of_a_root_do_not_run_together() -> None:
    assert root_hash("ab", "c") != root_hash("a", "bc") != root_hash("abc")


@given(st.lists(st.integers(0, 2**31 - 1), max_size=60), st.integers(1, 8), st.integers(0, 60))
def test_a_chain_grown_in_two_steps_equals_one_grown_at_once(tokens: list[int], size: int, cut: int) -> None:
    root = root_hash("m")
    at_once, in_steps = HashChain(root, size), HashChain(root, size)
    at_once.extend(tokens)
    in_steps.extend(tokens[:cut])
    in_steps.extend(tokens)
    assert at_once.hashes == in_steps.hashes
    assert len(at_once) == len(tokens) // size


@given(st.lists(st.integers(0, 100), min_size=8, max_size=32), st.data())
def test_a_changed_token_changes_every_key_from_its_block_on_and_none_before(
    tokens: list[int], data: st.DataObject
) -> None:
    position = data.draw(st.integers(0, len(tokens) - 1))
    changed = [*tokens]
    changed[position] += 1
    one, two = HashChain(root_hash("m"), 4), HashChain(root_hash("m"), 4)
    one.extend(tokens)
    two.extend(changed)
    for index, (a, b) in enumerate(zip(one.hashes, two.hashes, strict=True)):
        assert (a == b) == (index < position // 4)
