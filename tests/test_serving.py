"""Requests that come and go: arrivals while others run, cancellation, prefixes that nobody named."""
import random
from collections import defaultdict

import pytest
from conftest import prompt, tiny

from cache import Repeats
from engine import Engine, Request


def arrivals(requests, rng):
    """A source that has nothing to give now and then."""
    for request in requests:
        while rng.random() < 0.5:
            yield None
        yield request


def free_pages(engine):
    return len(engine.cache.free) + sum(len(e.pages) for e in engine.cache.entries.values())


@pytest.mark.parametrize("window", ["all", "block"])
def test_two_hundred_random_arrivals_equal_their_solo_runs(window):
    """Requests of all kinds join and leave a running batch at refresh points, in a cache that evicts; each
    gets the tokens it has alone, its events in order, and the cache ends with nothing held."""
    model = tiny(seed=4, layers=3)
    rng = random.Random(0)
    shared = [prompt(n, seed=n) for n in (20, 64, 65, 90)]
    requests = []
    for i in range(200):
        prefix, gen = rng.choice(shared), rng.randint(1, 10)
        block = rng.randint(1, gen)
        blocks = -(-gen // block)
        steps = blocks * rng.randint(1, max(1, gen // blocks))
        how = rng.choice([dict(), dict(threshold=rng.choice([0.05, 0.3])), dict(steps=steps)])
        requests.append(Request(
            prefix + prompt(rng.randint(1, 12), seed=1000 + i), prefix_len=rng.choice([len(prefix), 0]),
            cfg_scale=rng.choice([0, 0, 0, 0.5]), gen_length=gen, block_length=block,
            temperature=rng.choice([0, 0, 0.9]), seed=i, **how))
    kw = dict(table={10: 1, 60: 2}, measure=0, refresh=3, window=window)    # no guard: it learns
    engine = Engine(model, cache_mb=0.95, max_batch=5, **kw)      # 27 pages: an entry takes 3 or 6
    results, steps, gone = {}, defaultdict(int), set()
    for event in engine.stream(arrivals(requests, rng)):
        if rng.random() < 0.02 and not event.result:
            engine.cancel(requests[event.index])
            gone.add(event.index)
        assert event.step == steps[event.index] and event.index not in results
        steps[event.index] += not event.result or event.result.finish_reason != "cancelled"
        if event.result:
            results[event.index] = event.result
    alone = Engine(model, cache_mb=8, **kw)
    for i, request in enumerate(requests):
        expected = alone.generate([request])[0].tokens
        assert results[i].tokens == (expected[:len(results[i].tokens)] if i in gone else expected)
        assert (results[i].finish_reason == "cancelled") == (i in gone)
    assert engine.counts["passes"] < alone.counts["passes"] and engine.cache.stats()["evictions"] > 0
    assert free_pages(engine) == engine.cache.kv.shape[0] - 2


def test_requests_join_at_refresh_points_only(model):
    """With R = 4 a request that comes late starts when the running one refreshes, so both always refresh
    together."""
    engine = Engine(model, depth=2, refresh=4, cache_mb=8)
    def make(seed):
        return Request(prompt(30) + prompt(3, seed=seed), prefix_len=30, gen_length=12, stop_at_eos=False)

    seen, started = [], []

    def source():
        yield make(1)
        while len(seen) < 2:
            yield None
        yield make(2)
    for event in engine.stream(source()):
        if event.index == 1 and event.step == 0:
            started.append(len(seen))
        if event.index == 0:
            seen.append(event.refresh)
    assert started == [5] and seen == [i % 4 == 0 for i in range(12)]   # behind its fifth step
    assert engine.counts["passes"] == 16


def test_cancel_frees_at_once(model):
    """A cancelled request gives its pages back before the next step, tells so, and its neighbours do not
    notice; one that still waits never starts."""
    requests = [Request(prompt(70) + [i], prefix_len=70, gen_length=10, stop_at_eos=False) for i in range(3)]
    engine = Engine(model, depth=2, cache_mb=8, max_batch=2)
    results = {}
    for event in engine.stream(requests):
        if event.index == 0 and event.step == 3:
            before = free_pages(engine)
            engine.cancel(requests[0])
            assert free_pages(engine) == before + 2 * 2 + 1
            engine.cancel(requests[2])
        if event.result:
            results[event.index] = event.result
    assert [results[i].finish_reason for i in range(3)] == ["cancelled", "length", "cancelled"]
    assert results[0].forwards == 4 and results[2].forwards == 0
    assert results[1].tokens == Engine(model, depth=2, cache_mb=8).generate([requests[1]])[0].tokens
    assert free_pages(engine) == engine.cache.kv.shape[0] - 2


@pytest.mark.parametrize("window", ["all", "rest", "block"])
def test_cancel_where_the_engine_listens(model, window):
    """Symptom: a cancellation on another request's last event, or from inside the source of requests, ends
    the stream in an IndexError, all others with it: the cancelled one still stood among those to step."""
    def make(n):
        return Request(prompt(40) + prompt(n, seed=n), prefix_len=40, gen_length=8, block_length=4,
                       stop_at_eos=False)

    requests = [make(2), make(3), make(5)]
    engine = Engine(model, depth=2, refresh=2, window=window, cache_mb=8, max_batch=3)
    done = {}
    for event in engine.stream(requests):
        if event.step == 1 and event.index == 0 and not event.result:
            engine.cancel(requests[0])
        if event.result:
            done[event.index] = event.result
            if event.index == 0:
                engine.cancel(requests[1])
    assert [done[i].finish_reason for i in range(3)] == ["cancelled", "cancelled", "length"]

    def source():
        yield requests[0]
        yield requests[2]
        for _ in range(3):
            yield None
        engine.cancel(requests[0])
        while True:
            yield None
    done = {}
    for event in engine.stream(source()):
        if event.result:
            done[event.index] = event.result
            if len(done) == 2:
                break
    alone, = Engine(model, depth=2, refresh=2, window=window, cache_mb=8).generate([requests[2]])
    assert done[0].finish_reason == "cancelled" and done[1].tokens == alone.tokens
    assert free_pages(engine) == engine.cache.kv.shape[0] - 2


def test_guidance_in_the_least_cache():
    """Symptom: a request with guidance is accepted and then told that another stream holds the cache, as
    there are page table rows for one request and one prefix and it takes two of both."""
    model = tiny(layers=8, hidden=16, heads=2, kv_heads=2, mlp=16)
    request = Request(prompt(60) + [1], prefix_len=60, gen_length=4, cfg_scale=0.5)
    for mb in range(5, 200):
        engine = Engine(model, cache="naive", cache_mb=mb / 100, max_batch=1)
        try:
            engine.check(request)
        except ValueError:
            continue
        assert len(engine.generate([request])) == 1
        return


def test_cancel_before_and_between_passes(model):
    """Symptom: a cancellation before the first event is lost, or one between the passes of a step (requests
    of different depths) ends the stream in a traceback."""
    table, shared = {20: 1, 60: 3}, prompt(40)
    make = lambda n: Request(shared + prompt(n, seed=n), prefix_len=40, gen_length=6, stop_at_eos=False)
    requests = [make(2), make(60), make(3)]
    engine = Engine(model, table=table, measure=0, cache_mb=8)
    stream = engine.stream(requests)
    engine.cancel(requests[2])
    results = {}
    for event in stream:
        if (event.index, event.step) == (0, 2):
            engine.cancel(requests[1])
        if event.result:
            results[event.index] = event.result
    assert [results[i].finish_reason for i in range(3)] == ["length", "cancelled", "cancelled"]
    assert results[1].forwards == 2 and results[2].forwards == 0
    assert free_pages(engine) == engine.cache.kv.shape[0] - 2


def test_a_request_that_never_refreshes_lets_others_join(model):
    """Symptom: with a long interval a free place stays empty until the whole batch is done, though nobody
    refreshes."""
    engine = Engine(model, depth=2, refresh=1000, cache_mb=8, max_batch=2)
    long, short = (Request(prompt(9, seed=n), prefix_len=0, gen_length=n, stop_at_eos=False) for n in (30, 2))
    engine.generate([long, short, short, short])
    assert engine.counts["passes"] == 30


def test_a_bad_request_of_a_source_is_refused_and_nothing_is_held(model):
    engine = Engine(model, depth=2, cache_mb=8)
    with pytest.raises(ValueError, match="gen_length is 0"):
        list(engine.stream(iter([Request(prompt(9), gen_length=4), Request(prompt(9), gen_length=0)])))
    assert free_pages(engine) == engine.cache.kv.shape[0] - 2 and not engine.streams


def test_prefixes_in_common_are_found(model):
    """Prompts that name no prefix: the first of three with the same 70 leading ids is only remembered, the
    second makes the whole blocks they have in common a shared entry, the third hits it. The answer is that
    of naming this prefix."""
    engine = Engine(model, depth=2, cache_mb=8)
    requests = [Request(prompt(70) + prompt(6, seed=9 + i), gen_length=6) for i in range(3)]
    first, second, third = (engine.generate([r])[0] for r in requests)
    assert (first.prefix_tokens, second.prefix_tokens, third.prefix_tokens) == (0, 64, 64)
    assert (first.hit, second.hit, third.hit) == (False, False, True)
    named = Request(requests[2].prompt, prefix_len=64, gen_length=6)
    assert third.tokens == Engine(model, depth=2, cache_mb=8).generate([named])[0].tokens
    stats = engine.cache.stats()
    assert (stats["entries"], stats["tokens"], stats["hits"], stats["misses"]) == (1, 64, 1, 2)


def test_prefixes_are_not_looked_for_when_told_so(model):
    engine = Engine(model, depth=2, cache_mb=8, auto_prefix=False)
    results = engine.generate([Request(prompt(70) + [i], gen_length=2) for i in range(3)])
    assert [r.prefix_tokens for r in results] == [0, 0, 0]


def test_a_request_that_waits_does_not_meet_itself(model):
    """Symptom: a request that could not be admitted at once looks itself up again and takes its own prompt
    for a repeat."""
    engine = Engine(model, depth=2, cache_mb=0.72 if model.config.kv_heads == 4 else 0.45, max_batch=2)
    requests = [Request(prompt(130, seed=i), gen_length=4, prefix_len=p)
                for i, p in enumerate((120, None, None))]
    assert [r.prefix_tokens for r in engine.generate(requests)] == [120, 0, 0]


def test_the_index_of_repeats_is_bounded():
    """Ten thousand different prompts leave no more than the bound, and what was seen last is still known."""
    repeats = Repeats()
    for i in range(10_000):
        repeats.count([i, *range(100)])
    assert len(repeats.seen) == Repeats.ENTRIES
    assert repeats.count([9_999, *range(100)]) == 96 and repeats.count([0, *range(100)]) == 0
    assert repeats.count([9_999, *range(100)], salt="other") == 0


def test_ten_thousand_prompts_do_not_grow_the_cache():
    """No prompt comes twice: no entry is made, no page is held."""
    engine = Engine(tiny(layers=1), depth=1, cache_mb=2)
    prompts = ([i % 90, i // 90 % 90, i // 8100, *range(20)] for i in range(10_000))
    engine.generate([Request(ids, gen_length=1) for ids in prompts])
    assert len(engine.admission.repeats.seen) == 10_000 and engine.cache.stats()["entries"] == 0
    assert free_pages(engine) == engine.cache.kv.shape[0] - 2
