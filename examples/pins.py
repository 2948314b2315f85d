"""Pin a system prompt in the cache for five minutes, so that other traffic cannot evict it.

python examples/pins.py [MODEL]
"""

import sys

from octavo import LLM, SamplingParams

SYSTEM_PROMPT = "You are a careful librarian. Answer briefly, and name the shelf. " * 2
FILLER = "This is other traffic. " * 6


def main(model: str = "smollm2") -> None:
    params = SamplingParams(max_tokens=8, temperature=0.0)
    # A small cache, so that the other requests below evict what is not pinned.
    with LLM(model, max_num_seqs=4, max_model_len=512, num_blocks=64, pin_budget=0.5) as llm:
        receipt = llm.pin_prefix(SYSTEM_PROMPT, ttl_seconds=300)
        print(f"pinned {receipt.num_pinned_tokens} of {receipt.num_requested_tokens} tokens as {receipt.pin_id}")
        llm.generate([f"{number}. {FILLER}" for number in range(12)], params, use_tqdm=False)
        (output,) = llm.generate(SYSTEM_PROMPT + "Where is Moby-Dick?", params, use_tqdm=False)
        print(f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens were still cached")
        for pin in llm.pins():
            llm.unpin(pin.pin_id)


if __name__ == "__main__":
    main(*sys.argv[1:])
