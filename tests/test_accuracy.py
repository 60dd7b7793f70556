"""The accuracy bench: its questions, its statistics, its files and its verdicts. The engine is tested
elsewhere."""
import json
import math
import re
import sys
from collections import Counter
from functools import partial

import pytest
import torch
from conftest import ROOT

from bench import accuracy, report
from bench.accuracy import Setup, choose, make_setups
from bench.asked import RATIOS, draw_questions, staff
from hub.checkpoint import load
from tokenizer import Tokenizer

sys.path.insert(0, str(ROOT / "tools"))
from profiler import similarity     # noqa: E402

TINY = ROOT / "checkpoints" / "tiny"
SMALL = ["--model", str(TINY), "--questions", "1", "--ratios", "0.7", "--max-batch", "2", "--few", "1",
         "--slow", "1", "--states", "1"]


@pytest.fixture(scope="module")
def questions():
    return draw_questions(Tokenizer.from_folder(TINY), 12)


# -- questions


def test_as_many_questions_of_each_kind_at_each_ratio(questions):
    """The ratio is met to within two points, and nearly always to one; no answer is longer than its masks."""
    every = {(kind, r): 2 for kind in staff.KINDS for r in RATIOS}
    assert Counter((q.kind, q.target) for q in questions) == every
    tokenizer = Tokenizer.from_folder(TINY)
    for q in questions:
        assert abs(q.ratio - q.target) < 0.02 and len(q.prompt) + q.gen_length <= 1024
        assert len(tokenizer.encode(q.answer)) < q.gen_length
        shared = next(other for other in questions if other.document == q.document)
        assert q.prompt[:q.prefix_len] == shared.prompt[:q.prefix_len], "questions on one list share a prefix"
    assert sum(abs(q.ratio - q.target) < 0.01 for q in questions) > 0.9 * len(questions)


def test_questions_are_held_out_and_have_one_answer(questions, monkeypatch):
    """Their seeds are their own, so is each list; a question is asked once, and the texts agree that its
    answer is the only one."""
    seeds = []
    real = staff.random.Random
    monkeypatch.setattr("bench.asked.random.Random", lambda seed: seeds.append(seed) or real(seed))
    tokenizer = Tokenizer.from_folder(TINY)
    assert draw_questions(tokenizer, 2, (0.5,)) and draw_questions(tokenizer, 2, (0.5,), seed=1)
    assert len({*seeds}) == len(seeds) and all(seed.startswith("accuracy/") for seed in seeds)
    monkeypatch.undo()
    asked = Counter((q.document, q.own) for q in questions)
    assert set(asked.values()) == {1}
    for q in questions:
        text = tokenizer.decode(q.prompt[:q.prefix_len])
        if found := re.fullmatch(r"Who (?:is in|has) room (\d+)\?", q.own):
            said = rf"room {found[1]}\b"
            named = re.findall(rf"(\w+) (?:is in|works in \w+, in|has) {said}"
                               rf"|(\w+) reports to \w+ and is in {said}"
                               rf"|(\w+) leads the team and is in {said}", text.split("?")[0])
            assert len({*filter(None, sum(named, ()))}) == 1, (q.own, text)
        if found := re.fullmatch(r"How many people (?:are|work) in (\w+)\?", q.own):
            listed = re.match(r"\s*Staff list:.*?\.(?=\s*(?:Wh|How|$))", text)[0]
            assert q.answer == f"The number of people in {found[1]} is {len(re.findall(found[1], listed))}."


def test_a_kind_that_no_list_has_is_named(monkeypatch):
    monkeypatch.setattr(staff, "KINDS", (*staff.KINDS, "riddle"))
    with pytest.raises(ValueError, match="riddle.*leave out"):
        draw_questions(Tokenizer.from_folder(TINY), 1, (0.5,))


def test_a_part_of_the_questions_is_spread_over_kinds_and_ratios(questions):
    part = [questions[i] for i in choose(questions, 6)]
    assert Counter((q.kind, q.target) for q in part) == {(kind, r): 1 for kind in staff.KINDS for r in RATIOS}
    assert Counter(questions[i].kind for i in choose(questions, 4)) == dict.fromkeys(staff.KINDS, 4)
    assert choose(questions, None) == list(range(len(questions)))


def test_setups_cover_modes_depths_intervals_and_windows():
    setups = make_setups(8, 120, 48, 0)
    assert len({s.name for s in setups}) == len(setups)
    whole = {(s.cache, s.window, s.refresh, s.depth) for s in setups if s.asked is None}
    depths = {("bicache", "all", "16", d) for d in (*range(9), "auto")}
    assert depths | {(c, w, None, None) for c in ("none", "naive") for w in ("all", "block")} <= whole
    for cache, depth in (("intra", None), ("bicache", "auto")):
        every = {(s.refresh, s.window) for s in setups if (s.cache, s.depth) == (cache, depth)}
        assert every == {(R, w) for R in ("1", "4", "16", "inf") for w in ("all", "block")}
    grid = {(s.depth, s.refresh, s.window) for s in make_setups(8, 120, 48, 60) if s.depth in range(9)}
    assert len(grid) == 9 * 4 * 2


def test_a_setup_is_the_engine_it_is_called(questions):
    """Symptom: a row of the table was measured with other settings than its name says."""
    folder = accuracy.Folder(TINY)
    for s in make_setups(8, 120, 48, 60):
        engine = s.engine(folder, 2, 100)
        assert (engine.mode, engine.window) == (s.cache, s.window) and str(s.refresh) in s.name + "None"
        assert s.refresh is None or engine.refresh == accuracy.INTERVALS[s.refresh]
        assert s.depth is None or engine.admission.depth == s.depth
        assert (engine.guard is not None) == (s.depth == "auto" and s.guard)
    args, few = accuracy.parse(["--quick", "--max-batch", "2"]), [0, 1]
    at = lambda pace: Setup("bicache", depth="auto", refresh="16", pace=pace)
    fast, slow = (accuracy.run(at(pace), folder, questions, few, args) for pace in accuracy.PACES)
    assert slow["forwards"] > fast["forwards"] and max(fast["forwards"]) < 5
    assert sum(fast["work"]) == sum(fast["total"].values()) and min(fast["total"].values()) > 0


# -- statistics


@pytest.mark.parametrize("right, n, low, high", [   # Newcombe 1998 (Statist. Med. 17, 857), table I, method 3
    (81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611), (1, 29, 0.0061, 0.1718),
    (29, 29, 0.8830, 1.0)])
def test_wilson(right, n, low, high):
    assert report.wilson(right, n) == pytest.approx((low, high), abs=6e-5)


def test_paired_difference():
    """By hand for one case; a difference turned round turns its interval; none changed still leaves doubt."""
    point, low, high = report.paired(lost=12, won=2, n=50)
    middle, half = (3 - 13) / 52, 1.959964 * math.sqrt((16 / 52 - (10 / 52) ** 2) / 52)
    assert (point, low, high) == pytest.approx((-20, 100 * (middle - half), 100 * (middle + half)))
    assert report.paired(2, 12, 50) == pytest.approx((20, -high, -low))
    assert report.paired(0, 0, 500) == pytest.approx((0, -0.552, 0.552), abs=1e-3)


@pytest.mark.parametrize("lost, won", [(0.05, 0.05), (0.2, 0.05), (0.02, 0.0), (0.3, 0.3)])
def test_paired_interval_covers(lost, won, n=60):
    """Over all outcomes of 60 questions the interval holds the true difference in about 95 of 100."""
    covered, fact = 0, math.factorial
    for b in range(n + 1):
        for c in range(n + 1 - b):
            _, low, high = report.paired(b, c, n)
            if low <= 100 * (won - lost) <= high:
                ways = fact(n) // fact(b) // fact(c) // fact(n - b - c)
                covered += ways * lost**b * won**c * (1 - lost - won)**(n - b - c)
    assert covered > 0.94


def test_mcnemar():
    assert report.mcnemar(0, 0) == report.mcnemar(5, 5) == 1
    assert report.mcnemar(0, 10) == report.mcnemar(10, 0) == pytest.approx(2 / 1024)
    assert report.mcnemar(12, 2) == pytest.approx(2 * (1 + 14 + 91) / 2**14)


def test_states_are_those_of_the_profiler(questions):
    """The mean over prefix tokens is what profiler.similarity says of the same canvas; the first layer never
    changes."""
    model = load(TINY)
    ours = accuracy.states(model, questions, 1)
    pair = [q for q in questions if q.kind == "lookup"][:2]
    assert pair[0].document == pair[1].document
    one = accuracy.states(model, pair, 1)["lookup"]
    canvas = pair[0].prompt + [model.config.mask_id] * pair[0].gen_length
    theirs = similarity(model, [canvas], [pair[0].prefix_len])[0]
    assert torch.allclose(torch.tensor(one["alone"][0], dtype=torch.float64), theirs, atol=1e-5)
    for kind in staff.KINDS:
        assert ours[kind]["n"] == 1 and ours[kind]["between"][0][0] == 1.0
        mean, decile, lowest = torch.tensor(ours[kind]["between"]).unbind()
        assert (mean >= lowest).all() and (decile >= lowest).all()


# -- files and the command


@pytest.fixture(scope="module")
def setups():
    """Few, for the tests: the real list has 48."""
    bicache = partial(Setup, "bicache", refresh="16")
    return [Setup("none"), Setup("none", "block"), Setup("naive"), Setup("intra", refresh="16"),
            bicache(depth="auto"), bicache(depth="auto", guard=False), *(bicache(depth=d) for d in range(9)),
            Setup("none", pace="slow", asked=1), bicache(depth="auto", refresh="4", pace="slow", asked=1)]


def bench(capsys, *args):
    code = accuracy.main([*SMALL, *map(str, args)])
    return code, *capsys.readouterr()


def test_parts_make_the_whole_and_a_stopped_run_goes_on(setups, monkeypatch, tmp_path, capsys):
    """Two parts in files of their own, the second one cut off and resumed, say what a run at one go says. A
    torn last line and files of other runs are refused."""
    monkeypatch.setattr(accuracy, "make_setups", lambda *_: setups)
    whole, *parts = (tmp_path / name for name in ("whole.jsonl", "1.jsonl", "2.jsonl"))
    code, out, _ = bench(capsys, "--out", whole, "--svg", tmp_path / "whole.svg")
    assert code == 0
    summary = json.loads(out.strip().split("\n")[-1])
    assert set(summary["setups"]) == {s.name for s in setups} and summary["env"]["dtype"] == "float32"
    saved = {name: row["saved"] for name, row in summary["setups"].items()}
    assert saved["none, all"] == 0 < saved["bicache auto, R 16, all"] < 1
    assert summary["setups"]["none, all"]["kinds"]["lookup"]["right"] == 1, "the embedded model reads"

    for part in ("1/2", "2/2"):
        code, out, _ = bench(capsys, "--out", parts[int(part[0]) - 1], "--part", part)
        assert code == 0 and "missing yet" in out
    lines = parts[1].read_text().splitlines(keepends=True)
    parts[1].write_text("".join(lines[:3]))
    bench(capsys, "--out", parts[1], "--part", "2/2")
    again = parts[1].read_text().splitlines(keepends=True)
    assert again[:3] == lines[:3] and len(again) == len(lines), "what stood there was not measured again"
    untimed = lambda row: {key: value for key, value in row.items() if key != "seconds"}
    strip = lambda found: {name: untimed(row) for name, row in found["rows"].items()}
    assert strip(report.read(parts)) == strip(report.read([whole]))
    code, out, _ = bench(capsys, "--report", *parts, "--svg", tmp_path / "parts.svg")
    assert code == 0 and json.loads(out.strip().split("\n")[-1])["verdicts"] == summary["verdicts"]
    assert (tmp_path / "parts.svg").read_text() == (tmp_path / "whole.svg").read_text()

    code, out, err = bench(capsys, "--out", whole, "--seed", 1)
    assert code == 2 and err.count("\n") == 1
    assert err.startswith(f"accuracy.py: {whole} was measured with another seed")
    code, out, err = bench(capsys, "--out", whole, "--threshold", 0.5)
    assert code == 2 and "another threshold" in err
    torn = tmp_path / "torn.jsonl"
    torn.write_text("".join(lines)[:-10])
    code, out, err = bench(capsys, "--report", torn)
    assert code == 2 and f"line {len(lines)} of {torn} is no JSON" in err


@pytest.mark.parametrize("args, words", [
    (["--part", "3/2"], "--part is K/N"), (["--part", "1/2"], "--part wants --out"),
    (["--ratios", "0.99"], "--ratios run from"), (["--ratios", "half"], "numbers"),
    (["--questions", "-1"], "start at 1"), (["--report", "x", "--out", "y"], "measures nothing")])
def test_bad_options(args, words, capsys):
    with pytest.raises(SystemExit) as e:
        accuracy.main(args)
    assert e.value.code == 2 and words in capsys.readouterr().err


def test_a_file_that_is_no_result(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"setup": "none, all"}\n')
    code, _, err = bench(capsys, "--report", tmp_path / "a.jsonl")
    assert code == 2 and "no header" in err
    assert bench(capsys, "--report", tmp_path / "b.jsonl")[0] == 2
