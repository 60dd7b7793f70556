"""What `generate.py` writes and how it ends: files, signals, closed pipes, full disks."""
import io
import json
import os
import signal

import pytest
from command import ASK, DOCUMENT, listen, objects, run, start, write_lines  # noqa: F401

import generate


def test_requests_file_and_output(run, tmp_path):
    """A file of requests, as prefix and prompt or as chats; the results land in the output file, a line
    each."""
    output = tmp_path / "out.jsonl"
    chat = {"messages": [{"role": "system", "content": DOCUMENT},
                         {"role": "user", "content": "Which weights?"}]}
    path = write_lines(tmp_path / "in.jsonl", {"prefix": DOCUMENT, "prompt": "Which weights?"}, chat)
    code, out, _ = run("--requests", path, "--gen-length", 6, "--depth", 2, "--json", "--output", output)
    assert code == 0 and output.read_text(encoding="utf-8") == out and len(list(tmp_path.iterdir())) == 2
    first, second = objects(out)
    assert first["tokens"] == second["tokens"] and second["hit"]


def test_line_separators_inside_a_text(run, tmp_path):
    """Symptom: a JSON string that holds U+2028 raw is cut there. Only newlines end a line."""
    path = write_lines(tmp_path / "in.jsonl", '{"prompt": "one\u2028two"}')
    code, out, _ = run("--requests", path, "--gen-length", 2, "--json")
    assert code == 0 and len(out.splitlines()) == 1


def test_an_empty_prompt_and_a_link_as_output(run, tmp_path):
    """An empty text in a file is a prompt, where a template surrounds it; the output goes to what a link
    stands for."""
    (tmp_path / "link").symlink_to(tmp_path / "target")
    (tmp_path / "empty").touch()
    code, *_ = run("--prompt", f"@{tmp_path / 'empty'}", "--gen-length", 2, "--output", tmp_path / "link")
    assert code == 0 and (tmp_path / "link").is_symlink()
    assert len((tmp_path / "target").read_text().splitlines()) == 1


@pytest.mark.parametrize("name, older", [
    ("SIGINT", "an older, complete run\n"), ("SIGTERM", None), ("SIGHUP", None)])
def test_a_signal_leaves_whole_lines(run, tmp_path, monkeypatch, name, older):
    """Symptom: an interrupted run leaves half a line, or nothing of what was done, or writes a few lines over
    the complete file of an earlier run; SIGTERM and SIGHUP lose everything. Fixed: what is done is whole
    lines in the file of --output or, if that is there already, in FILE.part beside it, and a sentence says
    which."""
    output, number, done = tmp_path / "out.jsonl", getattr(signal, name), []
    where = tmp_path / "out.jsonl.part" if older else output
    # Whoever started the tests (nohup, a shell's &), or a library before, may have set another handler.
    default = signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL
    before = signal.signal(number, default)

    def hear(event):
        done.append(event.result)
        if sum(map(bool, done)) == 2:
            os.kill(os.getpid(), number)
    listen(monkeypatch, hear)
    if older:
        output.write_text(older)
    try:
        code, out, err = run(*["--prompt", "x"] * 9, "--gen-length", 4, "--max-batch", 1, "--output", output)
        assert code == 128 + number and signal.getsignal(number) == default
    finally:
        signal.signal(number, before)
    kept = [json.loads(line)["tokens"] for line in where.read_text().splitlines()]
    assert kept == [result.tokens for result in done if result]
    assert f"generate.py: interrupted; done so far: 2, in {where}" in err and err.count("\n") == 1
    assert not older or output.read_text() == older and "is as it was" in err


MANY = [*["--prompt", "number"] * 400, "--json", "--gen-length", 100, "--max-batch", 1]


def test_a_signal_to_a_process(text_folder, tmp_path):
    """The same from outside: whole lines in the file and in the pipe, the exit code, one sentence."""
    output = tmp_path / "out.jsonl"
    process = start(text_folder, *MANY, "--output", output, text=True)
    first = [process.stdout.readline() for _ in range(2)]
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert err.startswith("generate.py: interrupted; done so far: ")
    lines = output.read_text()
    assert lines.startswith("".join(first)) and lines.endswith("\n") and 2 <= len(lines.splitlines()) < 400


def test_a_closed_pipe_ends_quietly(text_folder):
    """Symptom: `generate.py --json | head -1` ends in a traceback."""
    process = start(text_folder, *MANY, text=True)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=120) == 1 and process.stderr.read() == ""


def test_a_full_disk_is_one_sentence(text_folder):
    """Symptom: `> /dev/full` ends in a traceback, or in Python's own complaint while it shuts down."""
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full on this system")
    with open("/dev/full", "wb") as full:
        _, err = (process := start(text_folder, *ASK, stdout=full, text=True)).communicate()
    assert process.returncode == 2
    assert err == "generate.py: standard output cannot be written: No space left on device\n"


def test_a_full_disk_keeps_the_other_file(run, tmp_path, capsys, monkeypatch):
    """Where --json's reader has no room, the file of --output has what was done, and the sentence says so."""
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full on this system")
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr("sys.stdout", full)
        code, _, err = run(*ASK, "--json", "--output", tmp_path / "out")
        monkeypatch.undo()
    assert code == 2
    assert "standard output cannot be written: No space left on device; done so far: 1, in" in err
    assert len((tmp_path / "out").read_text().splitlines()) == 1


def test_letters_that_the_terminal_does_not_have(run, monkeypatch):
    """Symptom: PYTHONIOENCODING=cp1252 ends the run at the first letter outside of it. Fixed: it goes on,
    with escapes; JSON is ASCII there."""
    for how, says in (("--compare", b"Q  \\u2192 \\u4e2d"), ("--json", b'"text": ')):
        page = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
        monkeypatch.setattr("sys.stdout", page)
        code, _, err = run("--prompt", "→ 中", "--gen-length", "8", "--no-eos", how)
        out = page.buffer.getvalue()
        assert code == 0 and not err and says in out
        assert how != "--json" or out.isascii() and json.loads(out)
        monkeypatch.undo()


def test_help_groups(capsys):
    """The options stand in their groups, each with its help."""
    with pytest.raises(SystemExit):
        generate.main(["--help"])
    out = capsys.readouterr().out
    assert all(f"\n{group}:\n" in out for group in ("model", "input", "decoding", "cache", "output"))
