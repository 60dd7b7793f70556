"""What tools/look.py prints for docs/how-it-works.md is what the model does."""
import sys

import pytest
import torch
from conftest import ROOT, prompt

from engine import Engine, Request

sys.path.insert(0, str(ROOT / "tools"))
import look                             # noqa: E402


@pytest.mark.parametrize("options", [{}, {"block_length": 3}, {"threshold": 0.3}])
def test_passes_are_those_of_the_engine(model, options):
    """Pass by pass the places that the engine commits, for both families, with their tokens'
    probabilities."""
    ids = prompt(20)
    request = Request(ids, gen_length=7, stop_at_eos=False, **options)
    events = list(Engine(model, cache="none", cache_mb=8).stream([request]))
    found = look.passes(model, ids, 7, **options)
    assert [sorted(places) for _, places, _ in found] == [sorted(at for at, _ in e.committed) for e in events]
    assert found[-1][0] == events[-1].result.tokens
    assert all(0 < sure <= 1 for _, _, all_sure in found for sure in all_sure)
    if not options:
        first, = found[0][2]
        logits = model(torch.tensor([ids + [model.config.mask_id] * 7]))[0]
        rows = logits[len(ids) - model.config.shift:][:7].softmax(-1)
        rows[:, model.config.mask_id] = 0
        assert first == pytest.approx(rows.max().item(), rel=1e-4)


def test_kv_of_a_prefix(model):
    """Layer 0 knows token and place alone: alike to the last bit under any question. A later layer differs,
    and the same question twice does not."""
    prefix = prompt(30)
    one, again, other = (look.prefix_kv(model, prefix + prompt(9, seed=seed), 30) for seed in (1, 1, 2))
    kv = model.config.kv_heads * model.config.head_dim
    assert len(one) == model.config.layers and one[0].shape == (2, 30, kv)
    assert torch.equal(one[0], other[0]) and all(torch.equal(a, b) for a, b in zip(one, again))
    similarity = look.alike(one, other)
    assert similarity.shape == (model.config.layers, 30)
    assert (similarity[0] > 0.99999).all() and (similarity[1:].mean(1) < 0.99).all()


def test_what_a_question_changes(capsys):
    """The embedded model, as the docs print it: shallow layers hardly change, deep ones do, and the tokens
    that change most are about the people in question."""
    assert look.main(["prefix"]) == 0
    out = capsys.readouterr().out
    line, = [line for line in out.split("\n") if line.startswith("alone, B")]
    means = [float(x) for x in line.split()[2:]]
    assert len(means) == 8 and min(means[:3]) > 0.98 and max(means[5:]) < 0.95
    marked = out[out.index("what B changes most"):]
    assert "Bern" in marked and "Ben has" in marked


def test_the_canvas_is_printed(capsys):
    """A mask less a pass, what was set in brackets, the answer in the end."""
    assert look.main(["canvas"]) == 0
    lines = capsys.readouterr().out.strip().split("\n")
    assert [line.count(look.MASK) for line in lines[3:]] == list(range(8, -1, -1))
    assert all(line.count("[") == 1 for line in lines[4:])
    assert lines[-1].split("  ")[-1].replace("[", "").replace("]", "") == "Lara is in room 66 . end end"


@pytest.mark.parametrize("argv, words", [
    (["canvas", "--gen-length", "0"], "gen_length is 0"),
    (["canvas", "--block-length", "9"], "block_length is 9"),
    (["canvas", "--prompt", "a", "--prompt", "b"], "2 times"),
    (["prefix", "--threshold", "0.9"], "only with canvas"),
    (["prefix", "--document", "no/such/file"], "no/such/file")])
def test_bad_input(capsys, argv, words):
    assert look.main(argv) == 2
    err = capsys.readouterr().err
    assert err.startswith("look.py: ") and words in err and err.count("\n") == 1
