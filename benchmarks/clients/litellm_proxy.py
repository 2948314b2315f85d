"""LiteLLM as a proxy: clients talk to it, and it talks to Octavo."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import openai
from checks import MODEL, URL, check, run_all

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    PORT = free.getsockname()[1]
PROXY = f"http://127.0.0.1:{PORT}"
CONFIG = {
    "model_list": [
        {
            "model_name": "behind",
            "litellm_params": {"model": f"hosted_vllm/{MODEL}", "api_base": f"{URL}/v1", "api_key": "none"},
        }
    ]
}
KEY = f"sk-{secrets.token_hex(16)}"  # the proxy does not start without one
client = openai.OpenAI(base_url=f"{PROXY}/v1", api_key=KEY, max_retries=0)
ASK = [{"role": "user", "content": "Name a colour of the sky."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "pick",
        "parameters": {
            "type": "object",
            "properties": {"colour": {"enum": ["blue", "grey"]}},
            "required": ["colour"],
        },
    },
}


@check("chat")
def chat() -> None:
    answer = client.chat.completions.create(model="behind", messages=ASK, max_tokens=8)
    assert answer.choices[0].message.content
    assert answer.usage.prompt_tokens > 0


@check("chat, streaming")
def stream() -> None:
    chunks = list(client.chat.completions.create(model="behind", messages=ASK, max_tokens=8, stream=True))
    assert any(chunk.choices and chunk.choices[0].delta.content for chunk in chunks)


@check("tools")
def tools() -> None:
    answer = client.chat.completions.create(
        model="behind", messages=ASK, tools=[TOOL], tool_choice="required", max_tokens=48
    )
    assert json.loads(answer.choices[0].message.tool_calls[0].function.arguments)["colour"] in ("blue", "grey")


@check("embeddings")
def embeddings() -> None:
    assert len(client.embeddings.create(model="behind", input="a text", encoding_format="float").data[0].embedding) > 8


@check("Anthropic's messages, made of chat completions by the proxy")
def messages() -> None:
    body = json.dumps({"model": "behind", "max_tokens": 8, "messages": ASK}).encode()
    headers = {"Content-Type": "application/json", "x-api-key": KEY}
    request = urllib.request.Request(f"{PROXY}/v1/messages", body, headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert json.load(answer)["type"] == "message"


def is_up() -> bool:
    try:
        with urllib.request.urlopen(f"{PROXY}/health/liveliness", timeout=2):
            return True
    except OSError:
        return False


with tempfile.TemporaryDirectory() as folder:
    path = Path(folder, "config.yaml")
    path.write_text(json.dumps(CONFIG))  # JSON is YAML
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": KEY}
    command = [str(Path(sys.executable).with_name("litellm")), "--config", str(path), "--port", str(PORT)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=sys.stderr) as proxy:
        try:
            deadline = time.monotonic() + 120
            while not is_up() and proxy.poll() is None and time.monotonic() < deadline:
                time.sleep(0.5)
            run_all()
        finally:
            proxy.terminate()
