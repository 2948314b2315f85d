"""The least price of output tokens on a machine known by its data sheet."""

from __future__ import annotations

from typing import Any

from octavo.planner.deployment import Deployment
from octavo.planner.roofline import find_machine, roofline, windows_of
from octavo.scheduler.step_time import StepLoad


def decode_price(plan: Deployment) -> dict[str, Any] | None:
    """Return the price of a million output tokens while all users decode; None if not asked for, or if they do not fit.

    The time of a step is a roofline's, with every sequence at the planned context. Prompts and idle time are left out,
    so this is the least price that the machine allows. `octavo simulate` includes both.

    Raises:
        ConfigError: several devices whose link is not known.
    """
    options = plan.options
    if options.price_per_hour is None or options.machine is None:
        return None
    per_hour, machine = options.price_per_hour, find_machine(options.machine)
    if plan.concurrency > plan.sequences_that_fit(plan.cost):
        return None
    users, devices = min(plan.concurrency, plan.max_num_seqs), options.tensor_parallel_size
    times = roofline(plan.shape, plan.spec, machine, plan.weights, devices)
    starts, lengths = [plan.context - 1] * users, [1] * users
    seconds = times.predict(StepLoad.of(starts, lengths, num_streams=users))
    seconds -= sum(layers.saved(starts, lengths) for layers in windows_of(times, plan.spec, plan.max_model_len))
    return {
        "per_hour": per_hour,
        "machine": machine.name,
        "users": users,
        "output_tokens_per_second": users / seconds,
        "per_million_output_tokens": per_hour / 3600 * seconds / users * 1e6,
    }
