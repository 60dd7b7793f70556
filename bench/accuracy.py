"""How many answers stay right when the K/V of a shared prefix are reused, by mode, on the same questions.

    python bench/accuracy.py --out accuracy.jsonl --svg accuracy.svg  # 500 questions a kind: an hour
    python bench/accuracy.py --out 1.jsonl --part 1/2       # half of the setups, 2/2 beside it, and then
    python bench/accuracy.py --report 1.jsonl 2.jsonl       # tables and verdicts of what was measured
    python bench/accuracy.py --quick                        # 12 questions a kind, about a minute

Held-out staff lists (tools/staff.py, seeds of their own) are asked what has exactly one answer; an answer is
right if it is that text. All setups see the same canvases, at prefix ratios from 0.3 to 0.97 (asked.py). With
a threshold an answer takes one or two steps; some questions are asked at a token a step as well, where the
interval R matters. Beside it stands how the K/V of a prefix change with the question. --out gets a line for
each setup once it is done: a stopped run goes on from there.
"""
import argparse
import json
import os
import sys
import time
import zlib
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))           # before bench/, whose kernels.py is not the engine's

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from tqdm import tqdm  # noqa: E402

import files  # noqa: E402
from bench import throughput  # noqa: E402
from bench.asked import RATIOS, Question, draw_questions, staff  # noqa: E402
from bench.report import draw, read, show  # noqa: E402
from hub.checkpoint import fingerprint, load  # noqa: E402
from depth import closeness, find_table  # noqa: E402
from engine import Engine, Request  # noqa: E402
from model import rotate  # noqa: E402
from tokenizer import Tokenizer  # noqa: E402

SIZES = dict(questions=500, few=500, slow=30, states=24, ratios=",".join(map(str, RATIOS)))
QUICK = dict(questions=12, few=3, slow=1, states=4, ratios="0.3,0.7,0.97")
INTERVALS = {"1": 1, "4": 4, "16": 16, "inf": 10**6}
PACES = ("threshold", "slow")             # slow: a token a step


class Folder:
    """A model folder, read once: what happens to the files later changes no row of a run."""

    def __init__(self, path):
        self.key, self.model = fingerprint(path), load(path).pack()
        self.tokenizer = Tokenizer.from_folder(path)
        self.layers = self.model.config.layers
        self.table = find_table(path, self.layers)
        if self.tokenizer is None:
            raise ValueError(f"{path} has no tokenizer to ask questions with")


@dataclass(frozen=True)
class Setup:
    """An engine and a pace; asked: how many questions of each kind, None for all."""
    cache: str
    window: str = "all"
    refresh: str | None = None
    depth: int | str | None = None
    guard: bool = True
    pace: str = PACES[0]
    asked: int | None = None

    @property
    def name(self) -> str:
        depth = "" if self.depth is None else " auto" if self.depth == "auto" else f" depth {self.depth}"
        guard = "" if self.guard else " table only"
        refresh = f", R {self.refresh}" if self.refresh else ""
        pace = f", {self.pace}" if self.pace != PACES[0] else ""
        return f"{self.cache}{depth}{guard}{refresh}, {self.window}{pace}"

    @property
    def heavy(self) -> bool:                            # computes all rows at each step
        return self.cache == "none" or self.refresh == "1"

    def engine(self, folder: Folder, max_batch: int, longest: int) -> Engine:
        options = {} if self.refresh is None else dict(refresh=INTERVALS[self.refresh])
        options |= {} if self.depth is None else dict(depth=self.depth)
        options |= {} if self.guard else dict(measure=0)
        c = folder.model.config
        tokens = (max_batch + 4) * (longest + 192)      # a batch of the longest, and prefixes beside it
        each = c.layers * (2 * c.kv_heads * c.head_dim + c.hidden) * 4
        return Engine(folder.model, cache=self.cache, window=self.window, max_batch=max_batch,
                      table=folder.table, cache_mb=tokens * each / 2**20, tokenizer=folder.tokenizer,
                      key=folder.key, **options)


def make_setups(layers: int, few: int, slow: int, grid: int) -> list[Setup]:
    """What is compared, each with `none, all` at its pace. All questions: none, naive, R = 16, all depths. On
    `few` of a kind: the other intervals. On `slow`: all intervals at a token a step. On `grid`: all depths at
    all intervals."""
    windows, auto, intra = ("all", "block"), Setup("bicache", depth="auto"), Setup("intra")

    def cross(setups, intervals, **more):
        return [replace(s, window=w, refresh=R, **more) for s in setups for w in windows for R in intervals]
    fixed = [Setup("bicache", depth=d) for d in range(layers + 1)]
    setups = [Setup(cache, w) for cache in ("none", "naive") for w in windows] + cross((intra, auto), ["16"])
    setups += [replace(auto, refresh="16", guard=False)] + [replace(s, refresh="16") for s in fixed]
    setups += cross((intra, auto), [R for R in INTERVALS if R != "16"], asked=few)
    setups += [Setup(cache, pace=PACES[1], asked=slow) for cache in ("none", "naive")]
    setups += cross((intra, auto), INTERVALS, pace=PACES[1], asked=slow)
    known = {s.name for s in setups}
    return setups + [s for s in cross(fixed, INTERVALS, asked=grid) * bool(grid) if s.name not in known]


def choose(questions: list[Question], asked: int | None) -> list[int]:
    """Places of the first `asked` questions of each kind, evenly over the ratios; all for None."""
    targets, taken, places = list(dict.fromkeys(q.target for q in questions)), Counter(), []
    for i, q in enumerate(questions):
        if asked is None or taken[q.kind, q.target] < (asked + targets[::-1].index(q.target)) // len(targets):
            taken[q.kind, q.target] += 1
            places.append(i)
    return places


def run(setup: Setup, folder: Folder, questions: list[Question], places: list[int], args,
        told=lambda: None) -> dict:
    """One line of results: what each question came to, and the work of all."""
    asked = [questions[i] for i in places]
    longest = max(len(q.prompt) + q.gen_length for q in asked)
    engine, start, results = setup.engine(folder, args.max_batch, longest), time.perf_counter(), {}
    threshold = args.threshold if setup.pace == PACES[0] else None
    requests = [Request(q.prompt, prefix_len=q.prefix_len, gen_length=q.gen_length, threshold=threshold,
                        block_length=min(args.block_length, q.gen_length)) for q in asked]
    for event in engine.stream(requests):
        if event.result:
            results[event.index] = event.result
            told()
    results = [results[i] for i in range(len(places))]
    right = [engine.tokenizer.decode(r.tokens).strip() == q.answer for q, r in zip(asked, results)]
    each = lambda name: [getattr(r, name) for r in results]
    work = {name: each(name) for name in ("token_layers", "encode_token_layers", "measure_token_layers")}
    return dict(
        setup=setup.name, **asdict(setup), places=places if setup.asked else None,
        right="".join("01"[x] for x in right), answers=[zlib.crc32(repr(r.tokens).encode()) for r in results],
        depths=each("depth"), forwards=each("forwards"), refreshes=each("refreshes"),
        work=[sum(parts) for parts in zip(*work.values())],
        total={name: sum(parts) for name, parts in work.items()}, seconds=time.perf_counter() - start)


@torch.inference_mode()
def keys_values(model, ids: list) -> torch.Tensor:
    """The K (after RoPE) and V of each layer for a canvas, each of length 1: (L, 2, T, K * D)."""
    x, rope, kept = model.embed(torch.tensor([ids])), model.rope(torch.arange(len(ids))[None]), []

    def attend(q, k, v):
        q, k = rotate(q, *rope), rotate(k, *rope)
        kept.append(F.normalize(torch.cat([k, v]).transpose(1, 2).flatten(2).float(), dim=-1))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
    for layer in model.layers:
        x = layer(x, attend)
    return torch.stack(kept)


def states(model, questions: list[Question], each: int) -> dict:
    """How alike the K/V of a prefix are at the first step, per kind and layer: `alone` and on a whole canvas;
    `between` the canvases of two questions of the kind on one document. The mean over prefix tokens, their
    worst decile and the lowest; `named`: between, the mean at the words that stand in one of the two
    questions only. All are means over `each` pairs."""
    found, groups = {}, {}
    canvas = lambda q: q.prompt + [model.config.mask_id] * q.gen_length
    for q in questions:
        groups.setdefault((q.kind, q.document), []).append(q)
    for kind in staff.KINDS:
        pairs, sums = [group[:2] for (k, _), group in groups.items() if k == kind and len(group) > 1], {}
        for a, b in pairs[::max(1, len(pairs) // each)][:each]:
            P = a.prefix_len
            alone = keys_values(model, a.prompt[:P])
            one, two = (keys_values(model, canvas(q))[:, :, :P] for q in (a, b))
            words = {*a.prompt[P:]} ^ {*b.prompt[P:]}                   # of one question and not the other
            differ = torch.isin(torch.tensor(a.prompt[:P]), torch.tensor([*words]))
            for name, other in (("alone", alone), ("between", two)):
                c = torch.stack([closeness(x, y) for x, y in zip(one, other)])              # (L, P)
                seen = torch.stack([c.mean(1), c.quantile(0.1, 1), c.min(1).values])
                sums.setdefault(name, []).append(seen)
                if differ.any() and name == "between":
                    sums.setdefault("named", []).append(c[:, differ].mean(1)[None])
        means = {name: torch.stack(x).mean(0).tolist() for name, x in sums.items()}
        found[kind] = dict(n=len(sums.get("alone", ())), **means)
    return found


def make_header(folder: Folder, questions: list[Question], setups: list[Setup], args) -> dict:
    """What makes results comparable: lines under another header are refused."""
    text = json.dumps([[q.prompt, q.prefix_len, q.gen_length, q.answer] for q in questions])
    options = ("seed", "threshold", "block_length", "max_batch", "few", "slow", "grid", "states")
    return dict(model=folder.key, layers=folder.layers, table=folder.table or {},
                **{name: getattr(args, name) for name in options},
                questions=f"{len(questions)} of {zlib.crc32(text.encode()):08x}",
                kinds=list(staff.KINDS), kind=[q.kind for q in questions],
                target=[q.target for q in questions], document=[q.document for q in questions],
                ratio=[round(q.ratio, 4) for q in questions],
                canvas=[len(q.prompt) + q.gen_length for q in questions],
                need=[s.name for s in setups])


def estimate(setups: list[Setup], folder: Folder, questions: list[Question], args) -> float:
    """Seconds for the setups, from one of each sort on neighbours in the list whose canvases are about the
    mean."""
    canvas = [len(q.prompt) + q.gen_length for q in questions]
    middle = min(range(len(canvas)), key=lambda i: abs(canvas[i] - sum(canvas) / len(canvas)))
    seconds, rate = 0, {}
    for s in setups:
        sort = s.heavy, s.pace
        if sort not in rate:
            n = 2 * args.max_batch if s.pace == PACES[0] else args.max_batch // 2 or 1
            n = min(n, -(-len(questions) // 6))
            some = list(range(len(questions)))[max(0, middle - n):][:n]
            rate[sort] = run(s, folder, questions, some, args)["seconds"] / n
        seconds += rate[sort] * len(choose(questions, s.asked))
    return seconds


def measure(args) -> dict:
    """Run what is missing; {"header": ..., "rows": {setup: line}} of --out, or of this run without."""
    folder, (part, parts) = Folder(args.model), args.part
    questions = draw_questions(folder.tokenizer, args.questions, args.ratios, args.seed)
    setups = make_setups(folder.layers, args.few, args.slow, args.grid)
    header = json.loads(json.dumps(make_header(folder, questions, setups, args)))       # as it comes back
    goes_on = args.out and os.path.exists(args.out)
    found = read([args.out], header) if goes_on else dict(header=header, rows={})
    by_sort = sorted(setups, key=lambda s: (s.pace == PACES[0], s.asked is None, not s.heavy))
    share = by_sort[part - 1::parts]                                        # of each sort
    todo = [s for s in share if s.name not in found["rows"]]
    file = open(args.out, "ab", buffering=0) if args.out else None          # a line is one write, or none

    def write(line: dict):
        found["rows"][line["setup"]] = line
        if file:
            files.write_whole(file, json.dumps(line).encode() + b"\n")
    if file and not file.tell():
        files.write_whole(file, json.dumps(dict(header=header)).encode() + b"\n")
    minutes = estimate(todo, folder, questions, args) / 60
    print(f"{len(questions)} questions on {questions[-1].document + 1} staff lists, {len(todo)} setups: "
          f"about {minutes:.1f} minutes", flush=True)
    with tqdm(total=sum(len(choose(questions, s.asked)) for s in todo), unit="answer", disable=None) as bar:
        for setup in todo:
            bar.set_description(setup.name)
            write(run(setup, folder, questions, choose(questions, setup.asked), args, bar.update))
    if part == parts and "states" not in found["rows"]:
        write(dict(setup="states", **states(folder.model, questions, args.states)))
    if file:
        file.close()
    return found


def parse(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: parser.exit(2, f"accuracy.py: {message}\n")
    add = parser.add_argument_group("questions").add_argument
    add("--model", default=str(ROOT / "checkpoints/tiny"), metavar="DIR",
        help="that reads staff lists (checkpoints/tiny)")
    add("--questions", type=int, metavar="N", help="of each kind (500; 12 with --quick)")
    add("--ratios", help=f"prefix ratios aimed at ({','.join(map(str, RATIOS))})")
    add("--seed", type=int, default=0, help="of the staff lists (0)")
    add = parser.add_argument_group("decoding").add_argument
    add("--threshold", type=float, default=0.9, help="probability from which a token is committed (0.9)")
    add("--block-length", type=int, default=8, help="tokens of a block (8)")
    add("--max-batch", type=int, default=16, help="requests that step together (16)")
    add = parser.add_argument_group("measuring").add_argument
    add("--few", type=int, metavar="N",
        help="questions of a kind for intervals other than 16 (500; 3 with --quick)")
    add("--slow", type=int, metavar="N", help="questions of a kind at a token a step (30; 1 with --quick)")
    add("--grid", type=int, default=0, metavar="N",
        help="questions of a kind for all depths x intervals x windows (0)")
    add("--states", type=int, metavar="N",
        help="questions of a kind whose prefix K/V are compared (24; 4 with --quick)")
    add("--quick", action="store_true", help="defaults for about a minute")
    add("--threads", type=int, default=1, help="of the CPU; so small a model waits for a second one (1)")
    add = parser.add_argument_group("results").add_argument
    add("--out", metavar="FILE", help="lines of JSON, one a setup; what stands there is not measured again")
    add("--part", default="1/1", metavar="K/N", help="only the K-th of N shares of the setups (1/1)")
    add("--report", nargs="+", metavar="FILE", help="measure nothing: show what stands in these files")
    add("--svg", metavar="FILE", help="draw accuracy against depth")
    args = parser.parse_args(argv)
    for name, value in (QUICK if args.quick else SIZES).items():
        setattr(args, name, value if getattr(args, name) is None else getattr(args, name))
    try:
        args.ratios = tuple(map(float, args.ratios.split(",")))
        args.part = tuple(map(int, args.part.split("/")))
        part, parts = args.part
    except ValueError:
        parser.error("--ratios are numbers separated by commas, --part is K/N")
    counts = ("questions", "block_length", "max_batch", "few", "slow", "states", "threads")
    least = min(getattr(args, name) for name in counts)
    for bad, why in (
            (not all(0.2 <= r <= 0.97 for r in args.ratios), "--ratios run from 0.2 to 0.97"),
            (least < 1 or args.grid < 0, "counts and lengths start at 1, --grid at 0"),
            (not 0 < args.threshold <= 1, "--threshold must be above 0 and at most 1"),
            (not 1 <= part <= parts, "--part is K/N with K from 1 to N"),
            (parts > 1 and (args.svg or not args.out),
             "--part wants --out, and what it leaves is drawn by --report"),
            (args.report and (args.out or args.quick or parts > 1),
             "--report measures nothing: leave out --out, --part, --quick"),
            (args.svg and not Path(args.svg).parent.is_dir(),
             f"--svg: there is no folder {Path(args.svg or '').parent}")):
        if bad:
            parser.error(why)
    return args


def main(argv=None) -> int:
    args = parse(argv)
    torch.set_num_threads(args.threads)
    try:
        env = throughput.machine("cpu", "float32")
        print(", ".join(f"{name} {value}" for name, value in env.items()), flush=True)
        found = read(args.report) if args.report else measure(args)
        if missing := [name for name in [*found["header"]["need"], "states"] if name not in found["rows"]]:
            todo = (f"{len(missing)} setups are missing yet, {missing[0]!r} first; "
                    "--report FILE FILE joins the parts")
            if args.report:
                raise ValueError(todo)
            print(todo)
            return 0
        summary = show(found)
        if args.svg:
            files.replace(args.svg, lambda path: path.write_text(draw(found), "utf-8"))
        print(json.dumps(dict(env=env, **summary)))
        return 0
    except (ValueError, OSError) as e:
        what = f"{e.filename}: {e.strerror}" if isinstance(e, OSError) else str(e)
        print(f"accuracy.py: {what}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("accuracy.py: interrupted" + "; the same command goes on" * bool(args.out), file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
