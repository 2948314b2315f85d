"""A real Gemma 3 file gives the ids of llama.cpp's algorithm, and the logits and tokens of transformers in float32.

    OCTAVO_GEMMA_GGUF=gemma-3-270m-q4_k_m.gguf python -m pytest -m soak tests/models/test_gemma_file.py

A tiny model cannot show the sizes of a real one: a window of 512, heads of 256 over a
width of 640, two bases of rotation, 262,144 tokens.
"""

from __future__ import annotations

import os
import random
import re
from heapq import heappop, heappush
from pathlib import Path

import pytest
import torch

from octavo.checkpoint.gguf_file import GGUFFile
from octavo.llm import LLM
from octavo.sampling_params import SamplingParams
from octavo.text.gguf_tokenizer import TokenType, build_tokenizer
from tests.models.tiny import load_gguf_with_transformers

FILE = os.environ.get("OCTAVO_GEMMA_GGUF", "")
PROMPT = "The capital of France is"
DOCUMENTS = Path(__file__).parents[2] / "docs"
ODDITIES = "ünïcödé 日本語 😀🏽 𝕏 \u200b   \t\t\n\n\n नमस्ते 한국어 <b>bold</b> a▁b 12345 aaaaa ===== ---  \r\n é\u0301"

pytestmark = [pytest.mark.soak, pytest.mark.skipif(not FILE, reason="OCTAVO_GEMMA_GGUF names no file")]


class SentencePiece:
    """llama.cpp's algorithm: of all adjacent pairs, the one whose union scores best is merged, the leftmost first."""

    def __init__(self, file: GGUFFile) -> None:
        tokens, types = file.get("tokenizer.ggml.tokens"), file.get("tokenizer.ggml.token_type")
        self.scores = file.get("tokenizer.ggml.scores")
        self.ids = {token: token_id for token_id, token in enumerate(tokens)}
        whole = (TokenType.CONTROL, TokenType.USER_DEFINED)
        cut_first = sorted((token for token, kind in zip(tokens, types, strict=True) if kind in whole), key=len)
        self.cut_first = re.compile(f"({'|'.join(map(re.escape, reversed(cut_first)))})")

    def encode(self, text: str) -> list[int]:
        parts = [part for part in self.cut_first.split(text) if part]
        cut = self.cut_first.fullmatch
        return [token_id for part in parts for token_id in ([self.ids[part]] if cut(part) else self._merge(part))]

    def _merge(self, text: str) -> list[int]:
        pieces = list(text.replace(" ", "▁"))
        after, before = [*range(1, len(pieces) + 1)], [*range(-1, len(pieces) - 1)]
        pairs: list[tuple[float, int, int, str]] = []

        def propose(left: int, right: int) -> None:
            if left >= 0 and right < len(pieces) and (union := pieces[left] + pieces[right]) in self.ids:
                heappush(pairs, (-self.scores[self.ids[union]], left, right, union))

        for right in range(1, len(pieces)):
            propose(right - 1, right)
        while pairs:
            _, left, right, union = heappop(pairs)
            if not pieces[left] or not pieces[right] or pieces[left] + pieces[right] != union:
                continue
            pieces[left], pieces[right], after[left] = union, "", after[right]
            if after[right] < len(pieces):
                before[after[right]] = left
            propose(before[left], left)
            propose(left, after[left])
        return [i for piece in filter(None, pieces) for i in self._ids_of(piece)]

    def _ids_of(self, piece: str) -> list[int]:
        if piece in self.ids:
            return [self.ids[piece]]
        return [self.ids[f"<0x{byte:02X}>"] for byte in piece.encode()]


def test_texts_have_the_ids_of_llama_cpp() -> None:
    file = GGUFFile(Path(FILE))
    ours, theirs = build_tokenizer(file)[0], SentencePiece(file)
    assert ours.encode(PROMPT).ids == [2, 818, 5279, 529, 7001, 563]
    rng = random.Random(0)
    corpus = "".join(path.read_text() for path in sorted(DOCUMENTS.rglob("*.md")))
    starts = [rng.randrange(len(corpus)) for _ in range(400)]
    texts = [ODDITIES, *(corpus[start : start + rng.randrange(1, 1500)] for start in starts)]
    texts += ["".join(rng.choices(ODDITIES, k=rng.randrange(1, 120))) for _ in range(400)]
    for text in texts:
        assert ours.encode(text, add_special_tokens=False).ids == theirs.encode(text), text


def test_logits_and_greedy_tokens_are_those_of_transformers() -> None:
    model = load_gguf_with_transformers(Path(FILE))
    llm = LLM(model=FILE, dtype="float32", quantization="none", max_model_len=2048)
    corpus = (DOCUMENTS / "internals" / "architecture.md").read_text()
    params = SamplingParams(max_tokens=24, temperature=0.0, prompt_logprobs=5, ignore_eos=True)
    for output in llm.generate([PROMPT, corpus[:4200]], params):
        prompt, answer = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
        with torch.inference_mode():
            theirs = model(torch.tensor([prompt + answer]), use_cache=False).logits[0].log_softmax(-1)
        assert output.prompt_logprobs is not None
        for position, candidates in enumerate(output.prompt_logprobs[1:]):
            assert candidates is not None
            for token_id, logprob in candidates.top:
                assert abs(logprob - theirs[position, token_id].item()) < 1e-3
        assert answer == theirs[len(prompt) - 1 : -1].argmax(-1).tolist()
    assert len(prompt) > 600  # beyond the window of 512
