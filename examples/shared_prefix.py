"""Ask several questions about one document. From the second one on, its tokens come from the prefix cache.

python examples/shared_prefix.py [MODEL]
"""

import sys

from octavo import LLM, SamplingParams

DOCUMENT = "An octavo is a sheet of paper folded three times, into eight leaves. " * 8
QUESTIONS = ["How many leaves has it?", "How often is the sheet folded?", "What is it made of?"]


def main(model: str = "smollm2") -> None:
    params = SamplingParams(max_tokens=16, temperature=0.0)
    with LLM(model, max_num_seqs=16, kv_cache_memory="256MiB") as llm:
        for question in QUESTIONS:
            (output,) = llm.generate(DOCUMENT + question, params, use_tqdm=False)
            print(f"{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens cached: {question}")


if __name__ == "__main__":
    main(*sys.argv[1:])
