"""Lets published chat templates write an assistant's turns, and parses them as a model's answers.

    python -m tests.campaigns.chat_templates             those of llama.cpp, from the sources of llama-cpp-python
    python -m tests.campaigns.chat_templates FOLDER…     of files *.jinja, such as vLLM's examples

    turn      reasons, says, calls once or twice, in seven combinations
    answer    what the template writes for the turn after its prompt, up to the end of the turn
    parsed    whole, by characters, and in pieces of five: the same reasoning, content and calls

A template that leaves a part of the turn out (its text is nowhere in the answer), or refuses it, cannot show it; that
is printed as "leaves out". "LOST" is what the answer has and the parser does not find. Exits with 1 if a template
that is not in `EXPLAINED` loses anything.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

from octavo.dialect.events import Arguments, CallBegins, Content, Reasoning
from octavo.dialect.parser import Dialect, OutputParser
from octavo.errors import RequestError
from octavo.server.bodies.tools import Dialects, ToolUse
from octavo.text.chat_template import render_chat

# Why templates lose what they show.
EXPLAINED = {
    "template_alpaca": "its prompt does not begin the answer",
    "template_inkbot": "its prompt does not begin the answer",
    "Kimi-K3": "every part of an answer is in a channel, <|open|>response<|sep|>: not supported",
    "muse-glimmer": "every part of an answer is in a channel, to=user<|message|>: not supported",
    "tool_chat_template_muse_glimmer": "as muse-glimmer",
    "meetkai-functionary-medium-v3.2": "text is addressed as calls are, >>>all: not supported",
    "openai-gpt-oss-120b": "it writes content beside a call as reasoning",
    "NVIDIA-Nemotron-Nano-v2": "it writes content into the reasoning that its prompt opens",
    "tool_chat_template_deepseekv31": "it is indented, and writes the spaces",
    "tool_chat_template_functiongemma": "it writes numbers and objects as text",
    "tool_chat_template_llama4_json": "it writes a call after text without a mark",
}
TYPES = {"place": "string", "days": "integer", "wanted": "object", "now": "boolean"}
ARGUMENTS = {
    "place": "Köln \"Süd\"\nam 'Rhein'",
    "days": 3,
    "wanted": {"unit": "C & <F>", "deep": [1, 2.5]},
    "now": True,
}
SAID, THOUGHT = "I look.", "They ask for it."
CALLS: list[tuple[str, Any]] = [("get_weather", ARGUMENTS), ("stop", {})]
# Content, reasoning and calls.
Turn = tuple[str, str, list[tuple[str, Any]]]
TURNS: dict[str, Turn] = {
    "say": (SAID, "", []),
    "think, say": (SAID, THOUGHT, []),
    "call": ("", "", CALLS[:1]),
    "call twice": ("", "", CALLS),
    "say, call": (SAID, "", CALLS[:1]),
    "think, call": ("", THOUGHT, CALLS[:1]),
    "think, say, call twice": (SAID, THOUGHT, CALLS),
}
TOOLS = ToolUse(
    [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": "A function.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        key: {"type": kind, "description": key, "additionalProperties": {"type": "string"}}
                        for key, kind in types.items()
                    },
                    "required": [],
                },
            },
        }
        for name, types in (("get_weather", TYPES), ("stop", {}))
    ]
)
USER = {"role": "user", "content": "How is it?"}
# Tokens at which models stop: within a turn of any, or only at the end of a turn.
STOP = re.compile(
    r"<\|(im_end|eot_id|eom_id|endoftext|end_of_text|(START|END)_OF_TURN_TOKEN|message_sep|eos)\|>|<SPECIAL_12>|<end_of_(turn|sentence)>"
    r"|<turn\|>|<seed:eos>|<sep>|</s>|</assistant>|<\|role_end\|>|<\|end\|><\|assistant\|>|<｜(hy_eos\S*|end▁of▁sentence)｜>"
    r"|(<\|(call|calls|end|return|eot)\|>|\[e~\[)\s*\Z"
)


def message(turn: Turn, ids: list[str]) -> dict[str, Any]:
    content, reasoning, calls = turn
    made = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, (name, arguments) in zip(ids, calls, strict=False)
    ]
    said: dict[str, Any] = {"role": "assistant", "content": content}
    return said | ({"reasoning_content": reasoning} if reasoning else {}) | ({"tool_calls": made} if made else {})


def parsed(dialect: Dialect, answer: str, size: int) -> Turn:
    parser = OutputParser(dialect)
    events = [each for i in range(0, len(answer), size) for each in parser.feed(answer[i : i + size])]
    events += parser.finish()
    names, arguments = [], []
    for event in events:
        if isinstance(event, CallBegins):
            names.append(event.name)
            arguments.append("")
        elif isinstance(event, Arguments):
            arguments[-1] += event.text
    content, reasoning = (
        "".join(event.text for event in events if isinstance(event, kind)).strip() for kind in (Content, Reasoning)
    )
    return content, reasoning, list(zip(names, map(_value, arguments), strict=True))


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def written_in(answer: str, turn: Turn, *, is_python: bool) -> tuple[Turn | None, str]:
    """Return the part of a turn that an answer has, and what its template left out; None if it is no answer at all."""
    content, reasoning, calls = turn
    kept = [call for call in calls if call[0] in answer]
    parts = {"content": content not in answer, "reasoning": reasoning not in answer, "a call": kept != calls}
    if kept and is_python and (found := re.search(r"\[.*\]", answer, re.DOTALL)):
        try:
            ast.parse(found[0])
        except SyntaxError:
            return None, "quotes around text"
    left_out = ", ".join(name for name, is_missing in parts.items() if is_missing)
    return (content if content in answer else "", reasoning if reasoning in answer else "", kept), left_out


def answer_to(prompt: str, whole: str, opening: str, closing: str) -> tuple[str, str]:
    """Return the prompt and the answer to it, where `whole` is the chat with it; the marks are those of reasoning.

    Templates may write another beginning into a prompt than into a chat: `<think>`, where the chat has no reasoning.
    """
    size = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(prompt, whole, strict=False)))
    common = prompt[:size]
    if common != prompt and common.rfind("<") > common.rfind(">"):
        common = common[: common.rfind("<")]  # not within a mark
    answer, begun = whole[len(common) :], prompt[len(common) :]
    if repeated := next((begun[i:] for i in range(len(begun)) if answer.startswith(begun[i:].rstrip())), "").rstrip():
        return prompt, answer.removeprefix(repeated)
    if opening and opening in begun and not answer.lstrip().startswith(opening):
        is_closed = closing in begun + answer
        return prompt, answer if is_closed else closing + answer
    return common, answer


def outcomes(template: str) -> Iterator[tuple[str, str, str]]:
    """Yield for each turn its name, what the template leaves out, and what is lost; first the formats."""
    render = partial(render_chat, template, bos_token="<s>", eos_token="</s>", enable_thinking=True)
    found = Dialects(template, "auto", "auto", render)
    calls, reasoning = found.calls_for(TOOLS), found.of_answer(None, ToolUse(), "").reasoning
    assert calls is not None
    described = found.chat([USER], TOOLS).tools is None
    yield "formats", calls.name + (" (described)" if described else ""), reasoning.name if reasoning else "-"
    ids = ["functions.get_weather:0", "functions.stop:1"] if calls.name == "kimi_k2" else ["call00000", "call00001"]
    for name, turn in TURNS.items():
        tools = TOOLS if turn[2] else ToolUse()

        def rendered(*messages: dict[str, Any], tools: ToolUse = tools, **more: Any) -> str:
            chat = found.chat([USER, *messages], tools)
            return render(chat.messages, tools=chat.tools, **more)

        try:
            prompt, whole = rendered(), rendered(message(turn, ids), add_generation_prompt=False)
        except RequestError as error:
            yield name, f"all: {error}", ""
            continue
        marks = (reasoning.opening, reasoning.closing) if reasoning else ("", "")
        prompt, answer = answer_to(prompt, whole, *marks)
        closing = calls.closing.strip() if turn[2] else ""
        while (stop := STOP.search(answer)) is not None and stop[0].strip() != closing:
            answer = answer[: stop.start()]
        shown, left_out = written_in(answer, turn, is_python=calls.name in ("pythonic", "lfm2"))
        if shown is None:
            yield name, left_out, ""
            continue
        dialect = found.of_answer(found.calls_for(tools), tools, prompt)
        got = next((got for size in (len(answer) or 1, 1, 5) if (got := parsed(dialect, answer, size)) != shown), shown)
        yield name, left_out, "" if got == shown else f"{answer!r} was read as {got}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, nargs="*")
    with tempfile.TemporaryDirectory() as scratch:
        return report(parser.parse_args().folder or [fetched(Path(scratch))])


def fetched(folder: Path) -> Path:
    """Return the folder of llama.cpp's templates, which it unpacks into `folder`."""
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", str(folder)]
    subprocess.run([*pip, "llama-cpp-python==0.3.36"], check=True)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        wanted = [each for each in archive.getmembers() if each.name.endswith(".jinja")]
        archive.extractall(folder, wanted, filter="data")
    return next(folder.rglob("models/templates"))


def report(folders: list[Path]) -> int:
    templates = [path for folder in folders for path in sorted(folder.glob("*.jinja"))]
    losing = whole = 0
    for path in templates:
        (_, calls, reasoning), *turns = outcomes(path.read_text())
        lost = [f"LOST in {name}: {how}" for name, _, how in turns if how]
        left_out = [f"{name}: leaves out {what}" for name, what, _ in turns if what]
        losing += bool(lost) and path.stem not in EXPLAINED
        whole += not lost and not left_out
        state = EXPLAINED.get(path.stem, "") if lost else "" if left_out else "clean"
        print(f"{path.stem:<50} {calls:<22} {reasoning:<16} {state}")
        print(*(f"    {line}\n" for line in (lost if path.stem not in EXPLAINED else []) + left_out), sep="", end="")
    print(f"{len(templates)} templates, {whole} show every turn; {losing} lose something that they show")
    return int(losing > 0)


if __name__ == "__main__":
    sys.exit(main())
