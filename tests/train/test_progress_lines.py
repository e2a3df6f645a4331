"""Lines about long work where there is no terminal."""

import sys

from expire_span.train.progress import Heartbeat
from tests.cli.test_bars import Lines


def test_what_is_noted_is_printed_after_a_silence(monkeypatch):
    lines = Lines(2)
    monkeypatch.setattr(sys, "stderr", lines)
    with Heartbeat("retrofit", silence=0.02) as beat:
        beat.note("step 3 of 9")
        assert lines.full.wait(20)
    assert lines.text.startswith("retrofit: step 3 of 9 (0 s)\n")


def test_a_sentence_is_printed_as_it_is_and_notes_wait(monkeypatch):
    lines = Lines(10**9)
    monkeypatch.setattr(sys, "stderr", lines)
    with Heartbeat("retrofit", silence=1000) as beat:
        beat.say("read 9 tokens")
        for n in range(50):
            beat.note(f"step {n}")
    assert lines.text == "read 9 tokens\n"


def test_a_terminal_shows_no_lines_of_its_own(monkeypatch):
    lines = Lines(10**9)
    monkeypatch.setattr(lines, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", lines)
    with Heartbeat("retrofit", silence=0.001) as beat:
        beat.note("step 1")
        beat.tell("asking")
        beat.say("fitting")
    assert lines.text == "fitting\n"
