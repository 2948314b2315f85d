"""A tokenizer that misbehaves as its text asks. Processes that read bodies import it, and no torch with it."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from octavo.text.chat_template import render_chat
from tests.server.fake_engine import ByteTokenizer


class SlowTokenizer(ByteTokenizer):
    """Takes long over texts that ask for it, ends its process, or tells which one that is.

    Args:
        template: what it shows as its chat template.
    """

    def __init__(self, template: str = "") -> None:
        self.chat_template_text = template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if text == "pid":
            text = str(os.getpid())
        if text.startswith("slow"):
            time.sleep(600)
        if text.startswith("crash"):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(text, add_special_tokens)

    def apply_chat_template(self, messages: list[dict[str, Any]], *_: Any, tools: Any = None, **variables: Any) -> str:
        """By a template that the chat brings with it, which only a test may."""
        return render_chat(messages[0]["content"], messages, **variables)
