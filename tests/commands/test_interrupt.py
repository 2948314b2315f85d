"""Ctrl-C that comes where Python drops exceptions is not lost."""

from __future__ import annotations

import signal

import pytest

from octavo.commands.interrupt import Interrupt, remembered_interrupt


class Unlucky:
    """The signal comes while this is finalised, from where no exception gets out."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_a_finaliser_swallows_is_found_when_asked() -> None:
    before = signal.getsignal(signal.SIGINT)
    with remembered_interrupt() as interrupt:
        interrupt.check()
        Unlucky()
        with pytest.raises(KeyboardInterrupt):
            interrupt.check()
    assert signal.getsignal(signal.SIGINT) is before


def test_elsewhere_it_comes_at_once() -> None:
    with remembered_interrupt() as interrupt:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert interrupt.came


def test_it_waits_until_an_import_has_ended() -> None:
    ended = []

    def load(interrupt: Interrupt) -> None:
        with interrupt.held():
            signal.raise_signal(signal.SIGINT)
            ended.append(True)

    with remembered_interrupt() as interrupt, pytest.raises(KeyboardInterrupt):
        load(interrupt)
    assert ended
