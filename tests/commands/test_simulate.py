"""`octavo simulate` from its command line, on an estimated machine; and what `octavo calibrate-speed` refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.planner.roofline import BANDWIDTH_REACHED, MACHINES, RATE_REACHED, StepTimes, find_machine, roofline
from octavo.planner.sources import find_shape
from octavo.simulator.pareto import best, draw
from octavo.simulator.setup import Plan
from octavo.simulator.speed import MEASURED, Speed
from octavo.simulator.study import parse_sweep
from tests.commands.conftest import OctavoCommand

ON_H100 = ["llama-3.1-8b", "--machine", "h100", "--max-model-len", "4096"]
SHORT = ["--num-requests", "30", "--input-len", "200", "--output-len", "10"]


def last_line(out: str) -> dict[str, Any]:
    return json.loads(out.splitlines()[-1])


def test_a_run_reports_latency_throughput_and_that_it_is_an_estimate(octavo_command: OctavoCommand) -> None:
    code, out, err = octavo_command("simulate", *ON_H100, *SHORT, "--request-rate", "20", "--json")
    assert code == 0, err
    result = last_line(out)
    assert result["speed"]["kind"] == "estimated"
    assert "NVIDIA H100" in result["speed"]["origin"]
    (point,) = result["points"]
    assert point["completed"] == 30
    assert point["output_tokens"] == 300
    assert 0 < point["itl_ms"]["p50"] < point["ttft_ms"]["p50"]


def test_the_answer_is_a_table_without_json_and_says_that_it_is_an_estimate(octavo_command: OctavoCommand) -> None:
    code, out, _ = octavo_command("simulate", *ON_H100, *SHORT, "--tenants", "a:2,b")
    assert code == 0
    assert "ESTIMATED by a roofline of h100, not measured" in out
    assert "ttft ms" in out
    assert [line.split()[0] for line in out.splitlines()[-2:]] == ["a", "b"]


@pytest.mark.slow
def test_a_sweep_simulates_every_combination_of_its_options(octavo_command: OctavoCommand, tmp_path: Path) -> None:
    sweeps = ["--sweep", "max-num-seqs=2,8", "--sweep", "kv_cache_dtype=auto,fp8"]
    code, out, err = octavo_command(
        "simulate", *ON_H100, *SHORT, *sweeps, "--kv-cache-memory", "256MiB", "--rates", "5,50", "--json"
    )
    assert code == 0, err
    points = last_line(out)["points"]
    assert len(points) == 8
    assert points[0]["variant"] == {"max_num_seqs": 2, "kv_cache_dtype": "auto"}
    assert points[2]["num_blocks"] > points[0]["num_blocks"] > 0
    assert points[0]["rate"] == 5.0
    code, out, _ = octavo_command("simulate", *ON_H100, *SHORT, *sweeps)
    assert len(out.splitlines()) == 1 + 1 + 4


def test_several_servers_are_simulated_behind_each_router(octavo_command: OctavoCommand) -> None:
    sweeps = ["--replicas", "2", "--sweep", "router=prefix,round_robin", "--price-per-hour", "3.6"]
    code, out, err = octavo_command("simulate", *ON_H100, *SHORT, "--request-rate", "20", *sweeps, "--json")
    assert code == 0, err
    for point in last_line(out)["points"]:
        assert (point["router"], point["servers"], point["completed"]) == (point["variant"]["router"], 2, 30)
        assert point["fleet_price_per_hour"] == 7.2
        assert point["price_per_million_tokens"] == pytest.approx(2000 / point["output_tok_s"], rel=1e-3)
    for argv, message in (
        (["--router", "prefix"], "--router needs --replicas"),
        (["--replicas", "2", "--find-replicas", "--ttft-slo-ms", "9"], "give --find-replicas or --replicas"),
    ):
        code, _, err = octavo_command("simulate", *ON_H100, *SHORT, *argv)
        assert code == 1, argv
        assert message in err


def test_targets_without_a_question_are_judged(octavo_command: OctavoCommand) -> None:
    slo = ["--ttft-slo-ms", "30", "--itl-slo-ms", "1000", "--max-num-seqs", "2"]
    code, out, err = octavo_command("simulate", *ON_H100, *SHORT, *slo, "--rates", "1,2000", "--json")
    assert code == 0, err
    alone, crowded = last_line(out)["points"]
    assert (alone["targets_met"], alone["ttft_within"], alone["itl_within"]) == (True, 1.0, 1.0)
    assert not crowded["targets_met"]
    assert 0 < crowded["ttft_within"] < 1
    code, out, _ = octavo_command("simulate", *ON_H100, *SHORT, *slo, "--rates", "1,2000")
    assert [line.split()[-1] for line in out.splitlines()[2:4]] == ["True", "False"]


def test_requests_that_do_not_fit_the_cache_miss_the_targets_and_are_told(octavo_command: OctavoCommand) -> None:
    argv = [*ON_H100, "--num-requests", "20", "--input-len", "uniform:16-1000", "--output-len", "4"]
    slo = ["--ttft-slo-ms", "5000"]
    cramped, sweep = ["--kv-cache-memory", "40MiB"], ["--sweep", "kv_cache_memory=40MiB,1GiB"]
    code, out, err = octavo_command("simulate", *argv, *slo, *sweep, "--json")
    assert code == 0, err
    small, large = last_line(out)["points"]
    assert (large["targets_met"], large["ttft_within"], large["refused"]) == (True, 1.0, 0)
    assert not small["targets_met"]
    assert small["ttft_within"] == pytest.approx(1 - small["refused"] / 20)
    assert 0 < small["refused"] < 20
    code, out, _ = octavo_command("simulate", *argv, *slo, *sweep)
    assert [line.split()[-2:] for line in out.splitlines()[2:4]] == [[str(small["refused"]), "False"], ["0", "True"]]
    assert f"up to {small['refused']} of 20 requests do not fit the KV cache" in out
    for question in (["--find-rate"], ["--find-replicas", "--request-rate", "5"]):
        code, out, err = octavo_command("simulate", *argv, *slo, *cramped, *question)
        assert code == 0, err
        assert out.splitlines()[-1] == f"{small['refused']} of 20 requests do not fit the KV cache: they are refused"


def test_the_table_counts_requests_that_were_cut_to_the_models_length(octavo_command: OctavoCommand) -> None:
    argv = ["llama-3.1-8b", "--machine", "h100", "--num-requests", "3", "--input-len", "900", "--output-len", "2"]
    code, out, err = octavo_command("simulate", *argv, "--sweep", "max_model_len=512,1024")
    assert code == 0, err
    heading, cut, whole = out.splitlines()[1:]
    assert [line.split()[-1] for line in (heading, cut, whole)] == ["clipped", "3", "0"]


@pytest.mark.slow
def test_a_swept_target_is_the_one_that_is_checked(octavo_command: OctavoCommand) -> None:
    argv = [*ON_H100, *SHORT, "--sweep", "itl_slo_ms=1,1000", "--slo-percentile", "90", "--json"]
    code, out, err = octavo_command("simulate", *argv, "--num-requests", "8", "--find-rate")
    assert code == 0, err
    strict, loose = last_line(out)["points"]
    assert strict["largest_rate"] is None
    assert "met_all_at_once" not in strict
    assert loose["met_all_at_once"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "last",
    [
        ["--sweep", "max_model_len=4096,1000000"],
        ["--sweep", "num_devices=1,33"],
        ["--sweep", "kv_cache_memory=1GiB,1MiB", "--max-num-seqs", "4"],
        ["--rates", "5,0"],
    ],
)
def test_every_variant_is_checked_before_the_first_is_simulated(
    octavo_command: OctavoCommand, monkeypatch: pytest.MonkeyPatch, last: list[str]
) -> None:
    monkeypatch.setattr("octavo.simulator.study.simulate", lambda *_: pytest.fail("simulated"))
    code, _, err = octavo_command("simulate", *ON_H100, *last)
    assert code == 1
    assert err.startswith("octavo")


def test_a_sweep_of_devices_needs_a_machine_to_have_several_of(octavo_command: OctavoCommand, tmp_path: Path) -> None:
    path = tmp_path / "speed.json"
    Speed("made up", MEASURED, StepTimes(0.01, ())).write(path)
    argv = ["llama-3.1-8b", "--speed", path, "--num-blocks", "99", "--max-model-len", "512", "--num-requests", "2"]
    assert octavo_command("simulate", *argv)[0] == 0
    for option in (["--num-devices", "33"], ["--sweep", "num_devices=1,33"]):
        code, _, err = octavo_command("simulate", *argv, *option)
        assert code == 1
        assert "num-devices needs --machine" in err.replace("_", "-")


def test_tokens_and_the_fleet_have_a_price(octavo_command: OctavoCommand) -> None:
    price = ["--price-per-hour", "3.6"]
    code, out, err = octavo_command("simulate", *ON_H100, *SHORT, *price, "--json")
    assert code == 0, err
    (point,) = last_line(out)["points"]
    assert point["price_per_million_tokens"] == pytest.approx(1000 / point["output_tok_s"], abs=1e-4)
    slo = ["--find-replicas", "--ttft-slo-ms", "40", "--max-num-seqs", "4", "--request-rate", "500"]
    code, out, _ = octavo_command("simulate", *ON_H100, *SHORT, *price, *slo, "--json")
    (point,) = last_line(out)["points"]
    assert point["fleet_price_per_hour"] == pytest.approx(3.6 * point["replicas"])
    code, out, _ = octavo_command("simulate", *ON_H100, *SHORT, *price, "--rates", "5,50")
    assert "price of 1 M" in out


@pytest.mark.slow
def test_ten_rates_up_to_saturation_are_simulated(octavo_command: OctavoCommand) -> None:
    code, out, err = octavo_command("simulate", *ON_H100, *SHORT, "--rates", "auto", "--json")
    assert code == 0, err
    points = last_line(out)["points"]
    code, out, _ = octavo_command("simulate", *ON_H100, *SHORT, "--json")
    served = last_line(out)["points"][0]["requests_s"]
    assert [point["rate"] for point in points] == pytest.approx([served * i / 10 for i in range(1, 11)], rel=0.01)


def test_a_slower_machine_takes_longer_in_proportion(octavo_command: OctavoCommand) -> None:
    code, out, err = octavo_command("simulate", *ON_H100, *SHORT, "--sweep", "slowdown=1,1.25", "--json")
    assert code == 0, err
    usual, slow = last_line(out)["points"]
    assert slow["duration_s"] == pytest.approx(1.25 * usual["duration_s"], rel=0.001)


@pytest.mark.slow
def test_the_largest_rate_and_the_number_of_replicas_are_found(octavo_command: OctavoCommand) -> None:
    slo = ["--ttft-slo-ms", "40", "--max-num-seqs", "4", "--num-requests", "16", "--output-len", "4"]
    code, out, err = octavo_command("simulate", *ON_H100, "--input-len", "200", *slo, "--find-rate", "--json")
    assert code == 0, err
    (point,) = last_line(out)["points"]
    assert point["largest_rate"] < point["missed_at"]
    rate = 4 * point["largest_rate"]
    code, out, err = octavo_command(
        "simulate", *ON_H100, "--input-len", "200", *slo, "--find-replicas", "--request-rate", rate, "--json"
    )
    assert code == 0, err
    assert last_line(out)["points"][0]["replicas"] > 1
    code, out, _ = octavo_command("simulate", *ON_H100, "--num-requests", "1", "--ttft-slo-ms", "0.01", "--find-rate")
    assert code == 0
    assert "not met at any rate" in out
    code, out, _ = octavo_command("simulate", *ON_H100, "--num-requests", "1", "--ttft-slo-ms", "9999", "--find-rate")
    assert code == 0
    assert "no largest rate: the targets are met with all requests at once" in out
    assert "not met at any rate" not in out


@pytest.mark.slow
def test_a_largest_rate_of_a_trace_is_also_told_as_a_factor(octavo_command: OctavoCommand, tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    rows = [f"{at},a,200,4\n" for at in (*range(20), *(19 + i / 100 for i in range(20)))]
    trace.write_text("arrival_s,client,prompt_tokens,output_tokens\n" + "".join(rows))
    argv = [*ON_H100, "--trace", trace, "--num-requests", "20", "--ttft-slo-ms", "40", "--max-num-seqs", "2", "--json"]
    code, out, err = octavo_command("simulate", *argv, "--find-rate")
    assert code == 0, err
    (point,) = last_line(out)["points"]
    assert point["rate_scale"] == pytest.approx(point["largest_rate"], rel=1e-3), "one a second, as far as it is taken"
    code, out, err = octavo_command("simulate", *argv, "--rate-scale", point["rate_scale"])
    (run,) = last_line(out)["points"]
    assert run["targets_met"]
    assert run["requests_s"] == pytest.approx(point["requests_s"], rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize(
    "question",
    [["--find-rate"], ["--find-replicas", "--request-rate", "500"], ["--rates", "500"], ["--request-rate", "5"]],
)
def test_arrivals_for_too_short_a_time_are_told(octavo_command: OctavoCommand, question: list[str]) -> None:
    argv = [
        *ON_H100,
        "--input-len",
        "200",
        "--output-len",
        "300",
        "--num-requests",
        "8",
        "--ttft-slo-ms",
        "40",
        *question,
    ]
    code, out, err = octavo_command("simulate", *argv, "--max-num-seqs", "6", "--json")
    assert code == 0, err
    (point,) = last_line(out)["points"]
    assert "too short for a queue to form" in point["note"]
    if question != ["--find-rate"]:  # which takes the longest
        code, out, _ = octavo_command("simulate", *argv, "--max-num-seqs", "6")
        assert out.splitlines()[-1] == f"note: {point['note']}"


def test_of_many_short_runs_the_table_names_the_shortest(octavo_command: OctavoCommand) -> None:
    argv = [*ON_H100, "--num-requests", "8", "--input-len", "200", "--output-len", "300"]
    code, out, err = octavo_command("simulate", *argv, "--rates", "0.01,500,inf")
    assert code == 0, err
    assert out.splitlines()[-1].startswith("note on 1 of 3 rows: arrivals last 0.0")
    assert "note" not in octavo_command("simulate", *argv)[1], "all at once is what was asked for"


@pytest.mark.slow
def test_a_plot_is_drawn_of_all_rates(octavo_command: OctavoCommand, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "deep" / "p.png"
    code, _, err = octavo_command("simulate", *ON_H100, *SHORT, "--rates", "5,50", "--plot", plot)
    assert code == 0, err
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_plot_shows_its_whole_title_four_ticks_and_the_target(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    figures: list[Any] = []
    monkeypatch.setattr("octavo.simulator.pareto.save", lambda figure, path: figures.append(figure))
    latencies = [{"p50": value / 2, "p95": value, "p99": 9 * value} for value in (21.0, 38.0)]
    points = [
        {"variant": {}, "completed": 5, "output_tok_s": 100.0 * value["p95"], "ttft_ms": value, "itl_ms": value}
        for value in latencies
    ]
    origin = "measured on " + "a machine with a long name, " * 12
    targets = {"ttft_ms": 30.0, "itl_ms": None, "percentile": 95.0}
    draw({"simulate": "m", "speed": {"origin": origin}, "targets": targets, "points": points}, str(tmp_path / "p.png"))
    (figure,) = figures
    figure.canvas.draw()
    assert figure.get_suptitle().replace("\n", " ") == f"m, simulated: {origin.strip()}"
    title, width = figure._suptitle.get_window_extent(), figure.bbox.width
    assert title.x0 >= 0
    assert title.x1 <= width
    ttft, itl = figure.axes
    assert ttft.get_ylabel() == "time to first token, p95, ms"
    least, most = ttft.get_ylim()
    assert len([tick for tick in ttft.get_yticks() if least <= tick <= most]) >= 4
    assert [line.get_ydata()[0] for line in ttft.lines if line.get_label() == "target"] == [30.0]
    assert not [line for line in itl.lines if line.get_label() == "target"]


def test_a_plot_of_answers_of_one_token_has_no_inter_token_latency(
    octavo_command: OctavoCommand, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    plot = tmp_path / "p.png"
    one_token = ["--num-requests", "5", "--output-len", "1", "--rates", "5,50"]
    code, _, err = octavo_command("simulate", *ON_H100, *one_token, "--plot", plot)
    assert code == 0, err
    assert plot.exists()


def test_a_plot_that_cannot_be_written_is_refused_before_anything_is_simulated(
    octavo_command: OctavoCommand, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "file").touch()
    for name, message in (("p.txt", "its name must end in"), ("", "it is a folder"), ("file/p.png", "cannot write")):
        code, out, err = octavo_command("simulate", *ON_H100, *SHORT, "--plot", tmp_path / name)
        assert (code, out) == (1, ""), err
        assert message in err


def test_the_figures_are_printed_even_if_drawing_them_fails(
    octavo_command: OctavoCommand, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fails(result: Any, path: str) -> None:
        raise ConfigError("cannot write: the disk is full")

    monkeypatch.setattr("octavo.workloads.plots.require_plot", lambda path: None)
    monkeypatch.setattr("octavo.simulator.pareto.draw", fails)
    code, out, err = octavo_command("simulate", *ON_H100, *SHORT, "--json", "--plot", tmp_path / "p.png")
    assert code == 1
    assert "the disk is full" in err
    assert last_line(out)["points"][0]["completed"] == 30


def test_a_speeds_server_gives_the_options_that_are_not_given(octavo_command: OctavoCommand, tmp_path: Path) -> None:
    measured = {"model": "llama-2-7b", "num_blocks": 999, "block_bytes": 1 << 23, "max_model_len": 2048}
    facts = {**measured, "block_size": 32, "max_num_seqs": 2, "max_num_batched_tokens": 64}
    Speed("made up", MEASURED, StepTimes(0.01, ()), facts=facts).write(tmp_path / "speed.json")
    speed = ["simulate", "--speed", tmp_path / "speed.json", *SHORT, "--json"]
    code, out, err = octavo_command(*speed)
    assert code == 0, err
    result = last_line(out)
    assert {name: result["options"][name] for name in facts if name in result["options"]} == {
        "model": "llama-2-7b",
        "block_size": 32,
        "max_num_seqs": 2,
        "max_num_batched_tokens": 64,
    }
    (point,) = result["points"]
    assert point["peak_running"] == 2
    assert point["steps"] > 30 * 200 / 64
    code, out, _ = octavo_command(*speed, "--max-num-seqs", "3")
    assert last_line(out)["points"][0]["peak_running"] == 3


def test_the_best_points_are_those_that_no_other_beats_in_both() -> None:
    assert best([(1, 5), (2, 4), (2, 9), (3, 7), (4, 8), (4, 6)]) == [(2, 4), (4, 6)]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["llama-3.1-8b"], "give the server's speed in one way"),
        ([*ON_H100, "--plans", "x"], "in one way"),
        (["llama-3.1-8b", "--machine", "h1000"], "did you mean h100?"),
        (["llama-3.1-8b", "--machine", "a100"], "did you mean a100-40gb or a100-80gb?"),
        (["llama-3.1-70b", "--machine", "h100"], "llama-3.1-70b needs 133.21 GiB"),
        ([*ON_H100, "--find-rate"], "--ttft-slo-ms, --itl-slo-ms or both"),
        ([*ON_H100, "--find-rate", "--ttft-slo-ms", "-1"], "ttft_slo_ms must be above 0"),
        ([*ON_H100, "--find-rate", "--concurrency", "3", "--ttft-slo-ms", "9"], "has no largest rate"),
        ([*ON_H100, "--find-rate", "--find-replicas"], "give --find-rate or --find-replicas"),
        ([*ON_H100, "--find-replicas", "--ttft-slo-ms", "9"], "depends on its rate"),
        ([*ON_H100, "--rates", "0"], "must be above 0"),
        ([*ON_H100, "--rates", "1", "--find-rate"], "--rates cannot be combined with --find-rate"),
        ([*ON_H100, "--request-rate", "0"], "must be above 0"),
        ([*ON_H100, "--request-rate", "1", "--burstiness", "inf"], "burstiness must be a finite number"),
        (["--plans", "/nowhere/x.plans"], "cannot read /nowhere/x.plans: No such file"),
        ([*ON_H100, "--scale-lengths", "0", "--trace", "TRACE"], "scale_lengths must be above 0, got 0"),
        (["llama-3.1-8b", "--machine", "l4", "--num-devices", "2"], "the bandwidth between several l4 is not known"),
        ([*ON_H100, "--speed", "/nowhere/speed.json"], "in one way"),
        (["llama-3.1-8b", "--speed", "/nowhere/speed.json"], "cannot read /nowhere/speed.json"),
        ([*ON_H100, "--rate-scale", "2"], "rate_scale needs trace"),
        ([*ON_H100, "--scale-lengths", "2"], "scale_lengths needs trace"),
        ([*ON_H100, "--think-time", "2"], "think_time needs concurrency"),
        ([*ON_H100, "--num-prefixes", "2"], "num_prefixes needs prefix_len"),
        ([*ON_H100, "--prefix-len", "9", "--num-prefixes", "0"], "num_prefixes must be at least 1"),
        ([*ON_H100, "--trace", "TRACE", "--prefix-len", "9"], "--trace, which has its own shared prefixes"),
        ([*ON_H100, "--trace", "TRACE", "--output-len", "9"], "--trace, which has its own (see"),
        ([*ON_H100, "--burstiness", "2"], "--burstiness needs --request-rate, --rates or --find-rate"),
        ([*ON_H100, "--slo-percentile", "90"], "--slo-percentile needs --ttft-slo-ms or --itl-slo-ms"),
        ([*ON_H100, "--num-blocks", "9", "--sweep", "kv_cache_memory=1GiB,2GiB"], "--num-blocks overrides"),
        ([*ON_H100, "--request-rate", "30", "--rates", "5,10"], "give --request-rate or --rates, not both"),
        ([*ON_H100, "--request-rate", "inf", "--burstiness", "2"], "all requests arrive at once"),
        (
            [*ON_H100, "--trace", "TRACE", "--find-rate", "--ttft-slo-ms", "9", "--burstiness", "2"],
            "this --trace has its own",
        ),
        ([*ON_H100, "--trace", "TRACE", "--tenants", "a:4,gold:2"], "no request of this --trace is from gold"),
        ([*ON_H100, "--trace", "TRACE", "--tenants", "a:4:2"], "give weights only"),
        ([*ON_H100, "--trace", "UNTIMED", "--rate-scale", "2"], "this --trace has no arrival times"),
        ([*ON_H100, "--sweep", "num_blocks=9,99", "--sweep", "kv_cache_memory=1GiB,2GiB"], "--num-blocks overrides"),
        ([*ON_H100, "--sweep", "max_num_seqs=1", "--sweep", "max-num-seqs=2"], "max_num_seqs is given twice"),
        ([*ON_H100, "--sweep", "model=llama-3.2-1b"], "--sweep model is not possible"),
        ([*ON_H100, "--price-per-hour", "0"], "price_per_hour must be above 0"),
        ([*ON_H100, "--slowdown", "0"], "slowdown must be above 0"),
        ([*ON_H100, "--trace", "TRACE", "--rate-scale", "2", "--rates", "1,2"], "leave out --request-rate and --rates"),
    ],
)
def test_a_question_without_an_answer_is_refused(
    octavo_command: OctavoCommand, tmp_path: Path, argv: list[str], message: str
) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,client,prompt_tokens,output_tokens\n0,a,10,2\n")
    untimed = tmp_path / "t.json"
    untimed.write_text('[{"prompt_token_ids": [1, 2], "max_tokens": 3}]')
    files = {"TRACE": str(trace), "UNTIMED": str(untimed)}
    code, _, err = octavo_command("simulate", *(files.get(word, word) for word in argv))
    assert code == 1
    assert message in err


def test_tenants_of_a_trace_have_weights(octavo_command: OctavoCommand, tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    rows = [f"0,{'ab'[i % 2]},100,20\n" for i in range(40)]
    trace.write_text("arrival_s,client,prompt_tokens,output_tokens\n" + "".join(rows))
    argv = [*ON_H100, "--trace", trace, "--scheduling-policy", "vtc", "--max-num-seqs", "2", "--json"]
    code, out, err = octavo_command("simulate", *argv, "--tenants", "b:8")
    assert code == 0, err
    tenants = last_line(out)["points"][0]["tenants"]
    assert tenants["b"]["ttft_p50_ms"] < 0.7 * tenants["a"]["ttft_p50_ms"]
    argv = [*argv, "--request-rate", "50"]
    uneven, even = (octavo_command("simulate", *argv, "--burstiness", each)[1] for each in ("0.1", "1"))
    assert last_line(uneven)["points"][0]["ttft_ms"] != last_line(even)["points"][0]["ttft_ms"]


def test_sweeps_take_values_as_their_flags_do() -> None:
    assert parse_sweep("kv_cache_memory=1GiB,4GiB") == ("kv_cache_memory", ["1GiB", "4GiB"])
    assert parse_sweep("--max-num-seqs=4k") == ("max_num_seqs", [4000])
    assert parse_sweep("enable_prefix_caching=on,off") == ("enable_prefix_caching", [True, False])
    for text, message in (
        ("max_num_seqs", "cannot read"),
        ("max_num_sequences=3", "no such engine option"),
        ("max_num_seqs=x", "max_num_seqs=x"),
        ("replicas=x", "replicas must be an integer"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_sweep(text)


def test_the_machines_are_listed_with_their_sources(octavo_command: OctavoCommand) -> None:
    code, out, _ = octavo_command("simulate", "--list-machines")
    assert code == 0
    assert len(out.splitlines()) == 1 + len(MACHINES)
    assert all(machine.source in out for machine in MACHINES.values())


def test_an_estimate_is_bound_by_bandwidth_for_few_rows_and_by_arithmetic_for_many() -> None:
    shape, h100 = find_shape("llama-3.1-8b"), find_machine("H100")
    from octavo.config import EngineConfig

    plan = Plan(shape, EngineConfig(max_model_len=4096), machine=h100)
    times = roofline(shape, plan.spec, h100)
    weights = 2 * shape.parameters.total
    assert times.product_seconds(1) == pytest.approx(weights / (3.35e12 * BANDWIDTH_REACHED))
    flops = 2 * shape.parameters.total * 4000
    assert times.product_seconds(4000) == pytest.approx(flops / (989e12 * RATE_REACHED))
    halves = roofline(plan.replace(num_devices=2).part, plan.spec, h100, num_devices=2)
    assert halves.product_seconds(1) == pytest.approx(times.product_seconds(1) / 2, rel=0.1)
    assert halves.base > times.base


def test_a_file_that_cannot_be_written_is_told_before_anything_is_measured(
    octavo_command: OctavoCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.simulator.calibration.calibrate", lambda *_: pytest.fail("measured"))
    for path in (tmp_path, tmp_path / "missing" / "speed.json"):
        code, _, err = octavo_command("calibrate-speed", "--output", path)
        assert code == 1
        assert f"cannot write {path}" in err


def test_plans_cannot_be_recorded_twice_at_once(octavo_command: OctavoCommand) -> None:
    code, _, err = octavo_command("calibrate-speed", "--record-plans", "x")
    assert code == 1
    assert "--keep-plans" in err
    code, _, err = octavo_command("calibrate-speed", "--seconds", "0")
    assert code == 1
    assert "seconds must be above 0" in err
