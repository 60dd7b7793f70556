"""One forward pass over a batch of requests: the refresh step and the reuse step of BiCache, and what is
compiled.

A *reuse* step computes window rows only, in every layer. In a *refresh* step the prefix rows join at layer
`depth`; below it their K/V are the shared ones, from there up they are computed anew and written to pages
of the request's own. Either way each layer does the same: write K/V of the rows it computes, then attend to
all pages that the table names.

`lay_out` says on the host which rows a pass computes; `forward` computes them, reads nothing from the
device and allocates nothing that outlives the pass. Checked row by row in tests/test_counts.py.
"""
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import decoding
import kernels
from cache import PAGE, count_pages
from model import Layer, Transformer


class Pass(NamedTuple):
    """What one forward pass reads, all int64. Padded requests and rows are inert: they write to page 1,
    never read."""
    ids: Tensor                 # (B, W) window rows: token ids
    first: Tensor               # (B,)   place in the suffix of the first window row
    rows: Tensor                # (B,)   how many window rows are real
    prefix_id: Tensor           # (B,)   row of the page table
    prefix_len: Tensor          # (B,)   P
    suffix_len: Tensor          # (B,)   S
    active: Tensor              # (M,)   rows that can be committed, in the flat (B * W) order

    def to(self, device) -> "Pass":
        return Pass(*(t.to(device) for t in self))


class Layout(NamedTuple):
    """The rows of a pass over a group of requests, in the order of the group; the shadows of those with
    guidance follow."""
    batch: Pass                 # on the CPU
    rules: decoding.Rules       # how to choose at each active row
    windows: list               # rows [lo, hi) of the suffix to compute, a pair for each request and shadow
    places: list                # for each request, (m,) places of the generated region that can be committed
    head_rows: int              # real rows through the output head: all places, and the shadows' once more


def lay_out(runs: list, shadows: list, kind: str, config, bucket) -> Layout:
    """Which rows a pass over `runs` computes and which of them can be committed. kind: of the window;
    bucket: rounds up."""
    windows = [run.window(kind, config.shift) for run in runs + shadows]
    W, B = bucket(max(hi - lo for lo, hi in windows), 16), bucket(len(windows), 1)
    ids, fields = torch.full((B, W), config.mask_id), torch.zeros(5, B, dtype=torch.long)
    places, active = [], []                     # in the generated region, and in the flat batch
    for b, (run, (lo, hi)) in enumerate(zip(runs + shadows, windows)):
        ids[b, :hi - lo] = run.suffix[lo:hi]
        fields[:, b] = torch.tensor([lo, hi - lo, run.lease.id, run.prefix_len, len(run.suffix)])
        block = run.blocks[0]
        places.append(run.masked[block.lo:block.hi].nonzero()[:, 0] + block.lo)
        active.append(places[-1] + (run.own - config.shift - lo + b * W))
    places, guides = places[:len(runs)], active[len(runs):]
    rows = _padded(torch.cat(active[:len(runs)]), runs, bucket)
    requests, steps = [run.request for run in runs], [run.forwards for run in runs]
    rules = decoding.rules_for(requests, steps, places, len(rows), config.vocab)
    if guides:                                  # behind all others, where rules.guide points at them
        rows = torch.cat([rows, _padded(torch.cat(guides), shadows, bucket)])
    return Layout(Pass(ids, *fields, rows), rules, windows, places, sum(map(len, active)))


def _padded(rows: Tensor, runs: list, bucket) -> Tensor:
    """Where lengths are rounded, rows for the whole blocks, as many at each step: one graph for all."""
    if bucket is exact:
        return rows
    most = sum(run.blocks[0].size for run in runs)
    return F.pad(rows, (0, bucket(most, 8) - len(rows)))


def prefix_rows(model: Transformer, cache, runs: list, depth: int, B: int, bucket) -> Tensor:
    """The prefix rows (B, P, hidden) as they enter layer `depth`; behind a prefix's end stands anything."""
    P, device = min(bucket(max(run.prefix_len for run in runs), PAGE), model.config.max_len), cache.kv.device
    if depth:
        ids = [run.lease.entry.id for run in runs]
        ids += ids[:1] * (B - len(ids))
        return cache.read_boundary(torch.tensor(ids, device=device), depth, P)
    ids = torch.zeros(B, P, dtype=torch.long)
    for b, run in enumerate(runs):
        ids[b, :run.prefix_len] = torch.tensor(run.prompt[:run.prefix_len])
    return model.embed(ids.to(device))


def shared_pages(runs: list) -> tuple[int, int]:
    """(n, b): the first n pages are the same for all of a batch in the layers below b."""
    if len(runs) == 1 or len({id(run.lease.entry) for run in runs}) > 1:
        return 0, 0
    return count_pages(runs[0].prefix_len), min(run.depth for run in runs)


def layer_pass(layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, pages: Tensor, columns: Tensor,
               pages_read: int, prefix_len: Tensor, suffix_len: Tensor, skip: int, impl: str,
               shared: int) -> Tensor:
    """One layer over rows x (B, N, hidden): K/V into `columns` (B, N) of `pages` (B, n), attention over all
    of them, the first `shared` pages being the same for all requests."""
    def attend(q, k, v):
        q = kernels.rope_store(q, k, v, cos, sin, kv, pages, columns, impl)
        return kernels.attend(q, kv, pages[:, :pages_read], prefix_len, suffix_len, impl, shared)
    return layer(x, attend, skip)


def finish(model: Transformer, x: Tensor, active: Tensor, rules: decoding.Rules, impl: str) -> Tensor:
    """What `decoding.choose` says of the active rows of x (B, W, hidden): (2 or 4, M) float64."""
    logits = model.logits(x.flatten(0, 1)[active])                                          # (M, V)
    chosen = decoding.choose(logits, rules, model.config.mask_id, model.config.eos_ids, impl)
    return torch.stack([t.double() for t in chosen])


def forward(model: Transformer, kv: Tensor, table: Tensor, batch: Pass, rules: decoding.Rules,
            pages_read: int, depth: int | None = None, prefix: Tensor | None = None, boundaries: tuple = (),
            shared: tuple = (0, 0), impl: str = "torch", layer_pass=layer_pass,
            finish=finish) -> tuple[Tensor, list]:
    """The verdict on the active rows (see `finish`), and the states (B, N, hidden) entering the layers
    `boundaries`.

    depth None: a reuse step. Else a refresh: `prefix` (B, P, hidden), the prefix rows as they enter layer
    `depth`, join the window rows there. In the last layer they give K/V only. pages_read: how many pages of
    a request may hold rows. shared: (n, b), the first n pages are the same for all requests in the layers
    below b.
    """
    dev, trash = batch.ids.device, (table.shape[2] - 1) * PAGE
    pages = table[batch.prefix_id].long()                                               # (B, L, n)
    W = batch.ids.shape[1]
    place = batch.first[:, None] + torch.arange(W, device=dev)                          # (B, W)
    start = (batch.prefix_len + PAGE - 1) // PAGE * PAGE                                # the suffix starts
    real = torch.arange(W, device=dev) < batch.rows[:, None]
    columns = torch.where(real, start[:, None] + place, trash)                          # (B, W)
    positions = batch.prefix_len[:, None] + place
    x = model.embed(batch.ids)                                                          # (B, W, hidden)
    rope, P, entering = model.rope(positions), 0, []
    for i, layer in enumerate(model.layers):
        if i == depth:
            P = prefix.shape[1]
            j = torch.arange(P, device=dev).expand(len(prefix), P)                      # (B, P)
            x = torch.cat([prefix, x], 1)                                               # (B, P + W, hidden)
            rope = model.rope(torch.cat([j, positions], 1))
            columns = torch.cat([torch.where(j < batch.prefix_len[:, None], j, trash), columns], 1)
        if i in boundaries:
            entering.append(x)
        skip = P if i == len(model.layers) - 1 else 0
        x = layer_pass(layer, x, *rope, kv, pages[:, i], columns, pages_read, batch.prefix_len,
                       batch.suffix_len, skip, impl, shared[0] if i < shared[1] else 0)
    return finish(model, x, batch.active, rules, impl), entering


class Step:
    """`forward`, bound to a model and its cache. The one place that compiles.

    A graph is fixed by its shapes, which the engine rounds up to buckets, and on a GPU by the depth of a
    refresh. A second engine on the same shapes finds the graphs of the first.
    """

    def __init__(self, model: Transformer, kv: Tensor, table: Tensor, impl: str, compile: bool):
        self.bound, self.run, self.parts = (model, kv, table), forward, dict(impl=impl)
        if not compile:
            return
        # Each bucket is a graph of the same code; torch gives up at 8, which is less than a server meets.
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 256)
        how = dict(fullgraph=True, dynamic=False)
        if kv.is_cuda:      # launches cost more than arithmetic there: the whole pass is one CUDA graph
            torch._dynamo.mark_static_address(kv)
            self.run = torch.compile(forward, mode="reduce-overhead", **how)
        else:               # compiling costs more: all layers share one body, at any depth
            self.parts["layer_pass"] = torch.compile(layer_pass, **how)
            self.parts["finish"] = torch.compile(finish, **how)

    def __call__(self, *args) -> tuple[Tensor, list]:
        verdict, entering = self.run(*self.bound, *args, **self.parts)
        return verdict.clone(), entering        # a CUDA graph overwrites what it returned at its next replay


def bucket(n: int, least: int) -> int:
    """n rounded up to least * (1, 2, 3, 4, 6, 8, 12, ...): one graph serves all lengths of a bucket."""
    size = least
    while size < n:
        if size == least:
            size *= 2
        elif (size // least).bit_count() == 1:
            size = size * 3 // 2
        else:
            size = size * 4 // 3
    return size


def exact(n: int, least: int) -> int:
    """No rounding: where nothing is compiled."""
    return n
