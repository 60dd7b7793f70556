"""What the kernels must give, whoever computes it and wherever: twins and Triton against float64 references
written plainly here.

Poison: memory that a kernel is given to fill starts as NaN, and so do all places of the cache that nobody may
read.
"""
import math
import os
from contextlib import contextmanager

import torch

import kernels

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
NAN, INF = float("nan"), float("inf")
PAGE = 64
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@contextmanager
def poison():
    """Memory that is allocated in here and not yet written holds NaN, or the largest integer (torch's
    default, if asked)."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.empty(1).isnan()
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def error(x, reference) -> float:
    """Norm of the difference over the norm of the reference; NaN anywhere gives NaN."""
    x, reference = x.double().cpu(), reference.double().cpu()
    return float((x - reference).norm() / reference.norm().clamp(min=1e-30))


# -- attention -----------------------------------------------------------------------------------------------

# name: B, H, K, N, D, prefix lengths, suffix lengths, pages in the list, dtype
ATTEND = {
    "two lengths": (2, 2, 2, 37, 32, (70, 3), (37, 12), 4, FP32),
    "no prefix": (2, 4, 2, 5, 64, (0, 64), (70, 5), 3, FP32),
    "no suffix": (1, 2, 1, 3, 32, (65,), (0,), 3, FP32),
    "sees nothing": (2, 2, 1, 5, 32, (0, 1), (0, 0), 2, FP32),
    "ends on a page": (1, 1, 1, 2, 128, (128,), (64,), 3, FP32),
    "split pages": (2, 2, 1, 9, 32, (500, 10), (20, 130), 12, FP32),
    "split, one share empty": (2, 2, 1, 1, 16, (0, 64), (0, 1), 16, FP32),
    "Dream's groups of 7": (1, 14, 2, 11, 128, (90,), (11,), 3, BF16),
    "more rows than a block": (2, 2, 2, 70, 64, (33, 200), (70, 41), 6, BF16),
    "float16": (1, 4, 4, 33, 128, (100,), (33,), 3, FP16),
    "list too short": (1, 2, 2, 4, 32, (100,), (100,), 3, FP32),
}
# Of `error`; one rounding is 6e-8 (thrice tf32: 1e-6), 5e-4, 4e-3.
TOLERANCE = {FP32: 1e-5, FP16: 1e-3, BF16: 8e-3}


def attend_case(B, H, K, N, D, P, S, n, dtype, device="cpu"):
    """Random inputs, and the cache twice: once clean, once NaN wherever no request may look."""
    g = torch.Generator().manual_seed(B * H + N + D)
    kv = torch.randn(B * n + 3, 2, K, PAGE, D, generator=g).to(dtype)
    pages = (torch.randperm(B * n + 2, generator=g)[:B * n] + 1).view(B, n)
    poisoned = torch.full_like(kv, NAN)
    for b in range(B):
        for c in visible(P[b], S[b], n):
            poisoned[pages[b, c // PAGE], :, :, c % PAGE] = kv[pages[b, c // PAGE], :, :, c % PAGE]
    q = torch.randn(B, N, H, D, generator=g).to(dtype).transpose(1, 2)
    return [x.to(device) for x in (q, kv, poisoned, pages, torch.tensor(P), torch.tensor(S))]


def visible(P, S, n) -> list:
    """The columns that a request sees in a list of n pages."""
    start = -(-P // PAGE) * PAGE
    return [c for c in (*range(P), *range(start, start + S)) if c < n * PAGE]


def attend_reference(q, kv, pages, P, S):
    B, H, N, D = q.shape
    out = torch.zeros(B, H, N, D, dtype=torch.float64)
    for b in range(B):
        columns = visible(int(P[b]), int(S[b]), pages.shape[1])
        for h in range(H if columns else 0):
            cells = [kv[pages[b, c // PAGE], :, h * kv.shape[2] // H, c % PAGE] for c in columns]   # (2, D)
            k, v = torch.stack(cells, 1).double()
            out[b, h] = (q[b, h].double() @ k.T / math.sqrt(D)).softmax(-1) @ v
    return out


def check_attend(case, impl, device="cpu"):
    *shape, dtype = ATTEND[case]
    if INTERPRETED and dtype == BF16:
        dtype = FP16                # the interpreter's matrix product takes the bits of bfloat16 for integers
    q, kv, poisoned, pages, P, S = attend_case(*shape, dtype, device)
    reference = attend_reference(*(x.cpu() for x in (q, kv, pages, P, S)))
    with poison():
        out = kernels.attend(q, poisoned if impl == "triton" else kv, pages, P, S, impl=impl)
    assert out.shape == q.shape and out.dtype == q.dtype
    assert error(out, reference) < TOLERANCE[q.dtype]
    assert not out[P + S == 0].any(), "who sees nothing gets zeros"


# -- rotate and store ----------------------------------------------------------------------------------------

# B, H, K, M (rows of q), N (rows of k and v), D, dtype
ROPE = [(2, 2, 2, 5, 5, 32, FP32), (2, 6, 2, 3, 7, 64, BF16), (1, 7, 1, 0, 4, 128, FP16),
        (1, 3, 3, 2, 2, 16, FP32)]


def check_rope_store(B, H, K, M, N, D, dtype, impl, device="cpu"):
    g = torch.Generator().manual_seed(N + D)
    n, real = 4, N - 1                                            # the last row is padding and goes to page 0
    rows = lambda heads, count: torch.randn(B, count, heads, D, generator=g).to(dtype).transpose(1, 2)
    q, k, v = rows(H, M), rows(K, N), rows(K, N)
    angle = torch.randn(B, 1, N, D // 2, generator=g) * 9
    pages = torch.zeros(B, n + 1, dtype=torch.long)
    pages[:, :n] = (torch.randperm(B * n, generator=g) + 1).view(B, n)
    columns = torch.stack([torch.randperm(n * PAGE, generator=g)[:N] for _ in range(B)])
    columns[:, real:] = n * PAGE
    kv = torch.full((B * n + 1, 2, K, PAGE, D), NAN, dtype=dtype)

    turned = []                                                     # q and k, rotated pair by pair in float64
    for x, a in ((q, angle[:, :, N - M:]), (k, angle)):
        a = a.double()
        z = torch.complex(*x.double().chunk(2, -1)) * torch.polar(torch.ones_like(a), a)
        turned.append(torch.cat([z.real, z.imag], -1))
    want = kv.double()
    for b in range(B):
        for j in range(real):
            at, offset = pages[b, columns[b, j] // PAGE], columns[b, j] % PAGE
            want[at, 0, :, offset], want[at, 1, :, offset] = turned[1][b, :, j], v[b, :, j].double()

    q, k, v, angle, kv, pages, columns = (x.to(device) for x in (q, k, v, angle, kv, pages, columns))
    with poison():
        out = kernels.rope_store(q, k, v, angle.cos(), angle.sin(), kv, pages, columns, impl=impl)
    assert out.shape == q.shape and out.dtype == dtype
    assert M == 0 or error(out, turned[0]) < TOLERANCE[dtype]
    kv = kv[1:].cpu().double()
    assert torch.equal(kv.isnan(), want[1:].isnan()), "written where it should not be, or not where it should"
    assert error(kv.nan_to_num(), want[1:].nan_to_num()) < TOLERANCE[dtype]
    assert torch.equal(kv[:, 1].nan_to_num(), want[1:, 1].nan_to_num()), "V is stored as it is"


# -- confidence ----------------------------------------------------------------------------------------------

SIZES = (2, FP32), (4097, FP32), (9001, BF16), (20001, FP16)
CONFIDENCE = [(V, dtype, noisy) for V, dtype in SIZES for noisy in (0, 1)]
MASK = 1


def confidence_case(V, dtype, noisy, device="cpu"):
    """Rows: plain, one far above all, all but one -inf, half -inf with a whole chunk of them, mask on top, a
    tie."""
    g = torch.Generator().manual_seed(V)
    l = (torch.randn(6, V, generator=g) * 3).to(dtype)
    l[1, 0] = 60
    l[2, :] = -INF
    l[2, V - 1 if V > 2 else 0] = 1.5
    l[3, V // 2 + 1:] = -INF
    l[4, MASK] = 50
    l[5, [0, V - 1 if V > 2 else 0, V // 2]] = 20       # V // 2 may be the mask id
    noise = None
    if noisy:
        noise = (torch.tensor([0.7, 1.0, 0.3, 1.5, 1.0, 0.0]), torch.tensor([0, 1, 2**40 + 5, -3, 9, 9]),
                 torch.arange(6), torch.arange(6) * 1000)
        noise = tuple(x.to(device) for x in noise)
    return l.to(device), noise


def confidence_reference(l, noise):
    """Token, log-probability, negative entropy, margin, the obvious way, in float64."""
    l = l.double().cpu()
    z = l.clone()
    if noise:
        temperature, *key = (x.cpu() for x in noise)
        u = kernels.uniform(*key, torch.arange(l.shape[1])).double()
        z -= temperature[:, None] * torch.log(-torch.log(u))
    z[:, MASK] = -INF
    token = z.argmax(1)
    p = l.softmax(1)
    chosen = torch.zeros_like(p).scatter(1, token[:, None], 1).bool()
    score = -torch.log1p(p.masked_fill(chosen, 0).sum(1) / p[chosen])
    entropy = torch.special.xlogy(p, p).sum(1)
    p[:, MASK] = 0
    top = torch.cat([p, torch.zeros(len(p), 1)], 1).topk(2, 1)[0]
    return token, score, entropy, top[:, 0] - top[:, 1]


def check_confidence(V, dtype, noisy, impl, device="cpu"):
    l, noise = confidence_case(V, dtype, noisy, device)
    token, *want = confidence_reference(l, noise)
    with poison():
        out = kernels.confidence(l, MASK, noise, stats=True, impl=impl)
        brief = kernels.confidence(l, MASK, noise, impl=impl)
    assert len(brief) == 2 and torch.equal(brief[0], out[0])
    assert torch.allclose(brief[1], out[1], atol=0, rtol=1e-6)
    assert out[0].dtype == torch.long and torch.equal(out[0].cpu(), token), "token"
    for name, x, y in zip(("score", "entropy", "margin"), out[1:], want):
        assert x.dtype == FP32
        # A score near 0 keeps its digits: rows whose probability rounds to 1 can still be told apart.
        atol = 1e-35 if name == "score" else 2e-6
        assert torch.allclose(x.cpu().double(), y, rtol=2e-5, atol=atol), (name, x, y)


def check_confidence_extremes(impl, device="cpu"):
    """A row of -inf is worth nothing, a NaN never passes for a score, no rows are no error, and both sides
    hash alike."""
    l = torch.full((3, 5000), -INF)
    l[1, 7] = NAN
    l[2, MASK] = 0
    token, *stats = kernels.confidence(l.to(device), MASK, None, stats=True, impl=impl)
    score, entropy, margin = (x.cpu() for x in stats)
    assert score[0] == entropy[0] == margin[0] == -INF and score[2] == -INF and not score[1].isfinite()
    assert entropy[2] == margin[2] == 0
    token, score = kernels.confidence(l[:0].to(device), MASK, impl=impl)
    assert token.shape == score.shape == (0,) and token.dtype == torch.long
    # Among equal logits the noise alone decides: the token is where the draw is largest.
    for seed in range(3):
        key = [torch.full((4,), seed), torch.arange(4), torch.arange(4) * 77]
        u = kernels.uniform(*key, torch.arange(5000))
        u[:, MASK] = -1
        noise = [x.to(device) for x in (torch.ones(4), *key)]
        token, _ = kernels.confidence(torch.zeros(4, 5000, device=device), MASK, noise, impl=impl)
        assert torch.equal(token.cpu(), u.argmax(1))
