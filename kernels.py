"""The three inner operations of a step: rotate and store K and V, attend over pages, judge a row of logits.

Each has a PyTorch twin, which runs anywhere and says what it means, and beside it a Triton kernel that must
give the same. `impl` picks one ("torch" or "triton"); `choose` says which a device gets. Checked against
float64, the kernels for registers and memory, too, compiled ahead of time (tests/test_kernels.py).

K and V live in the flat cache `kv: (pages, 2, K, page, D)` (cache.py). A request reads it through its page
list `(B, n)`: first the pages of its prefix, then those of its suffix. A *column* is a place in that list:
prefix token j has column j, suffix token j `ceil(P / page) * page + j`: it starts on a page of its own.
"""
from __future__ import annotations

import os
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from files import BadInput
from model import rotate

try:
    import triton
    import triton.language as tl
except ImportError:     # the twins need torch alone
    triton = None
jit = triton.jit if triton else lambda kernel: kernel

V_CHUNK = 16384         # logits are judged so many entries at a time: no (rows, V) tensor but the logits
LOG2E = 1.4426950408889634
PROGRAMS = 256          # attention splits its pages to reach so many: two a processor of an A100 or H100


def choose(device, wanted: str = "auto") -> str:
    """The implementation for `device`, "triton" or "torch". "auto" takes Triton on a GPU if it is installed.

    ValueError for "triton" without a GPU (under TRITON_INTERPRET=1 it runs anywhere, slowly, for tests).
    """
    if wanted not in ("auto", "triton", "torch"):
        raise BadInput(f"attention is {wanted!r}; it must be one of auto, triton, torch")
    gpu = torch.device(device).type == "cuda"
    if wanted == "torch" or wanted == "auto" and not gpu:
        return "torch"
    if not gpu and os.environ.get("TRITON_INTERPRET") != "1":
        raise BadInput(f"attention is 'triton', which needs a GPU, and the model is on {device}; "
                       "use 'auto' or 'torch'")
    if triton is None:
        warnings.warn("triton is not installed: attention and its like run on their slower PyTorch twins")
        return "torch"
    return "triton"


# -- rotate and store ----------------------------------------------------------------------------------------


def rope_store(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, kv: Tensor, pages: Tensor,
               columns: Tensor, impl: str = "torch") -> Tensor:
    """Rotate q and k by their positions and write k, v in place at their columns; returns the rotated q.

    q (B, H, M, D) holds the last M of the N rows, k and v (B, K, N, D) all; cos, sin (B, 1, N, D/2) float32;
    columns (B, N) in the page lists pages (B, n). K is stored rotated: a prefix starts at position 0.
    """
    if impl == "triton":
        return _rope_store_triton(q, k, v, cos, sin, kv, pages, columns)
    M = q.shape[2]
    _store(kv, pages, columns, rotate(k, cos, sin), v)
    return rotate(q, cos[:, :, cos.shape[2] - M:], sin[:, :, sin.shape[2] - M:])


# Opaque: the compiler would turn the writes into a copy of the whole cache (13 ms for 52 MB, and 0.1 so).
@torch.library.custom_op("nano_bicache::store", mutates_args=("kv",))
def _store(kv: Tensor, pages: Tensor, columns: Tensor, k: Tensor, v: Tensor) -> None:
    page = kv.shape[3]
    at, offset = pages.gather(1, columns // page), columns % page       # (B, N) each
    kv[at, 0, :, offset] = k.transpose(1, 2)                            # (B, N, K, D)
    kv[at, 1, :, offset] = v.transpose(1, 2)


@jit
def _rope_store_kernel(Q, Key, Value, Cos, Sin, KV, Pages, Columns, Out, N, M, q_b, q_h, q_n, k_b, k_h, k_n,
                       v_b, v_h, v_n, cos_b, cos_n, sin_b, sin_n, pages_b, columns_b, H: tl.constexpr,
                       K: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, H_UP: tl.constexpr,
                       K_UP: tl.constexpr):
    """One program is a token with all its heads: its cos and sin are read once. Out is (B, M, H, D)."""
    n, b = tl.program_id(0), tl.program_id(1).to(tl.int64)
    d = tl.arange(0, D // 2)[None, :]
    cos, sin = tl.load(Cos + b * cos_b + n * cos_n + d), tl.load(Sin + b * sin_b + n * sin_n + d)   # (1, D/2)
    if n >= N - M:
        h = tl.arange(0, H_UP)[:, None]
        row = n - (N - M)
        at, to = Q + b * q_b + h * q_h + row * q_n + d, Out + ((b * M + row) * H + h) * D + d
        x, y = tl.load(at, h < H, 0.0).to(tl.float32), tl.load(at + D // 2, h < H, 0.0).to(tl.float32)
        tl.store(to, (x * cos - y * sin).to(Out.dtype.element_ty), h < H)
        tl.store(to + D // 2, (y * cos + x * sin).to(Out.dtype.element_ty), h < H)
    h = tl.arange(0, K_UP)[:, None]
    column = tl.load(Columns + b * columns_b + n)
    page = tl.load(Pages + b * pages_b + column // PAGE).to(tl.int64)
    to = KV + ((page * 2 * K + h) * PAGE + column % PAGE) * D + d
    at = Key + b * k_b + h * k_h + n * k_n + d
    x, y = tl.load(at, h < K, 0.0).to(tl.float32), tl.load(at + D // 2, h < K, 0.0).to(tl.float32)  # (K, D/2)
    tl.store(to, (x * cos - y * sin).to(KV.dtype.element_ty), h < K)
    tl.store(to + D // 2, (y * cos + x * sin).to(KV.dtype.element_ty), h < K)
    at, to = Value + b * v_b + h * v_h + n * v_n + d, to + K * PAGE * D
    tl.store(to, tl.load(at, h < K).to(KV.dtype.element_ty), h < K)
    tl.store(to + D // 2, tl.load(at + D // 2, h < K).to(KV.dtype.element_ty), h < K)


def _rope_store_triton(q, k, v, cos, sin, kv, pages, columns):
    B, H, M, D = q.shape
    _, K, N, _ = k.shape
    out = q.new_empty(B, M, H, D)         # the order that the projections gave, and that attention reads best
    if B * N:
        assert all(x.stride(-1) == 1 for x in (q, k, v, cos, sin, pages, columns)) and kv.is_contiguous()
        cos, sin = cos.expand(B, 1, N, D // 2), sin.expand(B, 1, N, D // 2)
        _rope_store_kernel[(N, B)](
            q, k, v, cos, sin, kv, pages, columns, out, N, M, *q.stride()[:3], *k.stride()[:3],
            *v.stride()[:3], *cos.stride()[::2], *sin.stride()[::2], pages.stride(0), columns.stride(0), H=H,
            K=K, D=D, PAGE=kv.shape[3], H_UP=_power_of_2(H), K_UP=_power_of_2(K), num_warps=4)
    return out.transpose(1, 2)


def _power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


# -- attention over pages ------------------------------------------------------------------------------------


def attend(q: Tensor, kv: Tensor, pages: Tensor, prefix_len: Tensor, suffix_len: Tensor, impl: str = "torch",
           shared: int = 0) -> Tensor:
    """What queries q (B, H, N, D) see in the pages (B, n) of their request: prefix_len (B,) tokens of its
    prefix, suffix_len (B,) of its suffix, both ways. Returns (B, H, N, D); what sees nothing gets zeros.

    shared: so many of the first pages, all of the prefix, are the same for all requests: read once for all.
    """
    if impl == "triton":
        return _attend_triton(q, kv, pages, prefix_len, suffix_len)
    B, H, N, D = q.shape
    # Every query of a request sees the same columns, so the query heads of a kv head can be laid in one row:
    # grouped-query attention without repeating K and V.
    rows = q.reshape(B, kv.shape[2], -1, D)                                               # (B, K, H/K * N, D)
    if shared and q.device.type == "cpu":
        return _attend_shared(rows, kv, pages, prefix_len, suffix_len, shared).view(B, H, N, D)
    k, v, seen = _gather(kv, pages, prefix_len, suffix_len)
    return F.scaled_dot_product_attention(rows, k, v, attn_mask=seen).view(B, H, N, D)


def _gather(kv: Tensor, pages: Tensor, prefix_len: Tensor, suffix_len: Tensor, skip: int = 0) -> tuple:
    """K and V (B, K, C, D) of the pages (B, n), behind `skip` others; which columns hold rows (B, 1, 1,
    C)."""
    _, _, K, page, D = kv.shape
    flat = kv.view(-1, page * D)               # a row is one head of one page: gathering is plain memory copy
    rows = pages[:, None] * (2 * K) + torch.arange(K, device=kv.device)[:, None]                # (B, K, n)
    k, v = (F.embedding(rows + i * K, flat).view(len(pages), K, -1, D) for i in (0, 1))
    column = torch.arange(skip * page, skip * page + k.shape[2], device=kv.device)
    start = (prefix_len + page - 1) // page * page                                        # (B,) of the suffix
    in_suffix = (column >= start[:, None]) & (column < (start + suffix_len)[:, None])
    seen = in_suffix | (column < prefix_len[:, None])                                           # (B, C)
    return k, v, seen[:, None, None]


def _attend_shared(q, kv, pages, prefix_len, suffix_len, shared):
    """The same for q (B, K, R, D) where the first pages are common: all queries meet the prefix in one call,
    each request's its suffix in another; their sums of exponentials weigh the two (as in FlashDecoding)."""
    B, K, R, D = q.shape
    parts = []
    for x, gathered in ((q.transpose(0, 1).reshape(1, K, B * R, D),
                         _gather(kv, pages[:1, :shared], prefix_len[:1], suffix_len[:1])),
                        (q, _gather(kv, pages[:, shared:], prefix_len, suffix_len, shared))):
        k, v, seen = gathered
        bias = torch.zeros_like(seen, dtype=q.dtype).masked_fill(~seen, float("-inf"))
        parts.append(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(x, k, v, attn_mask=bias))
    (a, a_sum), (b, b_sum) = parts                # sums: logsumexp of the scores, (1, K, B * R) and (B, K, R)
    a, a_sum = (x.view(K, B, R, -1).transpose(0, 1) for x in (a, a_sum))
    return torch.lerp(b, a, torch.sigmoid(a_sum - b_sum[..., None]).to(q.dtype))


@jit
def _attend_kernel(Q, KV, Pages, PrefixLen, SuffixLen, Out, Lse, B, N, n, splits, scale, q_b, q_h, q_n,
                   pages_b, G: tl.constexpr, K: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr,
                   ROWS: tl.constexpr, PRECISION: tl.constexpr):
    """One program is ROWS queries of a request and a kv head, over one of `splits` equal shares of its pages.

    A row of queries is (token, head in the group of G that share the kv head). Writes what the share gives to
    Out (splits, B, N, H, D) and the base-2 log of its sum to Lse (splits, B, N, H). Programs of a kv head run
    side by side, neighbours in the batch first: pages that requests share come from L2 for all but the first.
    """
    b, h, split = tl.program_id(0) % B, tl.program_id(1), tl.program_id(2)
    row = tl.program_id(0) // B * ROWS + tl.arange(0, ROWS)
    token, head = row // G, h * G + row % G                                                         # (ROWS,)
    d, c = tl.arange(0, D), tl.arange(0, PAGE)
    rows, real = Q + b.to(tl.int64) * q_b + (token * q_n + head * q_h)[:, None], (token < N)[:, None]
    q = tl.load(rows + d[None, :], real, 0.0)                                                     # (ROWS, D)

    P, S = tl.load(PrefixLen + b).to(tl.int32), tl.load(SuffixLen + b).to(tl.int32)
    front = tl.cdiv(P, PAGE)                                # the suffix starts on this page of the list
    used = tl.minimum(front + tl.cdiv(S, PAGE), n)      # what lies behind is never read, nor its page numbers
    share = tl.cdiv(used, splits)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    for i in range(split * share, tl.minimum((split + 1) * share, used)):
        page = tl.load(Pages + b * pages_b + i).to(tl.int64)
        at = KV + (page * 2 * K + h) * (PAGE * D) + c[:, None] * D + d[None, :]                    # (PAGE, D)
        seen = c < tl.where(i < front, P - i * PAGE, S - (i - front) * PAGE)    # at least one: peak is finite
        score = tl.dot(q, tl.trans(tl.load(at)), input_precision=PRECISION) * scale             # (ROWS, PAGE)
        score = tl.where(seen[None, :], score, float("-inf"))
        top = tl.maximum(peak, tl.max(score, 1))
        p, fade = tl.exp2(score - top[:, None]), tl.exp2(peak - top)
        v = tl.load(at + K * PAGE * D, seen[:, None], 0.0)     # 0 times what a tail holds is not always 0
        acc = tl.dot(p.to(v.dtype), v, acc * fade[:, None], input_precision=PRECISION)
        total, peak = total * fade + tl.sum(p, 1), top

    at = ((split.to(tl.int64) * B + b) * N + token) * (K * G) + head
    out = acc / tl.where(total > 0, total, 1)[:, None]
    tl.store(Out + at[:, None] * D + d[None, :], out.to(Out.dtype.element_ty), real)
    tl.store(Lse + at, peak + tl.log2(total), token < N)            # -inf where there was nothing to see


@jit
def _combine_kernel(Part, Lse, Out, rows, splits, D: tl.constexpr, ROWS: tl.constexpr):
    """Weigh the shares Part (splits, rows, D) by their sums Lse (splits, rows) into Out (rows, D)."""
    row, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, D)[None, :]
    real = (row < rows)[:, None]
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, D], tl.float32)
    for split in range(splits):
        at = tl.cast(split, tl.int64) * rows + row
        lse = tl.load(Lse + at, row < rows, float("-inf"))
        top = tl.maximum(peak, lse)
        safe = tl.where(top == float("-inf"), 0.0, top)
        fade, weight = tl.exp2(peak - safe), tl.exp2(lse - safe)
        acc = acc * fade[:, None] + weight[:, None] * tl.load(Part + at[:, None] * D + d, real, 0.0)
        total, peak = total * fade + weight, top
    out = acc / tl.where(total > 0, total, 1)[:, None]
    tl.store(Out + row[:, None].to(tl.int64) * D + d, out.to(Out.dtype.element_ty), real)


def attend_config(dtype: torch.dtype, rows: int, programs: int) -> dict:
    """How `_attend_kernel` is compiled for `rows` query rows of each of `programs` pairs (request, kv head).

    Three stages are two buffers of K and V and, one page ahead, the number of the page they come from.
    """
    if dtype == torch.float32:      # three passes of tf32 come near it; ieee would miss the tensor cores
        return dict(ROWS=32, PRECISION="tf32x3", num_warps=8, num_stages=1)
    few = programs * -(-rows // 128) < PROGRAMS // 2
    size = 32 if rows <= 32 else 64 if few else 128     # 32: a block of masked tokens; 64: more programs
    return dict(ROWS=size, PRECISION="ieee", num_warps=8 if size == 128 else 4, num_stages=3)


def _attend_triton(q, kv, pages, prefix_len, suffix_len):
    B, H, N, D = q.shape
    _, _, K, page, _ = kv.shape
    if D not in (16, 32, 64, 128):
        raise BadInput(f"head_dim is {D}; the Triton kernel takes 16, 32, 64 or 128: use attention='torch'")
    out = q.new_empty(B, N, H, D)     # transposed back below, so that the output projection reads it in order
    if B * N == 0:
        return out.transpose(1, 2)
    assert q.stride(3) == pages.stride(1) == 1 and kv.is_contiguous()
    n, G = pages.shape[1], H // K
    config = attend_config(q.dtype, N * G, B * K)
    blocks = -(-N * G // config["ROWS"])
    splits = max(1, min(PROGRAMS // (B * K * blocks), n // 4))  # less than four pages are not worth the merge
    part = out if splits == 1 else out.new_empty(splits, B, N, H, D, dtype=torch.float32)
    lse = out.new_empty(splits, B, N, H, dtype=torch.float32)
    _attend_kernel[(B * blocks, K, splits)](
        q, kv, pages, prefix_len, suffix_len, part, lse, B, N, n, splits, LOG2E / D**0.5, *q.stride()[:3],
        pages.stride(0), G=G, K=K, D=D, PAGE=page, **config)
    if splits > 1:
        _combine_kernel[(-(-B * N * H // 16),)](part, lse, out, B * N * H, splits, D=D, ROWS=16, num_warps=4)
    return out.transpose(1, 2)


# -- confidence ----------------------------------------------------------------------------------------------


def _mix(x: Tensor) -> Tensor:
    """A 32-bit integer hash (the finalizer of MurmurHash3) of int64 values below 2**32."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B & 0xFFFFFFFF
    x = (x ^ (x >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF
    return x ^ (x >> 16)


def uniform(seed: Tensor, step: Tensor, row: Tensor, columns: Tensor) -> Tensor:
    """Random numbers in (0, 1), (M, C) float32, for seed, step, row (M,) and columns (C,), all int64.

    Counter-based: a draw depends on its own key alone, so no neighbour in a batch can change it. 23 bits and
    a half fill float32's 24: one bit more and the largest would round to 1, whose Gumbel noise is infinite.
    """
    key = _mix(_mix(_mix(seed & 0xFFFFFFFF) + step & 0xFFFFFFFF) + row & 0xFFFFFFFF)
    bits = _mix(_mix(columns + 0x9E3779B9 & 0xFFFFFFFF) ^ key[:, None])
    return ((bits >> 9).float() + 0.5) * 2.0**-23


def confidence(logits: Tensor, mask_id: int, noise=None, stats: bool = False, impl: str = "torch") -> tuple:
    """Per row of logits (M, V): the token to commit (M,) and the log of its probability (M,) float32.

    The token is the arg-max, the first one of equals, the mask id left out. `noise` = (temperature, seed,
    step, row), each (M,), draws from softmax(logits / temperature) instead, by adding Gumbel noise to the
    logits (Gumbel-max, in log space). The probability is that of the plain softmax over all V (LLaDA's rule).
    Logs, and the sum of all *other* entries, keep rows apart whose probability rounds to 1.

    With `stats` two more, (M,) float32 each, of the plain softmax (Dream's `entropy` and `topk_margin`): the
    negative entropy sum p log p, and the best minus the second-best probability, the mask id left out of the
    two. A row of -inf alone gets -inf everywhere.
    """
    if impl == "triton":
        return _confidence_triton(logits, mask_id, noise, stats)
    infinity, chunks, entropies, tops = float("inf"), [], [], []
    for start in range(0, logits.shape[1], V_CHUNK):
        l = logits[:, start:start + V_CHUNK].float()                      # (M, C), no copy if float32 already
        column = torch.arange(start, start + l.shape[1], device=l.device)
        masked = start <= mask_id < start + l.shape[1]
        z = l
        if noise is not None:
            temperature, seed, step, row = noise
            z = l - temperature[:, None] * (-uniform(seed, step, row, column).log()).log()
        if masked:
            z = z.masked_fill(column == mask_id, -infinity)
        best, token = z.max(1)                                                  # (M,) each
        peak = best if z is l else l.amax(1)
        base = peak.masked_fill(peak == -infinity, 0)[:, None]
        e = (l - base).exp_()                                                   # (M, C)
        if stats:
            s = e.sum(1)
            entropies.append(torch.stack((s, torch.where(e > 0, e * (l - base), 0).sum(1)), 1))
            allowed = l.masked_fill(column == mask_id, -infinity) if masked else l
            tops.append(allowed.topk(min(2, l.shape[1]), 1)[0])
        l_token = l.gather(1, token[:, None])[:, 0]
        others = e.scatter_(1, token[:, None], 0).sum(1)                      # all but the chunk's own choice
        chunks.append((best, token + start, l_token, peak, others))

    best, token, l_token, peak, others = (torch.stack(x, 1) for x in zip(*chunks))          # (M, chunks) each
    base = peak.amax(1, keepdim=True)
    base = base.masked_fill(base == -infinity, 0)
    fade, win = (peak - base).exp(), best.argmax(1, keepdim=True)
    others = (others * fade).sum(1) + (l_token - base).exp().scatter(1, win, 0).sum(1)      # (M,)
    token, l_token = token.gather(1, win)[:, 0], l_token.gather(1, win)[:, 0]
    score = -F.softplus(torch.where(l_token == -infinity, infinity, others.log() + base[:, 0] - l_token))
    if not stats:
        return token, score
    total = others + (l_token - base[:, 0]).exp()
    s, weighted = torch.stack(entropies, 2).unbind(1)                                       # (M, chunks) each
    weighted = torch.where(fade > 0, fade * (weighted + (peak - base) * s), 0).sum(1)
    first, second = F.pad(torch.cat(tops, 1), (0, 1), value=-infinity).topk(2, 1)[0].unbind(1)
    margin = ((first - base[:, 0]).exp() - (second - base[:, 0]).exp()) / total
    empty = total == 0
    return (token, score, (weighted / total - total.log()).masked_fill(empty, -infinity),
            margin.masked_fill(empty, -infinity))


@jit
def _mix_kernel(x):
    """`_mix` of uint32 values."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@jit
def _judge_kernel(Logits, Temperature, Seed, Step, Row, Part, Token, V, chunks, logits_m, mask_id,
                  CHUNK: tl.constexpr, NOISE: tl.constexpr, STATS: tl.constexpr):
    """One program is CHUNK entries of one row: few rows still fill the chip, and a chunk waits for no other.

    Writes to Part (M, fields, chunks) and Token (M, chunks) what the twin keeps of a chunk.
    """
    m, chunk = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    l = tl.load(Logits + m * logits_m + column, column < V, float("-inf")).to(tl.float32)
    z = l
    if NOISE:
        key = _mix_kernel(tl.load(Seed + m).to(tl.uint32)) + tl.load(Step + m).to(tl.uint32)
        key = _mix_kernel(_mix_kernel(key) + tl.load(Row + m).to(tl.uint32))
        bits = _mix_kernel(_mix_kernel(column.to(tl.uint32) + 0x9E3779B9) ^ key)
        u = ((bits >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608)
        z = l - tl.load(Temperature + m) * tl.log(-tl.log(u))
    z = tl.where(column == mask_id, float("-inf"), z)
    best, token = tl.max(z, 0, return_indices=True, return_indices_tie_break_left=True)
    chosen = column == chunk * CHUNK + token
    peak = tl.max(l, 0)
    base = tl.where(peak == float("-inf"), 0.0, peak)
    e = tl.exp(l - base)
    to = Part + m * chunks * (8 if STATS else 4) + chunk
    tl.store(Token + m * chunks + chunk, chunk * CHUNK + token)
    tl.store(to, best)
    tl.store(to + chunks, tl.sum(tl.where(chosen, l, 0.0), 0))
    tl.store(to + 2 * chunks, peak)
    tl.store(to + 3 * chunks, tl.sum(tl.where(chosen, 0.0, e), 0))
    if STATS:
        allowed = tl.where(column == mask_id, float("-inf"), l)
        first, at = tl.max(allowed, 0, return_indices=True, return_indices_tie_break_left=True)
        tl.store(to + 4 * chunks, tl.sum(e, 0))
        tl.store(to + 5 * chunks, tl.sum(tl.where(e > 0, e * (l - base), 0.0), 0))
        tl.store(to + 6 * chunks, first)
        tl.store(to + 7 * chunks, tl.max(tl.where(column == chunk * CHUNK + at, float("-inf"), allowed), 0))


@jit
def _verdict_kernel(Part, Token, Out, OutToken, M, chunks, CHUNKS: tl.constexpr, STATS: tl.constexpr):
    """One program merges the chunks of one row, as the twin's second half does. Out is (1 or 3, M)."""
    m, c = tl.program_id(0).to(tl.int64), tl.arange(0, CHUNKS)
    at, real = Part + m * chunks * (8 if STATS else 4) + c, c < chunks
    best, l_token = tl.load(at, real, float("-inf")), tl.load(at + chunks, real, float("-inf"))
    peak, others = tl.load(at + 2 * chunks, real, float("-inf")), tl.load(at + 3 * chunks, real, 0.0)
    base = tl.max(peak, 0)
    base = tl.where(base == float("-inf"), 0.0, base)
    fade = tl.exp(peak - base)
    _, win = tl.max(best, 0, return_indices=True, return_indices_tie_break_left=True)
    rest = tl.sum(others * fade + tl.where(c == win, 0.0, tl.exp(l_token - base)), 0)
    l_win = tl.sum(tl.where(c == win, l_token, 0.0), 0)
    tl.store(OutToken + m, tl.load(Token + m * chunks + win).to(tl.int64))
    x = tl.where(l_win == float("-inf"), float("inf"), tl.log(rest) + base - l_win)
    y = tl.exp(-tl.abs(x))
    u = 1.0 + y               # log(1 + y) to full precision for small y: the error of log(u) is that of u - 1
    tl.store(Out + m, -(tl.maximum(x, 0.0) + tl.where(u == 1.0, y, tl.log(u) * y / (u - 1.0))))
    if STATS:
        total = rest + tl.exp(l_win - base)
        s, weighted = tl.load(at + 4 * chunks, real, 0.0), tl.load(at + 5 * chunks, real, 0.0)
        weighted = tl.sum(tl.where(fade > 0, fade * (weighted + (peak - base) * s), 0.0), 0)
        firsts = tl.load(at + 6 * chunks, real, float("-inf"))
        seconds = tl.load(at + 7 * chunks, real, float("-inf"))
        first, top = tl.max(firsts, 0, return_indices=True)
        second = tl.max(tl.where(c == top, seconds, firsts), 0)
        margin = (tl.exp(first - base) - tl.exp(second - base)) / total
        tl.store(Out + M + m, tl.where(total == 0, float("-inf"), weighted / total - tl.log(total)))
        tl.store(Out + 2 * M + m, tl.where(total == 0, float("-inf"), margin))


def _confidence_triton(logits, mask_id, noise, stats):
    M, V = logits.shape
    chunk = 4096
    chunks = -(-V // chunk)
    temperature, seed, step, row = noise or (logits,) * 4           # not read without noise
    part = logits.new_empty(M, 8 if stats else 4, chunks, dtype=torch.float32)
    tokens = logits.new_empty(M, chunks, dtype=torch.int32)
    out = logits.new_empty(3 if stats else 1, M, dtype=torch.float32)
    token = logits.new_empty(M, dtype=torch.long)
    if M:
        assert logits.stride(1) == 1
        _judge_kernel[(M * chunks,)](
            logits, temperature, seed, step, row, part, tokens, V, chunks, logits.stride(0), mask_id,
            CHUNK=chunk, NOISE=noise is not None, STATS=stats, num_warps=4)
        _verdict_kernel[(M,)](part, tokens, out, token, M, chunks, CHUNKS=_power_of_2(chunks), STATS=stats,
                              num_warps=1)
    return token, *out.unbind(0)
