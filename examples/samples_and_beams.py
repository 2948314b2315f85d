"""Get several completions of one prompt: parallel samples, the best of them, and beam search.

The completions share the prompt's KV blocks; a sequence copies a shared block only when it first writes to it.

python examples/samples_and_beams.py [MODEL]
"""

import sys

from octavo import LLM, SamplingParams

WAYS = {
    "4 samples": SamplingParams(n=4, temperature=0.9, seed=1, max_tokens=16),
    "the 2 likeliest of 4 samples": SamplingParams(n=2, best_of=4, temperature=0.9, seed=1, max_tokens=16),
    "the best 2 of 4 beams": SamplingParams(n=2, best_of=4, use_beam_search=True, max_tokens=16),
}


def main(model: str = "smollm2") -> None:
    with LLM(model, max_num_seqs=16, kv_cache_memory="256MiB") as llm:
        for way, params in WAYS.items():
            print(f"{way}:")
            (output,) = llm.generate("The capital of France is", params, use_tqdm=False)
            for completion in output.outputs:
                print(f"  {completion.text!r} (log-probability {completion.cumulative_logprob})")


if __name__ == "__main__":
    main(*sys.argv[1:])
