"""Plan a deployment's memory from Python, as `octavo plan` does. Nothing is loaded or downloaded.

python examples/plan_memory.py [MODEL]
"""

import sys

from octavo.planner.deployment import Deployment
from octavo.planner.plan_options import PlanOptions
from octavo.planner.report import report_of
from octavo.planner.sources import find_shape


def main(model: str = "llama-3.1-70b") -> None:
    shape = find_shape(model)
    for dtype in ("bfloat16", "float32"):
        report = report_of(Deployment(shape, PlanOptions(context=4096, concurrency=256, kv_cache_dtype=dtype)))
        print(
            f"{report['model']}, KV cache in {dtype}: {report['kv_bytes_per_token']:,} bytes a token, "
            f"{report['kv_bytes_total'] / 1e9:.1f} GB for 256 sequences of 4,096 tokens"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
