"""Measure what an open live page costs the engine, and a browser that draws 100,000 blocks.

    python benchmarks/live_page.py        # 20 seconds; the browser's part needs chromium

The engine's thread takes a look between two steps, and the event loop, which shares the interpreter with it, serialises
what it found. Both are timed with a scheduler of 64 running sequences in a full pool and ten steps from one look to the
next, and given as shares of the time between two looks (`octavo.server.live_page`). With no page open, none of this is
done (tests/server/test_live_page.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from octavo.config import EngineConfig
from octavo.engine.live import LiveView
from octavo.kvcache.spec import KVCacheSpec
from octavo.planner.sources import find_shape
from octavo.request import Request, RequestId
from octavo.sampling_params import SamplingParams
from octavo.scheduler.assembly import assemble_cache, assemble_scheduler
from octavo.scheduler.plan import StepResult
from octavo.scheduler.scheduler import Scheduler
from octavo.server.live_page import MOST_PAGES, _event, pause

STEPS_BETWEEN = 10
PAGE = Path(__file__).parents[1] / "src" / "octavo" / "server" / "static"


def busy_scheduler(num_blocks: int, num_seqs: int) -> Scheduler:
    """A scheduler whose sequences have prompts that fill most of the pool."""
    config = EngineConfig(num_blocks=num_blocks, max_num_seqs=num_seqs, max_num_batched_tokens=65_536)
    spec = KVCacheSpec.build(find_shape("smollm2").kv_layers, 16, "bfloat16")
    kv = assemble_cache(config, spec, num_blocks)
    scheduler = assemble_scheduler(config, kv, 1 << 20)
    length = (num_blocks * 16) * 8 // 10 // num_seqs
    for number in range(num_seqs):
        params = SamplingParams(max_tokens=4000, ignore_eos=True, temperature=0.0)
        scheduler.add(Request(RequestId(f"r{number}"), [number] * length, params))
    while any(not seq.output_token_ids for request in scheduler.requests for seq in request.sequences):
        step(scheduler)
    return scheduler


def step(scheduler: Scheduler) -> None:
    plan = scheduler.schedule()
    scheduler.update(plan, StepResult((1,) * plan.num_draws))


def engine_cost(num_blocks: int, num_seqs: int, looks: int) -> dict[str, float]:
    """Milliseconds of a look and of its serialisation, looks a second, and the share of the time that all pages take,
    with one page and with as many as can be open."""
    scheduler, view = busy_scheduler(num_blocks, num_seqs), LiveView()
    view.look(scheduler)
    taken, worded = [], []
    for _ in range(looks):
        for _ in range(STEPS_BETWEEN):
            step(scheduler)
        began = time.perf_counter()
        changes = view.look(scheduler)
        looked = time.perf_counter()
        _event(changes)
        taken.append(looked - began)
        worded.append(time.perf_counter() - looked)
    look, words = statistics.median(taken), statistics.median(worded)
    figures = {"blocks": num_blocks - 1, "look_ms": 1e3 * look, "words_ms": 1e3 * words}
    for num_pages in (1, MOST_PAGES):
        between = pause(look + words, num_pages)
        figures |= {f"looks_per_s_{num_pages}": 1 / between, f"share_{num_pages}": num_pages * (look + words) / between}
    return figures


FRAMES = """(() => {
  spec = {num_blocks: %(blocks)d + 1, block_size: 16, block_bytes: 1024, host_blocks: 0};
  layOut();
  counters = [0, 0, 0, 0, 0, 0];
  tiers = [];
  owners = new Uint16Array(spec.num_blocks);
  codes = new Uint8Array(spec.num_blocks);
  const frame = (share) => {
    const now = performance.now();
    for (let i = 0; i < share * codes.length; i++) {
      const block = 1 + Math.floor(Math.random() * (codes.length - 1));
      codes[block] = Math.floor(Math.random() * 11);
      flash.set(block, now);
    }
    const began = performance.now();
    paint();
    // Until the pixels are there, not merely asked for.
    $("blocks").getContext("2d").getImageData(0, 0, 1, 1);
    return performance.now() - began;
  };
  const median = (share) => Array.from({length: 30}, () => frame(share)).sort((a, b) => a - b)[15];
  return [frame(1), median(0.3), median(0.01)];
})()"""


def frame_times(blocks: int) -> dict[str, float]:
    """Milliseconds of a frame in headless chromium: all cells new, 30 % changed, 1 % changed."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.server.chromium import chromium

    with chromium() as page:
        # The page without its server: the script fails to connect, but draws all the same.
        page.open((PAGE / "page.html").as_uri())
        page.wait_for("document.readyState === 'complete'")
        page.value("document.head.insertAdjacentHTML('beforeend', '<style>canvas{width:1200px}</style>')")
        script = json.dumps((PAGE / "page.js").read_text())
        page.value(
            f"(() => {{ const script = document.createElement('script'); script.textContent = {script};"
            "document.body.append(script); })()"
        )
        first, many, few = page.value(FRAMES % {"blocks": blocks})
    return {"blocks": blocks, "all_ms": first, "a_third_ms": many, "a_hundredth_ms": few}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--looks", type=int, default=50)
    parser.add_argument("--no-browser", action="store_true")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"engine": engine_cost(arguments.blocks + 1, arguments.sequences, arguments.looks)}
    if not arguments.no_browser:
        result["browser"] = frame_times(arguments.blocks)
    for name, figures in result.items():
        print(name, {key: round(value, 4) for key, value in figures.items()})
    print(json.dumps(result))


if __name__ == "__main__":
    main()
