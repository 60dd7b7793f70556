"""How fast the Triton kernels are beside what they replace, and beside what the GPU can do. Needs a GPU.

    python bench/kernels.py             # LLaDA-8B and Dream-7B shapes in bfloat16: a few minutes
    python bench/kernels.py --quick     # a few shapes

Times are medians of many, by CUDA events, with the L2 cache flushed before each: a layer never finds its own
pages there. Compilation is left out and told apart. The ceilings, a large matrix product and a copy, are
measured in the same run.

    attention    `attend` against gathering the pages and `scaled_dot_product_attention`, the faster of two:
                 with the mask, as the twin does, or cut to length without one, which lets it use flash
                 attention
    confidence   against the softmax of all logits in float64 (LLaDA's and Dream's own code) and in float32
    rope_store   against the twin

The last line is one JSON object. Targets: attention at least as fast everywhere and 1.3 times at P = 8192;
confidence at 70% of the copy bandwidth.
"""
import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))           # before bench/, whose kernels.py is this one

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

import kernels  # noqa: E402
from bench.workloads import SHAPES  # noqa: E402
from cache import PAGE, count_pages  # noqa: E402

SEED = 0
compiling = 0.0                         # seconds of first calls


def timed(f, repeats: int) -> float:
    """Median milliseconds of f() on the GPU, from a cold L2 cache."""
    global compiling
    start = time.perf_counter()
    f()
    torch.cuda.synchronize()
    compiling += time.perf_counter() - start
    flush = torch.empty(2**26, dtype=torch.int32, device="cuda")    # 256 MB, and the host runs ahead
    for _ in range(2):
        f()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, end in events:
        flush.zero_()
        start.record()
        f()
        end.record()
    torch.cuda.synchronize()
    return median(start.elapsed_time(end) for start, end in events)


def ceilings(dtype) -> dict:
    """TFLOP/s of a square matrix product and GB/s of a copy (read and written bytes)."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=dtype) for _ in range(2))
    x = torch.randn(2**28, device="cuda")
    y = torch.empty_like(x)
    product, copy = timed(lambda: a @ b, 20), timed(lambda: y.copy_(x), 20)
    return dict(tflops=2 * 8192**3 / product / 1e9, gbps=2 * x.nbytes / copy / 1e6)


def attention(model: str, P: int, S: int, B: int, shared: bool, dtype, repeats: int) -> dict:
    """B requests of S suffix rows behind P prefix tokens, of one shared prefix or each its own."""
    c = SHAPES[model]
    H, K, D = c.heads, c.kv_heads, c.head_dim
    front, back = count_pages(P), count_pages(S)
    prefix = torch.arange(front).expand(B, front) if shared else torch.arange(B * front).view(B, front)
    pages = torch.cat([prefix, prefix.max() + 1 + torch.arange(B * back).view(B, back)], 1).cuda()
    kv = torch.randn(int(pages.max()) + 1, 2, K, PAGE, D, device="cuda", dtype=dtype)
    q = torch.randn(B, S, H, D, device="cuda", dtype=dtype).transpose(1, 2)
    lengths = [torch.full((B,), n, device="cuda") for n in (P, S)]

    def gather_sdpa():
        rows = pages[:, None] * (2 * K) + torch.arange(K, device="cuda")[:, None]
        flat = kv.view(-1, PAGE * D)
        k, v = (F.embedding(rows + i * K, flat).view(B, K, -1, D)[:, :, :P + S] for i in (0, 1))
        y = F.scaled_dot_product_attention(q.reshape(B, K, -1, D), k, v)
        return y.view(B, H, S, D)                                                       # P is whole pages

    ours = lambda: kernels.attend(q, kv, pages, *lengths, impl="triton")
    masked = lambda: kernels.attend(q, kv, pages, *lengths)
    want = gather_sdpa().float()
    off = float((ours().float() - want).norm() / want.norm())
    ms, other = timed(ours, repeats), min(timed(masked, repeats), timed(gather_sdpa, repeats))
    read = ((1 if shared else B) * P + B * S) * K * D * 2 * kv.element_size() + 2 * q.nbytes
    return dict(model=model, P=P, S=S, B=B, shared=shared, ms=ms, sdpa_ms=other, speedup=other / ms,
                error=off, tflops=4 * B * H * S * (P + S) * D / ms / 1e9, gbps=read / ms / 1e6)


def confidence(model: str, M: int, dtype, repeats: int) -> dict:
    """M rows of logits of the model's vocabulary; the kernel greedy, and with noise and both statistics."""
    c = SHAPES[model]
    logits = torch.randn(M, c.vocab, device="cuda", dtype=dtype) * 3
    key = [torch.arange(M, device="cuda")] * 3

    def softmax(precision):
        p = logits.to(precision).softmax(-1)
        token = logits.argmax(-1, keepdim=True)
        return token, p.gather(1, token)

    ms = timed(lambda: kernels.confidence(logits, c.mask_id, impl="triton"), repeats)
    noise = (torch.ones(M, device="cuda"), *key)
    full = timed(lambda: kernels.confidence(logits, c.mask_id, noise, True, impl="triton"), repeats)
    return dict(model=model, M=M, ms=ms, noise_stats_ms=full,
                float32_ms=timed(lambda: softmax(torch.float32), repeats),
                float64_ms=timed(lambda: softmax(torch.float64), repeats), gbps=logits.nbytes / ms / 1e6)


def rope_store(model: str, B: int, N: int, dtype, repeats: int) -> dict:
    """N rows of each of B requests, rotated and written to pages of their own."""
    c = SHAPES[model]
    H, K, D, n = c.heads, c.kv_heads, c.head_dim, count_pages(N)
    q, k, v = (torch.randn(B, N, h, D, device="cuda", dtype=dtype).transpose(1, 2) for h in (H, K, K))
    angle = torch.randn(B, 1, N, D // 2, device="cuda")
    cos, sin, pages = angle.cos(), angle.sin(), torch.arange(B * n, device="cuda").view(B, n)
    kv = torch.zeros(B * n, 2, K, PAGE, D, device="cuda", dtype=dtype)
    columns = torch.arange(N, device="cuda").expand(B, N)

    def go(impl):
        return timed(lambda: kernels.rope_store(q, k, v, cos, sin, kv, pages, columns, impl=impl), repeats)
    ms, twin = go("triton"), go("torch")
    moved = 2 * (q.nbytes + k.nbytes + v.nbytes)
    return dict(model=model, B=B, N=N, ms=ms, torch_ms=twin, gbps=moved / ms / 1e6)


def table(name: str, rows: list) -> None:
    show = lambda x: f"{x:.3g}" if isinstance(x, float) else str(x)
    print(f"\n{name}\n" + " ".join(f"{key:>14}" for key in rows[0]))
    for row in rows:
        print(" ".join(f"{show(x):>14}" for x in row.values()))


def environment(args) -> dict:
    try:
        git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True,
                             text=True)
        commit = git.stdout.strip() or "unknown"
    except OSError:
        commit = "unknown"
    return dict(torch=torch.__version__, triton=kernels.triton.__version__,
                device=torch.cuda.get_device_name(), dtype=args.dtype, repeats=args.repeats, seed=SEED,
                commit=commit)


def main(argv=None) -> int:
    """0, or 2 where there is nothing to measure on."""
    parser = argparse.ArgumentParser(description="Triton kernels against what they replace (needs a GPU)")
    parser.add_argument("--quick", action="store_true", help="a few shapes instead of all")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--repeats", type=int, default=30,
                        help="timed calls, of which the median is taken (default: 30)")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available() or kernels.triton is None:
        no_gpu = not torch.cuda.is_available()
        lacking = "a GPU, and torch sees none" if no_gpu else "triton, which is not installed"
        print(f"bench/kernels.py: this measurement needs {lacking}", file=sys.stderr)
        return 2
    torch.manual_seed(SEED)
    dtype, models = getattr(torch, args.dtype), ("llada-8b", "dream-7b")
    print(json.dumps(environment(args)))
    ceiling = ceilings(dtype)
    print(f"ceilings: {ceiling['tflops']:.0f} TFLOP/s, {ceiling['gbps']:.0f} GB/s")

    lengths, suffixes, batches, counts = ((512, 8192), (32, 512), (1, 4), (32, 512)) if args.quick else (
        (512, 2048, 8192, 16384), (32, 128, 512), (1, 4, 16), (32, 256, 2048))
    cases = [(m, P, S, B, True) for m in models for P in lengths for S in suffixes for B in batches]
    cases += [(m, 8192, 128, max(batches), False) for m in models]
    rows = dict(attention=[attention(*case, dtype, args.repeats) for case in cases])
    table("attention", rows["attention"])
    rows["confidence"] = [confidence(m, M, dtype, args.repeats) for m in models for M in counts]
    table("confidence", rows["confidence"])
    passes = (1, 32), (1, 512), (4, 8192 + 128)                 # a block, a suffix, a refresh
    rows["rope_store"] = [rope_store(m, B, N, dtype, args.repeats) for m in models for B, N in passes]
    table("rope_store", rows["rope_store"])

    slowest = lambda cases: min(case["speedup"] for case in cases)
    most = max(case["M"] for case in rows["confidence"])        # few rows are over before the memory is busy
    reached = min(case["gbps"] for case in rows["confidence"] if case["M"] == most) / ceiling["gbps"]
    long = [case for case in rows["attention"] if case["P"] == 8192]
    targets = {"attention >= 1": slowest(rows["attention"]),
               "attention >= 1.3 at P = 8192": slowest(long),
               "confidence >= 0.7 of the copy bandwidth": reached}
    print(f"\ncompilation and first calls: {compiling:.1f} s")
    for name, value in targets.items():
        print(f"{name}: {value:.2f}")
    print(json.dumps(dict(environment=environment(args), ceilings=ceiling, targets=targets,
                          compile_seconds=compiling) | rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
