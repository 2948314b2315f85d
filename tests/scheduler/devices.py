"""A device whose step times follow a law that is known, and step-time models fitted to it. All times are made up."""

from __future__ import annotations

import random

from octavo.scheduler.step_time import StepLoad, StepTimeModel


def device(load: StepLoad) -> float:
    """Weights are read in 5 ms, which hides the arithmetic of 20 rows; streams read context, chunks compute."""
    products = max(0.005, 0.00025 * load.rows)
    return 0.002 + products + 4e-7 * load.context + 2e-8 * load.chunk_work + 2e-5 * load.num_seqs


def loads(rng: random.Random, count: int) -> list[StepLoad]:
    found = []
    for _ in range(count):
        streams = rng.randint(0, 32)
        load = StepLoad(streams, sum(rng.randint(10, 4000) for _ in range(streams)), 0.0, streams)
        if rng.random() < 0.5 or not streams:
            load = load.with_chunk(rng.randrange(6000), rng.randint(2, 600))
        found.append(load)
    return found


def fitted(noise: float = 0.0, outliers: float = 0.0, count: int = 600) -> StepTimeModel:
    rng, model = random.Random(1), StepTimeModel()
    for load in loads(rng, count):
        late = 20.0 if rng.random() < outliers else 1.0
        model.observe(load, device(load) * rng.uniform(1 - noise, 1 + noise) * late)
    return model
