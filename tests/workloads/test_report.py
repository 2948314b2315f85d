from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.workloads.report import as_json_line, as_table, machine, percentile, summarise


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], q: float) -> None:
    assert percentile(values, q) == pytest.approx(float(np.percentile(values, q)), abs=1e-6)


def test_nothing_has_no_percentile_and_an_empty_summary() -> None:
    assert math.isnan(percentile([], 50))
    assert set(summarise([]).values()) == {None}


def test_a_summary_is_scaled_and_names_its_percentiles() -> None:
    assert summarise([0.001, 0.003], 1000.0) == {
        "mean": 2.0,
        "p50": 2.0,
        "p90": 2.8,
        "p95": 2.9,
        "p99": 2.98,
        "max": 3.0,
    }


def test_a_json_line_is_one_line_of_valid_json_even_with_nan() -> None:
    line = as_json_line({"a": math.nan, "b": {"c": [1.5, math.inf]}, "text": "two\nlines"})
    assert "\n" not in line
    assert json.loads(line) == {"a": None, "b": {"c": [1.5, None]}, "text": "two\nlines"}


def test_a_table_shows_scalars_mappings_and_summaries_under_one_heading() -> None:
    table = as_table(
        {
            "requests": 12345,
            "errors": {"timeout": 2, "cut": 1},
            "options": {},
            "seconds_of_runs": [1.0, 2.5],
            "a_ms": {"mean": 1.0, "p50": None},
            "b_ms": {"mean": 2.0, "p50": 3.0},
        }
    )
    assert [line.split() for line in table.splitlines()] == [
        ["requests", "12,345"],
        ["errors", "timeout", "2,", "cut", "1"],
        ["options", "none"],
        ["seconds", "of", "runs", "1.000,", "2.500"],
        ["mean", "p50"],
        ["a", "ms", "1.000", "-"],
        ["b", "ms", "2.000", "3.000"],
    ]


def test_the_machine_names_its_processor_and_usable_cores() -> None:
    assert machine()["cores"] >= 1
    assert machine()["cpu"]
