"""The embedded checkpoint does its job: it reads staff lists that it has never seen, with and without a
cache."""
import json
import random
import sys

import pytest
from conftest import ROOT

import generate
from engine import Engine, Request

sys.path.insert(0, str(ROOT / "tools"))
from sequences import LATE          # noqa: E402
from staff import MARKED, ask, sample       # noqa: E402

TINY = ROOT / "checkpoints" / "tiny"


@pytest.fixture(scope="module")
def questions():
    """Two lookups and a question each of three other kinds about ten held-out documents of 3 to 30
    people."""
    rng, asked = random.Random("held out for the tests"), []
    for people in range(3, 31, 3):
        text, qa = sample(rng, people)
        for kind, n in (("lookup", 2), ("reverse", 1), ("two_hop", 1), ("counting", 1)):
            asked += [(kind, text, question, answer) for k, question, answer in qa if k == kind][:n]
    return asked


@pytest.mark.parametrize("cache", ["none", "bicache"])
def test_held_out_documents(questions, cache):
    """At most one answer of a kind is wrong; metrics.json has the figures over more."""
    engine = Engine.from_folder(TINY, cache=cache, max_batch=10)
    requests = []
    for _, text, question, _ in questions:
        ids, prefix_len = engine.tokenizer.render({"prefix": text, "prompt": question})
        requests.append(Request(ids, prefix_len=prefix_len, gen_length=24, threshold=0.9))
    right = {"lookup": [], "reverse": [], "two_hop": [], "counting": []}
    for (kind, _, _, answer), result in zip(questions, engine.generate(requests)):
        right[kind].append(engine.tokenizer.decode(result.tokens).strip() == answer)
        assert (result.depth > 0) == (cache == "bicache")
    assert all(sum(answers) >= len(answers) - 1 for answers in right.values()), right


@pytest.mark.parametrize("kind", MARKED)
def test_what_naive_reuse_breaks(kind):
    """"Who besides Ann is in Oslo?", "Which room besides Ann's is in Oslo?" ask for what a prefix run alone
    cannot know: with its K/V in all layers most answers are wrong. They are right where nothing is shared,
    and where the layers below LATE are."""
    asked = [ask(random.Random(f"naive breaks/{people}"), kind, people) for people in range(4, 30, 2)]
    right = {}
    for options in (dict(cache="none"), dict(cache="naive"), dict(cache="bicache", depth=LATE)):
        engine = Engine.from_folder(TINY, max_batch=7, **options)
        requests = []
        for text, question, _ in asked:
            ids, prefix_len = engine.tokenizer.render({"prefix": text, "prompt": question})
            requests.append(Request(ids, prefix_len=prefix_len, gen_length=24, threshold=0.9))
        answers = [engine.tokenizer.decode(result.tokens).strip() for result in engine.generate(requests)]
        right[options["cache"]] = sum(got == answer for got, (*_, answer) in zip(answers, asked))
    assert right["none"] >= 12 and right["bicache"] >= 12 and right["naive"] <= 6, right


ANSWERS = ["Zoe reports to Jim.", "Ben reports to Noah.", "Lara is in room 66.",
           "Ida reports to Fred, and Fred is in Tokyo.", "Tom reports to Noah, and Noah is in room 70.",
           "It is room 52.", "It is Ann.", "The number of people in Oslo is 3."]


def test_the_examples_run_without_options(capsys):
    """`python generate.py`: each question with its answer, which is right, the table, a miss and then hits,
    and the same answers without a cache."""
    assert generate.main([]) == 0
    out = capsys.readouterr().out
    asked = (ROOT / "examples" / "questions.txt").read_text().strip().split("\n")
    assert all(f"Q  {question}\nA  {answer}\n" in out for question, answer in zip(asked, ANSWERS, strict=True))
    table = out[out.index("request  prefix"):].split("\n")[1:len(asked) + 1]
    assert [row.split()[4] for row in table] == ["miss"] + ["hit"] * (len(asked) - 1)
    assert "times less work" in out and f"{len(asked)} of {len(asked)} answers equal" in out


def test_naive_reuse_breaks_an_example(capsys):
    """The demo shows the trade: with K/V of a prefix run alone in all layers an answer is another."""
    assert generate.main(["--cache", "naive"]) == 0
    out = capsys.readouterr().out
    assert sum(f"\nA  {answer}\n" in out for answer in ANSWERS) < len(ANSWERS)


def test_size_and_provenance():
    """At most 12 MB, a depth table of its own, and the measured figures beside the weights."""
    assert sum(f.stat().st_size for f in TINY.iterdir()) <= 12e6
    assert json.loads((TINY / "depth.json").read_text())["layers"] >= 8
    assert json.loads((TINY / "metrics.json").read_text())["held_out"]["other"]["n"] >= 80
