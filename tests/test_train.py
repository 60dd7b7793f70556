"""The training recipe runs, is reproducible, and goes on after a stop; who may not see whom is kept, and
questions have one answer."""
import json
import random
import re
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file

from model import Config, Transformer

sys.path.insert(0, str(ROOT / "tools"))
import staff                        # noqa: E402
from sequences import LATE, STATS, batch        # noqa: E402
from staff import ASSISTANT, END, USER          # noqa: E402
from train_tiny import hidden       # noqa: E402

SMALL = ["--layers", "8", "--width", "128", "--batch", "512", "--again", "500", "--no-compile", "--eval-docs", "1"]


@pytest.fixture(scope="module")
def lang():
    return staff.Language()


def train(folder, name, *args):
    out = folder / name
    command = [sys.executable, ROOT / "tools" / "train_tiny.py", "--out", out, "--state", folder / "state.pt"]
    run = subprocess.run([*command, *SMALL, *args], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return load_file(out / "model.safetensors"), json.loads((out / "metrics.json").read_text())


def test_training_is_reproducible_and_resumable(tmp_path):
    """The same seed gives the same weights; --resume goes on from the state and counts on; both write a
    folder that the engine loads."""
    weights, first = train(tmp_path, "a", "--tokens", "2000")
    again, _ = train(tmp_path, "b", "--tokens", "2000")
    assert weights.keys() == again.keys() and all(torch.equal(weights[k], again[k]) for k in weights)
    more, second = train(tmp_path, "c", "--tokens", "4000", "--resume")
    assert second["steps"] > first["steps"] and second["tokens"] >= 4000 > first["tokens"]
    assert any(not torch.equal(weights[k], more[k]) for k in weights)
    from engine import Engine, Request
    engine = Engine.from_folder(tmp_path / "c", cache="none", cache_mb=4)
    asked = {"prefix": "Staff list: Kim leads the team.", "prompt": "Who leads the team?"}
    ids, _ = engine.tokenizer.render(asked)
    assert engine.generate([Request(ids, gen_length=4)])[0].forwards <= 4


def chats(lang, steps):
    """(ids, document, question, answer, length, kind, low, high) of chats as they are trained on: where the
    document ends, the last question and its answer begin; what each row sees (T, T) in the layers below
    LATE and in the others."""
    for step in range(steps):
        rng, shares = random.Random(step), [1.0] * len(STATS[1:])
        ids, weights, kinds, biases, total = batch(rng, lang, 12, shares, 1500)
        T = ids.shape[1]
        low, high = (bias.expand(len(ids), 1, T, T)[:, 0] == 0 for bias in biases)
        for b, row in enumerate(ids.tolist()):
            if USER not in row:
                continue            # a restatement
            question, answer = (T - 1 - row[::-1].index(token) for token in (USER, ASSISTANT))
            n = int(high[b].any(0).nonzero().max()) + 1                     # nobody sees what is behind it
            kind = STATS[int(kinds[b, answer + 1])]
            yield row, row.index(END) + 1, question, answer + 1, n, kind, low[b], high[b]


def test_what_rows_do_not_see(lang):
    """A blind answer sees the document and itself and nothing else; rows alone see only what precedes the
    last question; all others see all. Four of five answers of the kinds in MARKED are blind, and half of
    those have the document alone below LATE."""
    count = {"blind": 0, "seeing": 0, "half alone": 0, "alone": 0, "easy and blind": 0}
    for ids, document, question, answer, n, kind, low, high in chats(lang, 60):
        rows, here = torch.arange(len(ids))[:, None], torch.arange(len(ids))
        blind, alone_low, alone_high = not high[answer, question], not low[0, n - 1], not high[0, n - 1]
        for sees, alone in ((low, alone_low), (high, alone_high)):
            hidden_rows = (here >= n) | (blind & (rows >= answer) & (here >= document) & (here < answer))
            hidden_rows = hidden_rows | (alone & (rows <= question) & (here > question))
            assert torch.equal(sees, ~hidden_rows)
        if kind in staff.MARKED:
            count["blind" if blind else "seeing"] += 1
            count["half alone"] += alone_low
            assert not alone_high and (blind or not alone_low)
        else:
            assert kind == "blind" or not blind
            count["easy and blind"] += blind
            count["alone"] += alone_high
    assert 2 < count["blind"] / count["seeing"] < 8, count
    assert 0.35 < count["half alone"] / count["blind"] < 0.65, count
    assert count["alone"] > 20 and count["easy and blind"] > 20, count


def test_a_blind_answer_knows_the_question_from_the_document_only(lang):
    """Another question changes nothing in a blind answer whose document is alone; where the document sees
    the question, or the answer does, all of its rows change. `hidden` uses the first bias in the layers
    below LATE, the second in the others."""
    document = "Staff list: Kim works in Oslo, in room 42, and leads the team."
    ids = torch.tensor([lang.prompt(document, f"Which room is {name} in?") + [staff.MASK] * 4
                        for name in ("Kim", "Tom")])
    T, question = ids.shape[1], ids[0].tolist().index(USER)
    row, here, answer = torch.arange(T)[:, None], torch.arange(T), T - 4
    blind = (row >= answer) & (here >= question) & (here < answer)
    alone = (row <= question) & (here > question)
    bias = lambda hide: torch.where(hide, -1e9, 0.0)[None, None].expand(2, 1, T, T)
    for layers, late in ((LATE + 1, True), (LATE + 2, False)):      # seen in layer LATE, read in the next one
        torch.manual_seed(0)
        model = Transformer(Config(
            layers=layers, hidden=64, heads=2, kv_heads=2, mlp=64, vocab=lang.size, max_len=256, theta=1e4,
            eps=1e-5, mask_id=0, eos_ids=(1,), qkv_bias=False, tied=True)).requires_grad_(False)
        for low, high, same in ((blind | alone, blind | alone, True), (blind | alone, blind, late),
                                (blind, blind | alone, False), (blind, blind, False), (alone, alone, False)):
            x = hidden(model, ids, (bias(low), bias(high)))[:, answer:]
            assert torch.equal(x[0], x[1]) == same
            assert same or (x[0] != x[1]).any(-1).all()


def test_questions_have_exactly_one_answer(lang):
    """Of the kinds in MARKED: one person of the list fits, more are in the city; counts are at most MOST;
    and all words are one token each."""
    asked = dict.fromkeys(staff.MARKED, 0)
    for i in range(60):
        rng = random.Random(f"one answer/{i}")
        persons = staff.team(rng, rng.randint(3, 30))
        for kind, question, answer in staff.questions(rng, persons):
            for text in (question, answer):
                assert len(lang.ids(text)) == len(re.findall(r"'s|\w+|[^\w\s]", text)), text
            if kind == "counting":
                assert 1 <= int(re.fullmatch(r".* is (\d+)\.", answer)[1]) <= staff.MOST, question
            if kind not in staff.MARKED:
                continue
            asked[kind] += 1
            names, city = re.fullmatch(r"W\w+(?: room)? besides (.+) is in (\w+)\?", question).groups()
            named, there = names.replace("'s", "").split(" and "), {p.name: p for p in persons if p.city == city}
            assert {*named} < there.keys() and len(named) == len(there) - 1, question
            [fit] = there.keys() - {*named}
            assert answer == (f"It is {fit}." if kind == "other" else f"It is room {there[fit].room}."), question
    assert all(n > 20 for n in asked.values()), asked
