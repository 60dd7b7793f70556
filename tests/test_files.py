"""What is read and written for the user: encodings, line ends, full disks, and what happens to older
files."""
import json
import os
import resource
import signal
from contextlib import contextmanager

import pytest

from cli.lines import Lines, check_chat, print_json
from files import BadInput, parse_json, read_json, read_lines, read_text, replace, to_json

FIELDS = ("gen_length", "prefix_len", "seed")


def test_texts_are_utf8_whatever_the_locale(tmp_path):
    """Symptom: a byte order mark becomes part of the prompt. It is no part of the text; line ends are. What
    is no UTF-8 is refused, with the byte that is none."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf\xc3\xa9 \r\n")
    assert read_text(path) == "é \r\n"
    path.write_bytes("é".encode("utf-16"))
    with pytest.raises(BadInput, match="it is not UTF-8 text at byte 0"):
        read_text(path)
    with pytest.raises(BadInput, match="cannot be read: Is a directory"):
        read_text(tmp_path)


def test_json_says_what_it_says():
    """Symptom: of a key that stands twice the first is silently ignored; NaN is read, and written, as
    JSON."""
    assert parse_json('{"a": [1, {"b": null}]}') == {"a": [1, {"b": None}]}
    for bad, says in (('{"a": 1, "b": 2, "a": 3}', "'a' stands there twice"),
                      ('{"a": NaN}', "NaN is no JSON number"),
                      ("[" * 100_000, "nested"), ('{"a" 1}', "at character 6")):
        with pytest.raises(ValueError, match=says):
            parse_json(bad)


def test_json_files(tmp_path):
    """A config with a byte order mark is read; one that is no object is refused by name."""
    path = tmp_path / "a.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": "\xc3\xa9"}')
    assert read_json(path) == {"a": "é"}
    for bad in ("[1]", "{", "{'a': 1}"):
        path.write_text(bad)
        with pytest.raises(BadInput, match="a.json is no JSON"):
            read_json(path)


def test_lines_of_a_file_of_requests(tmp_path):
    """Symptom: a blank line is bad JSON; after one, messages name the wrong line. Blank lines are passed
    over, and counted; a byte order mark on any line is none of it; U+2028 ends no line."""
    path = tmp_path / "in.jsonl"
    path.write_bytes('\ufeff{"a": "x\u2028y"}\r\n\n \t\n\ufeff{"b": 1}'.encode())
    assert list(read_lines(path)) == [(f"line 1 of {path}", {"a": "x\u2028y"}),
                                      (f"line 4 of {path}", {"b": 1})]
    path.write_bytes(b'{"a": 1}\n\n{"a": "\xe9"}\n')
    with pytest.raises(BadInput, match="line 3 of .* is not UTF-8 text"):
        list(read_lines(path))
    with pytest.raises(BadInput, match="cannot be read: No such file"):
        list(read_lines(tmp_path / "none"))


@pytest.mark.parametrize("value, says", [
    ([], "must be"), ({}, "must be"), ({"prefix": "a"}, "must be"),
    ({"prompt": "a", "messages": []}, "must be"),
    ({"prompt": "a", "Seed": 1}, "has 'Seed'; a request knows prefix, prompt, messages, raw, id, gen_length"),
    ({"prompt": ["a"]}, "has prompt \\['a'\\]; it must be a text"),
    ({"prompt": "a", "prefix": None}, "has prefix None"),
    ({"prompt": "a", "raw": 1}, "has raw 1; it must be true or false"),
    ({"messages": [], "prefix": ""}, "has messages and prefix, which exclude"),
    ({"messages": [], "raw": True}, "has messages and raw, which exclude"),
    ({"prompt": "a", "prefix": "b", "prefix_len": 1}, "has prefix_len and prefix, which exclude"),
])
def test_what_a_request_may_hold(value, says):
    """Symptom: a key that nobody reads, a misspelled option, is silently ignored. It is named, with those
    known."""
    with pytest.raises(BadInput, match=f"line 1 {says}"):
        check_chat(value, "line 1", FIELDS)


def test_a_good_request():
    chat = check_chat({"prompt": "a", "prefix": "", "raw": False, "id": [1], "seed": 2}, "line 1", FIELDS)
    assert (chat.text, chat.raw, chat.options, chat.passed) == ({"prompt": "a", "prefix": ""}, False,
                                                                {"seed": 2}, {"id": [1]})


def test_half_a_surrogate_pair_is_escaped():
    """Symptom: an id that JSON can spell and UTF-8 cannot ends the run when it is written."""
    for value in ("\ud83d", "é", "\U0001f600"):
        assert json.loads(to_json(value).encode()) == value
    assert to_json("é") == '"é"' and to_json("\ud83d") == '"\\ud83d"' and to_json("é", ascii=True).isascii()


# -- writing -------------------------------------------------------------------------------------------------


def test_a_file_gets_its_name_when_it_is_complete(tmp_path):
    path = tmp_path / "out"
    path.write_text("older\n")
    with Lines(str(path)) as lines:
        lines.write("é")
        assert path.read_text() == "older\n" and (tmp_path / "out.part").read_bytes() == "é\n".encode()
    assert path.read_bytes() == "é\n".encode() and os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, BadInput, RuntimeError])
def test_an_early_end_loses_nothing(tmp_path, error):
    """Symptom: an interrupted rerun replaces a complete older file by a few lines. Fixed: the older one
    stays, what is done stands beside it, under a name that nobody had; without an older one it gets the
    name."""
    path = tmp_path / "out"

    def run(*words):
        with pytest.raises(error) as e, Lines(str(path)) as lines:
            for word in words:
                lines.write(word)
            raise error()
        return " ".join(getattr(e.value, "__notes__", []))
    assert run() == "" and os.listdir(tmp_path) == []
    assert run("a") == f"done so far: 1, in {path}" and path.read_text() == "a\n"
    assert run("b", "c") == f"done so far: 2, in {path}.part, and {path} is as it was"
    assert run("d") == f"done so far: 1, in {path}.part2, and {path} is as it was"
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"out": "a\n", "out.part": "b\nc\n",
                                                                   "out.part2": "d\n"}


def test_the_questions_are_not_written_over(tmp_path):
    """Symptom: --output equal to --requests overwrites the questions. Refused, also through a link."""
    path, link = tmp_path / "in", tmp_path / "link"
    path.write_text("questions\n")
    link.symlink_to(path)
    for output, other in ((path, link), (link, path), (path, path)):
        with pytest.raises(BadInput, match="is what the questions are read from"):
            Lines(str(output), [str(other)])
    assert sorted(os.listdir(tmp_path)) == ["in", "link"] and path.read_text() == "questions\n"


@contextmanager
def small_disk():
    """Within: files may have 100 bytes, a longer write stops there, as on a full disk. No moment longer: what
    pytest prints may go to a file, too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_leaves_whole_lines(tmp_path):
    """Symptom: a full disk leaves half a line, and a traceback. The half is taken back; a sentence says
    it."""
    path = tmp_path / "out"
    says = pytest.raises(BadInput, match="out cannot be written: File too large")
    with small_disk(), says as e, Lines(str(path)) as lines:
        for word in "abc":
            lines.write(word * 40)
    assert e.value.__notes__ == [f"done so far: 2, in {path}"]
    assert path.read_text() == "a" * 40 + "\n" + "b" * 40 + "\n"


def test_a_full_disk_behind_standard_output(tmp_path, monkeypatch):
    """The same of a file that standard output goes to, behind what it held before (>>)."""
    path = tmp_path / "out"
    path.write_text("before\n")
    with open(path, "a", encoding="utf-8") as file:
        monkeypatch.setattr("sys.stdout", file)
        print_json("a" * 40)
        says = pytest.raises(BadInput, match="standard output cannot be written: File too large")
        with small_disk(), says:
            print_json("b" * 80)
        monkeypatch.undo()
    assert path.read_text() == 'before\n"' + "a" * 40 + '"\n'


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path):
    """Symptom: a full disk or an interrupt leaves a half-written file, or a temporary one for good."""
    path = tmp_path / "out"
    path.write_text("older")
    with small_disk(), pytest.raises(BadInput, match="out cannot be written: File too large"):
        replace(path, lambda to: to.write_text("a" * 200))

    def interrupted(to):
        to.write_text("half")
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        replace(path, interrupted)
    assert path.read_text() == "older" and os.listdir(tmp_path) == ["out"]
    replace(path, lambda to: to.write_text("newer"))
    assert path.read_text() == "newer"
