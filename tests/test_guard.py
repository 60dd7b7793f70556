"""Online measurement: what it finds, what it may cost, what it changes (depths of later requests) and what
not (any token)."""
import random
import sys

import pytest
import torch
from conftest import ROOT, prompt, tiny

import depth
import guard
from hub.checkpoint import load
from engine import Engine, Request
from guard import SHARE, ratio_bin
from tokenizer import Tokenizer

sys.path.insert(0, str(ROOT / "tools"))
import profiler     # noqa: E402
import staff        # noqa: E402

P, U, G, L = 70, 6, 10, 4


def ask(question=1, P=P, **kw):
    options = {"prefix_len": P, "gen_length": G, "stop_at_eos": False, **kw}
    return Request(prompt(P) + prompt(U, seed=question), **options)


def alike(model, request):
    """Per layer, by the profiler, which knows nothing of pages."""
    canvas = request.prompt + [model.config.mask_id] * request.gen_length
    return profiler.similarity(model, [canvas], [request.prefix_len])[0]


def guarded(model, table, threshold=0.9, **kw):
    return Engine(model, **{"table": depth.Table(table, threshold), "cache_mb": 8, **kw})


@pytest.fixture
def between(model):
    """A threshold that three layers of `ask()` pass and the last one does not: it makes depth 2."""
    return float(alike(model, ask())[2:4].mean())


@pytest.mark.parametrize("limit", [1, 3, 4])
def test_the_first_request_is_measured_and_equals_the_profiler(model, limit):
    """Shared K/V as they lie in their pages against the whole canvas from layer 0: what profiler.similarity
    computes without a cache, in the layers that the table's depth rests on."""
    first, second = guarded(model, {0: limit}, 0.0, max_batch=1).generate([ask(1), ask(2)])
    layers = min(limit + 1, L)
    assert first.similarity == pytest.approx(alike(model, ask(1))[:layers].tolist(), abs=1e-5)
    assert len(first.similarity) == layers
    assert second.similarity == first.similarity and second.measure_token_layers == 0


def test_it_reads_the_pages_that_requests_read(model):
    """Symptom: a damaged page goes unseen, since the prefix was run anew for the comparison. A layer of a
    stored prefix is overwritten by hand; the next measurement finds it."""
    engine = guarded(model, {0: L}, 0.0, refresh=1, measure=1)
    before = engine.generate([ask()])[0].similarity
    entry, = engine.cache.entries.values()
    engine.cache.kv[engine.cache.table[entry.id, 2, :2].long()] *= -1
    engine.counts["token_layers"] = 1e9             # enough to pay for another look
    after = engine.generate([ask()])[0].similarity
    assert after[2] < before[2] - 0.1 and after[1] == pytest.approx(before[1], abs=0.05)


@pytest.mark.parametrize("kw", [dict(), dict(window="block"), dict(max_batch=1)])
def test_no_token_hangs_on_being_measured(model, kw):
    """Each refresh measured, or none: as long as the table holds, the same tokens, forwards and
    token-layers."""
    requests = [ask(i, block_length=5, temperature=0.7 * (i % 2), cfg_scale=0.5 * (i == 2), seed=i)
                for i in range(5)]
    runs = []
    for measure in (0, 1):
        engine = guarded(model, {0: 2}, 0.0, refresh=3, measure=measure, **kw)
        engine.counts["token_layers"] = 1e9
        runs.append([(r.tokens, r.forwards, r.token_layers, r.depth) for r in engine.generate(requests)])
        assert engine.counts["measurements"] == (20 if measure else 0)      # five requests, steps 0, 3, 6, 9
    assert runs[0] == runs[1]


def test_a_contradicted_table_gives_way(model, between):
    """The first request runs at the table's depth, those admitted behind it, at any batch size, at the
    measured one; their tokens are those of that depth."""
    requests = [ask(i) for i in (1, 2, 3, 4)]
    for batch in (1, 4):
        for threshold, depth_then in ((between, 2), (0.9999, 0)):
            results = guarded(model, {0: L}, threshold, refresh=3, max_batch=batch).generate(requests)
            assert [r.depth for r in results] == [L] + [depth_then] * 3
            assert {r.table_depth for r in results} == {L}
            for depths, some in ((L, slice(0, 1)), (depth_then, slice(1, 4))):
                fixed = Engine(model, depth=depths, refresh=3, cache_mb=8).generate(requests[some])
                assert [r.tokens for r in results[some]] == [r.tokens for r in fixed]


def test_a_wrong_table_is_caught_and_accuracy_comes_back(model):
    """Symptom: a table made for other texts shares layers whose K/V depend on what follows, and the answers
    are wrong for ever. The first request's still are; then nothing is shared, and at R = 1 the answers are
    those without a cache."""
    requests = [ask(i) for i in range(6)]
    exact = [r.tokens for r in Engine(model, cache="none", cache_mb=8).generate(requests)]
    blind = [r.tokens for r in guarded(model, {0: L}, measure=0, refresh=1).generate(requests)]
    assert sum(a == b for a, b in zip(blind, exact)) <= 1
    results = guarded(model, {0: L}, 0.9999, refresh=1).generate(requests)
    assert results[0].tokens == blind[0] and [r.tokens for r in results[1:]] == exact[1:]


def test_the_embedded_model_with_a_table_that_is_too_bold():
    """All layers shared, "Who besides Ann is in Oslo?" is mostly answered wrongly: its answer is read off
    document rows that must have seen the question. The guard finds that out at the first question on each
    list; the next ones are answered as without a cache."""
    path, requests, answers = ROOT / "checkpoints" / "tiny", [], []
    model, tokenizer = load(path).pack(), Tokenizer.from_folder(path)
    for i in range(3):
        text, qa = staff.sample(random.Random(f"too bold/{i}"), 16)
        asked = [(question, answer) for kind, question, answer in qa if kind == "other"][:5]
        for question, answer in asked:
            ids, P = tokenizer.render({"prefix": text, "prompt": question})
            requests.append(Request(ids, prefix_len=P, gen_length=24, threshold=0.9))
            answers.append(answer)
    shared = lambda r: r.prompt[:r.prefix_len]
    first = [i for i, r in enumerate(requests) if i == 0 or shared(r) != shared(requests[i - 1])]
    rest = [i for i in range(len(requests)) if i not in first]
    right = {}
    for name, options in (("none", dict(cache="none")), ("table", dict(measure=0)), ("guard", dict())):
        if name != "none":
            options |= dict(table=depth.Table({0: 8}, 0.99))
        results = Engine(model, tokenizer=tokenizer, **options).generate(requests)
        right[name] = [tokenizer.decode(r.tokens).strip() == answer for r, answer in zip(results, answers)]
    assert len(first) == 3 and len(rest) >= 8
    assert all(results[i].depth == 8 for i in first) and all(0 < results[i].depth <= 3 for i in rest)
    count = {name: sum(right[name][i] for i in rest) for name in right}
    assert count["none"] >= len(rest) - 1 <= count["guard"] and count["table"] <= len(rest) // 2, count


def test_never_raised_past_the_table(model):
    """However alike the K/V are, a prefix gets no more than the table says, at its own ratio."""
    engine = guarded(model, {0: 1, 90: 3}, 0.0, max_batch=1, measure=1, refresh=1)
    results = engine.generate([ask(i) for i in range(3)])
    assert [r.depth for r in results] == [1, 1, 1] and all(len(r.similarity) == 2 for r in results)


def test_each_prefix_and_each_ratio_for_itself(model, between):
    """What one prefix shows says nothing of another, nor of the same one on a longer canvas or of another
    tenant's."""
    engine = guarded(model, {0: L}, between, max_batch=1)
    other = Request(prompt(60, seed=9) + prompt(U), prefix_len=60, gen_length=G)
    long = ask(gen_length=G + 40)
    assert ratio_bin(P, P + U + G) == 80 and ratio_bin(P, P + U + G + 40) == 55
    assert [r.depth for r in engine.generate([ask(1), ask(2), other, long, ask(3)])] == [L, 2, L, L, 2]
    salted = engine.generate([ask(1, salt="b"), ask(2, salt="b")])
    assert [r.depth for r in salted] == [L, 2], "a tenant's measurements are its own"


def test_a_table_finer_than_the_bins(model):
    """Symptom: two requests of one ratio bin at different depths of the table, whose means have different
    lengths."""
    engine = guarded(model, {0: 2, 82: 3}, 0.0, max_batch=1)
    engine.counts["token_layers"], engine.guard.every = 1e9, 1
    results = engine.generate([ask(gen_length=n) for n in (10, 8, 10, 8)])
    assert {ratio_bin(r.prefix_tokens, P + U + n) for r, n in zip(results, (10, 8))} == {80}
    assert [r.depth for r in results] == [2, 3, 2, 3] and [len(r.similarity) for r in results] == [3, 4, 3, 4]


def test_an_interrupted_measurement_leaves_nothing(model, monkeypatch):
    """An interrupt while the guard compares: no page stays taken, and the next request is the first to be
    measured."""
    engine = guarded(model, {0: L}, 0.0)
    monkeypatch.setattr("guard.compare", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        engine.generate([ask()])
    monkeypatch.undo()
    assert not any(entry.users for entry in engine.cache.entries.values())
    result, = engine.generate([ask()])
    assert result.hit and result.measure_token_layers > 0 and result.depth == L


def test_what_was_measured_outlives_the_entry(model, between):
    """Symptom: in a small cache every other request runs too deep, since a prefix that was lowered is
    forgotten when its K/V are evicted. The latest prefixes are remembered, and no more than KNOWN of them."""
    engine = guarded(model, {0: L}, between, max_batch=1)
    engine.generate([ask(1)])
    engine.cache.discard(*engine.cache.entries.values())
    assert [(r.depth, r.hit) for r in engine.generate([ask(2), ask(3)])] == [(2, False), (2, True)]
    engine.guard.KNOWN = 3
    engine.generate([Request(prompt(20, seed=i) + [1], prefix_len=20, gen_length=4) for i in range(5)])
    assert len(engine.guard.bins) == 3 and engine.generate([ask(4)])[0].depth == L


def test_a_prefix_that_shares_nothing_is_not_stored(model):
    """Lowered to 0, a prefix is neither encoded nor kept: nobody would read it."""
    engine = guarded(model, {0: L}, 1.1, max_batch=1)
    first, = engine.generate([ask(1)])
    engine.cache.discard(*engine.cache.entries.values())
    second, third = engine.generate([ask(2), ask(3)])
    assert [second.depth, third.depth] == [0, 0]
    assert engine.counts["encoded_prefixes"] == 1 and not engine.cache.entries
    assert second.table_depth == L and second.similarity == first.similarity and not second.hit


def test_a_request_that_names_no_prefix_follows_the_guard(model):
    """Symptom: a stored prefix that came down to 0 is still found by prompts that name none, which then keep
    its K/V for R steps though nothing is shared. They run as if nothing were stored: as without a cache."""
    engine = guarded(model, {0: L}, 1.1, max_batch=1)
    engine.generate([ask(1)])
    found = engine.generate([ask(i, prefix_len=None) for i in (2, 3, 4)])
    exact = Engine(model, cache="none", cache_mb=8).generate([ask(i, prefix_len=None) for i in (2, 3, 4)])
    assert [r.tokens for r in found] == [r.tokens for r in exact]
    assert [r.prefix_tokens for r in found] == [0, 0, 0]


def test_one_odd_request_does_not_condemn_a_prefix(model):
    """Symptom: one request whose values are not finite, and its prefix never shares again. What is not finite
    is not kept."""
    broken = tiny(shift=model.config.shift)
    broken.embed.weight.data[91] = float("nan")
    engine = guarded(broken, {0: L}, 0.0)
    bad = Request(prompt(P) + [91, 3, 4], prefix_len=P, gen_length=G)
    with pytest.raises(ValueError, match="non-finite"):
        engine.generate([bad])
    assert not engine.guard.bins and engine.guard.spent[0] > 0 == engine.guard.samples
    assert engine.counts["measurements"] == 1
    result, = engine.generate([ask()])
    assert result.depth == L and all(s > 0 for s in result.similarity)
    engine.guard.every, engine.counts["token_layers"] = 1, 1e9
    with pytest.raises(ValueError, match="non-finite"):
        engine.generate([bad])
    assert engine.generate([ask()])[0].similarity[1] > 0


def test_when_it_looks(model):
    """A prefix' first refresh, then each fourth: of the 13 refreshes of a request at R = 1 those at steps 0,
    3, 7 and 11."""
    engine, steps = guarded(model, {0: 2}, 0.0, refresh=1, measure=4), []
    engine.counts["token_layers"] = 1e9
    before = 0
    for event in engine.stream([ask(gen_length=13)]):
        if engine.counts["measurements"] > before:
            steps.append(event.step)
            before += 1
    assert steps == [0, 3, 7, 11]


def test_what_waits_and_what_does_not(model):
    """Without work to pay for it, an engine looks eight times: at new prefixes. With self_profile new
    prefixes never wait. The two halves of the share are kept apart, so that neither starves the other."""
    new = lambda i: Request(prompt(20 + i, seed=i) + [1, 2], prefix_len=20 + i, gen_length=2, steps=1)
    trusting = guarded(model, {0: 2}, 0.0)
    trusting.generate([new(i) for i in range(12)])
    assert trusting.counts["measurements"] == 8 and guard.SHARE == 0.02
    profiling = Engine(model, self_profile=0.01, cache_mb=8)
    profiling.generate([new(i) for i in range(12)])
    assert profiling.counts["measurements"] == 12
    profiling.guard.every = 1
    assert profiling.generate([new(0)])[0].measure_token_layers == 0, "a further look waits"
    for full, measured in ((0, 1), (1, 0)):
        engine = guarded(model, {0: 2}, 0.0, measure=1)
        engine.generate([new(0)])
        engine.guard.samples, engine.counts["token_layers"] = guard.FREE, 1e6
        engine.guard.spent = [0, 0]
        engine.guard.spent[full] = 0.01 * 1e6
        known, other = engine.generate([new(0), new(1)])
        assert [bool(other.measure_token_layers), bool(known.measure_token_layers)] == [full == 1, full == 0]


def test_depths_come_down_to_boundaries(monkeypatch):
    """With more than 16 layers a refresh can start at every fourth one only: what was measured is rounded
    down to these, and a table that the model bears out at its own threshold stays as it is."""
    model = tiny(layers=20, scale=1.5)
    values = alike(model, ask())
    requests = [ask(1), ask(2)]
    for limit, layers, then in ((7, 8, 7), (11, 9, 7), (20, 15, 11), (20, 3, 0)):
        threshold = float(values[layers - 1:layers + 1].mean())           # so many leading layers are alike
        assert (values >= threshold).long().cumprod(0).sum() == layers
        results = guarded(model, {0: limit}, threshold, max_batch=1).generate(requests)
        assert [r.depth for r in results] == [limit, then], (limit, layers)


def test_a_later_refresh_is_measured_on_the_present_canvas(model, monkeypatch):
    """What is compared at step R is the canvas with the tokens that stand there by then, not the masks of the
    first step."""
    seen = []
    compare = guard.compare
    monkeypatch.setattr(guard, "compare", lambda *a: seen.append(a[3].tolist()) or compare(*a))
    engine = guarded(model, {0: 2}, 0.0, refresh=4, measure=1)
    events = list(engine.stream([ask(gen_length=8)]))
    now, mask = ask().prompt, model.config.mask_id
    expected = now + [mask] * 8
    for event in events[:4]:
        for place, token in event.committed:
            expected[len(now) + place] = token
    assert seen == [now + [mask] * 8, expected] and mask in expected
    assert events[-1].result.tokens != expected[len(now):]


def test_mixed_traffic_leaves_room_for_both_kinds_of_looking(model):
    """Symptom: prefixes that are used once take all that may be spent, and the popular one is never looked at
    again. At most SHARE of the work is measured, half of it again, but for an engine's first FREE looks."""
    engine = guarded(model, {0: L}, 0.0, measure=2, refresh=1)
    once = lambda i: Request(prompt(30, seed=i) + [1], prefix_len=30, gen_length=2)
    requests = [ask(i) if i % 2 else once(i) for i in range(240)]
    results = engine.generate(requests)
    work = sum(r.token_layers + r.encode_token_layers for r in results)
    measured = sum(r.measure_token_layers for r in results)
    free = guard.FREE * (L - 0.5) * (P + U + G)
    assert engine.counts["token_layers"] == work
    assert sum(engine.guard.spent) == measured <= SHARE * work + free
    popular = next(bin for bin in engine.guard.bins.values() if bin.refreshes > 100)
    assert popular.samples >= 3 and engine.counts["measurements"] < 60
    capped = guarded(model, {0: L}, 0.0, refresh=1)
    capped.guard.samples = guard.FREE
    results = capped.generate(requests)
    assert 0 < sum(r.measure_token_layers for r in results) <= SHARE * work


def test_the_latest_prefixes_are_remembered(model, between):
    """Of more than KNOWN prefixes the one that was measured longest ago is forgotten."""
    engine = guarded(model, {0: L}, between, max_batch=1, measure=1)
    engine.guard.KNOWN, engine.counts["token_layers"] = 2, 1e9
    other = lambda seed: Request(prompt(60, seed=seed) + prompt(U), prefix_len=60, gen_length=G)
    results = engine.generate([ask(1), other(8), ask(1), other(9), ask(1)])
    assert [r.depth for r in results] == [L, L, 2, L, 2]


def test_the_mean_runs_and_may_recover(model):
    """The mean over all measurements counts, not the last one: a prefix lowered by one odd request gets its
    depth back."""
    engine = guarded(model, {0: L}, 0.0, max_batch=1)
    engine.generate([ask()])
    bin, = engine.guard.bins.values()
    engine.guard.threshold, bin.mean = 0.45, torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    engine.guard.every, engine.counts["token_layers"] = 1, 1e9
    results = engine.generate([ask(i) for i in range(12)])
    assert results[0].depth == 1 and results[-1].depth > 1
    exact = torch.stack([alike(model, ask(i)) for i in range(12)])
    expected = (exact.sum(0) + torch.tensor([1, 1, 0, 0])) / 13
    assert results[-1].similarity == pytest.approx(expected.tolist(), abs=1e-5)
