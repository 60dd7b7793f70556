"""Work, counted and never timed: rows through each layer and the head, forward passes, reads from the
device, graphs.

The rows are counted by hooks on the layers themselves, not by the engine's own books, which are then held
against them.
"""
import math

import pytest
import torch
from conftest import prompt, tiny

import kernels
from engine import Engine, Request

P, U, G, L, R = 70, 6, 16, 4, 4
S = U + G


class Count:
    """Rows (token positions) that enter each layer and the head, per forward pass of the model's first
    layer."""

    def __init__(self, model):
        self.passes, self.head, self.handles = [], [], []
        for i, layer in enumerate(model.layers):
            hook = lambda m, a, i=i: self.layer(i, a[0])
            self.handles.append(layer.register_forward_pre_hook(hook))
        hook = lambda m, a: self.head.append(a[0].shape[0])
        self.handles.append(model.head.register_forward_pre_hook(hook))

    def layer(self, i, x):
        if i == 0:
            self.passes.append([])
        self.passes[-1].append(x.shape[0] * x.shape[1])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for handle in self.handles:
            handle.remove()


def ask(seed=1, **kw):
    options = {"prefix_len": P, "gen_length": G, "stop_at_eos": False, **kw}
    return Request(prompt(P) + prompt(U, seed=seed), **options)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_rows_of_every_step(model, depth):
    """docs/how-it-works.md, Cost, step by step: a hit computes S rows in the layers below its depth, P + S
    from there up at steps 0, R, 2R, ..., and S everywhere else. Nothing is done for the prefix that the
    first request already did."""
    engine = Engine(model, depth=depth, refresh=R, cache_mb=8)
    with Count(model) as first:
        miss, = engine.generate([ask(1)])
    assert first.passes[0] == [P] * L and len(first.passes) == 1 + G        # the prefix alone, then the steps
    with Count(model) as count:
        hit, = engine.generate([ask(2)])
    for step, rows in enumerate(count.passes):
        assert rows == [S] * depth + [P + S if step % R == 0 else S] * (L - depth), step
    f = math.ceil(G / R)
    half = 0.5 * P * f                                      # the last layer's prefix rows give K and V only
    formula = f * (depth * S + (L - depth) * (P + S)) + (G - f) * L * S - half
    assert hit.token_layers == formula == sum(map(sum, count.passes)) - half
    assert hit.encode_token_layers == 0 and miss.encode_token_layers == L * P - 0.5 * P
    assert miss.token_layers == hit.token_layers and hit.refreshes == f


@pytest.mark.parametrize("cache, formula", [
    ("none", lambda f: G * L * (P + S)), ("intra", lambda f: f * L * (P + S) + (G - f) * L * S - 0.5 * P * f),
    ("naive", lambda f: G * L * S)])
def test_token_layers_of_the_other_modes(model, cache, formula):
    """The table of docs/how-it-works.md, Cost: none, intra, and naive, which is the floor."""
    result, = Engine(model, cache=cache, refresh=R, cache_mb=8).generate([ask()])
    assert result.token_layers == formula(math.ceil(G / R))


@pytest.mark.parametrize("window", ["rest", "block"])
def test_rows_of_a_window(model, window):
    """After a block's first step only the window's rows are computed (Dream's begins one row earlier)."""
    block, shift = 4, model.config.shift
    with Count(model) as count:
        result, = Engine(model, cache="none", window=window, cache_mb=8).generate([ask(block_length=block)])
    T = P + U + G
    for step, rows in enumerate(count.passes):
        lo = P + U + step // block * block - shift
        hi = T if window == "rest" else lo + block + shift
        assert rows == [T if step % block == 0 else hi - lo] * L
    assert result.token_layers == sum(map(sum, count.passes))


def test_head_sees_only_rows_that_can_be_committed(model):
    """The head is V wide: per step it gets the undecided rows of the present block and no others."""
    with Count(model) as count:
        Engine(model, depth=2, cache_mb=8).generate([ask(block_length=8, steps=8)])
    assert [n for n in count.head if n] == [8, 6, 4, 2] * 2
    with Count(model) as count:
        engine = Engine(model, depth=2, cache_mb=8)
        engine.generate([ask(1, block_length=8), ask(2, gen_length=5), ask(3, block_length=16, steps=4)])
    head = [n for n in count.head if n]
    alone = [[8 - i % 8 for i in range(16)], [5 - i for i in range(5)], [16, 12, 8, 4]]
    assert sum(head) == sum(map(sum, alone)) == engine.counts["head_rows"]


def test_prefix_queries_of_the_last_layer_are_skipped(model):
    """In a refresh the last layer's prefix rows give K and V; nobody reads their queries, attention and
    MLP."""
    seen = []
    handle = model.layers[-1].q.register_forward_pre_hook(lambda m, a: seen.append(a[0].shape[1]))
    try:
        Engine(model, depth=2, refresh=1, cache_mb=8).generate([ask(steps=2)])
    finally:
        handle.remove()
    assert seen == [0, S, S]                # encoding the prefix, then two refreshes


def test_one_read_from_the_device_per_pass(model, monkeypatch):
    """The loop reads tokens and confidences in one transfer per forward pass; the step itself reads
    nothing."""
    reads = []
    original = torch.Tensor.cpu
    counted = lambda self: (reads.append(tuple(self.shape)), original(self))[1]
    monkeypatch.setattr(torch.Tensor, "cpu", counted)
    engine = Engine(model, depth=2, refresh=R, cache_mb=8)
    engine.generate([ask(i) for i in range(3)])
    assert len(reads) == engine.counts["host_reads"] == engine.counts["passes"] == G


def test_private_pages_are_counted_by_depth(model):
    """A running request costs L - b layers of prefix pages, not L, and one set of suffix pages serves all
    layers where each step computes them anew."""
    engine = Engine(model, depth=3, cache_mb=8)
    stream = engine.stream([ask()])
    next(stream)
    pages = engine.cache.kv.shape[0] - 2 - len(engine.cache.free)
    assert pages == L * 2 + (L - 3) * 2 + 1
    stream.close()


def test_batches_share_passes(model):
    """Eight requests of one prefix and one length take as many forward passes as one."""
    engine = Engine(model, depth=2, cache_mb=8, max_batch=8)
    engine.generate([ask(i) for i in range(8)])
    assert engine.counts["passes"] == G and engine.counts["encoded_prefixes"] == 1


@pytest.mark.parametrize("shift", [False, True])
def test_a_step_compiles_without_a_graph_break(shift):
    """fullgraph=True raises at a graph break. The whole step is one graph, a refresh in which the prefix
    joins at the depth, in a batch of two, and gives the tokens of the eager step."""
    model = tiny(shift, layers=2)
    requests = [Request(prompt(20) + prompt(n, seed=n), prefix_len=20, gen_length=2, steps=1) for n in (3, 5)]
    eager = Engine(model, depth=1, cache_mb=2).generate(requests)
    engine = Engine(model, depth=1, cache_mb=2)
    engine.generate(requests)                               # the prefix is encoded now
    reset()
    engine.step.run = torch.compile(engine.step.run, fullgraph=True, dynamic=False, backend="aot_eager")
    assert [r.tokens for r in engine.generate(requests)] == [r.tokens for r in eager]
    assert graphs() == 1


def reset():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def graphs() -> int:
    assert not torch._dynamo.utils.counters["graph_break"]
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_graphs_follow_buckets_and_nothing_else(monkeypatch):
    """Symptom: a graph for every length. Thirty requests of thirty lengths, with five prefixes and three
    depths, make no more graphs than there are buckets of (rows, pages), the same tokens as eager; a second
    engine makes none."""
    model = tiny(layers=3)
    table = {30: 1, 60: 2}
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **kw: compile(f, **kw, backend="aot_eager"))
    prefix_lens = [30 + 20 * (i % 5) for i in range(30)]
    requests = [Request(prompt(P) + prompt(2 + i, seed=i), prefix_len=P, gen_length=3, steps=1)
                for i, P in enumerate(prefix_lens)]
    kw = dict(table=table, measure=0, cache_mb=8, max_batch=1)
    eager = [r.tokens for r in Engine(model, **kw).generate(requests)]
    reset()
    engine, shapes = Engine(model, compile=True, **kw), set()
    layer_pass = engine.step.parts["layer_pass"]

    def note(layer, x, cos, sin, kv, pages, columns, pages_read, *rest):
        shapes.add((x.shape[1], pages_read, rest[2]))
        return layer_pass(layer, x, cos, sin, kv, pages, columns, pages_read, *rest)
    engine.step.parts["layer_pass"] = note
    assert [r.tokens for r in engine.generate(requests)] == eager
    made = graphs()
    windows = {rows for rows, _, skip in shapes}
    assert made <= len(shapes) + len(windows) and len(shapes) < 30
    again = Engine(model, compile=True, **kw)
    assert [r.tokens for r in again.generate(requests)] == eager and graphs() == made


@pytest.mark.parametrize("noise", [False, True])
def test_confidence_makes_no_tensor_over_the_vocabulary(noise):
    """Symptom: softmax in float64 over V = 126,464 weighs more than the cache. The choice and its
    probability come in one pass over chunks of V: no tensor of (M, V) is made, none of float64, and both
    equal the plain formula."""
    from torch.utils._python_dispatch import TorchDispatchMode
    M, V = 16, 126_464
    logits = torch.randn(M, V, generator=torch.Generator().manual_seed(0)) * 3
    made = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **kwargs or {})
            outs = out if isinstance(out, tuple) else (out,)
            new = [t for t in outs if torch.is_tensor(t) and t.data_ptr() != logits.data_ptr()]
            made.extend((t.numel(), t.dtype) for t in new)
            return out

    keys = (torch.full((M,), 0.5), torch.arange(M), torch.arange(M), torch.arange(M)) if noise else None
    with Watch():
        token, logp = kernels.confidence(logits, V - 1, keys)
    assert max(n for n, _ in made) <= M * kernels.V_CHUNK
    assert not any(dtype == torch.float64 for _, dtype in made)
    plain = logits.double().log_softmax(1)
    if not noise:
        assert torch.equal(token, logits[:, :-1].argmax(1))
    torch.testing.assert_close(logp.double(), plain.gather(1, token[:, None])[:, 0], atol=1e-5, rtol=1e-5)


def test_a_batch_reads_its_shared_prefix_once(model, monkeypatch):
    """Symptom: eight requests of one prefix copy its K/V eight times a layer. Below the depth the shared
    pages are gathered once for all; above, each request has its own."""
    gathered = []
    gather = kernels._gather
    counted = lambda kv, pages, *rest: (gathered.append(pages.numel()), gather(kv, pages, *rest))[1]
    monkeypatch.setattr(kernels, "_gather", counted)
    engine = Engine(model, depth=3, cache_mb=8)
    requests = [ask(i, steps=1) for i in range(8)]
    batch = engine.generate(requests)
    prefix, suffix = 2, 1                                               # pages of P and S tokens
    encoding, per_pass = [prefix] * (L - 1), [prefix, 8 * suffix] * 3 + [8 * (prefix + suffix)]
    assert [n for n in gathered if n] in (encoding + per_pass, [prefix] * L + per_pass)
    alone = [Engine(model, depth=3, cache_mb=8).generate([r])[0] for r in requests]
    assert [r.tokens for r in batch] == [r.tokens for r in alone]


@pytest.mark.parametrize("P, suffix, dtype", [
    (70, (5, 64), torch.float32), (64, (1, 9), torch.float32), (130, (100, 3), torch.bfloat16)])
def test_reading_the_shared_prefix_once_is_the_same_attention(P, suffix, dtype):
    """Two parts weighed by their sums give what one softmax over all columns gives; pages nobody may read
    hold NaN."""
    g = torch.Generator().manual_seed(P)
    n, heads, K, D = -(-P // 64), 4, 2, 32
    kv = torch.full((12, 2, K, 64, D), math.nan, dtype=dtype)
    pages = torch.tensor([[*range(1, n + 1), 5, 6], [*range(1, n + 1), 7, 8]])
    kv[pages.unique()] = torch.randn(len(pages.unique()), 2, K, 64, D, generator=g).to(dtype)
    q = torch.randn(2, heads, 7, D, generator=g).to(dtype)
    lengths = torch.tensor([P, P]), torch.tensor(suffix)
    once = kernels.attend(q, kv, pages, *lengths, shared=n)
    torch.testing.assert_close(once, kernels.attend(q, kv, pages, *lengths),
                               atol=1e-5 if dtype == torch.float32 else 1e-2, rtol=0)
