"""Complete several prompts offline, in one batch.

python examples/generate.py [MODEL]
"""

import sys

from octavo import LLM, SamplingParams


def main(model: str = "smollm2") -> None:
    prompts = ["The capital of France is", "Once upon a time", "A paged KV cache is"]
    params = SamplingParams(max_tokens=32, temperature=0.8, top_p=0.95, seed=1)
    with LLM(model, max_num_seqs=16, kv_cache_memory="256MiB") as llm:
        for output in llm.generate(prompts, params):
            completion = output.outputs[0]
            print(f"{output.prompt!r} -> {completion.text!r} ({completion.finish_reason})")


if __name__ == "__main__":
    main(*sys.argv[1:])
