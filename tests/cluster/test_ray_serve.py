"""Two replicas of the packaged model on Ray Serve: conversations stay, and a replica that is killed is replaced."""

from __future__ import annotations

import inspect
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml

from octavo.errors import ConfigError
from tests.deploy.files import DEPLOY
from tests.ports import free_port

# Read when Ray is first imported.
os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "f" * 64, "RAY_USAGE_STATS_ENABLED": "0"}
# However slow a machine is on which tests run in several processes.
os.environ |= {"RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60", "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60"}

pytest.importorskip("dynamo.llm")
ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'octavo[ray]'")
serve = pytest.importorskip("ray.serve", reason="Ray Serve is not installed: pip install 'octavo[ray]'")

from octavo.cluster.ray_router import PrefixRouter  # noqa: E402
from octavo.cluster.ray_serve import app, waiting_tokens_policy  # noqa: E402

# Ray's own processes are left to themselves when it stops.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")

ENGINE = {"model": "smollm2", "kv_cache_memory": "64MiB", "max_model_len": 2048}


def test_rays_request_router_is_still_as_the_adapter_expects() -> None:
    from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

    assert ray.__version__.startswith("2.60."), "the API is alpha: read ray_router.py again, then move the pin"
    for name in ("choose_replicas", "on_request_completed", "initialize_state"):
        theirs, ours = (inspect.signature(getattr(each, name)) for each in (RequestRouter, PrefixRouter))
        assert list(ours.parameters)[:1] == ["self"]
        if name != "initialize_state":
            assert list(theirs.parameters) == list(ours.parameters), name
    assert isinstance(RequestRouter._event_loop, property)
    assert isinstance(RunningReplica.routing_stats, property)
    assert {"kwargs", "metadata"} <= set(PendingRequest.__dataclass_fields__)


def test_replicas_are_added_while_tokens_wait_and_taken_away_when_idle() -> None:
    def wanted(waiting: list[float], running: list[float]) -> int:
        metrics = {"waiting_tokens": dict(enumerate(waiting)), "running_requests": dict(enumerate(running))}
        context = SimpleNamespace(aggregated_metrics=metrics, config=SimpleNamespace(target_ongoing_requests=2048.0))
        return waiting_tokens_policy(context)[0]

    assert wanted([], []) == 1
    assert wanted([5000.0, 2000.0], [3.0, 2.0]) == 4
    assert wanted([0.0, 0.0, 0.0], [3.0, 0.0, 1.0]) == 2
    assert wanted([10.0], [1.0]) == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [({"motor": {}}, "motor"), ({"engine": {"block_size": -1}}, "block_size"), ({"server": {"port": -1}}, "port")],
)
def test_arguments_that_cannot_be_are_refused_before_anything_starts(args: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        app(args)


def test_the_rayservice_names_an_application_that_its_arguments_build() -> None:
    service = yaml.safe_load((DEPLOY / "kubernetes" / "rayservice.yaml").read_text())
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    assert application["import_path"] == "octavo.cluster.ray_serve:app"
    assert app(application["args"]) is not None
    groups = [service["spec"]["rayClusterConfig"]["headGroupSpec"]]
    for group in groups + service["spec"]["rayClusterConfig"]["workerGroupSpecs"]:
        (container,) = group["template"]["spec"]["containers"]
        assert {"name": "RAY_AUTH_MODE", "value": "token"} in container["env"]


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    """A client of the ingress. Ray starts in a cluster of its own, with token authentication."""
    port = free_port()
    ray.init(num_cpus=3, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(app({"engine": ENGINE, "server": {"api_key": ["ada", "ben"]}, "replicas": 2}), name="octavo")
        url, headers = f"http://127.0.0.1:{port}", {"Authorization": "Bearer ada"}
        with httpx.Client(base_url=url, headers=headers, timeout=120) as client:
            yield client
    finally:
        serve.shutdown()
        ray.shutdown()


def replicas() -> set[int]:
    """The processes of replicas, which Ray names so."""
    names = {int(path.parent.name): path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")}
    return {pid for pid, name in names.items() if name.startswith(b"ray::ServeReplica:octavo:Replica")}


@pytest.mark.integration
@pytest.mark.slow
def test_a_conversation_of_eight_turns_stays_with_its_blocks_and_tenants_stay_apart(client: httpx.Client) -> None:
    time.sleep(2.5)  # until both replicas have described themselves
    topics = {
        topic: [{"role": "system", "content": f"You know all about {topic}. " * 12}] for topic in ("books", "ships")
    }
    for turn in range(8):
        for topic, messages in topics.items():
            messages.append({"role": "user", "content": f"Tell me the fact number {turn} about {topic}."})
            body = {"messages": messages, "max_tokens": 8, "temperature": 0}
            answer = client.post("/v1/chat/completions", json=body).json()
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
            usage = answer["usage"]
            num_computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
            assert turn == 0 or num_computed < 64, (topic, turn, num_computed)
            time.sleep(0.3)  # a person reads; the event of the blocks arrives
    body = {"messages": topics["books"][:2], "max_tokens": 8, "temperature": 0}
    answer = client.post("/v1/chat/completions", json=body, headers={"Authorization": "Bearer ben"}).json()
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert answer["choices"][0]["message"]["content"] == topics["books"][2]["content"]
    assert client.post("/v1/completions", json=body, headers={"Authorization": "Bearer x"}).status_code == 401


@pytest.mark.integration
@pytest.mark.slow
def test_a_replica_that_is_killed_is_replaced_and_its_streams_end_with_a_clear_error(client: httpx.Client) -> None:
    before, ended = replicas(), dict[int, list[str]]()
    assert len(before) == 2

    def stream(number: int) -> None:
        body = {"prompt": f"Story {number}: once", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        with httpx.stream(
            "POST", f"{client.base_url}/v1/completions", json=body, headers=dict(client.headers), timeout=300
        ) as answer:
            ended[number] = []
            ended[number].extend(line for line in answer.iter_lines() if line)

    threads = [threading.Thread(target=stream, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    while len(ended) < len(threads):
        time.sleep(0.05)
    time.sleep(0.5)
    for pid in before:  # all, so that every stream was at one of them
        os.kill(pid, signal.SIGKILL)
    for thread in threads:
        thread.join()
    for lines in ended.values():
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "worker_lost"
        assert lines[-1] == "data: [DONE]"
    ends = time.monotonic() + 180
    while serve.status().applications["octavo"].status != "RUNNING" or len(now := replicas()) < 2 or now & before:
        assert time.monotonic() < ends, serve.status()
        time.sleep(0.5)
    body = {"prompt": "and then", "max_tokens": 4}
    assert client.post("/v1/completions", json=body).status_code == 200
