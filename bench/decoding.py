"""How many tokens a forward pass may decide before answers suffer: threshold, factor and entropy bound.

    python bench/decoding.py --out decoding.jsonl --svg docs/decoding.svg   # 500 questions a kind
    python bench/decoding.py --questions 12                                 # a few minutes

The questions of accuracy.py, in the engine's default mode, with one token a step and with each strategy at
several settings. An answer is right if it is that text; its tokens are those in front of EOS, and EOS: what
is decided behind EOS on the way counts for nothing. --out gets a line for each setting once it is done: the
same command goes on from there. A strategy's advice is its fastest setting that loses at most half a point to
one token a step.
"""
import argparse
import json
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))           # before bench/, whose kernels.py is not the engine's

import torch  # noqa: E402
from tqdm import tqdm  # noqa: E402

from bench import report  # noqa: E402
from bench.accuracy import Folder, Setup  # noqa: E402
from bench.asked import draw_questions, staff  # noqa: E402
from engine import Request  # noqa: E402

ONE = "one token a step"
SETTINGS = {"threshold": (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99), "factor": (0.1, 0.25, 0.5, 1.0, 2.0),
            "entropy_bound": (0.001, 0.01, 0.1, 0.3, 1.0)}
LOSS = 0.5                              # points that a setting may lose and still be advised


def run(how: dict, folder: Folder, questions: list, args, told) -> dict:
    """What each question came to with one strategy at one setting."""
    longest = max(len(q.prompt) + q.gen_length for q in questions)
    start = time.perf_counter()
    engine = Setup("bicache", depth="auto").engine(folder, args.max_batch, longest)
    requests = [Request(q.prompt, prefix_len=q.prefix_len, gen_length=q.gen_length,
                        block_length=min(args.block_length, q.gen_length), **how) for q in questions]
    right, tokens, forwards = ["0"] * len(questions), 0, 0
    for event in engine.stream(requests):
        if r := event.result:
            right[event.index] = "01"[r.text.strip() == questions[event.index].answer]
            tokens += len(r.tokens) + (r.finish_reason == "eos")
            forwards += r.forwards
            told()
    return dict(right="".join(right), tokens=tokens, forwards=forwards, seconds=time.perf_counter() - start)


def measure(args) -> dict:
    """Run what is missing: {"header": ..., "rows": {setting: line}} of --out, or of this run without."""
    folder = Folder(args.model)
    questions = draw_questions(folder.tokenizer, args.questions, seed=args.seed)
    header = dict(bench="decoding", model=folder.key, seed=args.seed, block_length=args.block_length,
                  kinds=list(staff.KINDS), kind=[q.kind for q in questions])
    known = args.out and os.path.exists(args.out) and os.path.getsize(args.out)
    found = report.read([args.out], header) if known else dict(header=header, rows={})
    settings = {ONE: {}} | {f"{name} {value:g}": {name: value} for name, values in SETTINGS.items()
                            for value in values}
    todo = {name: how for name, how in settings.items() if name not in found["rows"]}
    with open(args.out or os.devnull, "a") as file, \
            tqdm(total=len(todo) * len(questions), unit="answer", disable=None) as bar:
        if not known:
            file.write(json.dumps(dict(header=header)) + "\n")
        for name, how in todo.items():
            bar.set_description(name)
            found["rows"][name] = dict(setup=name, **run(how, folder, questions, args, bar.update))
            file.write(json.dumps(found["rows"][name]) + "\n")
            file.flush()
    return found


def changes(found: dict, name: str, kind=None) -> tuple[int, int, int]:
    """(lost, won, n) of a setting against one token a step, for a kind, or for all."""
    here, base = found["rows"][name]["right"], found["rows"][ONE]["right"]
    pairs = [(a, b) for a, b, k in zip(here, base, found["header"]["kind"]) if kind in (None, k)]
    return pairs.count(("0", "1")), pairs.count(("1", "0")), len(pairs)


def rate(found: dict, name: str, kind=None) -> float:
    """Right answers of a setting, in percent."""
    pairs = zip(found["rows"][name]["right"], found["header"]["kind"])
    right = [a == "1" for a, k in pairs if kind in (None, k)]
    return 100 * sum(right) / len(right)


def speed(row: dict) -> float:
    return row["tokens"] / row["forwards"]


def advice(found: dict) -> dict:
    """For each strategy its fastest setting within LOSS of one token a step, over all questions; or none."""
    best = {}
    for strategy in SETTINGS:
        fit = [(speed(row), name) for name, row in found["rows"].items()
               if name.startswith(strategy) and report.paired(*changes(found, name))[0] >= -LOSS]
        best[strategy] = max(fit, default=(0, None))[1]
    return best


def show(found: dict) -> dict:
    """Print the table and the advice; what the last line of the bench holds."""
    kinds = found["header"]["kinds"]
    print(f"{'':20} {'tokens/pass':>11}  {'all right, difference to one token a step':42}"
          + "".join(f"{kind:>10}" for kind in kinds))
    settings = {}
    for name, row in found["rows"].items():
        difference = report.paired(*changes(found, name))
        share = {kind: rate(found, name, kind) for kind in [None, *kinds]}
        print(f"{name:20} {speed(row):11.2f}  {share[None]:5.1f}%  {report.points(difference):33}"
              + "".join(f"{share[kind]:10.1f}" for kind in kinds))
        settings[name] = dict(tokens_a_pass=speed(row), right=share[None], difference=difference,
                              kinds={kind: share[kind] for kind in kinds}, seconds=row["seconds"])
    best = advice(found)
    for strategy, name in best.items():
        print(f"{strategy}: " + (f"{name}, {speed(found['rows'][name]):.2f} tokens a pass" if name else
                                 f"no setting loses less than {LOSS} points"))
    return dict(settings=settings, advice=best)


def draw(found: dict) -> str:
    """Exact match against tokens a pass as an SVG, a line for each strategy, one token a step dashed. No
    background and mid-grey text: it reads on light and dark pages."""
    w, h, left, top = 420, 220, 46, 40
    share = {name: rate(found, name) for name in found["rows"]}
    pace = {name: speed(row) for name, row in found["rows"].items()}
    low, high = min(share.values()), max(share.values())
    low, high = low - 0.1 * (high - low) - 0.5, high + 0.1 * (high - low) + 0.5
    slow, fast = min(pace.values()), max(pace.values()) + 0.01
    x = lambda name: left + w * (pace[name] - slow) / (fast - slow)
    y = lambda value: top + h * (high - value) / (high - low)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + w + 90}" height="{top + h + 44}" '
           'font-family="sans-serif" font-size="11" fill="#7a7a7a">',
           f'<text x="{left}" y="16">right answers in percent against tokens a forward pass</text>',
           f'<path d="M{left} {top}V{top + h}H{left + w}" fill="none" stroke="#7a7a7a"/>',
           f'<path d="M{left} {y(share[ONE]):.1f}H{left + w}" stroke="#7a7a7a" stroke-dasharray="3 3"/>',
           f'<text x="{left + w + 6}" y="{y(share[ONE]) + 4:.1f}">{ONE}</text>']
    for i in range(5):
        value, tokens, at = low + (high - low) * i / 4, slow + (fast - slow) * i / 4, left + w * i / 4
        out += [f'<text x="{left - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.1f}</text>',
                f'<text x="{at:.1f}" y="{top + h + 16}" text-anchor="middle">{tokens:.2f}</text>']
    for number, (strategy, color) in enumerate(zip(SETTINGS, report.COLORS)):
        names = sorted((name for name in pace if name.startswith(strategy)), key=pace.get)
        line = " ".join(f"{x(name):.1f},{y(share[name]):.1f}" for name in names)
        out.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        for name in names:
            out.append(f'<circle cx="{x(name):.1f}" cy="{y(share[name]):.1f}" r="3" fill="{color}">'
                       f'<title>{name}: {pace[name]:.2f}, {share[name]:.1f}%</title></circle>')
        out.append(f'<text x="{left + 110 * number}" y="{top + h + 36}" fill="{color}">'
                   f'&#9632; {strategy.replace("_", " ")}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: parser.exit(2, f"decoding.py: {message}\n")
    add = parser.add_argument
    add("--model", default=str(ROOT / "checkpoints/tiny"), metavar="DIR", help="that reads staff lists")
    add("--questions", type=int, default=500, metavar="N", help="of each kind (500)")
    add("--seed", type=int, default=0, help="of the staff lists (0)")
    add("--block-length", type=int, default=8, help="tokens of a block (8)")
    add("--max-batch", type=int, default=16, help="requests that step together (16)")
    add("--out", metavar="FILE", help="lines of JSON, one a setting; what stands there is not measured again")
    add("--svg", metavar="FILE", help="draw accuracy against tokens a pass")
    args = parser.parse_args(argv)
    if min(args.questions, args.block_length, args.max_batch) < 1:
        parser.error("--questions, --block-length and --max-batch start at 1")
    if args.svg and not Path(args.svg).parent.is_dir():
        parser.error(f"--svg: there is no folder {Path(args.svg).parent}")
    torch.set_num_threads(1)            # so small a model waits for a second one
    try:
        found = measure(args)
        summary = show(found)
        if args.svg:
            Path(args.svg).write_text(draw(found), encoding="utf-8")
        print(json.dumps(summary))
        return 0
    except (ValueError, OSError) as e:
        print(f"decoding.py: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("decoding.py: interrupted" + "; the same command goes on" * bool(args.out), file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
