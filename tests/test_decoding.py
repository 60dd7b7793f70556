"""Which tokens a step commits: LLaDA's and Dream's rules against plain loops written from their papers and
published facts.

That each strategy gives the same tokens in any cache mode and any batch stands in tests/test_engine.py; the
authors' own outputs stand in tests/golden. A loop here recomputes the whole canvas and shares no line with
the engine. One rule is ours: MASK is never committed, so it is left out of the choice and, where there is
one, of the filter.
"""
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from conftest import prompt, tiny
from reference import count_by_entropy, count_by_factor, plain

import decoding
import kernels
from decoding import Share
from engine import Engine, Request


@pytest.fixture(params=[False, True], ids=["llada", "dream"], scope="module")
def model(request):
    """Weights so wide that the rows of a canvas of masks differ in token and score."""
    return tiny(shift=request.param, scale=3.0)


def run(model, *requests, **kw):
    return Engine(model, **{"cache": "none", "cache_mb": 8, **kw}).generate(requests)


def first_events(model, requests, steps=1):
    """The events of the first steps of requests that all run together."""
    engine = Engine(model, cache="none", cache_mb=64, max_batch=len(requests))
    stream = engine.stream(requests)
    events = list(itertools.islice(stream, steps * len(requests)))
    stream.close()
    return events


def chi_square(seen, p):
    """Of counts against probabilities."""
    expected = p * seen.sum()
    return float(((seen - expected) ** 2 / expected).sum())


def shifted(model, canvas):
    """logits (T, V) with row i for position i."""
    logits = model(canvas)[0]
    return torch.cat([logits[:1], logits[:-1]]) if model.config.shift else logits


# -- how many a step commits ---------------------------------------------------------------------------------


PARALLEL = [dict(factor=0.5), dict(factor=2.0), dict(factor=9.0), dict(threshold=0.05),
            dict(entropy_bound=0), dict(entropy_bound=2.0), dict(entropy_bound=30.0)]


@pytest.mark.parametrize("block", [None, 7])
def test_parallel_decoding_is_its_plain_loop(model, block):
    """Factor, entropy bound and threshold give the tokens and the number of passes of loops that recompute
    the whole canvas, wherever nothing is approximated: alone, and all in one batch with an answer of one
    token a step. Small settings commit one token a step, large ones all, those between something between."""
    ids = prompt(13, seed=4)
    expected = [plain(model, ids, 20, block, **how) for how in PARALLEL]
    forwards = [n for _, n in expected]
    assert max(forwards) == 20 and min(forwards) == (1 if block is None else 3) and len(set(forwards)) > 3
    requests = [Request(ids, prefix_len=8, gen_length=20, block_length=block, stop_at_eos=False, **how)
                for how in PARALLEL]
    for kw in (dict(cache="none"), dict(cache="bicache", depth=0, refresh=1), dict(cache="intra", refresh=1)):
        alone = [run(model, request, **kw)[0] for request in requests]
        assert [(r.tokens, r.forwards) for r in alone] == expected
        neighbour = Request(prompt(9, seed=5), gen_length=11, steps=11)
        _, *batch = run(model, neighbour, *requests, **kw)
        assert [(r.tokens, r.forwards) for r in batch] == expected


def test_select_is_the_plain_rules():
    """One call for a batch of all rules gives each row what its rule gives alone: counts taken from the best
    on, of equal scores the earlier, nothing where there is no row."""
    g = torch.Generator().manual_seed(0)
    for trial in range(50):
        sizes = torch.randint(1, 12, (6,), generator=g).tolist()
        scores = torch.full((6, 12), -torch.inf, dtype=torch.float64)
        for b, size in enumerate(sizes):
            tenths = torch.rand(size, generator=g).mul(9).round() + 1           # so that some are equal
            scores[b, :size] = tenths.div(10).log()
        f, bound, t = (float(x) for x in torch.rand(3, generator=g) * torch.tensor([8, 8, 1]))
        shares = [Share(3), Share(1, above=t), Share(1, above=1, factor=f), Share(1, entropy_bound=bound),
                  Share(0, above=t), Share(0)]
        chosen = decoding.select(scores, torch.tensor(shares, dtype=torch.float64))
        ranked = [sorted(row[:size].tolist(), reverse=True) for row, size in zip(scores, sizes)]
        likely = [sum(score > math.log(t) for score in row) for row in ranked]
        counts = [min(3, sizes[0]), max(1, likely[1]), count_by_factor([math.exp(x) for x in ranked[2]], f),
                  count_by_entropy([-x for x in ranked[3]], bound), likely[4], 0]
        for row, size, count, picked in zip(scores, sizes, counts, chosen):
            order = sorted(range(size), key=lambda i: (-float(row[i]), i))
            assert picked.nonzero()[:, 0].tolist() == sorted(order[:count]), trial


# -- Dream ---------------------------------------------------------------------------------------------------


def dream_loop(model, ids, G, steps, eps, algorithm, top_p=1.0, top_k=None):
    """Dream's sampler at temperature 0: the tokens, and how many steps committed any."""
    mask = model.config.mask_id
    canvas, undecided, busy = torch.tensor([ids + [mask] * G]), torch.arange(len(ids) + G) >= len(ids), 0
    t = torch.linspace(1, eps, steps + 1)
    for i in range(steps):
        rows = undecided.nonzero()[:, 0]
        logits = shifted(model, canvas)[rows].double()                          # (m, V)
        if top_p < 1 or top_k:
            logits[:, mask] = -torch.inf
        for row in logits:
            order = row.softmax(0).sort(descending=True)
            if top_p < 1:                               # drop what follows the first entries that reach top_p
                row[order.indices[1:][order.values.cumsum(0)[:-1] > top_p]] = -torch.inf
            if top_k:
                row[order.indices[top_k:]] = -torch.inf
        p = logits.softmax(1)
        choice = p.clone()
        choice[:, mask] = 0
        best = choice.topk(2, 1)
        score = {"maskgit_plus": best.values[:, 0], "topk_margin": best.values[:, 0] - best.values[:, 1],
                 "entropy": (p * (p + 1e-10).log()).sum(1)}[algorithm]
        n = int(len(rows) * (1 - t[i + 1] / t[i])) if i < steps - 1 else len(rows)
        at = score.argsort(descending=True, stable=True)[:n]     # a filter may leave one token: equal scores
        canvas[0, rows[at]], undecided[rows[at]], busy = best.indices[at, 0], False, busy + (n > 0)
    return canvas[0, len(ids):].tolist(), busy


@pytest.mark.parametrize("filters", [{}, dict(top_p=0.4), dict(top_k=3), dict(top_p=0.7, top_k=9)])
@pytest.mark.parametrize("algorithm", ["maskgit_plus", "entropy", "topk_margin"])
def test_dream_is_its_plain_loop(model, algorithm, filters):
    """Schedule, score and filter give the tokens of the loop, without a cache and with depth 0 and R = 1."""
    for G, steps in ((17, 5), (9, 9)):
        ids = prompt(11, seed=G)
        tokens, busy = dream_loop(model, ids, G, steps, 1e-3, algorithm, **filters)
        request = Request(ids, prefix_len=6, gen_length=G, steps=steps, eps=1e-3, remasking=algorithm,
                          stop_at_eos=False, **filters)
        for kw in (dict(cache="none"), dict(cache="bicache", depth=0, refresh=1)):
            result, = run(model, request, **kw)
            assert (result.tokens, result.forwards) == (tokens, busy)


def test_dream_schedule():
    """int(masks * (1 - s/t)) with timesteps linear from 1 to eps in float32, all at the last step; steps that
    would commit nothing are left out."""
    for G, steps, eps in itertools.product((1, 2, 7, 32, 100), (1, 2, 7, 32, 100), (1e-3, 1e-5, 0.3)):
        if steps > G:
            continue
        t, masks, expected = torch.linspace(1, eps, steps + 1), G, []
        for i in range(steps):
            n = masks if i == steps - 1 else int(torch.tensor(float(masks)) * (1 - t[i + 1] / t[i]))
            masks -= n
            expected += [n] if n else []
        request = Request([1], gen_length=G, steps=steps, eps=eps, remasking="entropy")
        block, = decoding.plan_blocks(request, torch.ones(G, dtype=torch.bool))
        assert [share.count for share in block.shares] == expected and sum(expected) == G


def test_origin_commits_each_row_by_itself(model):
    """Of the rows that are undecided each is committed with probability 1 - s/t, whatever its score, and all
    at the last step: 60 requests of 40 tokens, counts within four standard deviations, every place alike."""
    N, G, steps, eps = 60, 40, 4, 1e-3
    how = dict(gen_length=G, steps=steps, eps=eps, remasking="origin", stop_at_eos=False)
    events = first_events(model, [Request(prompt(4), seed=i, **how) for i in range(N)], steps)
    t, left, where = torch.linspace(1, eps, steps + 1), N * G, torch.zeros(G)
    for i in range(steps):
        now = [e for e in events if e.step == i]
        count = sum(len(e.committed) for e in now)
        p = float(1 - t[i + 1] / t[i]) if i < steps - 1 else 1.0
        assert abs(count - left * p) <= 4 * (left * p * (1 - p)) ** 0.5
        left -= count
        for e in now if i == 0 else ():
            where[[place for place, _ in e.committed]] += 1
    assert left == 0 and all(e.result for e in events[-N:])
    assert chi_square(where, torch.full((G,), 1 / G)) < 72           # 39 degrees of freedom, p = 0.001


@pytest.mark.parametrize("algorithm", ["maskgit_plus", "entropy", "topk_margin"])
def test_alg_temp_draws_the_rows(model, algorithm):
    """With alg_temp the rows are drawn, without replacement, from softmax(score / alg_temp): which two of
    four, in 600 seeds."""
    ids, mask, temp, N = prompt(5, seed=2), model.config.mask_id, 0.3, 600
    p = shifted(model, torch.tensor([ids + [mask] * 4]))[5:].double().softmax(1)
    choice = p.clone()
    choice[:, mask] = 0
    best = choice.topk(2, 1).values
    score = {"maskgit_plus": best[:, 0], "topk_margin": best[:, 0] - best[:, 1],
             "entropy": (p * p.log()).sum(1)}[algorithm]
    w = (score / temp).softmax(0)
    pairs = list(itertools.combinations(range(4), 2))
    expected = torch.stack([w[a] * w[b] / (1 - w[a]) + w[b] * w[a] / (1 - w[b]) for a, b in pairs])
    how = dict(gen_length=4, steps=2, remasking=algorithm, alg_temp=temp)
    requests = [Request(ids, seed=i, **how) for i in range(N)]
    seen = torch.zeros(len(pairs))
    for event in first_events(model, requests):
        seen[pairs.index(tuple(sorted(place for place, _ in event.committed)))] += 1
    assert chi_square(seen, expected) < 20.5                        # 5 degrees of freedom, p = 0.001
    assert chi_square(seen, torch.full((6,), 1 / 6)) > 20.5         # and it is not just any row


def test_filters_act_at_the_temperature():
    """Dream's order: temperature, then top_p, then top_k, then the draw. Chi-square of 20,000 draws; nothing
    outside."""
    logits, M = torch.tensor([3.0, 2.0, 1.5, 0.0, -1.0, 9.0]), 20000            # the last is MASK
    rows = torch.arange(M)
    for temperature, top_p, top_k, kept in ((1.0, 0.8, 6, 2), (2.0, 0.8, 6, 3), (2.0, 0.9, 6, 4),
                                            (2.0, 1.0, 3, 3), (2.0, 0.3, 3, 1), (2.0, 0.8, 2, 2)):
        full = lambda x: torch.full((M,), x)
        rules = decoding.Rules(sample=(full(temperature), rows, rows * 0, rows * 0), tempered=full(True),
                               nucleus=(full(top_p), full(top_k)))
        token, logp = decoding.choose(logits.expand(M, 6), rules, mask_id=5, eos_ids=(4,))
        p = (logits[:kept] / temperature).softmax(0)
        seen = token.bincount(minlength=6)
        assert seen[kept:].sum() == 0 and (kept == 1 or chi_square(seen[:kept], p) < 16.3)
        torch.testing.assert_close(logp, p.log()[token])  # the score is read from what the draw was made from


def test_a_request_without_a_rule_is_left_alone(model):
    """Symptom: a request got other tokens beside one with top_p. Cause: the filter takes MASK out of the
    softmax first, and took it out of every row's. Verdicts on a row that asks for nothing are those without
    rules, whatever its neighbours ask."""
    logits = torch.randn(2, 40, generator=torch.Generator().manual_seed(1)) * 3
    logits[:, 39] = 6.0                                             # MASK is the likeliest
    calm = decoding.choose(logits, decoding.Rules(stats=True), mask_id=39, eos_ids=(38,))
    per_row = lambda a, b, dtype=torch.float32: torch.tensor([a, b], dtype=dtype)
    zero = torch.zeros(2, dtype=torch.long)
    rules = decoding.Rules(
        sample=(per_row(0, 1.5), zero, zero, zero), tempered=per_row(True, True, torch.bool),
        nucleus=(per_row(1, 0.5), per_row(40, 7, torch.long)), no_eos=per_row(False, True, torch.bool),
        guide=(per_row(0, 2, torch.long), per_row(0, 3.0)), stats=True)
    mixed = decoding.choose(torch.cat([logits, logits[:1]]), rules, mask_id=39, eos_ids=(38,))
    for before, after in zip(calm, mixed):
        assert before[0] == after[0]
    assert not torch.equal(calm[1][1], mixed[1][1])
    plain_one = Request(prompt(12), gen_length=16, stop_at_eos=False)
    alone, = run(model, plain_one)
    for other in (dict(top_p=0.8, temperature=1.0), dict(top_k=3), dict(cfg_scale=1.0),
                  dict(logits_eos_inf=True), dict(remasking="entropy", temperature=0.5, alg_temp=1.0)):
        assert run(model, Request(prompt(9), gen_length=16, **other), plain_one)[1].tokens == alone.tokens


# -- LLaDA ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [dict(), dict(steps=4), dict(block_length=4, steps=6),
                                 dict(block_length=5, threshold=0.1)])
@pytest.mark.parametrize("cfg", [0.5, 2.0])
def test_guidance_is_two_passes(model, cfg, how):
    """cfg_scale: un + (cfg + 1) * (cond - un), where `un` are the logits of the same canvas behind a prompt
    of masks."""
    ids = prompt(10, seed=3)

    def forward(canvas):
        empty = canvas.clone()
        empty[:, :len(ids)] = model.config.mask_id
        un = model(empty)
        return un + (cfg + 1) * (model(canvas) - un)

    expected = plain(model, ids, 12, forward=forward, **how)
    assert expected[0] != plain(model, ids, 12, **how)[0]
    request = Request(ids, prefix_len=7, gen_length=12, cfg_scale=cfg, stop_at_eos=False, **how)
    for kw in (dict(cache="none"), dict(cache="bicache", depth=0, refresh=1), dict(cache="intra", refresh=1)):
        result, = run(model, request, **kw)
        assert (result.tokens, result.forwards) == expected


@pytest.fixture(scope="module")
def fond():
    """A model that likes to end: EOS and end-of-turn (id 7) are the choice of about every third row."""
    model = tiny(seed=5, scale=3.0)
    for token in (model.config.eos_ids[0], 7):
        model.head.weight[token] *= 2
    return model


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_eos_and_eot_are_committed_last(fond, temperature):
    """confidence_eos_eot_inf lowers the confidence of EOS and end-of-turn, and leaves the choice alone, at
    every temperature: the engine is the loop that ranks (ends last, then probability) over unchanged
    choices."""
    c, ids, G, steps = fond.config, prompt(8, seed=1), 24, 8
    ends = torch.tensor([*c.eos_ids, 7])
    tokenizer = SimpleNamespace(eos_ids={7}, decode=str)
    request = dict(gen_length=G, temperature=temperature, seed=4, stop_at_eos=False)
    once, = run(fond, Request(ids, steps=1, confidence_eos_eot_inf=True, **request), tokenizer=tokenizer)
    assert once.tokens == run(fond, Request(ids, steps=1, **request), tokenizer=tokenizer)[0].tokens
    assert len(set(once.tokens) & set(ends.tolist())) == 2          # both are among the choices

    canvas, undecided = torch.tensor([ids + [c.mask_id] * G]), torch.arange(len(ids) + G) >= len(ids)
    for step in range(steps):
        rows = undecided.nonzero()[:, 0]
        key = [torch.full_like(rows, k) for k in (4, step)]
        noise = (torch.full(rows.shape, temperature), *key, rows - len(ids)) if temperature else None
        token, logp = kernels.confidence(fond(canvas)[0, rows], c.mask_id, noise)
        last = torch.isin(token, ends)
        order = sorted(range(len(rows)), key=lambda i: (bool(last[i]), -float(logp[i])))
        at = torch.tensor(order[:G // steps])
        canvas[0, rows[at]], undecided[rows[at]] = token[at], False
    late = Request(ids, steps=steps, confidence_eos_eot_inf=True, **request)
    result, = run(fond, late, tokenizer=tokenizer)
    assert result.tokens == canvas[0, len(ids):].tolist()
    assert result.tokens != run(fond, Request(ids, steps=steps, **request), tokenizer=tokenizer)[0].tokens


def test_logits_eos_inf(fond):
    """EOS is never chosen, drawn or not; greedy it is the loop whose EOS logit is -inf. Without the option
    EOS comes."""
    eos, ids = fond.config.eos_ids[0], prompt(8, seed=1)

    def forward(canvas):
        logits = fond(canvas)
        logits[..., eos] = -torch.inf
        return logits

    how = dict(gen_length=24, steps=8, stop_at_eos=False)
    free, barred = run(fond, Request(ids, **how), Request(ids, logits_eos_inf=True, **how))
    assert eos in free.tokens and barred.tokens == plain(fond, ids, 24, steps=8, forward=forward)[0]
    drawn = run(fond, *(Request(ids, temperature=2.0, seed=i, logits_eos_inf=True, **how) for i in range(6)))
    assert not any(eos in r.tokens for r in drawn)


@pytest.mark.parametrize("how", [
    dict(temperature=1.0), dict(temperature=0.7, remasking="entropy"), dict(remasking="random", steps=5),
    dict(remasking="maskgit_plus", alg_temp=0.5), dict(remasking="origin", eps=1e-3, steps=5)])
def test_seeds(model, how):
    """The same seed gives the same tokens, another seed others, and the global generator is neither read nor
    moved."""
    ask = lambda seed: Request(prompt(6), gen_length=20, seed=seed, stop_at_eos=False, **how)
    state = torch.get_rng_state()
    first, = run(model, ask(1))
    torch.manual_seed(99)
    again, other = run(model, ask(1), ask(2))
    assert first.tokens == again.tokens != other.tokens
    torch.set_rng_state(state)
    run(model, ask(1))
    assert torch.equal(torch.get_rng_state(), state)
