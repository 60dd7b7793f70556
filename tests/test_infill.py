"""Infilling: a canvas that is given in part. What is given stays, what is open is decided as anywhere
else."""
import json
import re

import pytest
import torch
from conftest import ROOT, prompt, tiny
from reference import plain

import generate
from cli import infill
from cli.terminal import Watch
from engine import Engine, Request
from tokenizer import Tokenizer

MODES = [dict(cache="none"), dict(cache="none", window="block"), dict(cache="intra", refresh=3),
         dict(cache="naive"), dict(depth=2, refresh=4), dict(depth=3, refresh=2, window="rest"),
         dict(depth=1, refresh=3, window="block")]
OPEN = {                            # where a canvas of 14 places is open
    "front": [0, 1, 2, 7],          # Dream decides place 0 from the last row of the prompt
    "both ends": [0, 5, 6, 13],
    "behind": [9, 10, 11, 12, 13],
    "middle": [3],
    "scattered": [1, 3, 5, 7, 9, 11],
    "all": list(range(14)),
}
PACES = [dict(), dict(block_length=3), dict(steps=2), dict(threshold=0.05, block_length=4), dict(factor=3.0),
         dict(entropy_bound=3.0, block_length=2)]


@pytest.fixture(params=[False, True], ids=["llada", "dream"], scope="module")
def model(request):
    return tiny(shift=request.param)


def canvas_for(model, places: list) -> list:
    canvas = prompt(14, seed=8)
    for place in places:
        canvas[place] = model.config.mask_id
    return canvas


def run(model, requests, **kw):
    return Engine(model, **{"cache_mb": 8, **kw}).generate(requests)


@pytest.mark.parametrize("where", OPEN)
def test_infilling_is_the_plain_loop(model, where):
    """Every pace, over blocks of open places, gives the canvas and the passes of the loop that recomputes all
    of it at each step, where nothing is approximated; alone and all in one batch."""
    ids, canvas = prompt(11, seed=3), canvas_for(model, OPEN[where])
    paces = [how for how in PACES if max(how.get("block_length", 1), how.get("steps", 1)) <= len(OPEN[where])]
    expected = [plain(model, ids, canvas=canvas, **how) for how in paces]
    requests = [Request(ids, prefix_len=6, canvas=canvas, stop_at_eos=False, **how) for how in paces]
    for kw in (dict(cache="none"), dict(depth=0, refresh=1)):
        for results in ([run(model, [r], **kw)[0] for r in requests], run(model, requests, **kw)):
            assert [(r.tokens, r.forwards) for r in results] == expected
            assert {r.finish_reason for r in results} == {"length"}


@pytest.mark.parametrize("kw", MODES)
def test_what_is_given_survives(model, kw):
    """In every mode and window the given places come back as they were, no open place holds MASK, each open
    place is told of once and no given one ever; a request gets the same alone and beside others of its kind
    and ordinary ones, drawn or not, guided or not."""
    shared, requests = prompt(70), []
    strategies = [dict(block_length=1), dict(factor=3.0), dict(entropy_bound=3.0), dict(cfg_scale=0.5),
                  dict(temperature=1.0, seed=3), dict()]
    for i, (places, how) in enumerate(zip(OPEN.values(), strategies, strict=True)):
        ids = shared + prompt(2 + i, seed=i)
        requests.append(Request(ids, prefix_len=70, canvas=canvas_for(model, places), **how))
    requests.append(Request(shared + [5], prefix_len=70, gen_length=9))
    alone = [run(model, [r], **kw)[0].tokens for r in requests]
    engine, told, tokens = Engine(model, cache_mb=8, max_batch=4, **kw), [[] for _ in requests], {}
    for event in engine.stream(requests):
        told[event.index] += [place for place, _ in event.committed]
        if event.result:
            tokens[event.index] = event.result.tokens
    assert [tokens[i] for i in range(len(requests))] == alone
    for request, places, result in zip(requests[:-1], told, alone):
        masks = [i for i, t in enumerate(request.canvas) if t == model.config.mask_id]
        assert len(set(places)) == len(places) and set(places) <= set(masks)
        assert {i for i in masks if i < len(result)} <= set(places) and model.config.mask_id not in result
        assert all(t == c for i, (t, c) in enumerate(zip(result, request.canvas)) if i not in masks)
        assert len(result) == 14 or masks[-1] == 13             # cut at an EOS behind all that is given


def test_all_open_is_gen_length(model):
    """A canvas of masks alone is what gen_length means: tokens, passes, work, EOS and all, in every mode."""
    mask = model.config.mask_id
    for kw in MODES:
        for how in (dict(block_length=5), dict(temperature=1.5, seed=2), dict(steps=4, remasking="random")):
            ask = lambda **length: Request(prompt(20, seed=1), prefix_len=12, **length, **how)
            short, canvas = (run(model, [r], **kw)[0] for r in (ask(gen_length=14), ask(canvas=[mask] * 14)))
            assert short == canvas


def test_eos_ends_a_canvas_only_behind_what_is_given():
    """Symptom: a hole in the middle is filled with EOS and the text behind it is lost. A model that answers
    nothing but EOS ends an open end at once, and fills holes with text behind them; an EOS that was given
    ends nothing."""
    model = tiny(seed=3)
    model.norm.weight.zero_()           # all hidden states vanish but for a constant: one token for every row
    model.norm.weight[0] = 1
    model.head.weight.zero_()
    eos, mask = model.config.eos_ids[0], model.config.mask_id
    model.embed.weight[:, 0] = 1e4
    model.head.weight[eos, 0] = 1
    for canvas, tokens, reason, forwards in (
            ([mask, mask, 5, 6], [eos, eos, 5, 6], "length", 2),
            ([mask, 5, mask, mask], [eos, 5], "eos", 2),
            ([7, 8, mask, mask], [7, 8], "eos", 1),
            ([mask, eos], [eos, eos], "length", 1),
            ([eos, mask, 4], [eos, eos, 4], "length", 1)):
        result, = run(model, [Request([1, 2], canvas=canvas)], cache="none")
        assert (result.tokens, result.finish_reason, result.forwards) == (tokens, reason, forwards), canvas


def test_blocks_run_over_open_places_from_left_to_right(model):
    """Blocks of three open places, however far apart; with window `block` a block's later steps compute what
    lies between its first and its last open place, for Dream from one row earlier on."""
    canvas = canvas_for(model, [1, 2, 4, 7, 12, 13])
    request = Request(prompt(9), canvas=canvas, block_length=3, stop_at_eos=False)
    events = list(Engine(model, cache="none", window="block", cache_mb=8).stream([request]))
    places = [place for event in events for place, _ in event.committed]
    assert sorted(places[:3]) == [1, 2, 4] and sorted(places[3:]) == [7, 12, 13]
    shift = int(model.config.shift)
    first, second = (9 + 1 - shift, 9 + 5), (9 + 7 - shift, 9 + 14)
    assert [event.computed for event in events] == [(0, 23), first, first, (0, 23), second, second]


def test_a_canvas_is_any_sequence_of_ints(model):
    """As a prompt is; it becomes a list, and its length the gen_length, when the request is checked; twice is
    as good as once."""
    mask = model.config.mask_id
    request = Request(torch.tensor([1, 2]), canvas=torch.tensor([mask, 4]))
    engine = Engine(model, cache="none")
    engine.check(request)
    engine.check(request)
    assert request.canvas == [mask, 4] and request.gen_length == 2
    assert engine.generate([request])[0].tokens[1] == 4


# -- texts with holes ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["random", "embedded"])
def tokenizer(request, text_folder):
    return Tokenizer.from_folder(text_folder if request.param == "random" else ROOT / "checkpoints" / "tiny")


@pytest.mark.parametrize("prefix, text, words", [
    ("", "Hans works in ___ and has room ___.", (" Riga", " 37")),
    ("Staff list: Ida is in Rome. ", "Hans ___ in Riga, ___3\nand ___", (" works", " in room 37", " so on")),
    ("Staff list:", " ___, Tom", (" Ann",)),
    ("", 'He said "___" twice.', ("yes",)),
    ("", "one_two __ ____ ___2 three", (" and", " and")),
])
def test_filled_by_hand_it_is_the_whole_text(tokenizer, prefix, text, words):
    """Symptom: "is ___ and" leaves a lone space in front of the hole, or "___." gets one behind it. With the
    ids of words in the holes, prompt and canvas are the ids of the text with these words; the prefix' are the
    first."""
    ids, P, canvas = infill.read(text, prefix, tokenizer, mask_id=-1)
    sizes = [int(n or 1) for n in infill.HOLE.split(text)[1::2]]
    for size, word in zip(sizes, words, strict=True):
        at = canvas.index(-1)
        assert canvas[at:at + size] == [-1] * size
        canvas[at:at + size] = infill.amid(word, tokenizer)
    full = prefix + text
    for word in words:
        hole = infill.HOLE.search(full)
        full = full[:hole.start()].removesuffix(" ") + word + full[hole.end():]
    assert -1 not in canvas and ids + canvas == tokenizer.encode(full)
    assert (P > 0) == bool(prefix) and prefix.startswith(tokenizer.decode(ids[:P]).strip())


@pytest.mark.parametrize("args, says", [
    (["--infill", "a text"], "--infill number 1: 'a text' has no hole; write ___ for an open token"),
    (["--infill", "a ___", "--infill", " ___ b"], "number 2: ' ___ b' starts with a hole; put at least a"),
    (["--infill", "a ___600"], "make 60. tokens and the model takes 512"),
    (["--infill", "a ___", "--gen-length", "4"], "has the length of its text; leave out --gen-length"),
    (["--infill", "a ___", "--stop", "b"], "--infill ends where its text ends; leave out --stop"),
    (["--infill", "a ___", "--requests", "x"], "leave out --prompt, --infill and --prefix"),
    (["--infill", "a ___", "--block-length", "2"], "block_length is 2; .* the number of open places \\(1\\)"),
])
def test_bad_infill(text_folder, capsys, args, says):
    assert generate.main(["--model", str(text_folder), *args]) == 2
    error = capsys.readouterr().err
    assert re.search(says, error) and error.count("\n") == 1


def test_infill_on_the_command_line(text_folder, capsys):
    """Two texts behind a shared prefix, beside a prompt: both are told whole, in JSON and in text, with what
    was given as it was given; the second one hits the prefix' cache."""
    prefix = "The weights are random. They are decisive. "
    args = ["--model", str(text_folder), "--prefix", prefix, "--depth", "2"]
    holed = "The weights ___ random ___3 decisive.", "They ___2 tiny."
    args += ["--infill", holed[0], "--infill", holed[1], "--prompt", "Why?"]
    assert generate.main([*args, "--json"]) == 0
    lines = sorted(map(json.loads, capsys.readouterr().out.splitlines()), key=lambda line: line["index"])
    assert [line["finish_reason"] for line in lines[1:]] == ["length"] * 2
    assert lines[1]["text"].startswith("The weights") and lines[1]["text"].endswith(" decisive.")
    assert " random" in lines[1]["text"] and lines[2]["text"].endswith(" tiny.")
    assert [line["forwards"] for line in lines[1:]] == [4, 2] and lines[2]["hit"]
    assert generate.main(args) == 0
    out = capsys.readouterr().out
    for question, line in zip(holed, lines[1:]):
        assert f"Q  {question}\nA  {line['text'].strip()}\n" in out


def test_watch_shows_what_is_given(model):
    """The given tokens stand in the line from the first step on."""
    request = Request([1], canvas=[0, 7, 0], stop_at_eos=False)
    watch = Watch([request], decode=lambda ids: "".join(f"<{i}>" for i in ids), mask_id=0)
    assert watch.at_first(request) == [None, 7, None]
    assert watch.at_first(Request([1], gen_length=2)) == [None, None]
