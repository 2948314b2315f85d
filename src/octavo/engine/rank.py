"""The main function of a rank other than rank 0 (`runner/ranks.py`)."""

from __future__ import annotations

import ctypes
import logging
import os
import pickle
import signal

from octavo.helper_process import receive, requests_and_answers, send

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Load a share of a model, then compute what rank 0 sends, until it stops or dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    requests, answers = requests_and_answers()
    job = pickle.loads(receive(requests))
    os.sched_setaffinity(0, job.cpus)
    logging.basicConfig(level=job.log_level, format=f"%(asctime)s %(levelname)s rank {job.rank} %(name)s: %(message)s")
    # Imported only now: this takes seconds, in which the process must already end with its parent.
    from octavo.checkpoint.model_source import model_of
    from octavo.engine.model_loading import choose_kv_scales
    from octavo.engine.ranks import load_share
    from octavo.storage.arena import KVArena
    from octavo.storage.host import HostTier

    model = load_share(job)
    send(answers, model.weight_bytes.to_bytes(8, "little"))
    num_blocks, num_host_blocks = pickle.loads(receive(requests))
    arena = KVArena(job.spec, num_blocks)
    host = HostTier(num_host_blocks, job.spec.block_bytes)
    choose_kv_scales(job.config, model_of(job.config), arena, model)
    send(answers, b"")
    # No handler of Python's, such as a coverage tool's, would run in the loop: the signal must end the process.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    model.follow(arena.layers, arena.memory, host.memory)
