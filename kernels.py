"""The three inner operations of a step: rotate and store K and V, attend over pages, judge a row of logits.

This file holds the PyTorch twins, which run anywhere and say what each operation means. Triton kernels of the same
signatures stand beside them as they come; a twin is what they are tested against.

K and V live in the flat cache `kv: (pages, 2, K, page, D)` (cache.py). A request reads it through its page list
`(B, n)`: first the pages of its prefix, then those of its suffix. A *column* is a place in that list: prefix token j has
column j, suffix token j has column `ceil(P / page) * page + j`, so that the suffix starts on a page of its own.
"""
import torch
import torch.nn.functional as F
from torch import Tensor

from model import rotate

V_CHUNK = 16384         # logits are judged this many vocabulary entries at a time: no (rows, V) tensor but the logits


def rope_store(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, pages: Tensor,
               columns: Tensor) -> Tensor:
    """Rotate q and k by their positions and write k, v in place at their columns; returns the rotated q.

    q (B, H, M, D) holds the last M of the N rows, k and v (B, K, N, D) all; cos, sin (B, 1, N, D/2) float32; columns
    (B, N) in the page lists pages (B, n). K is stored rotated: a prefix starts at position 0 in every request.
    """
    page, M = kv.shape[3], q.shape[2]
    k, q = rotate(k, cos, sin), rotate(q, cos[:, :, cos.shape[2] - M:], sin[:, :, sin.shape[2] - M:])
    at, offset = pages.gather(1, columns // page), columns % page       # (B, N) each
    kv[at, 0, :, offset] = k.transpose(1, 2)                            # (B, N, K, D)
    kv[at, 1, :, offset] = v.transpose(1, 2)
    return q


def attend(q: Tensor, kv: Tensor, pages: Tensor, prefix_len: Tensor, suffix_len: Tensor) -> Tensor:
    """What queries q (B, H, N, D) see in the pages (B, n) of their request: prefix_len (B,) tokens of its prefix and
    suffix_len (B,) of its suffix, in both directions. Returns (B, H, N, D); a row that sees nothing gets zeros.
    """
    B, H, N, D = q.shape
    _, _, K, page, _ = kv.shape
    flat = kv.view(-1, page * D)                    # a row is one head of one page: gathering is plain memory copy
    rows = pages[:, None] * (2 * K) + torch.arange(K, device=q.device)[:, None]                 # (B, K, n)
    k, v = (F.embedding(rows + i * K, flat).view(B, K, -1, D) for i in (0, 1))                  # (B, K, n * page, D)

    column = torch.arange(k.shape[2], device=q.device)
    start = (prefix_len + page - 1) // page * page                                              # (B,) of the suffix
    seen = (column < prefix_len[:, None]) | ((column >= start[:, None]) & (column < (start + suffix_len)[:, None]))
    # Every query of a request sees the same columns, so the query heads that share a kv head can be laid in one row of
    # queries: grouped-query attention without repeating K and V.
    out = F.scaled_dot_product_attention(q.reshape(B, K, -1, D), k, v, attn_mask=seen[:, None, None])
    return out.view(B, H, N, D)


def _mix(x: Tensor) -> Tensor:
    """A 32-bit integer hash (the finalizer of MurmurHash3) of int64 values below 2**32."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
    return x ^ (x >> 16)


def uniform(seed: Tensor, step: Tensor, row: Tensor, columns: Tensor) -> Tensor:
    """Random numbers in (0, 1), (M, C) float32, for seed, step, row (M,) and columns (C,), all int64.

    Counter-based: a draw depends on its own key and on nothing else, so no neighbour in a batch can change it.
    """
    key = _mix(_mix(_mix(seed & 0xFFFFFFFF) + step & 0xFFFFFFFF) + row & 0xFFFFFFFF)
    bits = _mix(_mix(columns + 0x9E3779B9 & 0xFFFFFFFF) ^ key[:, None])
    return ((bits >> 8).float() + 0.5) * 2.0**-24


def confidence(logits: Tensor, mask_id: int, noise=None) -> tuple[Tensor, Tensor]:
    """Per row of logits (M, V): the token to commit (M,) and the log of its probability (M,) float32.

    The token is the arg-max, the mask id left out. `noise` = (temperature, seed, step, row), each (M,), draws from
    softmax(logits / temperature) instead, by adding Gumbel noise to the logits (Gumbel-max, in log space). The
    probability is that of the plain softmax over all V, at temperature 1 (LLaDA's rule). Working in logs, and from the
    sum of all *other* entries, keeps rows apart whose probability rounds to 1.
    """
    best = token = l_token = peak = others = None
    for start in range(0, logits.shape[1], V_CHUNK):
        l = logits[:, start:start + V_CHUNK].float()                            # (M, C)
        column = torch.arange(start, start + l.shape[1], device=l.device)
        z = l
        if noise is not None:
            temperature, seed, step, row = noise
            z = l - temperature[:, None] * (-uniform(seed, step, row, column).log()).log()
        b, t = z.masked_fill(column == mask_id, float("-inf")).max(1)           # (M,), (M,)
        m = l.amax(1)
        o = (l - m[:, None]).exp().scatter(1, t[:, None], 0).sum(1)             # all but the chunk's own choice
        l_t = l.gather(1, t[:, None])[:, 0]
        if start == 0:
            best, token, l_token, peak, others = b, t, l_t, m, o
            continue
        top, wins = torch.maximum(peak, m), b > best
        loser = torch.where(wins, l_token, l_t)
        others = others * (peak - top).exp() + o * (m - top).exp() + (loser - top).exp()
        best, token, l_token = torch.where(wins, b, best), torch.where(wins, t + start, token), torch.where(wins, l_t, l_token)
        peak = top
    return token, -F.softplus(others.log() + peak - l_token)
