"""The sweep of the bench: time of one forward pass against its token-layers, for prefixes of 0 to 4000 tokens
and 1 to 16 requests at once, and its picture. Cost grows as docs/how-it-works.md says where the points follow
the grey line."""
import math
from argparse import Namespace
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median

from bench.workloads import MODES, Workload, build, document, make_engine, make_requests

PREFIXES, BATCHES = (0, 250, 500, 1000, 2000, 4000), (1, 2, 4, 8, 16)       # tokens, requests
MIDDLE = 500                # P of the batches
STEPS = 4                   # one token each: a first pass, with its refresh, and three more
COLORS = "#1b6ca8", "#d1495b", "#2e933c", "#edae49", "#6f4e7c", "#00798c", "#8d5524", "#333333"


def sweep(model, pairs: list, args) -> list:
    """A point {mode, P, B, token_layers, seconds} for each kind of pass (by its token-layers), the median
    over passes."""
    c, points = model.config, []
    L = c.layers
    for P, B in [(P, 1) for P in PREFIXES] + [(MIDDLE, B) for B in BATCHES[1:]]:
        own = build(pairs, c, B, STEPS)[0].own
        w = Workload("sweep", document(pairs, c, min(P, c.max_len - max(map(len, own)) - STEPS)), own, STEPS)
        for mode in args.modes:
            engine = make_engine(model, [w], Namespace(**{**vars(args), "batch": B}), **MODES[mode])
            batch, passes = make_requests(w, STEPS, 1), defaultdict(list)
            engine.generate([replace(r, steps=1) for r in batch])               # encodes the prefix
            for _ in range(args.repeats):
                step, now, done = -1, args.clock(), []
                for e in engine.stream(batch):
                    if e.step != step:                      # the events of a pass come together, behind it
                        step, before, now = e.step, now, args.clock()
                        done.append([now - before, 0, e.refresh])
                    done[-1][1] += L * (e.computed[1] - e.computed[0])
                    done[-1][1] += (L - e.depth - 0.5) * e.prefix_tokens if e.refresh else 0
                for seconds, work, refresh in done:
                    passes[work, refresh].append(seconds)
            for (work, refresh), times in passes.items():
                point = dict(mode=mode + " refresh" * refresh, P=len(w.prefix), B=B, token_layers=work,
                             seconds=median(times))
                print("{mode:<22} P {P:>5}  B {B:>3} {token_layers:>12,.0f} token-layers {seconds:9.4f} s"
                      .format(**point), flush=True)
                points.append(point)
    return points


def draw(points: list, path: str) -> None:
    """The points on logarithmic axes, with a grey line where time is in proportion to the work; SVG, written
    by hand."""
    X, Y = ([math.log10(p[key]) for p in points] for key in ("token_layers", "seconds"))
    x0, x1, y0, y1 = math.floor(min(X)), math.ceil(max(X)), math.floor(min(Y)), math.ceil(max(Y))
    px, py = (lambda x: 70 + (x - x0) / (x1 - x0) * 520), (lambda y: 350 - (y - y0) / (y1 - y0) * 320)
    line = lambda a, b, color: (f'<path d="M{px(a[0]):.0f} {py(a[1]):.0f}L{px(b[0]):.0f} {py(b[1]):.0f}" '
                                f'stroke="{color}"/>')
    def text(x, y, words, anchor="start"):
        return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{words}</text>'

    out = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 780 400" font-family="sans-serif" '
           'font-size="12">',
           '<rect width="780" height="400" fill="white"/>',
           text(330, 390, "token-layers of a pass", "middle"), text(14, 20, "seconds")]
    for x in range(x0, x1 + 1):
        out += [line((x, y0), (x, y1), "#ddd"), text(px(x), 368, f"1e{x}", "middle")]
    for y in range(y0, y1 + 1):
        out += [line((x0, y), (x1, y), "#ddd"), text(62, py(y) + 4, f"1e{y}", "end")]
    rate = median(y - x for x, y in zip(X, Y))              # log10 of seconds per token-layer
    lo, hi = max(x0, y0 - rate), min(x1, y1 - rate)
    out.append(line((lo, lo + rate), (hi, hi + rate), "#999"))
    color = dict(zip(dict.fromkeys(p["mode"] for p in points), COLORS))
    for p, x, y in zip(points, X, Y):
        r, fill = 2 + 2 * p["B"] ** 0.5, color[p["mode"]]
        out.append(f'<circle cx="{px(x):.1f}" cy="{py(y):.1f}" r="{r:.1f}" fill="{fill}" fill-opacity="0.6">'
                   f'<title>{p["mode"]}, P {p["P"]}, B {p["B"]}</title></circle>')
    for i, mode in enumerate(color):
        out += [f'<circle cx="605" cy="{46 + 20 * i}" r="5" fill="{color[mode]}"/>',
                text(616, 50 + 20 * i, mode)]
    out += [text(600, 60 + 20 * len(color), "larger dots: more requests"), "</svg>\n"]
    Path(path).write_text("\n".join(out), encoding="utf-8")
