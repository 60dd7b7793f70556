"""Bad input: one sentence that names the value, the limit and the remedy, before any model runs."""
import itertools
import math

import pytest
import torch
from conftest import GOLDEN, prompt, tiny

from engine import Engine, Request

GOOD = dict(prompt=[1, 2, 3], gen_length=8)


@pytest.mark.parametrize("bad, says", [
    (dict(prompt=[]), "prompt is empty"),
    (dict(prompt=[1, 96]), "96; ids run from 0 to 95"),
    (dict(prompt=[-1]), "-1; ids run"),
    (dict(prompt="abc"), "prompt is empty|list of token ids"),
    (dict(prompt=[1.5, 2]), "a token of the prompt is 1.5; it must be a whole number"),
    (dict(prompt=[[1, 2]]), "whole number"),
    (dict(prompt=None), "prompt is None; it must be a list"),
    (dict(gen_length=2.5), "gen_length is 2.5; it must be a whole number"),
    (dict(gen_length=True), "gen_length is True"),
    (dict(gen_length=None), "gen_length is None"),
    (dict(steps="3"), "steps is '3'"),
    (dict(block_length=2.0), "block_length is 2.0"),
    (dict(prefix_len=True), "prefix_len is True"),
    (dict(seed=2**40), "seed is"),
    (dict(seed=-1), "seed is -1"),
    (dict(seed=None), "seed is None"),
    (dict(threshold="0.5"), "threshold is '0.5'; it must be a number"),
    (dict(temperature=True), "temperature is True"),
    (dict(temperature=1e-38), "temperature is 1e-38; it must be 0"),
    (dict(alg_temp=1e-300, remasking="entropy"), "alg_temp is 1e-300"),
    (dict(cfg_scale=1e39), "cfg_scale is 1e"),
    (dict(salt=["a"]), "salt is"),
    (dict(gen_length=0), "gen_length is 0"),
    (dict(gen_length=-4), "gen_length is -4"),
    (dict(prompt=[1] * 510), "make 518 tokens and the model takes 512"),
    (dict(prefix_len=4), "prefix_len is 4; the prompt has 3"),
    (dict(prefix_len=-1), "prefix_len is -1"),
    (dict(block_length=0), "block_length is 0"),
    (dict(block_length=9), "from 1 to gen_length \\(8\\)"),
    (dict(block_length=4, steps=3), "steps is 3; it must be a multiple of the number of blocks \\(2\\)"),
    (dict(steps=9), "steps is 9"),
    (dict(steps=0), "steps is 0"),
    (dict(threshold=0.0), "threshold is 0.0"),
    (dict(threshold=1.1), "threshold is 1.1"),
    (dict(threshold=math.nan), "threshold is nan"),
    (dict(threshold=0.5, steps=4), "exclude each other"),
    (dict(threshold=0.5, remasking="random"), "give steps instead"),
    (dict(temperature=-0.1), "temperature is -0.1"),
    (dict(temperature=math.inf), "temperature is inf"),
    (dict(temperature=math.nan), "temperature is nan"),
    (dict(remasking="best"), "remasking is 'best'; it must be one of low_confidence"),
    (dict(alg_temp=0.5, threshold=0.5), "leave it at 0"),
    (dict(alg_temp=0.5, remasking="random"), "leave it at 0"),
    (dict(top_p=0), "top_p is 0"),
    (dict(top_k=0), "top_k is 0"),
    (dict(cfg_scale=-1), "cfg_scale is -1"),
    (dict(eps=1.0), "eps is 1.0"),
    (dict(remasking="origin"), "give eps"),
    (dict(eps=0.001, block_length=4), "with steps alone, not"),
    (dict(eps=0.001, factor=1.0), "with steps alone, not"),
    (dict(factor=0.0), "factor is 0.0; it must be above 0"),
    (dict(factor=math.inf), "factor is inf"),
    (dict(factor="1"), "factor is '1'; it must be a number"),
    (dict(factor=1.0, steps=4), "steps \\(4\\) and factor \\(1.0\\) exclude each other"),
    (dict(factor=1.0, remasking="topk_margin"), "factor compares probabilities"),
    (dict(factor=1.0, alg_temp=0.5), "leave it at 0"),
    (dict(entropy_bound=-0.1), "entropy_bound is -0.1; it must be at least 0"),
    (dict(entropy_bound=math.nan), "entropy_bound is nan"),
    (dict(entropy_bound=1, factor=1, threshold=0.5), "threshold \\(0.5\\) and factor .* and entropy_bound"),
    (dict(entropy_bound=1, remasking="random"), "ranks by entropy, remasking 'random' does not"),
    (dict(entropy_bound=1, alg_temp=0.5), "leave it at 0"),
    (dict(canvas=[1, 2]), "no open place; put the mask id \\(95\\)"),
    (dict(canvas=[]), "no open place"),
    (dict(canvas=7), "canvas is 7; it must be a list"),
    (dict(canvas=[95, 96]), "canvas holds token id 96"),
    (dict(canvas=[95, 1.0]), "a token of the canvas is 1.0"),
    (dict(canvas=[95] * 3), "gen_length is 8 and the canvas has 3 places; give one"),
    (dict(canvas=[95] * 510, gen_length=128), "and canvas \\(510\\) make 513 tokens"),
    (dict(canvas=[95] * 3 + [1] * 5, steps=4), "from 1 to the number of open places \\(3\\)"),
    (dict(canvas=[95] * 3 + [1] * 5, block_length=4), "to the number of open places \\(3\\)"),
    (dict(canvas=[95] * 8, stop=("end",)), "stop is .* leave one out"),
    (dict(stop="end"), "stop is 'end'; it must be a tuple of texts"),
    (dict(stop=("a", "")), "none of them empty"),
    (dict(stop=("end",)), "the engine has no tokenizer to find texts with"),
])
def test_bad_request(llada, bad, says, monkeypatch):
    """Refused at the call of `stream`, before anything runs, also when it is the second of two; then it is
    named."""
    engine = Engine(llada, depth=2, cache_mb=4)
    monkeypatch.setattr(engine, "step", None)
    with pytest.raises(ValueError, match=says):
        engine.stream([Request(**GOOD | bad)])
    with pytest.raises(ValueError, match="request 1: .*" + says):
        engine.stream([Request(**GOOD), Request(**GOOD | bad)])


@pytest.mark.parametrize("bad, says", [
    (dict(cache="full"), "cache is 'full'"), (dict(window="some"), "window is 'some'"),
    (dict(depth=5), "depth is 5"),
    (dict(depth=-1), "depth is -1"), (dict(depth="deep"), "depth is 'deep'"),
    (dict(refresh=0), "refresh is 0"),
    (dict(refresh=1.5), "refresh is 1.5"), (dict(max_batch=0), "max_batch is 0"),
    (dict(cache_mb=0), "cache_mb is 0"),
    (dict(refresh="16"), "refresh is '16'"), (dict(max_batch=True), "max_batch is True"),
    (dict(cache_mb="big"), "cache_mb is 'big'"),
    (dict(cache_mb=0.01), "a cache of 0.01 MB holds no page; set cache_mb to 0."),
    (dict(measure=-1, table={5: 1}), "measure is -1"),
    (dict(measure=1.5), "measure is 1.5"), (dict(measure=True), "measure is True"),
    (dict(self_profile=1.5), "self_profile is 1.5"),
    (dict(self_profile=True), "self_profile is True"), (dict(self_profile=0.9, measure=0), "measure is 0"),
    (dict(measure=4), "no depth table to hold against"),
    (dict(self_profile=0.9, table={5: 1}), "exclude each other"),
    (dict(measure=4, depth=2), "an effect only with"),
    (dict(self_profile=0.9, cache="intra"), "an effect only with")])
def test_bad_engine(llada, bad, says):
    with pytest.raises(ValueError, match=says):
        Engine(llada, **{"table": {}} | bad)


def test_budget_too_small_says_how_much_is_needed(model):
    """A request that can never fit is refused at submission with the megabytes it needs, and those
    suffice."""
    request = Request(prompt(200), prefix_len=190, gen_length=20)
    says = r"needs [\d.]+ MB of cache and the budget is 0.20 MB; set cache_mb to ([\d.]+)"
    with pytest.raises(ValueError, match=says) as e:
        Engine(model, depth=2, cache_mb=0.2).generate([request])
    need = float(str(e.value).rsplit("set cache_mb to ")[1].split(" or")[0])
    result, = Engine(model, depth=2, cache_mb=need).generate([request])
    assert result.depth == 2 and len(result.tokens) <= 20


def test_requests_wait_for_room_and_all_are_served(model):
    """Symptom: the loop spins or starves when the cache holds one request at a time. Eight requests whose
    pages fit only one by one are served in order, with the tokens they have alone."""
    requests = [Request(prompt(150, seed=i), prefix_len=140, gen_length=4) for i in range(8)]
    alone = [Engine(model, depth=2, cache_mb=8).generate([r])[0].tokens for r in requests]
    small = Engine(model, depth=2, cache_mb=0.72 if model.config.kv_heads == 4 else 0.45)
    assert [r.tokens for r in small.generate(requests)] == alone


def test_two_streams_on_one_full_cache(model):
    """Symptom: a stream waits for ever on pages that another, idle stream holds. It says so instead."""
    engine = Engine(model, depth=2, cache_mb=0.72 if model.config.kv_heads == 4 else 0.45)
    request = Request(prompt(150), prefix_len=140, gen_length=4)
    first = engine.stream([request])
    next(first)
    with pytest.raises(RuntimeError, match="held by another stream"):
        engine.generate([Request(prompt(150, seed=1), prefix_len=140, gen_length=4)])
    first.close()
    assert engine.generate([request])[0].hit


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_non_finite_logits(model, dtype):
    """Symptom: NaN logits turn into token 0, silently; or one request that makes NaN or infinity leaves some
    in its pages, and the next request on them is refused, too. The step, the request and a remedy are named,
    and the pages are clean after."""
    broken = tiny(model.config.shift, seed=2).to(dtype)
    broken.head.weight[7] = 0               # so that no answer holds the token that breaks
    broken.embed.weight[7] = math.nan if dtype == torch.float32 else math.inf
    healthy = [Request(prompt(20 + i, vocab=6), prefix_len=9, gen_length=4) for i in range(3)]
    bad = [Request([7] * 80, prefix_len=p, gen_length=4) for p in (70, 0)]
    engine = Engine(broken, depth=2, cache_mb=0.8)
    before = [r.tokens for r in engine.generate(healthy)]
    for request in bad:
        with pytest.raises(ValueError, match="non-finite logits at step 0 of request 1; .*float32"):
            engine.generate([healthy[0], request, healthy[1]])
        assert all(e.users == 0 for e in engine.cache.entries.values())
        assert [r.tokens for r in engine.generate(healthy)] == before
    assert engine.cache.kv.isfinite().all() and engine.cache.hidden.isfinite().all()


def test_an_interrupt_while_encoding_leaves_no_half_entry(model, monkeypatch):
    """Symptom: a prefix whose encoding was interrupted is found later, with empty pages. It is forgotten, its
    pages freed."""
    engine = Engine(model, depth=2, cache_mb=4)
    free = len(engine.cache.free)

    def interrupt(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr(engine.cache, "write_boundaries", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([Request(prompt(20), prefix_len=9, gen_length=4)])
    assert len(engine.cache.free) == free and not engine.cache.index and not engine.cache.entries


def test_an_interrupt_while_encoding_for_guidance(model, monkeypatch):
    """Symptom: interrupted while the shadow's prefix is encoded, the request's own pages and its entry stay
    taken for ever."""
    engine, calls = Engine(model, depth=2, cache_mb=4), []
    write = engine.cache.write_boundaries

    def interrupt(*args):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        write(*args)
    monkeypatch.setattr(engine.cache, "write_boundaries", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([Request(prompt(20), prefix_len=9, gen_length=4, cfg_scale=1.0)])
    held = sum(len(e.pages) for e in engine.cache.entries.values())
    assert len(engine.cache.free) + held == engine.cache.kv.shape[0] - 2
    assert all(e.users == 0 for e in engine.cache.entries.values())


GPU_IS_FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has ...")
CPU_IS_FULL = RuntimeError("[enforce fail at alloc_cpu.cpp:116] err == 0. DefaultCPUAllocator: can't "
                           "allocate memory: you tried to allocate ...")


@pytest.mark.parametrize("full", [GPU_IS_FULL, CPU_IS_FULL, MemoryError()])
def test_memory_that_does_not_suffice(model, monkeypatch, full):
    """Symptom: a cache or weights larger than memory, or a step on a full GPU, end in the allocator's
    traceback. A sentence says what was asked for and what to set, from the library, too; what a step held is
    free again."""
    with pytest.raises(ValueError,
                       match=r"cache_mb is 1.09951e\+12 and this machine has \d+ MB in all; set it to less"):
        Engine(model, depth=2, cache_mb=2**40 - 1)
    engine, request = Engine(model, depth=2, cache_mb=4), Request(prompt(20), prefix_len=9, gen_length=4)
    right, free, step = engine.generate([request])[0].tokens, len(engine.cache.free), engine.step

    def fail(*_, **__):
        raise full
    monkeypatch.setattr(engine, "step", fail)
    with pytest.raises(ValueError,
                       match=r"not enough memory for a step on cpu with 1 running; set max_batch \(8\)"):
        engine.generate([request])
    monkeypatch.setattr(engine, "step", step)
    assert len(engine.cache.free) == free and engine.generate([request])[0].tokens == right
    monkeypatch.setattr(torch, "zeros", fail)
    with pytest.raises(ValueError,
                       match="not enough memory for a cache of 4 MB on cpu; set cache_mb to less"):
        Engine(model, depth=2, cache_mb=4)
    monkeypatch.setattr("engine.load", fail)
    with pytest.raises(ValueError,
                       match="not enough memory for the weights of .* as float32 on cpu; use dtype"):
        Engine.from_folder(GOLDEN / "llada", depth=2)


def test_another_error_of_torch_stays(model, monkeypatch):
    """What is no want of memory is a bug, and stays a traceback."""
    engine = Engine(model, depth=2, cache_mb=4)

    def fail(*_, **__):
        raise RuntimeError("shape mismatch")
    monkeypatch.setattr(engine, "step", fail)
    with pytest.raises(RuntimeError, match="shape mismatch"):
        engine.generate([Request(prompt(20), gen_length=4)])


@pytest.mark.parametrize("prefix_len", [None, 40])
def test_what_is_accepted_can_be_served(model, prefix_len):
    """Symptom: a request passes the check and then fails for want of room, with guidance (twice the pages) or
    where the boundary states run out first. Over a range of budgets: refused at the start with a budget that
    suffices, or served."""
    shared, c = prompt(40), model.config
    for budget in (0.1 + 0.02 * i for i in range(60)):
        engine = Engine(model, depth=3, cache_mb=budget)
        for i in range(3):
            request = Request(shared + prompt(5, seed=i), prefix_len=prefix_len, gen_length=4, cfg_scale=0.5)
            try:
                assert len(engine.generate([request])[0].tokens) <= 4
            except ValueError as e:
                need = float(str(e).rsplit("set cache_mb to ")[1].split(" or")[0])
                assert need > budget
                Engine(model, depth=3, cache_mb=need).check(request)


def test_nothing_is_evicted_in_vain(model):
    """Symptom: a waiting request evicts entries for a prefix that it then cannot start with."""
    # 30 pages; the second takes 26
    engine = Engine(model, depth=2, cache_mb=0.99 if model.config.kv_heads == 4 else 0.64)
    small = [Request(prompt(20, seed=i) + [1], prefix_len=20, gen_length=8, stop_at_eos=False)
             for i in (1, 2)]
    engine.generate(small)
    entries = set(engine.cache.entries)
    stream = engine.stream([small[0], Request(prompt(280, seed=9), prefix_len=200, gen_length=4)])
    for event in itertools.islice(stream, 8):
        assert event.index == 0 and set(engine.cache.entries) == entries
    stream.close()


def test_prompts_may_be_tensors(model):
    """Symptom: a tensor as prompt never shares, because its elements hash by identity. It becomes a list of
    ints."""
    engine = Engine(model, depth=2, cache_mb=4)
    ids = torch.tensor(prompt(30))
    twice = [Request(ids, prefix_len=20, gen_length=2) for _ in range(2)]
    assert [r.hit for r in engine.generate(twice)] == [False, True]
    assert engine.generate([Request(prompt(30), prefix_len=20, gen_length=2)])[0].hit
