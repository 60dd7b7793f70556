"""`generate.py` as people run it: its output, its exit code; as a process where that is the point."""
import io
import os
import re
import sys
import weakref

import pytest
import torch
from command import ASK, DOCUMENT, ENV, QUESTIONS, listen, objects, run, start, write_lines  # noqa: F401

import generate


@pytest.fixture(scope="module")
def plain(text_folder):
    """The answers without a cache."""
    stdout, sys.stdout = sys.stdout, io.StringIO()
    try:
        assert generate.main(["--model", str(text_folder), *ASK, "--cache", "none", "--json"]) == 0
        return objects(sys.stdout.getvalue())
    finally:
        sys.stdout = stdout


# -- what is told --------------------------------------------------------------------------------------------


def test_text(run, plain):
    """Questions with their answers, the table, the totals; the same answers as --json gives."""
    code, out, err = run(*ASK, "--cache", "none")
    assert code == 0 and not err
    for question, answer in zip(QUESTIONS, plain):
        assert f"Q  {question}\nA  {answer['text'].strip()}\n" in out
    assert re.search(r"request +prefix +ratio +depth +cache +refreshes +steps +generated", out)
    assert re.search(r"none +[\d,]+ token-layers", out)


@pytest.mark.parametrize("cache, exact", [
    (["none"], True), (["intra", "--refresh", 1], True), (["bicache", "--depth", 0, "--refresh", 1], True),
    (["bicache", "--depth", 2], False), (["naive"], False),
    (["bicache", "--depth", 3, "--window", "block", "--block-length", 4], False)])
def test_every_cache_mode(run, plain, cache, exact):
    """One JSON object a line and nothing else; the exact modes give the tokens of no cache, the sharing ones
    a miss, then a hit."""
    code, out, err = run(*ASK, "--cache", *cache, "--json")
    found = objects(out)
    assert code == 0 and not err and len(found) == 2
    assert all(set(line) >= {"text", "tokens", "finish_reason", "depth", "hit"} for line in found)
    if exact:
        assert [r["tokens"] for r in found] == [r["tokens"] for r in plain]
    else:
        assert [r["hit"] for r in found] == [False, True]
        assert found[0]["prefix_tokens"] == found[1]["prefix_tokens"] > 20


def test_trace_and_compare(run):
    """The trace shows, layer by layer, the refresh every R steps and where K/V were read; --compare runs
    again without."""
    _, out, _ = run(*ASK, "--depth", 2, "--refresh", 4, "--no-eos", "--trace", "--compare")
    assert "layer   3 #ppp#ppp#ppp" in out and "layer   1 ssssssssssss" in out
    assert re.search(r"of 2 answers equal", out)


def test_watch_draws_in_a_terminal(text_folder, plain):
    """The canvases fill up in place; at the end questions and answers stand as without --watch."""
    pty = pytest.importorskip("pty", reason="no pseudo-terminals on this system")
    ours, theirs = pty.openpty()
    process = start(text_folder, *ASK, "--cache", "none", "--watch", stdout=theirs, stderr=theirs,
                    env=ENV | {"COLUMNS": "200", "LINES": "24"})
    os.close(theirs)
    shown = b""
    while chunk := read(ours):
        shown += chunk
    assert process.wait() == 0
    shown = shown.decode().replace("\r", "")
    assert shown.count("░") >= 11 and shown.index("░") < shown.index("Q  Which weights?")
    assert all(f"A  {answer['text'].strip()}" in shown for answer in plain)


def read(terminal):
    try:
        return os.read(terminal, 4096)
    except OSError:                         # how Linux says that the other side is closed
        return b""


def test_the_text_is_not_stripped(run, text_folder, capsys):
    """Symptom: white space at the ends of an answer is gone from --json. Cause: it was stripped for the eye.
    Fixed: the JSON's text is what the tokenizer says of the tokens."""
    from tokenizer import Tokenizer
    _, out, _ = run(*ASK, "--no-eos", "--json")
    decode = Tokenizer.from_folder(text_folder).decode
    assert all(found["text"] == decode(found["tokens"]) for found in objects(out))
    assert any(found["text"] != found["text"].strip() for found in objects(out))       # or this shows nothing


@pytest.mark.parametrize("how", [["--json"], ["--cache", "naive"]])
def test_memory_does_not_grow_with_the_requests(run, tmp_path, monkeypatch, how):
    """Symptom: 1.8 GB for 10,000 requests of 128 steps. Cause: all events were kept to the end, though no
    trace was to be drawn, and all results. Fixed: who listens keeps what it prints; counted here, by
    references to them, events and results that are alive while the last request ends."""
    path, seen, alive = write_lines(tmp_path / "in.jsonl", *({"prompt": str(i)} for i in range(12))), [], []

    def hear(event):
        seen.extend(map(weakref.ref, filter(None, (event, event.result))))
        alive.append(sum(ref() is not None for ref in seen))
    listen(monkeypatch, hear)
    code, _, _ = run("--requests", path, "--gen-length", 3, "--max-batch", 2, *how)
    assert code == 0 and len(seen) >= 12 * 4 and max(alive) <= 6


# -- what is refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("args, says", [
    (["--steps", "0"], "steps is 0"),
    (["--gen-length", "-1"], "gen_length is -1"),
    (["--depth", "99"], "depth is 99"),
    (["--remasking", "best"], "remasking is 'best'"),
    (["--model", "/nowhere"], "no model folder"),
    (["--output", "/nowhere/x"], "--output /nowhere/x cannot be written"),
    (["--output", "/dev/null"], "no ordinary"),
    (["--output", "/"], "no ordinary"),
    (["--cache-mb", "0.1"], "set cache_mb to"),
    (["--prompt", "@/nowhere"], "/nowhere cannot be read"),
    (["--device", "cuda"], "torch finds no GPU"),
    (["--device", "cuda:1"], "torch finds no GPU"),
    (["--seed", str(2**40), "--temperature", "1"], "seed is 1099511627776"),
])
def test_bad_options(run, args, says):
    """Exit code 2, one line on standard error that says what to do, nothing on standard output."""
    if "--device" in args and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    code, out, err = run(*ASK, *args)
    assert code == 2 and out == "" and says in err and len(err.splitlines()) == 1


def test_bad_option_as_a_process(text_folder):
    """The same from outside: the exit code is the process' own."""
    process = start(text_folder, *ASK, "--threshold", 2, text=True)
    out, err = process.communicate()
    assert process.returncode == 2 and not out
    assert err == "generate.py: --prompt number 1: threshold is 2.0; it must be above 0 and at most 1\n"


@pytest.mark.parametrize("line, says", [
    ("{", "line 3 of"), ('{"text": 1}', "line 3 of"), ('{"messages": []}', "list of messages"),
    ('{"prefix": 3, "prompt": "x"}', "has prefix 3"), ("[]", "line 3 of"),
    ("[" * 100_000, "nested too deeply"),
    ('{"prompt": "x", "gen_length": 0}', "gen_length is 0"), ('{"prompt": "\\ud800"}', "line 3 of"),
    ('{"prompt": "x", "remasking": ["random"]}', "remasking is"),
    ('{"prompt": "x", "stop_at_eos": "no"}', "no"),
    ('{"prompt": "x", "prefix_len": 99}', "prefix_len is 99")])
def test_unreadable_requests(run, tmp_path, line, says):
    """Symptom: the message names request 1, which is line 3 of the file; a JSON line's option is not checked.
    Cause: requests were counted from 0, behind blank lines. The line is named, before the model runs."""
    path = write_lines(tmp_path / "in.jsonl", '{"prompt": "x"}', "", line)
    code, out, err = run("--requests", path)
    assert code == 2 and not out and says in err and "line 3 of" in err and len(err.splitlines()) == 1


def test_a_bug_stays_a_traceback(run, monkeypatch):
    """Symptom: a bug of ours, an encoding error in some library, passes for bad input. Cause: main caught
    every ValueError. Fixed: what we refuse is a class of its own."""
    def bug(*_):
        raise ValueError("a bug")
    monkeypatch.setattr(generate, "headline", bug)
    with pytest.raises(ValueError, match="a bug"):
        run(*ASK)


def test_a_default_length_without_room(run, text_folder, tmp_path):
    """Symptom: a generation_config.json that asks for more than the model holds refuses every prompt. The
    length is cut to the room that there is, and a sentence says so; one that was given is refused, as
    ever."""
    folder = tmp_path / "model"
    folder.mkdir()
    for path in text_folder.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "generation_config.json").write_text('{"max_new_tokens": 100000}')
    ask = ["--model", folder, "--prompt", "x", "--json", "--threshold", "0.01"]
    code, out, err = run(*ask)
    assert code == 0 and len(out.splitlines()) == 1
    assert err.startswith("generate.py: 1 of 1 answers get less than ")
    code, out, err = run(*ask, "--gen-length", 100000)
    assert code == 2 and "shorten one" in err
    for wrong in ('"32"', "true", "0"):
        (folder / "generation_config.json").write_text(f'{{"max_new_tokens": {wrong}}}')
        code, out, err = run(*ask)
        assert code == 2 and "max_new_tokens is" in err


# -- what comes in -------------------------------------------------------------------------------------------


def test_equal_texts_give_equal_ids(run, tmp_path, monkeypatch):
    """Symptom: --prefix 'Ann is in Oslo.\\n\\n' --prompt 'Q: who?' gives other ids than the two joined, and
    than the same in a file of requests. Cause: texts were stripped, and line ends translated. Fixed: texts
    are as given, through whichever door."""
    import tokenizer
    seen, split = [], tokenizer.Tokenizer.split

    def spy(self, prefix, rest):
        seen.append(split(self, prefix, rest))
        return seen[-1]
    monkeypatch.setattr(tokenizer.Tokenizer, "split", spy)
    prefix, prompt = "\ufeff Ann is in Oslo.\r\n\n"[1:], "Q: who? \n"
    (tmp_path / "prefix.txt").write_bytes(prefix.encode("utf-8-sig"))
    lines = write_lines(tmp_path / "in.jsonl", {"prefix": prefix, "prompt": prompt, "raw": True})
    for doors in (["--prefix", prefix, "--prompt", prompt, "--raw"],
                  ["--prefix", f"@{tmp_path / 'prefix.txt'}", "--prompt", prompt, "--raw"],
                  ["--requests", lines]):
        assert run(*doors, "--gen-length", 1)[0] == 0
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(prefix.encode())))
    assert run("--prefix", "-", "--prompt", prompt, "--raw", "--gen-length", 1)[0] == 0
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines.read_bytes())))
    assert run("--requests", "-", "--gen-length", 1)[0] == 0
    assert len(seen) == 5 and all(ids == seen[0] for ids in seen)


def test_raw_is_one_running_text(run, text_folder, tmp_path):
    """Symptom: a base model whose folder brings a chat template cannot be asked to go on with a text. With
    --raw, or "raw" in a line, no template stands around prefix and prompt; a line has the last word."""
    from tokenizer import Tokenizer
    _, P = Tokenizer.from_folder(text_folder).split("Ann is ", "in")
    lines = write_lines(tmp_path / "in.jsonl", {"prefix": "Ann is ", "prompt": "in"},
                        {"prefix": "Ann is ", "prompt": "in", "raw": False})
    _, out, _ = run("--requests", lines, "--raw", "--gen-length", 2, "--cache", "naive", "--json")
    raw, chat = objects(out)
    assert raw["prefix_tokens"] == P < chat["prefix_tokens"]


def test_draws_differ_by_place_and_repeat(run, tmp_path):
    """Symptom: the same prompt four times at a temperature gives four equal answers. Cause: one seed for all.
    Fixed: number i has seed + i, so that number 2 at seed 5 is number 0 at seed 7; a line's own seed counts
    as it is."""
    draw = ["--temperature", "1", "--gen-length", 8, "--no-eos", "--json"]
    _, out, _ = run(*["--prompt", "who"] * 4, "--seed", 5, *draw)
    four = [tuple(found["tokens"]) for found in objects(out)]
    assert len(set(four)) == 4
    lines = write_lines(tmp_path / "in.jsonl", {"prompt": "who"}, {"prompt": "who", "seed": 6},
                        {"prompt": "who"})
    _, out, _ = run("--requests", lines, "--seed", 7, *draw)
    found = [tuple(found["tokens"]) for found in objects(out)]
    assert found[:2] == [four[2], four[1]] and found[2] not in found[:2]


def test_stop_and_n(run, tmp_path):
    """--stop ends answers in front of a text, whichever comes first, in JSON and as text; --n draws as often,
    each answer the one that its place would get in a list."""
    draw = [*ASK, "--temperature", "1", "--json"]
    _, out, _ = run(*draw, "--n", "2")
    both, stop = objects(out), objects(out)[0]["text"][3:5]
    assert len(both) == 4 and both[0]["text"] != both[1]["text"]
    again = write_lines(tmp_path / "in.jsonl",
                        *({"prefix": DOCUMENT, "prompt": q} for q in QUESTIONS for _ in "ab"))
    _, out, _ = run("--requests", again, *draw[-3:], "--gen-length", "12")
    assert [a["tokens"] for a in objects(out)] == [a["tokens"] for a in both]
    _, out, _ = run(*draw, "--n", "2", "--stop", "\x00", "--stop", stop)
    for cut, full in zip(objects(out), both, strict=True):
        assert cut["text"] == full["text"].split(stop)[0]
        assert cut["finish_reason"] == ("stop" if stop in full["text"] else full["finish_reason"])
    assert objects(out)[0]["finish_reason"] == "stop" and objects(out)[0]["forwards"] <= both[0]["forwards"]
    code, _, err = run(*ASK, "--n", "2")
    assert (code, err) == (2, "generate.py: --prompt number 1 would get the same answer 2 times: nothing is "
                              "drawn; leave out --n, or set temperature, alg_temp, or remasking random or "
                              "origin\n")


def test_a_line_brings_its_own_options(run, tmp_path):
    """Symptom: gen_length in a JSONL line was refused, or would have been ignored. A line may hold any field
    of Request by its name; it goes before the command line's, null takes that back, and an id comes out
    again."""
    lines = write_lines(
        tmp_path / "in.jsonl", {"prompt": "a", "gen_length": 3, "id": {"any": "\ud800"}},
        {"prompt": "b", "steps": None, "threshold": 0.01, "id": 7}, {"prompt": "c"})
    code, out, _ = run("--requests", lines, "--gen-length", 5, "--steps", 5, "--no-eos", "--json")
    assert code == 2                                    # steps 5 of gen_length 3
    lines.write_text(lines.read_text().replace('"gen_length": 3', '"gen_length": 3, "steps": 3'))
    code, out, _ = run("--requests", lines, "--gen-length", 5, "--steps", 5, "--no-eos", "--json")
    found = objects(out)
    assert code == 0 and [len(x["tokens"]) for x in found] == [3, 5, 5]
    assert [x["forwards"] for x in found] == [3, 1, 5]
    assert found[0]["id"] == {"any": "\ud800"} and found[1]["id"] == 7 and "id" not in found[2]
