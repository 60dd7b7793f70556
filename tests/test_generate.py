"""`generate.py` as people run it: a process, its output, its exit code."""
import json
import os
import re
import signal
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

import generate

DOCUMENT = "The golden data are two tiny checkpoints with random weights. The weights are random but decisive."
ASK = ["--prefix", DOCUMENT, "--prompt", "Which weights?", "--prompt", "How many checkpoints are there?", "--gen-length", "12"]


def run(*args, **kw):
    return subprocess.run([sys.executable, ROOT / "generate.py", *map(str, args)], capture_output=True, text=True, timeout=300,
                          env=os.environ | {"OMP_NUM_THREADS": "1"}, **kw)


@pytest.fixture(scope="module")
def plain(text_folder):
    """The answers without a cache."""
    return [json.loads(line) for line in run("--model", text_folder, *ASK, "--cache", "none", "--json").stdout.splitlines()]


def test_text(text_folder, plain):
    """Questions with their answers, the table, the totals; the same answers as --json gives."""
    out = run("--model", text_folder, *ASK, "--cache", "none")
    assert out.returncode == 0 and not out.stderr
    for question, answer in zip(("Which weights?", "How many checkpoints are there?"), plain):
        assert f"Q  {question}\nA  {answer['text']}\n" in out.stdout
    assert re.search(r"request +prefix +ratio +depth +cache +refreshes +steps +generated", out.stdout)
    assert re.search(r"none +[\d,]+ token-layers", out.stdout)


@pytest.mark.parametrize("cache", [["none"], ["intra", "--refresh", 1], ["bicache", "--depth", 0, "--refresh", 1],
                                   ["bicache", "--depth", 2], ["naive"], ["bicache", "--depth", 3, "--window", "block",
                                                                          "--block-length", 4]])
def test_every_cache_mode(text_folder, plain, cache):
    """One JSON object a line and nothing else; the exact modes give the tokens of no cache, the sharing ones a miss, then a
    hit."""
    out = run("--model", text_folder, *ASK, "--cache", *cache, "--json")
    assert out.returncode == 0 and not out.stderr
    lines = sorted((json.loads(line) for line in out.stdout.splitlines()), key=lambda r: r["index"])
    assert len(lines) == 2 and all(set(line) >= {"text", "tokens", "finish_reason", "depth", "hit"} for line in lines)
    if 1 in cache or cache == ["none"]:
        assert [r["tokens"] for r in lines] == [r["tokens"] for r in plain]
    if cache[0] == "naive" or 2 in cache or 3 in cache:
        assert [r["hit"] for r in lines] == [False, True] and lines[0]["prefix_tokens"] == lines[1]["prefix_tokens"] > 20


def test_requests_file_and_output(text_folder, tmp_path):
    """A file of requests, as prefix and prompt or as chats; the results land in the output file, a line each."""
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    chat = {"messages": [{"role": "system", "content": DOCUMENT}, {"role": "user", "content": "Which weights?"}]}
    path.write_text(json.dumps({"prefix": DOCUMENT, "prompt": "Which weights?"}) + "\n" + json.dumps(chat) + "\n")
    out = run("--model", text_folder, "--requests", path, "--gen-length", 6, "--depth", 2, "--json", "--output", output)
    assert out.returncode == 0 and output.read_text() == out.stdout and not (tmp_path / "out.jsonl.tmp").exists()
    first, second = map(json.loads, out.stdout.splitlines())
    assert first["tokens"] == second["tokens"] and second["hit"]


def test_trace_and_compare(text_folder):
    """The trace shows, layer by layer, the refresh every R steps and where K/V were read; --compare runs again without."""
    out = run("--model", text_folder, *ASK, "--depth", 2, "--refresh", 4, "--no-eos", "--trace", "--compare").stdout
    assert "layer   3 #ppp#ppp#ppp" in out and "layer   1 ssssssssssss" in out
    assert re.search(r"of 2 answers equal", out)


@pytest.mark.parametrize("args, says", [
    (["--steps", "0"], "steps is 0"), (["--gen-length", "-1"], "gen_length is -1"), (["--depth", "x"], "--depth: 'x' is neither"),
    (["--depth", "99"], "depth is 99"), (["--cache", "none", "--depth", "2"], "--depth has an effect only with"),
    (["--cache", "naive", "--refresh", "2"], "--refresh has no effect"), (["--requests", "x.jsonl"], "brings its own prompts"),
    (["--watch"], "in a terminal"), (["--trace", "--json"], "leave it out"), (["--remasking", "best"], "remasking is 'best'"),
    (["--model", "/nowhere"], "no model folder"), (["--output", "/nowhere/x"], "--output /nowhere/x cannot be written"),
    (["--cache-mb", "0.1"], "set cache_mb to"), (["--prompt", "@/nowhere"], "/nowhere cannot be read"),
    (["--device", "cuda"], "torch finds no GPU"), (["--depth", "²"], "--depth: '²' is neither"), (["--output", "/dev/null"], "no ordinary"),
    (["--output", "/"], "no ordinary"), (["--seed", "3"], "--seed has an effect only"), (["--cache", "none", "--salt", "x"], "--salt"),
    (["--cache", "none", "--no-auto-prefix"], "--auto-prefix has"), (["--seed", str(2**40), "--temperature", "1"], "seed is 1099511627776")])
def test_bad_options(text_folder, args, says, capsys):
    """Exit code 2, one line on standard error that says what to do, nothing on standard output."""
    if "cuda" in args and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    code, (out, err) = generate.main(["--model", str(text_folder), *ASK, *args]), capsys.readouterr()
    assert code == 2 and out == "" and says in err and len(err.splitlines()) == 1


def test_bad_option_as_a_process(text_folder):
    """The same from outside: the exit code is the process' own; argparse's own refusals included."""
    out = run("--model", text_folder, *ASK, "--threshold", "2")
    assert out.returncode == 2 and not out.stdout and out.stderr == "generate.py: request 0: threshold is 2.0; it must be above 0 and at most 1\n"
    out = run("--bogus")
    assert out.returncode == 2 and not out.stdout and out.stderr == "generate.py: unrecognized arguments: --bogus\n"


@pytest.mark.parametrize("line, says", [("{", "line 2 of"), ('{"text": 1}', "line 2 of"), ('{"messages": []}', "list of messages"),
                                        ('{"prefix": 3, "prompt": "x"}', "line 2 of"), ("[]", "line 2 of"), ("[" * 100_000, "line 2 of")])
def test_unreadable_requests(text_folder, tmp_path, line, says, capsys):
    """The line that cannot be used is named, before the model runs."""
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "x"}\n' + line + "\n")
    code, (out, err) = generate.main(["--model", str(text_folder), "--requests", str(path)]), capsys.readouterr()
    assert code == 2 and not out and says in err and "line 2" in err and len(err.splitlines()) == 1


def test_interrupt_leaves_whole_lines(text_folder, tmp_path):
    """Symptom: an interrupted run leaves half a line, or nothing of what was done. Exit code 130; the output file holds the
    finished results, each line whole."""
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"number {i}"}) for i in range(400)))
    process = subprocess.Popen([sys.executable, ROOT / "generate.py", "--model", text_folder, "--requests", path, "--json",
                                "--gen-length", "100", "--max-batch", "1", "--output", output], stdout=subprocess.PIPE, text=True,
                               env=os.environ | {"OMP_NUM_THREADS": "1"})
    first = [process.stdout.readline() for _ in range(2)]
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    lines = output.read_text()
    assert lines.startswith("".join(first)) and lines.endswith("\n") and len(lines.splitlines()) < 400
    assert all(json.loads(line)["tokens"] for line in lines.splitlines())


def test_help_groups(capsys):
    """The options stand in their groups, each with its help."""
    with pytest.raises(SystemExit):
        generate.main(["--help"])
    out = capsys.readouterr().out
    assert all(f"\n{group}:\n" in out for group in ("model", "input", "decoding", "cache", "output"))


def test_watch_draws_in_a_terminal(text_folder, plain):
    """The canvases fill up in place; at the end questions and answers stand as without --watch."""
    pty = pytest.importorskip("pty", reason="no pseudo-terminals on this system")
    ours, theirs = pty.openpty()
    process = subprocess.Popen([sys.executable, ROOT / "generate.py", "--model", text_folder, *ASK, "--cache", "none", "--watch"],
                               stdout=theirs, stderr=theirs, env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"})
    os.close(theirs)
    shown = b""
    while chunk := read(ours):
        shown += chunk
    assert process.wait() == 0
    shown = shown.decode()
    assert shown.count("░") >= 11 and shown.index("░") < shown.index("Q  Which weights?")
    assert all(f"A  {answer['text']}" in shown.replace("\r", "") for answer in plain)


def read(terminal):
    try:
        return os.read(terminal, 4096)
    except OSError:                         # how Linux says that the other side is closed
        return b""


def test_line_separators_inside_a_text(text_folder, tmp_path, capsys):
    """Symptom: a JSON string that holds U+2028 raw is cut there. Only newlines end a line."""
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "one\u2028two"}\n', encoding="utf-8")
    assert generate.main(["--model", str(text_folder), "--requests", str(path), "--gen-length", "2", "--json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_an_empty_prompt_and_a_link_as_output(text_folder, tmp_path, capsys):
    """An empty prompt is a prompt where a template surrounds it; the output goes to what a link stands for."""
    (tmp_path / "link").symlink_to(tmp_path / "target")
    assert generate.main(["--model", str(text_folder), "--prompt", "", "--gen-length", "2", "--output", str(tmp_path / "link")]) == 0
    assert (tmp_path / "link").is_symlink() and len((tmp_path / "target").read_text().splitlines()) == 1
    capsys.readouterr()


def test_a_closed_pipe_ends_quietly(text_folder):
    """Symptom: `generate.py --json | head -1` ends in a traceback."""
    many = [x for i in range(30) for x in ("--prompt", str(i))]
    process = subprocess.Popen([sys.executable, ROOT / "generate.py", "--model", text_folder, *many, "--json", "--gen-length", "20",
                                "--max-batch", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(timeout=120) == 1 and process.stderr.read() == ""
