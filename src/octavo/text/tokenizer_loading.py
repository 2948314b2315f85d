"""Loads the tokenizer that a configuration names."""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor

from octavo.checkpoint.model_source import tokenizer_of
from octavo.config import EngineConfig
from octavo.errors import ModelNotFoundError
from octavo.text.chat_template import check_template
from octavo.text.tokenizer import Tokenizer, needs_transformers
from octavo.text_file import read_text

logger = logging.getLogger(__name__)

# The maximum length of a chat template in characters.
_MOST_TEMPLATE = 1024 * 1024


def begin_loading(config: EngineConfig) -> Future[Tokenizer | None] | None:
    """Call `load_tokenizer` in another thread, for a caller that meanwhile imports torch.

    Returns:
        None if that would import torch too, which two threads must not do at once, or if there is no tokenizer.
    """
    try:
        if needs_transformers(tokenizer_of(config)):
            return None
    except ModelNotFoundError:
        return None
    thread = ThreadPoolExecutor(1, "octavo-tokenizer")
    try:
        return thread.submit(load_tokenizer, config)
    finally:
        thread.shutdown(wait=False)


def load_tokenizer(config: EngineConfig) -> Tokenizer | None:
    """Load the tokenizer of a configuration, with its chat template; None if the model has none.

    Raises:
        ConfigError: the chat template cannot be read.
        ModelError: see `Tokenizer.from_source`; or the configuration names a tokenizer, and there is none.
    """
    template = None if config.chat_template is None else _read_template(config.chat_template)
    try:
        tokenizer = Tokenizer.from_source(tokenizer_of(config))
        return tokenizer if template is None else tokenizer.with_chat_template(template)
    except ModelNotFoundError as error:
        if config.tokenizer is not None:
            raise
        logger.warning("%s; prompts must be token ids", error)
        return None


def _read_template(path: str) -> str:
    template = read_text(path, "the chat template", _MOST_TEMPLATE)
    check_template(template, path)
    return template
