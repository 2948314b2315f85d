"""An engine that says what a test wants it to say, some characters at a time, and then ends."""

from __future__ import annotations

from typing import Any

from octavo.engine.outputs import CompletionOutput
from octavo.errors import RequestError
from octavo.request import FinishReason
from octavo.sampling_params import SamplingParams
from octavo.text.chat_template import render_chat
from tests.server.fake_engine import EOS, ByteTokenizer, FakeEngine, logprobs_of

# A template that shows how it calls: Hermes' and Qwen's way.
TEMPLATE = """{% if tools %}#tools: {{ tools | tojson }}
<tool_call></tool_call>
{% endif %}{% for m in messages %}#{{ m.role }}: {{ m.content }}{% for call in m.tool_calls or [] %}
<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>{% endfor %}
{% endfor %}{% if add_generation_prompt %}#assistant: {% if thinks %}<think>
{% endif %}{% endif %}"""


class TemplateTokenizer(ByteTokenizer):
    """A byte tokenizer with a real chat template."""

    def __init__(self, template: str = TEMPLATE) -> None:
        self.chat_template_text = template

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        tools: list[dict[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        return render_chat(
            self.chat_template_text, messages, add_generation_prompt=add_generation_prompt, tools=tools, **variables
        )


class ScriptedEngine(FakeEngine):
    """Answers every prompt with `script`, `per_token` bytes a token.

    Attributes:
        says: by index of the choice; the last is said by all further ones.
    """

    def __init__(self, *says: str, template: str = TEMPLATE, per_token: int = 3, **options: Any) -> None:
        super().__init__(**options)
        self.says = list(says)
        self.per_token = per_token
        self.tokenizer = TemplateTokenizer(template)

    def answer(self, prompt: list[int], params: SamplingParams, index: int) -> list[CompletionOutput]:
        if not self.says:
            raise RequestError("the test said nothing")
        text = self.says[min(index, len(self.says) - 1)]
        pieces = [text[i : i + self.per_token] for i in range(0, len(text), self.per_token)][: params.max_tokens]
        deltas = [CompletionOutput(index, piece, list(piece.encode())) for piece in pieces]
        if len(deltas) == params.max_tokens:
            deltas[-1].finish_reason = FinishReason.LENGTH
        else:
            deltas.append(CompletionOutput(index, "", [EOS], finish_reason=FinishReason.STOP))
        if params.logprobs is not None:
            for delta in deltas:
                delta.logprobs = [logprobs_of(token_id, params.logprobs) for token_id in delta.token_ids]
        return deltas
