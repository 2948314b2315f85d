import os

from common import HF_DIR, SPECULATION, gguf, load, report, timed, warm_up

import octavo
from octavo import LLM, SamplingParams

work = load()
# bf16: the dequantised folder; gguf: the packaged Q4_1 file; Q4_0 and so on: that file. Q4_0+2: by two ranks
named = os.environ.get("WEIGHTS", "bf16")
weights, _, ranks = named.partition("+")
llm, startup = timed(
    lambda: LLM(
        HF_DIR if weights == "bf16" else gguf() if weights == "gguf" else gguf(weights),
        tensor_parallel_size=int(ranks or 1),
        max_num_seqs=64,
        kv_cache_memory="2GiB",
        speculative_config={"method": SPECULATION} if SPECULATION else None,
        enable_prefix_caching=os.environ.get("PREFIX", "0") == "1",
    )
)


def run(w):
    outs = llm.generate(
        [{"prompt_token_ids": r["prompt_token_ids"]} for r in w],
        [SamplingParams(max_tokens=r["max_tokens"], ignore_eos=True, temperature=0, detokenize=False) for r in w],
    )
    return sum(len(o.outputs[0].token_ids) for o in outs)


run(warm_up(work))
n, s = timed(run, work)
report("octavo", octavo.__version__, named, work, n, s, startup)
