"""The format of tool calls is found by what a chat template writes."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from octavo.dialect.detection import TemplateCalls, template_calls
from octavo.dialect.formats import CALL_FORMATS, CallFormat, reasoning_format
from octavo.dialect.writing import write_calls
from octavo.text.chat_template import render_chat

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}CALL{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GLM = (
    "<tool_call>{{ c.function.name }}\n{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v if v is string else v | tojson }}</arg_value>\n{% endfor %}</tool_call>"
)
SEED = (
    "<seed:tool_call>\n<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}"
    "<parameter={{ k }}>{{ v }}</parameter>\n{% endfor %}</function>\n</seed:tool_call>"
)
DEEPSEEK_R1 = (
    "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + c.type + '<｜tool▁sep｜>' + c.function.name + '\\n```json\\n' "
    "+ c.function.arguments + '\\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>' }}"
)
APERTUS = '<|tools_prefix|>[{"{{ c.function.name }}": {{ c.function.arguments | tojson }}}]<|tools_suffix|>'
HUNYUAN_3 = (
    "{% set s = ':opensource' %}<tool_calls{{ s }}>\n<tool_call{{ s }}>{{ c.function.name }}<tool_sep{{ s }}>\n"
    "{% for k, v in c.function.arguments.items() %}<arg_key{{ s }}>{{ k }}</arg_key{{ s }}>\n"
    "<arg_value{{ s }}>{{ v if v is string else v | tojson }}</arg_value{{ s }}>\n{% endfor %}"
    "</tool_call{{ s }}>\n</tool_calls{{ s }}>"
)
HERMES = "<tool_call>\n{{ c.function | tojson }}\n</tool_call>"


def found(template: str) -> TemplateCalls:
    return template_calls(partial(render_chat, template), template)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        (GLM, "glm45"),
        (SEED, "seed_oss"),
        (HERMES, "hermes"),
        (APERTUS, "apertus"),
        (HUNYUAN_3, "hy_v3"),
        ("function call<|role_sep|>\n{{ c.function | tojson }}", "gigachat3"),
        ("<|function_call|>{{ c.function | tojson }}", "gigachat31"),
        ("<|tool_call|>[{{ c.function | tojson }}]", "granite"),
        ("<|tool_call|>[{{ c.function | tojson }}]<|/tool_call|>", "phi4_mini_json"),
        ('{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}', "llama3_json"),
    ],
)
def test_a_call_that_a_template_writes_tells_its_format(written: str, name: str) -> None:
    calls = found(CHATML.replace("CALL", written))
    assert calls.format is not None
    assert (calls.format.name, calls.as_text) == (name, False)


def test_a_template_that_wants_arguments_as_text_gets_them_so() -> None:
    calls = found(CHATML.replace("CALL", DEEPSEEK_R1))
    assert calls.format is not None
    assert (calls.format.name, calls.as_text) == ("deepseek_v3", True)


@pytest.mark.parametrize(
    "written",
    [
        "<tool_call>{{ c.function.name }}: {{ c.function.arguments | tojson }}</tool_call>",
        "<f>{{ c.function | tojson }}",
    ],
)
def test_calls_in_an_unknown_format_are_not_taken_for_a_known_one(written: str) -> None:
    assert found(CHATML.replace("CALL", written) + "{# <tool_call> #}").format is None


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>\\n<function=' }}", "qwen3_xml"),
        ("… <tool_call></tool_call> XML tags", "hermes"),
        ("{{ '[TOOL_CALLS] [' }}", "mistral"),
        ('Respond in the format {"name": function name, "parameters": dictionary}', "llama3_json"),
        ("format of [func_name1(params_name1=params_value1), func_name2(params)]", "pythonic"),
        ("<|tool_list_start|>", "lfm2"),
        ("List of tools: [", "lfm2"),
    ],
)
def test_a_template_that_only_describes_calls_is_searched_for_marks(template: str, name: str) -> None:
    calls = found(template)
    assert calls.format is not None
    assert calls.format.name == name


def test_a_template_without_tools_or_reasoning_has_no_format() -> None:
    assert found("{{ messages }}".replace("messages", "messages[0].content")).format is None
    assert reasoning_format("auto", "{{ messages }}") is None
    assert reasoning_format("auto", "{% if '</think>' in content %}").name == "qwen3"
    assert reasoning_format("auto", "<|channel|>analysis").name == "openai_gptoss"
    assert reasoning_format("auto", "between <think></think> and <response></response>").name == "ernie45"


@pytest.mark.parametrize("each", [each for each in CALL_FORMATS if not each.unmarked], ids=lambda each: each.name)
def test_every_marked_format_is_told_from_the_others(each: CallFormat) -> None:
    def render(messages: list[dict[str, Any]], **_: Any) -> str:
        text = ""
        for message in messages:
            made = message.get("tool_calls") or []
            calls = [(call["function"]["name"], call["function"]["arguments"]) for call in made]
            text += message["content"] + (f"<|start|>assistant{write_calls(each, calls)}" if calls else "")
        return text

    calls = template_calls(render, "")
    assert calls == TemplateCalls(each), json.dumps(str(calls))
