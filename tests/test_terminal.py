"""The live canvas: tokens decoded together, lines cut by columns, never more of them than the terminal
has."""
from types import SimpleNamespace

import pytest

from cli import terminal
from request import Event, Request, Result
from cli.terminal import Trace, Watch, cut, width

BYTES = SimpleNamespace(decode=lambda ids: bytes(ids).decode(errors="replace"))


@pytest.fixture
def watch(monkeypatch, capsys):
    """A terminal of 20 columns and 5 lines, and requests that generate the bytes of a text."""
    monkeypatch.setattr(terminal, "PAUSE", 0)
    monkeypatch.setattr(terminal.shutil, "get_terminal_size", lambda: (20, 5))
    return lambda n=1, G=6: Watch([Request([1], gen_length=G) for _ in range(n)], BYTES.decode, 0)


def event(index, committed, done=False):
    result = Result([], "length", 1, 0, 0, 0, False, 0, 0) if done else None
    return Event(index, 0, False, (0, 1), committed, 0, 0, result)


def test_neighbours_are_decoded_together(watch, capsys):
    """Symptom: CJK, emoji and accents, which are several byte tokens, are shown as question marks for good.
    Cause: each token was decoded alone. Neighbours that are decided are decoded together."""
    seen, letters = watch(), list(enumerate("中文".encode()))
    for some in (letters[:2], letters[4:], letters[2:4]):
        seen.event(event(0, some))
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "\033[1F\033[K   1  中文"


def test_columns_are_counted_not_letters(watch, capsys):
    """Symptom: a line of CJK is twice as wide as the terminal, wraps, and the canvas runs away."""
    assert [width(c) for c in "a中é\u0301\u200d"] == [1, 2, 1, 0, 0] and width("😀") == 2
    assert cut("中文字", 5) == "中文" and cut("e\u0301e\u0301e", 2) == "e\u0301e\u0301" and cut("abc", 9) == "abc"
    seen = watch(1, 30)
    seen.event(event(0, list(enumerate("中文中文中文中文中文".encode()))))
    line = capsys.readouterr().out.split("\033[K")[1].rstrip("\n")
    assert sum(map(width, line)) <= 20 and line.startswith("   1  中文")


def test_no_more_lines_than_the_terminal_has(watch, capsys):
    """Symptom: more running requests than lines scroll the canvas away, since the cursor cannot go up that
    far."""
    seen = watch(9)
    for index in range(9):
        seen.event(event(index, [(0, 65)]))
        out = capsys.readouterr().out
        assert out.count("\n") <= 4
    assert out.splitlines()[-1].endswith("and 6 more")
    seen.event(event(0, [(1, 66)], done=True))
    out = capsys.readouterr().out
    # one scrolls up, for good
    assert out.startswith("\033[4F") and out.count("\n") == 5 and "   1  AB" in out


def test_control_characters_are_not_obeyed(watch, capsys):
    """Symptom: an answer that holds ESC [ 2 J clears the screen."""
    seen = watch()
    seen.event(event(0, list(enumerate(b"a\x1b[2Jb"))))
    assert capsys.readouterr().out.count("\033") == 1


def test_a_terminal_without_the_shade(watch, monkeypatch, capsys):
    """On a code page without the shade another sign stands for what is undecided."""
    monkeypatch.setattr("sys.stdout", SimpleNamespace(encoding="cp1252", write=print, flush=lambda: None))
    assert watch().shade == "_"


def test_the_trace_of_two_requests(capsys):
    """A letter for each layer and step; nothing of the events is kept."""
    trace = Trace([None, None], 3)
    for index, step, refresh, depth, P in ((0, 0, True, 1, 9), (1, 0, False, 0, 0), (0, 1, False, 1, 9)):
        trace.event(Event(index, step, refresh, (2, 7 - step), [], P, depth))
    trace.end()
    out = capsys.readouterr().out
    assert "request 1: 2 steps" in out and "  layer   2 #p\n  layer   1 #p\n  layer   0 ss\n" in out
    assert "own rows  5 at first, 4 to 5 a step" in out and "  layer   0 .\n" in out
