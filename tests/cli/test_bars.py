"""Progress without a terminal: what is new is printed, and something at least after every silence."""

import sys
import threading

from expire_span.cli.bars import steady_progress


class Lines:
    """A stderr that is no terminal, and tells when it has enough lines."""

    def __init__(self, enough: int) -> None:
        self.text, self.enough, self.full = "", enough, threading.Event()

    def write(self, text: str) -> None:
        self.text += text
        if self.text.count("\n") >= self.enough:
            self.full.set()

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return False


def test_something_is_printed_though_nothing_is_told(monkeypatch):
    lines = Lines(4)
    monkeypatch.setattr(sys, "stderr", lines)
    with steady_progress("suite", silence=0.01) as tell:
        tell("snap at 0.25", 3, 8)
        assert lines.full.wait(20)
    first, *rest = lines.text.splitlines()
    assert first.startswith("suite: 3 of 8 answers, snap at 0.25 (") and len(rest) >= 3


def test_the_last_word_is_printed(monkeypatch):
    lines = Lines(10**9)
    monkeypatch.setattr(sys, "stderr", lines)
    with steady_progress("suite", silence=1000) as tell:
        for n in range(100):
            tell("asking", n + 1, 100)
    assert [line.split(",")[0] for line in lines.text.splitlines()][-1] == "suite: 100 of 100 answers"
    assert lines.text.count("\n") < 5
