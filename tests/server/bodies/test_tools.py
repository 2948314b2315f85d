"""What chat templates get and what is read from their answers, whatever they support."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest

from octavo.dialect.events import Arguments, CallBegins, Content, Reasoning
from octavo.dialect.parser import OutputParser
from octavo.server.bodies.tools import Dialects, ToolUse
from octavo.text.chat_template import render_chat
from tests.dialect.test_detection import APERTUS, CHATML, GLM, HERMES, HUNYUAN_3, SEED

LOOP = "{% for k, v in c.function.arguments.items() %}"
ARGUMENTS = {
    "place": "Köln \"Süd\"\nam 'Rhein'",
    "days": 3,
    "wanted": {"unit": "C & <F>", "deep": [1, 2.5]},
    "now": True,
}
TYPES = {"place": "string", "days": "integer", "wanted": "object", "now": "boolean"}
PARAMETERS = {"type": "object", "properties": {name: {"type": kind} for name, kind in TYPES.items()}}
TOOLS = ToolUse([{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}])
USER = {"role": "user", "content": "How is it?"}
CALL = {"id": "call00000", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "tool_call_id": "call00000", "content": "cold"}
# As in Gemma 2.
WITHOUT_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
# As in LFM2 and Granite 3.3.
WITHOUT_CALLS = (
    "{{ tools | tojson if tools }}{# <|tool_list_start|> #}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)


def dialects(template: str) -> Dialects:
    return Dialects(template, "auto", "auto", partial(render_chat, template))


@pytest.mark.parametrize(
    "written",
    [
        pytest.param(written, id=name)
        for name, written in {
            "hermes": HERMES,
            "glm": GLM,
            "seed": SEED,
            "apertus": APERTUS,
            "hunyuan 3": HUNYUAN_3,
            "gigachat 3.1": "<|function_call|>{{ c.function | tojson }}",
            "granite": "<|tool_call|>[{{ c.function | tojson }}]",
            "qwen3 coder": "<tool_call>\n<function={{ c.function.name }}>\n" + LOOP + "<parameter={{ k }}>\n"
            "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
            "minimax m2": '<minimax:tool_call>\n<invoke name="{{ c.function.name }}">\n' + LOOP + '<parameter name="'
            '{{ k }}">{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}</invoke>\n</minimax:tool_call>',
            "mistral": "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}",
            "deepseek v3.1": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{{ c.function.name }}<｜tool▁sep｜>"
            "{{ c.function.arguments | tojson }}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            "kimi k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.{{ c.function.name }}:0"
            "<|tool_call_argument_begin|>"
            "{{ c.function.arguments | tojson }}<|tool_call_end|><|tool_calls_section_end|>",
            "hunyuan a13b": "<tool_calls>[{{ c.function | tojson }}]</tool_calls>",
            "minimax m1": "<tool_calls>\n{{ c.function | tojson }}\n</tool_calls>",
            "solar": "<|tool_calls|><|tool_call:begin|>{{ c.id }}<|tool_call:name|>{{ c.function.name }}"
            "<|tool_call:args|>{{ c.function.arguments | tojson }}<|tool_call:end|><|calls|>",
            "minicpm 5": '<function name="{{ c.function.name }}">' + LOOP + '<param name="{{ k }}">'
            "{{ '<![CDATA[' + v + ']]>' if v is string else v | tojson }}</param>{% endfor %}</function>",
            "functionary 3.1": "<function={{ c.function.name }}>{{ c.function.arguments | tojson }}</function>",
            "step 3": "<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜>"
            '<steptml:invoke name="{{ c.function.name }}">' + LOOP + '<steptml:parameter name="{{ k }}">'
            "{{ v if v is string else v | tojson }}</steptml:parameter>{% endfor %}</steptml:invoke>"
            "<｜tool_call_end｜>\n<｜tool_calls_end｜>",
            "internlm": "<|action_start|><|plugin|>\n{{ c.function | tojson }}<|action_end|>",
            "xlam": "[{{ c.function | tojson }}]",
        }.items()
    ],
)
def test_a_call_that_a_template_writes_is_read_back(written: str) -> None:
    template = CHATML.replace("CALL", written) + "{{ '' if tools }}"
    render = partial(render_chat, template)
    found = dialects(template)
    prompt = render(found.chat([USER], TOOLS).messages, tools=TOOLS.tools)
    whole = render(found.chat([USER, CALLING], TOOLS).messages, tools=TOOLS.tools, add_generation_prompt=False)
    answer = whole.removeprefix(prompt).removesuffix("<|im_end|>\n")
    for size in (len(answer), 1, 5):
        parser = OutputParser(found.of_answer(found.calls_for(TOOLS), TOOLS, prompt))
        events = [each for i in range(0, len(answer), size) for each in parser.feed(answer[i : i + size])]
        events += parser.finish()
        assert [each.name for each in events if isinstance(each, CallBegins)] == ["weather"]
        assert json.loads("".join(each.text for each in events if isinstance(each, Arguments))) == ARGUMENTS
        assert not "".join(each.text for each in events if isinstance(each, Content)).strip()


@pytest.mark.parametrize(
    "writes",
    ["{{ c.id }}", "{% set _ = messages.append(1) %}functions.{{ c.function.name }}:0"],
    ids=["writes ids alone", "refuses calls"],
)
def test_a_template_of_kimi_k2_is_known_by_its_marks_or_its_ids(writes: str) -> None:
    written = (
        "<|tool_calls_section_begin|><|tool_call_begin|>"
        + writes
        + ("<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|><|tool_calls_section_end|>")
    )
    found = dialects(CHATML.replace("CALL", written) + "{{ '' if tools }}")
    calls = found.calls_for(TOOLS)
    assert calls is not None
    assert calls.name == "kimi_k2"
    chat = found.chat([USER, {**CALLING, "tool_calls": [{**CALL, "id": "functions.weather:0"}]}, RESULT], TOOLS)
    assert chat.tools == TOOLS.tools
    text = render_chat(CHATML.replace("CALL", written), chat.messages)
    assert "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{" in text


def test_harmonys_template_gets_content_beside_a_call_as_part_of_the_analysis() -> None:
    written = (
        "{{ raise_exception('Cannot pass both') if m.content and m.thinking }}<|channel|>commentary to=functions."
        "{{ c.function.name }} <|constrain|>json<|message|>{{ c.function.arguments | tojson }}<|call|>"
    )
    template = CHATML.replace("<|im_start|>{{ m.role }}", "<|start|>{{ m.role }}").replace("CALL", written)
    found = dialects(template + "{{ '' if tools }}")
    calling = {**CALLING, "content": "I look.", "reasoning": "They ask."}
    text = render_chat(template, found.chat([USER, calling, RESULT], TOOLS).messages)
    assert "<|start|>assistant\nThey ask.\n\nI look.<|channel|>commentary to=functions.weather" in text


def test_a_template_that_leaves_calls_out_gets_them_in_their_messages() -> None:
    chat = dialects(WITHOUT_CALLS).chat([USER, CALLING, RESULT], TOOLS)
    assert chat.tools == TOOLS.tools
    assert [each["role"] for each in chat.messages] == ["user", "assistant", "tool"]
    assert chat.messages[1]["content"].startswith("<|tool_call_start|>[weather(place=")


@pytest.mark.parametrize("loop", ["{{ raise_exception('single') if m.tool_calls | length > 1 }}", "", None])
def test_calls_of_one_message_are_told_one_by_one_if_the_template_takes_one(loop: str | None) -> None:
    """Llama 3.1's refuses two, gpt-oss's leaves the second out."""
    template = CHATML.replace("CALL", HERMES) + "{{ '' if tools }}"
    if loop is not None:
        template = template.replace("for c in m.tool_calls or []", "for c in (m.tool_calls or [])[:1]")
        template = template.replace("{{ m.content }}", "{{ m.content }}{% if m.tool_calls %}" + loop + "{% endif %}")
    second = {**CALL, "id": "call00001", "function": {"name": "second", "arguments": {}}}
    results = [{**RESULT, "tool_call_id": "call00001", "content": "two"}, {**RESULT, "content": "one"}]
    calling = {**CALLING, "content": "I look.", "tool_calls": [CALL, second]}
    chat = dialects(template).chat([USER, calling, *results, USER], TOOLS)
    if loop is None:
        assert chat.messages == [USER, calling, *results, USER]
        return
    told = [each["content"] or each["tool_calls"][0]["function"]["name"] for each in chat.messages[1:]]
    assert told == ["I look.", "one", "second", "two", "How is it?"]
    assert list(chat.places) == [0, 3, 4, 2, 5]
    assert render_chat(template, chat.messages)


def test_a_template_without_system_messages_gets_them_from_the_user() -> None:
    found = dialects(WITHOUT_SYSTEM)
    system = {"role": "system", "content": "Be brief."}
    plain = found.chat([system, USER, {"role": "assistant", "content": "Fine."}], ToolUse())
    assert render_chat(WITHOUT_SYSTEM, plain.messages) == "<user>Be brief.\n\nHow is it?<assistant>Fine."
    assert list(plain.places) == [0, 0, 1]
    # Tools are described there too, and results of calls that follow each other are one message.
    chat = found.chat([USER, CALLING, RESULT, RESULT, {"role": "assistant", "content": "Cold."}], TOOLS)
    text = render_chat(WITHOUT_SYSTEM, chat.messages)
    assert text.index("<tools>") < text.index("How is it?") < text.index("<assistant><tool_call>")
    assert text.count("<tool_response>\ncold") == 2
    assert list(chat.places) == [0, 1, 2, 2, 3]


@pytest.mark.parametrize(
    ("opening", "closing"), [("<think>", "</think>"), ("<think:opensource>", "</think:opensource>")]
)
def test_marks_of_reasoning_that_a_template_puts_together_are_found(opening: str, closing: str) -> None:
    template = (
        "{% set mark = '" + opening[1:-1] + "' %}{% for m in messages %}{{ m.role }}:{% if m.reasoning_content %}"
        "{{ '<' + mark + '>' + m.reasoning_content + '</' + mark + '>' }}{% endif %}{{ m.content }}{% endfor %}"
    )
    found = dialects(template)
    parser = OutputParser(found.of_answer(None, ToolUse(), "user:"))
    assert parser.feed(f"{opening}Hm.{closing}Yes.") + parser.finish() == [Reasoning("Hm."), Content("Yes.")]


def test_a_chat_for_a_template_with_everything_stays_as_it_is() -> None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}, USER, CALLING, RESULT]
    template = CHATML.replace("CALL", HERMES) + "{{ '' if tools }}"
    chat = dialects(template).chat(messages, TOOLS)
    assert (chat.messages, chat.tools, list(chat.places)) == (messages, TOOLS.tools, [0, 1, 2, 3])
