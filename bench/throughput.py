r"""How fast the modes are, side by side: none, intra, fast, bicache, and bicache with a block window.

    python bench/throughput.py                          # llada-110m, float32; --workloads, --modes take parts
    python bench/throughput.py --quick                  # a tiny model, under a minute
    python bench/throughput.py --sweep --svg cost.svg   # time of a pass against its token-layers
    python bench/throughput.py --shape qwen3-0.6b --dtype bfloat16 --workloads document --document 1000 \
        --gen-length 128 --block-length 32 --modes fast,bicache+block --pace 4      # a real size, one table

Weights are random and seeded: they cost what real ones cost, and nothing is downloaded. Their confidence
means nothing, so a threshold cannot be run; a fixed schedule of 3 tokens a step stands in for one. `fast` is
Fast-dLLM's dual cache: nothing shared, and after a block's first step the rows of the block alone. Blocks are
of 8, LLaDA's own setting for GSM8K.

The modes take turns in each repeat, and a ratio is the median of the ratios within a repeat. Prefixes are
encoded before the clock starts: a hit is measured, and what an encoding costs stands apart. The *floor* is
the same run with the prefix free: the request without it, nothing cached, the same window. Exit status 1 if
tokens differ that must be equal (float32).
"""
import argparse
import json
import platform
import resource
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))           # before bench/, whose kernels.py is not the engine's

import torch  # noqa: E402

from bench.sweep import draw, sweep  # noqa: E402
from bench.workloads import (MODES, NAMES, OURS, SHAPES, Workload, build, make_engine,  # noqa: E402
                             make_requests, plain_loop, random_model, read_questions)
from engine import Engine  # noqa: E402

FLOORS = {"floor": "none", "floor+block": "fast"}       # whose engine runs it, without the prefix
CHECKED = "3 a step"                                    # the schedule under which tokens are compared


@dataclass
class Run:
    seconds: float
    first: float            # seconds to the first committed token
    results: list


def run(engine: Engine, requests: list, clock) -> Run:
    start, first, results = clock(), None, {}
    for event in engine.stream(requests):
        if first is None and event.committed:
            first = clock() - start
        if event.result:
            results[event.index] = event.result
    return Run(clock() - start, first, [results[i] for i in range(len(requests))])


def floor_of(mode: str) -> str:
    return "floor+block" if "window" in MODES[FLOORS.get(mode, mode)] else "floor"


def measure(engines: dict, w: Workload, schedule: str, args) -> list:
    """A row for each mode, and for each floor that one of them is held against."""
    modes = args.modes + [floor for floor in FLOORS if floor in map(floor_of, args.modes)]
    batch = {m: make_requests(w, args.block_length, args.schedules[schedule], m not in FLOORS) for m in modes}
    go = lambda m, requests: run(engines[FLOORS.get(m, m)], requests, args.clock)
    brief = lambda r: replace(r, gen_length=args.block_length, steps=1)
    # Encodes the prefix; where steps are compiled, a whole run makes all its graphs.
    warm = {m: go(m, batch[m] if args.compile else [brief(r) for r in batch[m]]) for m in modes}
    runs = defaultdict(list)
    for i in range(args.repeats):
        for m in modes[i % len(modes):] + modes[:i % len(modes)]:
            if len(runs[m]) < 2 or sum(r.seconds for r in runs[m]) < args.cell_seconds:
                runs[m].append(go(m, batch[m]))

    def ratio(a, b):
        if a not in runs:
            return None
        return median(x.seconds / y.seconds for x, y in zip(runs[a], runs[b]))
    rows = []
    for m in modes:
        seconds, results = median(r.seconds for r in runs[m]), runs[m][0].results
        tokens = [r.tokens for r in results]
        assert results[0].hit or not results[0].depth, f"{m} lost its prefix before it was measured"
        rows.append(dict(
            workload=w.name, schedule=schedule, mode=m, runs=len(runs[m]), seconds=seconds,
            tokens_per_s=w.gen_length * len(results) / seconds, first_s=median(r.first for r in runs[m]),
            forwards=results[0].forwards, refreshes=results[0].refreshes, depth=results[0].depth,
            token_layers=sum(r.token_layers for r in results), times_fast=ratio("fast", m),
            over_floor=1 / ratio(floor_of(m), m),
            compile_s=warm[m].seconds - seconds if args.compile else None,
            tokens=tokens, steady=all([r.tokens for r in x.results] == tokens for x in runs[m])))
    return rows


def print_rows(rows: list) -> None:
    print(f"  {'mode':<14}{'s':>8}{'tok/s':>8}{'first s':>9}{'forwards':>9}{'token-layers':>14}{'x fast':>8}"
          f"{'/ floor':>8}{'runs':>5}")
    for r in rows:
        fast = f"{r['times_fast']:8.2f}" if r["times_fast"] else f"{'-':>8}"
        more = f"   compiling {r['compile_s']:.1f} s" if r["compile_s"] is not None else ""
        print(f"  {r['mode']:<14}{r['seconds']:8.3f}{r['tokens_per_s']:8.1f}{r['first_s']:9.3f}"
              f"{r['forwards']:9}{r['token_layers']:14,.0f}{fast}{r['over_floor']:8.2f}{r['runs']:5}{more}",
              flush=True)


def encoding_cost(engine: Engine, w: Workload, args) -> tuple[float, float]:
    """Seconds and token-layers that the first request on a prefix pays: a miss under a salt of its own, less
    a hit."""
    request = replace(make_requests(w, args.block_length, args.block_length)[0], salt="encoding cost")
    miss, *hits = [run(engine, [request], args.clock) for _ in range(4)]
    return miss.seconds - median(hit.seconds for hit in hits), miss.results[0].encode_token_layers


def compare_plain(engine: Engine, w: Workload, args) -> dict:
    """`none` against the plain loops, taking turns: {loop: (median seconds, median of none's time over its
    time)}."""
    request, times = make_requests(w, args.block_length, args.schedules[CHECKED])[0], defaultdict(list)
    rivals = {"none": lambda: engine.generate([request]),
              "plain loop": lambda: plain_loop(engine.model, request, True),
              "plain loop, only the logits needed": lambda: plain_loop(engine.model, request, False)}
    for _ in range(args.repeats):
        for name, call in rivals.items():
            start = args.clock()
            call()
            times[name].append(args.clock() - start)
    return {name: (median(t), median(a / b for a, b in zip(times["none"], t))) for name, t in times.items()}


def check(engines: dict, model, w: Workload, rows: list, args) -> dict:
    """{claim of equal tokens: whether it holds}. The first request of a workload answers for the others."""
    request = make_requests(w, args.block_length, args.schedules[rows[0]["schedule"]])[0]
    neighbour = replace(request, prompt=w.own[0][::-1], prefix_len=0)
    tokens = {row["mode"]: row["tokens"][0] for row in rows}

    def slow(**options):
        engine = make_engine(model, [w], args, cache="bicache", depth=0, compile=False, **options)
        return engine.generate([request])[0].tokens
    claims = {}
    for m in args.modes:
        beside = engines[m].generate([neighbour, request])[1]
        claims[f"{m}: alone, beside a neighbour"] = beside.tokens == tokens[m]
        if "bicache" in m:
            miss = engines[m].generate([replace(request, salt="equal tokens")])[0]
            claims[f"{m}: a hit, a miss"] = miss.tokens == tokens[m] and not miss.hit
    if "none" in tokens:
        claims["none, plain loop"] = tokens["none"] == plain_loop(model, request, True)
        claims["none, bicache at depth 0 refreshed at each step"] = tokens["none"] == slow(refresh=1)
    if "intra" in tokens:
        claims["intra, bicache at depth 0"] = tokens["intra"] == slow()
    return claims


def machine(device: str, dtype: str) -> dict:
    """What a run depends on besides its options."""
    try:
        git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True,
                             text=True)
        commit = git.stdout.strip() or "unknown"
    except OSError:
        commit = "unknown"
    gpu = device.startswith("cuda")
    name = torch.cuda.get_device_name(device) if gpu else platform.processor() or platform.machine()
    return dict(torch=torch.__version__, device=f"{device} ({name})", dtype=dtype,
                threads=torch.get_num_threads(), commit=commit)


def environment(args) -> dict:
    return machine(args.device, args.dtype) | dict(
        clock=args.clock.__name__, shape=args.shape, seed=args.seed, questions=Path(args.questions).name,
        batch=args.batch, gen_length=args.gen_length, block_length=args.block_length, refresh=args.refresh,
        compile=args.compile)


def fail(message: str):
    print(f"throughput.py: {message}", file=sys.stderr)
    sys.exit(2)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = fail
    add = parser.add_argument_group("workload").add_argument
    add("--shape", choices=SHAPES, help="layout of the random model (llada-110m; tiny with --quick)")
    add("--questions", default=str(OURS), metavar="FILE",
        help='lines of {"question": ..., "answer": ...}, as GSM8K has them (our own)')
    add("--workloads", default=",".join(NAMES),
        help=f"which prefixes, separated by commas ({','.join(NAMES)})")
    add("--document", type=int, metavar="N", help="tokens of the document (as many as make r = 0.95)")
    add("--gen-length", type=int, default=32, metavar="N", help="tokens to generate (32)")
    add("--block-length", type=int, default=8, metavar="N",
        help="tokens of a block; gen-length is a multiple of it (8)")
    add("--pace", default="1,3", metavar="N,N",
        help="tokens a step, one table each; tokens are compared, and the plain loops timed, at 3 (1,3)")
    add("--batch", type=int, default=1, metavar="B", help="requests at once, all on one prefix (1)")
    add("--refresh", type=int, default=16, metavar="R", help="steps from one refresh to the next (16)")
    add = parser.add_argument_group("measuring").add_argument
    add("--modes", help=f"which to run, separated by commas ({','.join(MODES)}; none,bicache with --sweep)")
    add("--repeats", type=int, metavar="N", help="timed runs of each mode (5; 3 with --quick or --sweep)")
    add("--cell-seconds", type=float, metavar="S",
        help="after two runs a mode repeats only while its runs in a table took less (60; 2 with --quick)")
    add("--clock", choices=("wall", "cpu"), default="wall",
        help="cpu counts this process' own time, in all threads: for --threads 1 on a busy machine (wall)")
    add("--quick", action="store_true", help="defaults for a tiny model and less than a minute")
    add("--sweep", action="store_true",
        help="instead: time of a pass against token-layers, prefixes of 0 to 4000 tokens, batches of 1 to 16")
    add("--svg", metavar="FILE", help="where --sweep draws its picture")
    add = parser.add_argument_group("machine").add_argument
    add("--device", default="cpu", help="cpu, cuda, cuda:1 (cpu)")
    add("--dtype", default="float32", choices=("float32", "bfloat16", "float16"),
        help="of weights and cache (float32)")
    add("--threads", type=int, metavar="N",
        help="of the CPU; more than are idle make it slower, not faster (torch decides)")
    add("--compile", action="store_true", help="compile the steps; the time that takes stands apart")
    add("--seed", type=int, default=0, help="of the weights (0)")
    args = parser.parse_args()
    args.shape = args.shape or ("tiny" if args.quick else "llada-110m")
    args.repeats = (3 if args.quick or args.sweep else 5) if args.repeats is None else args.repeats
    args.modes = (args.modes or ("none,bicache" if args.sweep else ",".join(MODES))).split(",")
    if args.sweep and args.cell_seconds is not None:
        fail("--cell-seconds has no effect with --sweep")
    args.cell_seconds = (2 if args.quick else 60) if args.cell_seconds is None else args.cell_seconds
    if unknown := [m for m in args.modes if m not in MODES]:
        fail(f"--modes names {unknown[0]!r}; known are {', '.join(MODES)}")
    args.workloads, paces = args.workloads.split(","), args.pace.split(",")
    if bad := [n for n in paces if not n.isdecimal() or not 1 <= int(n) <= args.block_length]:
        fail(f"--pace has {bad[0]!r}; it must be numbers from 1 to --block-length ({args.block_length})")
    args.schedules = {"fixed" if int(n) == 1 else f"{int(n)} a step": int(n) for n in paces}
    if unknown := [w for w in args.workloads if w not in NAMES]:
        fail(f"--workloads names {unknown[0]!r}; known are {', '.join(NAMES)}")
    for name in ("document", "gen_length", "block_length", "batch", "refresh", "repeats", "cell_seconds",
                 "threads"):
        if getattr(args, name) is not None and not getattr(args, name) > 0:
            fail(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be positive")
    if args.gen_length % args.block_length:
        fail(f"--gen-length is {args.gen_length}; it must be a multiple of --block-length "
             f"({args.block_length})")
    if args.svg and not args.sweep:
        fail("--svg has no effect without --sweep")
    if args.svg and not Path(args.svg).parent.is_dir():
        fail(f"--svg cannot be written: there is no folder {Path(args.svg).parent}")
    args.clock = time.perf_counter if args.clock == "wall" else time.process_time
    return args


def main():
    args = parse()
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        pairs = read_questions(args.questions)
        workloads = build(pairs, SHAPES[args.shape], args.batch, args.gen_length)
        workloads = [replace(w, prefix=w.prefix[:args.document]) if w.name == "document" else w
                     for w in workloads if w.name in args.workloads]
        shape, dtype = SHAPES[args.shape], getattr(torch, args.dtype)
        model = random_model(shape, args.device, dtype, args.seed, args.compile)
    except (ValueError, RuntimeError, AssertionError) as e:         # the latter two: torch, of a lost device
        fail(str(e).split("\n")[0])
    env = environment(args)
    print(", ".join(f"{key} {value}" for key, value in env.items()))
    if args.sweep:
        points = sweep(model, pairs, args)
        if args.svg:
            draw(points, args.svg)
        print(json.dumps(dict(env=env, points=points)))
        return
    print("random weights: their confidence means nothing, so a fixed number of tokens a step stands in for "
          "a threshold")
    engines = {m: make_engine(model, workloads, args, **MODES[m]) for m in {*args.modes, *FLOORS.values()}}
    rows, encoding, plain, claims = [], {}, {}, {}
    checked = next((w for w in workloads if w.name == "4-shot"), workloads[0])
    for w in workloads:
        for schedule in args.schedules:
            rows += (new := measure(engines, w, schedule, args))
            deepest = max(r["depth"] for r in new)
            print(f"\n{w.name}, {schedule}: prefix {len(w.prefix)}, own prompt {len(w.own[0])}, "
                  f"r {w.ratio:.2f}, depth {deepest} of {model.config.layers}")
            print_rows(new)
            if w is checked and schedule == CHECKED:
                claims = check(engines, model, w, new, args)
                plain = compare_plain(engines["none"], w, args) if "none" in args.modes else {}
        if sharing := [m for m in args.modes if "bicache" in m]:
            encoding[w.name] = seconds, work = encoding_cost(engines[sharing[0]], w, args)
            print(f"  encoding this prefix, once: {seconds:.3f} s, {work:,.0f} token-layers")
    print()
    for name, (_, none_over) in plain.items():
        if name != "none":
            print(f"none takes {none_over:.3f} times as long as the {name}")
    claims["all modes: all repeats"] = all(r["steady"] for r in rows)
    for claim, holds in claims.items():
        print(f"equal tokens: {claim}: {'yes' if holds else 'NO'}")
    for r in rows:
        del r["tokens"]
    env["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(f"peak memory of the process: {env['peak_mb']:,} MB")
    print(json.dumps(dict(env=env, rows=rows, encoding=encoding, plain=plain, equal=claims)))
    sys.exit(args.dtype == "float32" and not all(claims.values()))


if __name__ == "__main__":
    main()
