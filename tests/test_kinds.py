"""The identities again, on a small random model of each kind that is neither LLaDA nor Dream.

What differs (norms on q and k, heads wider or narrower than the hidden size says, a tied head, the shift with
or without biases) lies in model.py alone; cache, step, guard and profiler must not know of it.
"""
import pytest
import torch
import torch.nn.functional as F
from conftest import prompt, tiny
from reference import plain

from engine import Engine, Request
from model import rotate
from test_engine import (  # noqa: F401: these run here on the fixture below
    mixed_requests, run, test_alone_equals_any_batch, test_depth_varies_inside_a_batch,
    test_intra_is_depth_zero, test_naive_is_full_depth_never_refreshed,
    test_prefix_as_long_as_the_prompt_leaves_one_token, test_shared_pages_are_never_written_again)

KINDS = {       # hidden is 48 everywhere
    "qwen3": dict(qk_norm=True, heads=4, kv_heads=2, head_dim=20, tied=True),
    "coder": dict(seed=2, qkv_bias=True, heads=6, kv_heads=2, head_dim=8, tied=True),
    "llama": dict(heads=6, kv_heads=3, head_dim=16),
    "CoDA": dict(shift=True, qkv_bias=False, qk_norm=True, heads=3, kv_heads=1, head_dim=16),
    "open-dcoder": dict(shift=True, heads=6, kv_heads=2, head_dim=8, tied=True)}


def make(kind, **kw):
    """Norms that do something: weights around 1. A tied head takes the embedding's, and less of it."""
    model = tiny(**KINDS[kind] | kw)
    generator = torch.Generator().manual_seed(1)
    for name, p in model.named_parameters():
        if name.endswith("norm.weight"):
            p.add_(torch.randn(p.shape, generator=generator) * 0.3)
    return model


@pytest.fixture(scope="module", params=KINDS)
def model(request):
    return make(request.param)


@pytest.mark.parametrize("block, steps, threshold", [(16, 16, None), (5, None, None), (8, None, 0.05)])
def test_no_cache_is_the_plain_loop(model, block, steps, threshold):
    """`none` and depth 0 with R = 1, two requests at once, are the loop that recomputes the whole canvas at
    each step."""
    how = dict(gen_length=16, block_length=block, steps=steps, threshold=threshold, stop_at_eos=False)
    prompts = [prompt(14, seed=1), prompt(9, seed=2)]
    expected = [plain(model, ids, 16, block, steps, threshold) for ids in prompts]
    for P in (0, 1, 8):
        requests = [Request(ids, prefix_len=P, **how) for ids in prompts]
        for kw in (dict(cache="none"), dict(depth=0, refresh=1)):
            assert [(r.tokens, r.forwards) for r in run(model, requests, **kw)] == expected, (P, kw)


@pytest.mark.parametrize("window", ["all", "rest", "block"])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_a_batch_of_two_at_every_depth_and_window(model, depth, window):
    """Two requests of one prefix together, and each alone; the miss that stores the prefix, and the hit."""
    shared = prompt(70)
    requests = [Request(shared + prompt(3 + i, seed=i), prefix_len=70, gen_length=12, block_length=4)
                for i in range(2)]
    how = dict(depth=depth, window=window, refresh=3)
    alone = [run(model, [r], **how)[0] for r in requests]
    engine = Engine(model, cache_mb=8, **how)
    for _ in range(2):
        both = engine.generate(requests)
        assert [r.tokens for r in both] == [r.tokens for r in alone]
    assert all(r.hit for r in both) == (depth > 0) and {r.depth for r in both} == {depth}


def test_cached_keys_are_normed_and_rotated(model):
    """Symptom: K goes to the cache before its norm, and a hit reads another K than the miss computed. What a
    published prefix holds is what the plain pass computes, layer by layer."""
    ids = prompt(40)
    engine = Engine(model, depth=2, cache_mb=8)
    engine.generate([Request(ids + [5], prefix_len=40, gen_length=2)])
    entry, = engine.cache.entries.values()
    pages = torch.tensor(entry.pages).view(model.config.layers, -1)
    kept = engine.cache.kv[pages][:, 0, :, :, :40]                                          # (L, 2, K, P, D)
    x, rope = model.embed(torch.tensor([ids])), model.rope(torch.arange(40)[None])
    gqa = model.config.heads != model.config.kv_heads
    for layer, page in zip(model.layers, kept):
        def attend(q, k, v):
            k = rotate(k, *rope)
            torch.testing.assert_close(page, torch.cat([k, v]), atol=1e-3, rtol=0)     # values of up to 20
            return F.scaled_dot_product_attention(rotate(q, *rope), k, v, enable_gqa=gqa)
        x = layer(x, attend)


def test_guard_and_profiler_agree(model):
    """The guard measures on the K/V that requests really read what the profiler measures on texts."""
    from tools.profiler import similarity
    ids, P, G = prompt(30), 24, 6
    engine = Engine(model, self_profile=0.5, cache_mb=8)
    result, = engine.generate([Request(ids, prefix_len=P, gen_length=G)])
    expected = similarity(model, [tuple(ids + [model.config.mask_id] * G)], [P])[0]
    assert len(result.similarity) > 0
    measured = torch.tensor(result.similarity).double()
    torch.testing.assert_close(measured, expected[:len(measured)], atol=1e-5, rtol=0)


def test_packed_weights_give_the_same(model):
    """The layout for the CPU knows nothing of shapes: a packed model answers as the plain one, a tied head
    included."""
    import copy
    packed = copy.deepcopy(model).pack()
    requests = mixed_requests()[:3]
    how = dict(depth=2, refresh=4, window="block")
    assert [r.tokens for r in run(packed, requests, **how)] == [r.tokens for r in run(model, requests, **how)]


@pytest.mark.parametrize("kind", ["qwen3", "CoDA"])
def test_bfloat16_runs(kind):
    """The type that these checkpoints are stored in: the same answer twice, alone and beside another."""
    model = make(kind).to(torch.bfloat16)
    requests = [Request(prompt(20, seed=i), prefix_len=12, gen_length=8, block_length=4) for i in range(2)]
    engine = Engine(model, depth=2, cache_mb=4)
    assert [r.tokens for r in engine.generate(requests)] == [r.tokens for r in engine.generate(requests)]


def test_each_eos_ends_an_answer():
    """eos_token_id may be a list: whichever stands first ends the answer, and none is ever chosen with
    logits_eos_inf."""
    model = make("llama")
    ids = prompt(10)
    tokens = run(model, [Request(ids, gen_length=12, stop_at_eos=False)], cache="none")[0].tokens
    early, late = list(dict.fromkeys(tokens))[1:3]                              # neither opens the answer
    for eos in ((late,), (early, late), (late, early), (93, late)):
        model = make("llama", eos_ids=eos)
        result, = run(model, [Request(ids, gen_length=12)], cache="none")
        end = min(tokens.index(i) for i in eos if i in tokens)
        assert (result.tokens, result.finish_reason) == (tokens[:end], "eos") and end > 0
        banned = Request(ids, gen_length=12, logits_eos_inf=True, stop_at_eos=False)
        free, = run(model, [banned], cache="none")
        assert not set(eos) & set(free.tokens)
