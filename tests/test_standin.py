"""A stand-in at encoding: MASK behind a prefix while it is encoded, in place of what its requests bring."""
import sys

import pytest
import torch
from conftest import ROOT, prompt, save_folder
from reference import plain, reusing

import depth
import step
from engine import Engine, Request
from hub.checkpoint import fingerprint

sys.path.insert(0, str(ROOT / "tools"))
import profiler     # noqa: E402

P, L = 70, 4


def ask(question=1, gen_length=10, **kw):
    return Request(prompt(P) + prompt(6, seed=question), prefix_len=P, gen_length=gen_length,
                   stop_at_eos=False, **kw)


@pytest.mark.parametrize("standin, n", [("none", 0), ("masks", 8)])
@pytest.mark.parametrize("depth", [1, 2, L])
def test_reuse_is_the_plain_loop(model, depth, standin, n):
    """Two requests in a batch, then both again on what is stored, each against the plain loop that runs the
    prefix with so many MASK behind it; lengths that round alike share an entry."""
    engine = Engine(model, depth=depth, refresh=1, standin=standin, cache_mb=8)
    asked = [ask(1, 10), ask(2, 15)]
    expected = [plain(model, r.prompt, r.gen_length, forward=reusing(model, prompt(P), depth, n))[0]
                for r in asked]
    miss, hit = engine.generate(asked)
    assert [miss.tokens, hit.tokens] == expected == [r.tokens for r in engine.generate(asked)]
    assert not miss.hit and hit.hit and engine.counts["encoded_prefixes"] == 1
    assert miss.encode_token_layers == (L - 0.5) * P + L * n and hit.encode_token_layers == 0


def test_it_matters(model):
    """Or the test above would hold for an engine that ignores the stand-in."""
    canvas = torch.tensor([ask().prompt + [model.config.mask_id] * 10])
    with torch.no_grad():
        alone, behind = (reusing(model, prompt(P), 2, n)(canvas) for n in (0, 8))
    assert not torch.allclose(alone, behind, atol=1e-3)


def test_lengths_that_round_differently_share_nothing(model):
    """A stand-in is part of the key: a request's answer does not hang on who came before."""
    engine = Engine(model, depth=2, standin="masks", cache_mb=8)
    short, long = engine.generate([ask(1, 7), ask(1, 8)])
    assert engine.counts["encoded_prefixes"] == 2 and not long.hit
    alone, = Engine(model, depth=2, standin="masks", cache_mb=8).generate([ask(1, 8)])
    assert alone.tokens == long.tokens
    assert sorted(e.salt for e in engine.cache.entries.values()) == [("", 4), ("", 8)]


@pytest.mark.parametrize("kw", [dict(window="block"), dict(cache="naive")])
@pytest.mark.parametrize("cfg", [0.0, 1.0])
def test_padded_or_not(model, monkeypatch, kw, cfg):
    """The same tokens where lengths are rounded up, with windows and with guidance; of the pages that the
    stand-in lay in nothing remains in the entry's table, and none of them is lost."""
    asked = [ask(1, 10, block_length=5, cfg_scale=cfg), ask(2, 9, block_length=3)]
    options = {"depth": 2, "standin": "masks", "cache_mb": 8, **kw}
    if "cache" in kw:
        del options["depth"]
    one, two = Engine(model, **options), Engine(model, **options)
    two.bucket = two.admission.bucket = step.bucket
    free = len(one.cache.free)
    assert [r.tokens for r in one.generate(asked)] == [r.tokens for r in two.generate(asked)]
    for engine in (one, two):
        entries = engine.cache.entries.values()
        assert len(engine.cache.free) == free - sum(len(e.pages) for e in entries)
        assert all((engine.cache.table[e.id, :, 2:-1] == 0).all() for e in entries)


def test_nothing_shared_nothing_encoded(model):
    """At depth 0 and without a cache the option changes nothing."""
    for kw in (dict(depth=0), dict(cache="none"), dict(cache="intra")):
        asked, engine = [ask()], Engine(model, standin="masks", cache_mb=8, **kw)
        found, = engine.generate(asked)
        assert found.tokens == Engine(model, cache_mb=8, **kw).generate(asked)[0].tokens
        assert not engine.counts["encoded_prefixes"]


def test_guard_and_profiler_measure_what_is_stored(model, tmp_path):
    """The guard's similarity is the profiler's with the same stand-in; a table measured so says so in
    depth.json, and the engine follows it unless told otherwise."""
    canvas = ask().prompt + [model.config.mask_id] * 10
    alike, alone = (profiler.similarity(model, [canvas], [P], [n])[0] for n in (8, 0))
    table = depth.Table({0: L}, 0.0, "masks")
    found, = Engine(model, table=table, cache_mb=8).generate([ask()])
    other, = Engine(model, table=table, standin="none", cache_mb=8).generate([ask()])
    assert found.similarity == pytest.approx(alike.tolist(), abs=1e-5)
    assert other.similarity == pytest.approx(alone.tolist(), abs=1e-5) != found.similarity
    percent = 100 * P // len(canvas)
    cut, _ = profiler.cut((ask().prompt, P), percent, model.config)
    p = profiler.profile(model, [(ask().prompt, P)], [percent], per_ratio=1, standin="masks")
    n = depth.count_standin("masks", len(cut) - len(ask().prompt))
    torch.testing.assert_close(p.mean[0], profiler.similarity(model, [cut], [P], [n])[0].tolist())
    save_folder(tmp_path, model)
    p.fingerprint = fingerprint(tmp_path)
    profiler.write(p, tmp_path / "depth.json")
    assert depth.find_table(tmp_path, L).standin == "masks"


@pytest.mark.parametrize("gen_length, n", [(1, 1), (2, 2), (3, 2), (64, 64), (127, 64), (128, 128)])
def test_never_more_than_the_request_has(gen_length, n):
    """So the prefix and its stand-in are never longer than the canvas."""
    assert depth.count_standin("masks", gen_length) == n and depth.count_standin("none", gen_length) == 0


def test_refused(model):
    with pytest.raises(ValueError, match="standin is 'mask'; it must be one of table, none, masks"):
        Engine(model, standin="mask")
