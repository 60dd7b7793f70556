"""The identities of the design: what caching, batching, padding and history must never change."""
import itertools
import math

import pytest
import torch
from conftest import prompt, tiny
from reference import plain

import kernels
from engine import Engine, Request


def run(model, requests, **kw):
    engine = Engine(model, **{"cache_mb": 8, **kw})
    return engine.generate(requests)


GRID = [(16, 16, 16, None), (16, 16, 5, None), (12, 5, None, None), (12, 4, 6, None), (9, 9, None, 0.2),
        (20, 8, None, 0.05), (1, 1, 1, None)]


@pytest.mark.parametrize("gen_length, block, steps, threshold", GRID)
def test_no_cache_is_the_plain_loop(model, gen_length, block, steps, threshold):
    """`none` and depth 0 with R = 1 are the loop that recomputes the whole canvas at each step, for
    prefixes of 0, 1, some and all but one token, with the same number of forward passes."""
    ids = prompt(14, seed=gen_length)
    expected = plain(model, ids, gen_length, block, steps, threshold)
    how = dict(gen_length=gen_length, block_length=block, steps=steps, threshold=threshold, stop_at_eos=False)
    result, = run(model, [Request(ids, **how)], cache="none")
    assert (result.tokens, result.forwards) == expected
    for P in (0, 1, 9, 13):
        result, = run(model, [Request(ids, prefix_len=P, **how)], cache="bicache", depth=0, refresh=1)
        assert (result.tokens, result.forwards) == expected, P


def test_prefix_as_long_as_the_prompt_leaves_one_token(model):
    """Symptom: a prompt that equals a stored prefix leaves no row to compute, and Dream finds no row before
    its first token. Fix: one prompt token always stays in the suffix."""
    ids = prompt(12)
    engine = Engine(model, depth=2, cache_mb=8)
    named, = engine.generate([Request(ids, prefix_len=12, gen_length=6)])
    found, = engine.generate([Request(ids, gen_length=6)])
    assert named.prefix_tokens == found.prefix_tokens == 11 and found.hit
    assert named.tokens == found.tokens
    exact, = run(model, [Request(ids, prefix_len=12, gen_length=6, stop_at_eos=False)], depth=0, refresh=1)
    assert exact.tokens == plain(model, ids, 6)[0]


@pytest.mark.parametrize("refresh", [2, 5])
def test_intra_is_depth_zero(model, refresh):
    """Depth 0 with interval k is caching inside the request only: same tokens as `intra`, nothing is
    shared."""
    request = Request(prompt(30), prefix_len=20, gen_length=12)
    engine = Engine(model, cache="intra", refresh=refresh, cache_mb=8)
    intra, = engine.generate([request])
    zero, = run(model, [request], depth=0, refresh=refresh)
    assert intra.tokens == zero.tokens and intra.refreshes == zero.refreshes == math.ceil(12 / refresh)
    assert engine.cache.stats()["entries"] == 0


def test_naive_is_full_depth_never_refreshed(model):
    """`naive` reuses all layers of the prefix-only K/V and recomputes none."""
    request = Request(prompt(30), prefix_len=20, gen_length=12)
    naive, = run(model, [request], cache="naive")
    full, = run(model, [request], depth=model.config.layers, refresh=1000)
    assert naive.tokens == full.tokens and naive.refreshes == 0 and naive.depth == model.config.layers


def test_intra_caches_the_prompt_by_default(model):
    """A cache that is silently never used: without a named prefix `intra` keeps all of the prompt but one
    token."""
    result, = run(model, [Request(prompt(20), gen_length=8)], cache="intra", refresh=4)
    assert result.prefix_tokens == 19 and result.refreshes == 2


MIXED = [
    dict(prefix_len=70, gen_length=16, block_length=8),
    dict(prefix_len=70, gen_length=9, steps=3),
    dict(prefix_len=64, gen_length=20, block_length=6, threshold=0.1),
    dict(prefix_len=0, gen_length=7),
    dict(prefix_len=33, gen_length=12, temperature=0.8, seed=5),
    dict(prefix_len=70, gen_length=12, remasking="random", seed=1, steps=4),
    dict(prefix_len=70, gen_length=10, remasking="entropy", temperature=0.5, seed=2, alg_temp=0.3),
    dict(prefix_len=70, gen_length=10, remasking="topk_margin", cfg_scale=0.7),
    dict(prefix_len=70, gen_length=10, steps=10, remasking="origin", eps=1e-3, seed=4),
    dict(prefix_len=10, gen_length=10, top_p=0.8, top_k=20, temperature=1.2, seed=9,
         confidence_eos_eot_inf=True),
    dict(prefix_len=70, gen_length=11, logits_eos_inf=True, stop_at_eos=False),
    dict(prefix_len=70, gen_length=14, block_length=7, factor=2.0),
    dict(prefix_len=70, gen_length=13, entropy_bound=1.0, temperature=0.7, seed=3),
]


def mixed_requests():
    shared = prompt(70)
    return [Request(shared[:kw["prefix_len"]] + prompt(3 + i, seed=40 + i), **kw)
            for i, kw in enumerate(MIXED)]


@pytest.mark.parametrize("cache, depth, window", [
    ("none", "auto", "all"), ("none", "auto", "block"), ("intra", "auto", "all"), ("bicache", 2, "all"),
    ("bicache", 3, "block"), ("bicache", 1, "rest"), ("naive", "auto", "all")])
def test_alone_equals_any_batch(model, cache, depth, window):
    """A request gets the same tokens alone, beside any neighbours, at any place in the batch and after any
    history, though lengths, prefixes, strategies and seeds differ; a hit equals the miss that made the
    entry."""
    requests = mixed_requests()
    kw = dict(cache=cache, depth=depth, window=window, refresh=4)
    alone = [run(model, [r], **kw)[0].tokens for r in requests]
    engine = Engine(model, cache_mb=8, max_batch=4, **kw)
    for order in (range(len(requests)), reversed(range(len(requests)))):
        order = list(order)
        batch = engine.generate([requests[i] for i in order])
        assert [r.tokens for r in batch] == [alone[i] for i in order]
    if cache in ("bicache", "naive"):
        assert all(r.hit for r in batch if r.depth)


def test_depth_varies_inside_a_batch(model):
    """The table gives each request its own depth; a refresh then runs once a depth, and nobody notices."""
    table = {20: 1, 60: 3}
    shared = prompt(40)
    requests = [Request(shared + prompt(n, seed=n), prefix_len=40, gen_length=8, block_length=4)
                for n in (2, 60, 5, 20)]
    engine = Engine(model, table=table, measure=0, cache_mb=8, refresh=3)
    batch = engine.generate(requests)
    assert sorted({r.depth for r in batch}) == [1, 3]
    alone = [run(model, [r], table=table, measure=0, refresh=3)[0] for r in requests]
    assert [r.tokens for r in batch] == [r.tokens for r in alone]


def test_shared_pages_are_never_written_again(model):
    """Symptom: an answer changes after others used the same prefix. The bytes of a published entry are the
    same after a hundred requests of all kinds, its boundary states included."""
    engine = Engine(model, depth=2, refresh=2, window="block", cache_mb=8)
    shared = prompt(70)
    engine.generate([Request(shared + [1], prefix_len=70, gen_length=2)])
    entry, = engine.cache.entries.values()
    before = engine.cache.kv[entry.pages].clone(), engine.cache.hidden[entry.hidden_pages].clone()
    requests = [(70 - i % 3, prompt(1 + i % 7, seed=i), 1 + i % 6) for i in range(100)]
    engine.generate([Request(shared[:P] + own, prefix_len=P, gen_length=G) for P, own, G in requests])
    assert entry.id in engine.cache.entries
    assert torch.equal(before[0], engine.cache.kv[entry.pages])
    assert torch.equal(before[1], engine.cache.hidden[entry.hidden_pages])


def test_eviction_leaves_nothing_stale(model):
    """Symptom: after an eviction an old table entry still points at pages that now belong to another
    prefix. Many prefixes through a cache with room for few give the same tokens as a fresh cache each."""
    requests = [Request(prompt(66, seed=i % 5) + [i], prefix_len=66, gen_length=4) for i in range(15)]
    fresh = [run(model, [r], depth=2, cache_mb=4)[0].tokens for r in requests]
    cache_mb = 1.2 if model.config.kv_heads == 4 else 0.78              # 37 pages
    engine = Engine(model, depth=2, cache_mb=cache_mb, max_batch=2)
    assert [r.tokens for r in engine.generate(requests)] == fresh
    assert engine.cache.stats()["evictions"] > 0


def test_mask_ids_in_the_prompt_are_prompt(model):
    """Symptom: a prompt that holds the mask id gets it 'denoised', or the loop never ends. The undecided
    region comes from lengths; the prompt's masks stay as they are."""
    mask = model.config.mask_id
    ids = [3, mask, 5, mask, mask, 8, mask]
    how = dict(gen_length=6, stop_at_eos=False)
    expected = plain(model, ids, 6)
    for kw in (dict(cache="none"), dict(depth=0, refresh=1)):
        result, = run(model, [Request(ids, prefix_len=4, **how)], **kw)
        assert (result.tokens, result.forwards) == expected
    result, = run(model, [Request(ids, prefix_len=4, **how)], depth=2)
    assert result.forwards == 6 and mask not in result.tokens


@pytest.mark.parametrize("kw", [{}, dict(temperature=1.0), dict(temperature=50.0, remasking="entropy"),
                                dict(top_k=1, temperature=1.0)])
def test_mask_is_never_committed(kw):
    """Symptom: the model's likeliest token is MASK and it is committed as text. A model that always prefers
    MASK must answer with its second choice, greedy or drawn."""
    model = tiny(seed=3)
    model.norm.weight.zero_()           # all hidden states vanish, so that the logits are those of a bias
    model.norm.weight[0] = 1
    model.head.weight.zero_()
    model.head.weight[model.config.mask_id, 0] = 1e3
    model.head.weight[7, 0] = 1
    for sign in (1, -1):
        model.head.weight[:, 0] *= sign
        result, = run(model, [Request(prompt(5), gen_length=12, stop_at_eos=False, **kw)], cache="none")
        assert model.config.mask_id not in result.tokens and len(result.tokens) == 12




def test_eos_counts_once_nothing_before_it_is_undecided(monkeypatch, model):
    """Symptom: the request ends at an EOS that was committed early although text before it is undecided, or
    the EOS is looked for in the prompt. The prompt is full of EOS here, and the EOS at place 5 is committed
    first."""
    eos, G = model.config.eos_ids[0], 9
    order = [5, 7, 0, 2, 1, 4, 3, 6, 8]         # of commitment; the answer is complete up to EOS after seven
    commit = Engine._commit

    def planned(self, group, layout, depth, token, stats):
        """The engine's own commit, with the model's choice replaced by the plan."""
        at = layout.places[0].tolist()
        token = torch.tensor([eos if p in (5, 7) else 10 + p for p in at])
        score = torch.tensor([-1.0 - order.index(p) for p in at]).double()
        return commit(self, group, layout, depth, token, [score])

    monkeypatch.setattr(Engine, "_commit", planned)
    result, = run(model, [Request([eos] * 6, gen_length=G)], cache="none")
    assert (result.tokens, result.finish_reason, result.forwards) == ([10, 11, 12, 13, 14], "eos", 7)
    result, = run(model, [Request([eos] * 6, gen_length=G, stop_at_eos=False)], cache="none")
    assert (result.tokens, result.finish_reason) == ([10, 11, 12, 13, 14, eos, 16, eos, 18], "length")


def test_temperature_draws_follow_the_softmax():
    """Gumbel-max on counter-based noise draws tokens in proportion to softmax(logits / temperature):
    chi-square over 20,000 draws, and the mask id never."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 5.0])
    M, T = 20000, 0.7
    noise = torch.full((M,), T), torch.arange(M), torch.zeros(M, dtype=torch.long), torch.full((M,), 3)
    token, _ = kernels.confidence(logits.expand(M, 5), 4, noise)
    expected = (logits[:4] / T).softmax(0) * M
    seen = token.bincount(minlength=5)
    chi_square = ((seen[:4] - expected) ** 2 / expected).sum()
    assert seen[4] == 0 and chi_square < 16.3                           # 3 degrees of freedom, p = 0.001


def test_stream_tells_every_token_once(model):
    """The events of a request add up to its result, and each commits at least one token."""
    requests = mixed_requests()[:4]
    engine = Engine(model, depth=2, cache_mb=8, max_batch=2)
    canvas = [dict() for _ in requests]
    for event in engine.stream(requests):
        assert event.committed and not set(canvas[event.index]) & {place for place, _ in event.committed}
        canvas[event.index].update(event.committed)
        if event.result:
            n = len(event.result.tokens)
            assert [canvas[event.index][i] for i in range(n)] == event.result.tokens


def test_a_stream_that_is_dropped_gives_everything_back(model):
    """Symptom: a caller that stops listening leaks the pages of what was running. After closing a stream
    half way, only the shared entries hold pages."""
    engine = Engine(model, depth=2, cache_mb=8)
    stream = engine.stream(mixed_requests())
    for _ in itertools.islice(stream, 5):
        pass
    stream.close()
    shared = sum(len(e.pages) for e in engine.cache.entries.values())
    assert engine.cache.kv.shape[0] - 2 - len(engine.cache.free) == shared
    assert all(e.users == 0 for e in engine.cache.entries.values())


def test_salt_separates_tenants(model):
    """A prefix is found only under the salt it was stored with, named or not."""
    engine = Engine(model, depth=2, cache_mb=8)
    ask = lambda salt, P=20: engine.generate([Request(prompt(25), prefix_len=P, gen_length=2, salt=salt)])[0]
    hits = [ask("a").hit, ask("b").hit, ask("a").hit, ask("c", None).hit, ask("b", None).hit]
    assert hits == [False, False, True, False, True]


def test_draws_differ_by_place_step_and_seed():
    """Symptom: rows of one request draw alike, because the noise does not depend on where they stand. Where
    all tokens are equally likely, 48 places drawn in one step give many different tokens, and so do one
    place's steps and seeds."""
    model = tiny()
    model.norm.weight.zero_()                           # all logits are 0
    flat = dict(gen_length=48, temperature=1.0, stop_at_eos=False)
    requests = [Request([1], steps=1, **flat), Request([1], steps=1, seed=1, **flat), Request([1], **flat)]
    once, other, slow = run(model, requests, cache="none")
    assert all(len(set(r.tokens)) > 24 for r in (once, other, slow))
    equal = lambda a, b: sum(x == y for x, y in zip(a.tokens, b.tokens))
    assert equal(once, other) < 8 and equal(once, slow) < 8
