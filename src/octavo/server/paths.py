"""A request's path, and the API (OpenAI's, Anthropic's, Ollama's or llama.cpp's) that it belongs to."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import Scope


def path_of(scope: Scope) -> str:
    """Return the path as the router sees it, without the prefix that a proxy removes (--root-path)."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def is_under(path: str, prefix: str) -> bool:
    """Return whether `path` is `prefix` or below it."""
    return path == prefix or path.startswith(prefix + "/")


def is_anthropic(scope: Scope) -> bool:
    """Return whether the client expects answers in the form of Anthropic's API.

    Both APIs have /v1/models, where Anthropic's clients are recognised by the header `anthropic-version`.
    """
    path = path_of(scope)
    if is_under(path, "/v1/messages"):
        return True
    return is_under(path, "/v1/models") and any(name == b"anthropic-version" for name, _ in scope["headers"])


def is_ollama(scope: Scope) -> bool:
    """Return whether a request is one of Ollama's API."""
    return is_under(path_of(scope), "/api")


# llama.cpp's paths that are not OpenAI's, those that are not served too.
LLAMACPP_PATHS = ("/completion", "/completions", "/infill", "/props", "/slots", "/lora-adapters", "/apply-template")


def is_llamacpp(scope: Scope) -> bool:
    """Return whether a request is one of llama.cpp's own API."""
    return any(is_under(path_of(scope), path) for path in LLAMACPP_PATHS)
