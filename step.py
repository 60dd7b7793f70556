"""One forward pass over a batch of requests: the refresh step and the reuse step of BiCache, and what is compiled.

A *reuse* step computes window rows only, in every layer. In a *refresh* step the prefix rows join at layer `depth`; below
it their K/V are the shared ones, from there up they are computed anew and written to pages of the request's own. Either
way each layer does the same: write K/V of the rows it computes, then attend to all pages that the table names.

Nothing here reads from the device or allocates what outlives the pass. Checked row by row in tests/test_counts.py.
"""
from typing import NamedTuple

import torch
from torch import Tensor

import decoding
import kernels
from cache import PAGE
from model import Layer, Transformer


class Pass(NamedTuple):
    """What one forward pass reads, all int64. Padded requests and rows are inert: they write to page 0."""
    ids: Tensor                 # (B, W) window rows: token ids
    first: Tensor               # (B,)   place in the suffix of the first window row
    rows: Tensor                # (B,)   how many window rows are real
    prefix_id: Tensor           # (B,)   row of the page table
    prefix_len: Tensor          # (B,)   P
    suffix_len: Tensor          # (B,)   S
    active: Tensor              # (M,)   rows that can be committed, in the flat (B * W) order


def layer_pass(layer: Layer, x: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, pages: Tensor, columns: Tensor,
               pages_read: int, prefix_len: Tensor, suffix_len: Tensor, skip: int, impl: str) -> Tensor:
    """One layer over rows x (B, N, hidden): K/V into `columns` (B, N) of `pages` (B, n), attention over all of them."""
    def attend(q, k, v):
        q = kernels.rope_store(q, k, v, cos, sin, kv, pages, columns, impl)
        return kernels.attend(q, kv, pages[:, :pages_read], prefix_len, suffix_len, impl)
    return layer(x, attend, skip)


def finish(model: Transformer, x: Tensor, active: Tensor, rules: decoding.Rules, impl: str) -> Tensor:
    """What `decoding.choose` says of the active rows of x (B, W, hidden): (2 or 4, M) float64."""
    logits = model.logits(x.flatten(0, 1)[active])                                          # (M, V)
    chosen = decoding.choose(logits, rules, model.config.mask_id, model.config.eos_id, impl)
    return torch.stack([t.double() for t in chosen])


class Step:
    """The pass, bound to a model and its cache. The one place that compiles.

    All layers share one compiled body, so neither the depth nor the step kind makes a graph: the shapes do, and the engine
    rounds those up to buckets. A second engine on the same shapes finds the graphs of the first.
    """

    def __init__(self, model: Transformer, kv: Tensor, table: Tensor, impl: str, compile: bool):
        self.model, self.kv, self.table, self.impl = model, kv, table, impl
        self.layer_pass, self.finish = layer_pass, finish
        if compile:
            # Each bucket is a graph of the same code; torch gives up at 8, which is less than a server meets.
            torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 256)
            self.layer_pass, self.finish = (torch.compile(f, fullgraph=True, dynamic=False) for f in (layer_pass, finish))

    def __call__(self, batch: Pass, rules: decoding.Rules, pages_read: int, depth: int | None = None,
                 prefix: Tensor | None = None, boundaries: tuple = ()) -> tuple[Tensor, list]:
        """The verdict on the active rows (see `finish`), and the states (B, N, hidden) entering the layers `boundaries`.

        depth None: a reuse step. Else a refresh: `prefix` (B, P, hidden), the prefix rows as they enter layer `depth`, join
        the window rows there. In the last layer they give K/V only. pages_read: how many pages of a request may hold rows.
        """
        model, dev, trash = self.model, batch.ids.device, (self.table.shape[2] - 1) * PAGE
        pages = self.table[batch.prefix_id]                                                 # (B, L, n)
        W = batch.ids.shape[1]
        place = batch.first[:, None] + torch.arange(W, device=dev)                          # (B, W)
        start = (batch.prefix_len + PAGE - 1) // PAGE * PAGE                                # the suffix' first column
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
            x = self.layer_pass(layer, x, *rope, self.kv, pages[:, i], columns, pages_read, batch.prefix_len,
                                batch.suffix_len, P if i == len(model.layers) - 1 else 0, self.impl)
        return self.finish(model, x, batch.active, rules, self.impl), entering


def bucket(n: int, least: int) -> int:
    """n rounded up to least * (1, 2, 3, 4, 6, 8, 12, ...): a compiled graph serves all lengths of a bucket."""
    size = least
    while size < n:
        size = size * 2 if size == least else size * 3 // 2 if (size // least).bit_count() == 1 else size * 4 // 3
    return size
