"""Prompts equal those transformers renders, and what a template refuses is the client's error, in its own words."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from octavo.errors import RequestError
from octavo.text.chat_template import is_plain, render_chat
from tests.models import tiny

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = """
{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- set ns = namespace(count=0) %}
{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
    {%- if message['role'] == 'system' and loop.index0 > 0 %}
        {%- continue %}
    {%- endif %}
    {%- set ns.count = ns.count + 1 %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if tools is not none %}
    {{- "Today: " + date_string }}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
QWEN = """
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {{- '<|im_start|>assistant' }}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
            {{- '\\n<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n' }}
        {%- endif %}
        {%- if message.content %}
            {% generation %}{{- '\\n' + message.content }}{% endgeneration %}
        {%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {{- '\\n<tool_call>' + tool_call.function | tojson + '</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
TEMPLATES = {"smollm2": SMOLLM2, "llama3": LLAMA3, "qwen": QWEN, "chatml": tiny.CHATML}
TOOLS = [{"type": "function", "function": {"name": "wetter", "parameters": {"ort": "<München> & 'so'"}}}]
CALL = {"type": "function", "function": {"name": "wetter", "arguments": {"ort": "Köln"}}}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one question": [{"role": "user", "content": "Hi!\n  <b>ünï</b> 😀"}],
    "a system prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
    "several turns": [
        {"role": "user", "content": " 1 "},
        {"role": "assistant", "content": "2", "reasoning_content": "\nthink\n"},
        {"role": "system", "content": "late"},
        {"role": "user", "content": "3"},
    ],
    "a turn without text": [
        {"role": "user", "content": "w?"},
        {"role": "assistant", "content": "", "tool_calls": [CALL], "refusal": None},
        {"role": "tool", "content": "12°"},
    ],
}


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("prompt", [True, False], ids=["prompt", "no prompt"])
def test_a_prompt_is_what_transformers_renders(
    conversation: str, template: str, tools: list[dict[str, Any]] | None, prompt: bool
) -> None:
    variables = {"bos_token": "<s>", "eos_token": "</s>", "enable_thinking": False, "date_string": "1 Jan 2025"}
    messages = [{k: v for k, v in message.items() if v is not None} for message in CONVERSATIONS[conversation]]
    (expected,), _ = render_jinja_template(
        [messages], tools=tools, chat_template=TEMPLATES[template], add_generation_prompt=prompt, **variables
    )
    ours = render_chat(
        TEMPLATES[template], CONVERSATIONS[conversation], tools=tools, add_generation_prompt=prompt, **variables
    )
    assert ours == expected


def test_text_parts_become_lines_of_one_string() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    as_parts = render_chat(SMOLLM2, [{"role": "user", "content": parts}])
    assert as_parts == render_chat(SMOLLM2, [{"role": "user", "content": "one\ntwo"}])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([{"type": "image_url", "image_url": {"url": "x"}}], "'image_url'"),
        (["text"], "'str'"),
        ([{"type": "text"}], "'text'"),
        (7, "string or a list of parts, got 7"),
    ],
)
def test_content_that_is_no_text_is_the_clients_error(content: Any, words: str) -> None:
    with pytest.raises(RequestError, match=r"messages\[1\]\.content.*" + words) as error:
        render_chat(SMOLLM2, [{"role": "user", "content": "Hi"}, {"role": "user", "content": content}])
    assert error.value.param == "messages[1].content"


def test_a_model_without_a_template_points_to_completions() -> None:
    with pytest.raises(RequestError, match=r"no chat template.*/v1/completions"):
        render_chat(None, [{"role": "user", "content": "Hi"}])


def test_an_empty_conversation_is_refused() -> None:
    with pytest.raises(RequestError, match="messages must not be empty"):
        render_chat(SMOLLM2, [])


def test_what_a_template_refuses_is_said_in_its_own_words() -> None:
    with pytest.raises(RequestError, match="unknown role pirate") as error:
        render_chat(LLAMA3, [{"role": "pirate", "content": "Arr"}], bos_token="")
    assert error.value.param == "messages"


@pytest.mark.parametrize("message", [{"role": "user"}, {"content": "Hi"}, {"role": 7, "content": "Hi"}])
def test_messages_a_template_did_not_foresee_are_the_clients_error(message: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="chat template refused"):
        render_chat(SMOLLM2, [message])


def test_a_template_cannot_leave_the_sandbox() -> None:
    for attack in ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ messages.append(1) }}"):
        with pytest.raises(RequestError):
            render_chat(attack, [{"role": "user", "content": "Hi"}])


def test_a_template_that_calls_itself_without_end_is_refused() -> None:
    recursive = "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}"
    with pytest.raises(RequestError, match="chat template refused"):
        render_chat(recursive, [{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize(
    "template",
    [
        SMOLLM2,
        "{% for m in messages %}{{ '<|' + m.role + '|>' + m['content'] | trim }}{% endfor %}",
        "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}{% else %}{% set rest = messages %}"
        "{% endif %}"
        "{% for m in rest %}{% if (m.role == 'user') != loop.first %}{{ raise_exception('no') }}{% endif %}"
        "{% set text = bos_token + m.content.strip() %}{{ text }}{% endfor %}",
    ],
)
def test_a_template_that_walks_once_over_the_messages_is_plain(template: str) -> None:
    assert is_plain(template)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(9) %}x{% endfor %}",
        "{% for a in messages %}{% for b in messages %}x{% endfor %}{% endfor %}",
        "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% set a = messages[0].content %}{% set a = a ~ a %}{% set a = a + a %}",
        "{% set ns = namespace(a='x') %}{% for m in messages %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
        "{% set a %}{{ messages[0].content }}{% endset %}",
        "{% set a = [a, a] %}",
        "{{ '%*d' % (width, 1) }}",
        "{% set loop = messages[0] %}{{ loop.content % 1 }}",
        "{{ 'x' * 99999 }}",
        "{{ 9 ** n }}",
        "{{ lipsum(n=99999) }}",
        "{{ messages | tojson(indent=99999) }}",
        "{{ messages[0].content.replace('a', 'aa') }}",
        "{{ messages[0].content | center(99999) }}",
        "{% filter center(99999) %}{% endfilter %}",
        "{% include 'other' %}",
        "{{ messages",
        "x" * 8193,
    ],
)
def test_a_template_that_may_make_much_of_little_is_not_plain(template: str) -> None:
    assert not is_plain(template)
