"""The exceptions that Octavo raises.

OctavoError
├── ConfigError            an option or a combination of options is invalid          (ValueError)
├── RequestError           one request is invalid; the engine is unharmed            (ValueError)
│   ├── FieldError             one field of it is
│   ├── ContextLengthError     prompt, or prompt + max_tokens, over max_model_len
│   └── CapacityError          would need more blocks or sequence slots than exist
├── ModelError             a model cannot be loaded
│   ├── ModelNotFoundError     nothing usable at that path or hub id                 (FileNotFoundError)
│   ├── UnsupportedModelError  an architecture or tensor type Octavo cannot run
│   └── CorruptModelError      a file that does not hold what it declares
├── OverloadedError        the queue is full for now; the same request may be sent again
│   └── TenantOverloadedError  only its tenant's part of the queue is full
├── LogitsError            the model gave a running request nothing to sample from; it alone is ended
│   └── GrammarError           its structured output's grammar cannot be followed any further
├── UnreadError            a request was ended because its caller left its outputs unread
├── RequestFailedError     a request was ended because computing or reporting it failed; the engine continues
├── ExecutorError          a step failed in the process that computes it, or that process has died
├── CacheError             the block accounting was violated: a bug, never user input
└── EngineDeadError        the step loop died; carries the cause
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path

# Maximum number of characters of a client's own text that an error repeats.
SHOWN_CHARACTERS = 64


class _Shown(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = SHOWN_CHARACTERS
        self.maxdict = self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = 3
        self.maxlevel = 2


_repr = _Shown().repr


def require_packages(user: str, extra: str, *modules: str) -> None:
    """Import modules of the packages in one of Octavo's extras; raises `ConfigError` if one is missing.

    Args:
        user: what needs them, such as an option's name.
    """
    try:
        for module in modules:
            import_module(module)
    except ImportError as error:
        raise ConfigError(f"{user} needs octavo[{extra}] ({error}): {how_to_install(f'octavo[{extra}]')}") from error


def how_to_install(package: str) -> str:
    """Return how to install Octavo with its dependencies; in a checkout, `make install` brings all extras."""
    checkout = Path(__file__).parents[2]
    if (checkout / "Makefile").is_file() and (checkout / "pyproject.toml").is_file():
        return f"run `make -C {checkout} install`"
    return f"run `pip install '{package}'`"


def shown(value: object) -> str:
    """Return `repr(value)` for an error message, cut to `SHOWN_CHARACTERS` without building the whole text first."""
    if isinstance(value, int) and value.bit_length() > 4 * SHOWN_CHARACTERS:
        return f"a number of {value.bit_length()} bits"
    text = _repr(value)
    return text if len(text) <= SHOWN_CHARACTERS + 2 else text[: SHOWN_CHARACTERS - 1] + "…"


def shortened(text: str) -> str:
    """Return a client's own text for an error message, without quotes, cut to `SHOWN_CHARACTERS`."""
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"


class OctavoError(Exception):
    """Root of the tree drawn in this module's docstring."""


class ConfigError(OctavoError, ValueError):
    """An option, or a combination of options, is invalid."""


class RequestError(OctavoError, ValueError):
    """One request is invalid. `param` names the offending field, `code` is OpenAI's error code."""

    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def rename(self, names: Mapping[str, str]) -> None:
        """Name fields as a client does that used another API; `names` maps our names to its names."""
        self.param = _renamed(self.param or "", names) or None


class FieldError(RequestError):
    """A field of a request is wrong. The message is the field's name, then the problem.

    Args:
        param: the field, or a place in it, such as `messages[2].content`.
        problem: words that follow the name, such as "must be a string"; "{}" stands for the fields in `others`.
    """

    def __init__(self, param: str, problem: str, *others: str) -> None:
        super().__init__("", param=param)
        self._problem = problem
        self._others = others
        self.args = (self._message(param),)

    def _message(self, param: str) -> str:
        return f"{param} {self._problem.format(*self._others) if self._others else self._problem}"

    def __reduce__(self) -> tuple[type[FieldError], tuple[str, ...]]:
        return type(self), (self.param or "", self._problem, *self._others)

    def rename(self, names: Mapping[str, str]) -> None:
        super().rename(names)
        self._others = tuple(_renamed(other, names) for other in self._others)
        self.args = (self._message(self.param or ""),)


def _renamed(place: str, names: Mapping[str, str]) -> str:
    """Return a place such as `messages[2].content`, of which the field is renamed."""
    end = min((at for at in (place.find("."), place.find("[")) if at >= 0), default=len(place))
    return names.get(place[:end], place[:end]) + place[end:]


class ContextLengthError(RequestError):
    """The prompt, or prompt + max_tokens, exceeds max_model_len."""

    code = "context_length_exceeded"


class CapacityError(RequestError):
    """The request needs more KV blocks or sequence slots than the engine has in all."""

    code = "capacity_exceeded"


class OverloadedError(OctavoError):
    """The queue of waiting requests is full; the same request may be served if it is sent again later."""


class TenantOverloadedError(OverloadedError):
    """The tenant's share of the queue is full: no more of its requests, or prompt tokens, may wait."""


class ModelError(OctavoError):
    """A model cannot be loaded."""


class ModelNotFoundError(ModelError, FileNotFoundError):
    """There is no usable model at that path or hub id."""


class UnsupportedModelError(ModelError):
    """The model has an architecture or tensor type that Octavo cannot run."""


class CorruptModelError(ModelError):
    """The content of a file does not match what it declares."""


class LogitsError(OctavoError):
    """Logits cannot be sampled: they are NaN or infinite, or all masked. `request_ids` names the requests.

    Neither the client's fault nor fatal for the engine: it ends these requests with the reason "error", which a server
    answers with 500 and the code "unusable_logits", and continues with all others.
    """

    def __init__(self, request_ids: Sequence[str]) -> None:
        names = ", ".join(request_ids)
        super().__init__(
            f"the logits of request {names} are NaN or infinite, or every token is masked: look for overflow in the "
            "model (float16 overflows where bfloat16 does not) or damaged weights"
        )
        self.request_ids = list(request_ids)

    def __reduce__(self) -> tuple[type[LogitsError], tuple[list[str]]]:
        # Pickled by its ids and not by its message, because it may come from another process.
        return type(self), (self.request_ids,)


class GrammarError(LogitsError):
    """Grammars have become too complex to be followed any further. `reasons` holds the reason of each request.

    The engine ends these requests with the reason "error", which a server answers with 400 and the code
    "grammar_too_complex", and continues with all others.
    """

    def __init__(self, reasons: Mapping[str, str]) -> None:
        super().__init__(list(reasons))
        self.reasons = dict(reasons)
        listed = "; ".join(f"{name}: {reason}" for name, reason in self.reasons.items())
        self.args = (f"the grammar of a structured output cannot be followed any further: {listed}",)

    def __reduce__(self) -> tuple[type[GrammarError], tuple[dict[str, str]]]:  # type: ignore[override]
        return type(self), (self.reasons,)


class ExecutorError(OctavoError):
    """A step failed in the process that computes it, with its traceback in the message, or that process has died."""


class RequestFailedError(OctavoError):
    """The engine ended one request because computing or reporting it raised an exception, and continues."""

    def __init__(self, request_id: str) -> None:
        super().__init__(f"the engine failed on request {request_id} and ended it; its log has the details")
        self.request_id = request_id


class CacheError(OctavoError):
    """The block accounting was violated. Always a bug in Octavo, never the result of user input."""


class UnreadError(OctavoError):
    """A request was ended because its caller read the outputs far more slowly than they arrived."""


class EngineDeadError(OctavoError):
    """The step loop died; no further request can be served. `__cause__` holds the reason."""
