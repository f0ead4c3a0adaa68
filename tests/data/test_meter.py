import io
import sys
import time

import pytest

from lmforge.data import meter as module
from lmforge.data.meter import meter


class Clock:
    now = 0.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def _pass(clock):
    with meter() as shown:
        shown.stage("reading", 50_000_000)
        for done in range(0, 50_000_000, 1_000_000):
            clock.now += 0.5
            shown.show(done)
        shown.stage("comparing", 0)
        clock.now += 11
        shown.show(3_000_000)


def test_plain_lines_now_and_then(clock, capsys):
    _pass(clock)
    lines = capsys.readouterr().err.splitlines()
    assert lines == ["reading: 19 of 50 MB (38%)", "reading: 39 of 50 MB (78%)", "comparing: 3 MB"]


def test_a_bar_on_a_terminal(clock, monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    _pass(clock)
    said = terminal.getvalue()
    assert "reading" in said
    assert "49.0/50.0 MB" in said
    assert "\x1b" in said  # it goes back over its own line


def test_showing_costs_next_to_nothing(capsys):
    with meter() as shown:
        shown.stage("reading", 100)
        before = time.process_time()
        for done in range(100_000):
            shown.show(done)
    assert time.process_time() - before < 0.5
    assert capsys.readouterr().err == ""
