"""The picture of the README: one request denoised step by step, what each layer computes and reads for it.

    python tools/animate.py                             # docs/denoise.svg, of the embedded model
    python tools/animate.py --prompt "Who is in room 66?" --refresh 8 --out other.svg

Left the canvas, masks lifting; right the layers, prefix and suffix, by where their K/V come from; below the
work so far, beside that of `none`. All of it is the event stream of one real run on a prefix that an
earlier request has stored (a hit). The SVG moves by CSS alone, so it does so inside an <img>, too; where
nothing is animated it shows the last step. Checked: tests/test_animate.py.
"""
import argparse
import os
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path
from textwrap import wrap

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from engine import Engine, Request      # noqa: E402

LEAD, BEAT, HOLD = 1.5, 0.9, 4.5        # seconds: all masked, one step, the finished answer
WIDTH, HEIGHT = 860, 390
LEFT, RIGHT, SPAN = 24, 474, 362        # where the two halves begin, and the width of the right one
COLUMNS, CELL, ROW = 8, 51, 38          # answer cells in a row, their pitch in x and in y
EDGE = LEFT + 11 + COLUMNS * CELL - 4   # the right edge of the left half
LINES, LETTERS = 7, 70                  # of the document
LAYER = 21                              # height of a layer, gap included
PAGE = 64                               # tokens of a page: the prefix is drawn in pages

STYLE = """
text { font-family: -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; font-size: 12px }
.card { fill: #ffffff; stroke: #d0d7de } .ink { fill: #1f2328 } .dim { fill: #656d76 }
.mask { fill: #e4e8ed } .bar { fill: #c3cad2 } .cell { fill: #f4f6f8; stroke: #d0d7de }
.shared { fill: #4a7fb5 } .private { fill: #3f9b74 } .computed { fill: #e08a2e }
.head { font-size: 14px; font-weight: 600 } .small { font-size: 10.5px } .tiny { font-size: 9px }
.middle { text-anchor: middle } .end { text-anchor: end }
.number { font-variant-numeric: tabular-nums; font-weight: 600 }
@media (prefers-color-scheme: dark) {
.card { fill: #0d1117; stroke: #30363d } .ink { fill: #e6edf3 } .dim { fill: #9198a1 }
.mask { fill: #2a313a } .bar { fill: #4b535d } .cell { fill: #161b22; stroke: #3d444d }
.shared { fill: #4c86c0 } .private { fill: #45a37c } .computed { fill: #e08a2e } }
@media (prefers-reduced-motion: reduce) { * { animation: none !important } }
"""


@dataclass
class Run:
    """What the picture shows of one request; a list has one item a step."""
    document: str
    question: str
    layers: int
    prefix: int                 # P
    suffix: int                 # S
    depth: int
    refreshes: list             # was it a refresh?
    committed: list             # [(place in the answer, text), ...]
    work: list                  # token-layers so far
    none: list                  # the same without a cache


def record(model, document: str, question: str, gen_length: int, refresh: int) -> Run:
    """Answer `question` about `document` twice, the second time a hit, and once more without a cache."""
    engine = Engine.from_folder(model, refresh=refresh, measure=0)
    ids, P = engine.tokenizer.render({"prefix": document, "prompt": question})
    request = Request(ids, prefix_len=P, gen_length=gen_length)
    engine.generate([request])
    events = list(engine.stream([request]))
    plain = Engine(engine.model, cache="none", tokenizer=engine.tokenizer)
    layers = engine.model.config.layers
    word = lambda token: engine.tokenizer.decode([token]).strip()
    words = [[(place, word(token)) for place, token in e.committed] for e in events]
    return Run(document, question, layers, prefix=P, suffix=len(ids) + gen_length - P, depth=events[0].depth,
               refreshes=[e.refresh for e in events], committed=words, work=count(events, layers),
               none=count(list(plain.stream([request])), layers))


def count(events: list, layers: int) -> list[float]:
    """Token-layers of a request after each step (docs/how-it-works.md, Cost); in the end its result's."""
    total, sums = 0, []
    for e in events:
        lo, hi = e.computed
        total += layers * (hi - lo) + e.refresh * (layers - e.depth - 0.5) * e.prefix_tokens
        sums.append(total)
    return sums


class Clock:
    """When things happen, as CSS keyframes: step k begins at `at(k)` percent of the loop."""

    def __init__(self, steps: int):
        self.steps, self.total, self.rules = steps, LEAD + BEAT * steps + HOLD, {}

    def at(self, step: float) -> float:
        return 100 * (LEAD + BEAT * step) / self.total

    def rule(self, name: str, frames: str) -> str:
        """The style that plays `frames`; a rule is written once, however many elements play it."""
        self.rules[name] = f"@keyframes {name} {{ {frames} }}"
        return f"animation: {name} {self.total:g}s infinite backwards"

    def since(self, step: int) -> str:
        """There from this step on."""
        t = self.at(step)
        return self.rule(f"since{step}", f"0%, {t:.2f}% {{ opacity: 0 }} {t + 1:.2f}%, 100% {{ opacity: 1 }}")

    def until(self, step: int) -> str:
        """There before this step; of no opacity where nothing is animated."""
        t = self.at(step)
        return self.rule(f"until{step}", f"0%, {t:.2f}% {{ opacity: 1 }} {t + 1:.2f}%, 100% {{ opacity: 0 }}")

    def during(self, step: int) -> str:
        """There in this step alone; -1 is the time before the first one, and the last one stays."""
        t = self.at(step) if step >= 0 else 0
        after = self.at(step + 1) if step + 1 < self.steps else 100
        hidden = f"0%, {t - 0.01:.2f}% {{ opacity: 0 }}" if t else ""
        gone = f"{after:.2f}%, 100% {{ opacity: 0 }}" if after < 100 else ""
        shown = f"{t:.2f}%, {after - 0.01:.2f}% {{ opacity: 1 }}"
        return self.rule(f"during{step + 1}", f"{hidden} {shown} {gone}")

    def pulse(self, name: str, steps: list, low: float, fade: float) -> str:
        """Up to full opacity at each of `steps`, down to `low` over `fade` steps."""
        frames = ["0% { opacity: 0 }"]
        for step in steps:
            t = self.at(step)
            frames.append(f"{t:.2f}% {{ opacity: {low if step else 0:g} }}")
            frames.append(f"{t + 0.4:.2f}%, {self.at(step + fade / 3):.2f}% {{ opacity: 1 }}")
            frames.append(f"{self.at(step + fade):.2f}% {{ opacity: {low:g} }}")
        return self.rule(name, " ".join([*frames, f"100% {{ opacity: {low:g} }}"]))

    def grow(self, name: str, lengths: list) -> str:
        """From nothing to full length, by `lengths` (shares of it) at the end of each step."""
        frames = [f"0%, {self.at(0):.2f}% {{ transform: scaleX(0) }}"]
        for step, length in enumerate(lengths):
            span = f"{self.at(step) + 1.5:.2f}%, {self.at(step + 1):.2f}%"
            frames.append(f"{span} {{ transform: scaleX({length:.4f}) }}")
        return self.rule(name, " ".join([*frames, "100% { transform: scaleX(1) }"]))


def box(x: float, y: float, w: float, h: float, kind: str, style: str = "", round: float = 2) -> str:
    style = f' style="{style}"' if style else ""
    return f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="{round:g}" class="{kind}"{style}/>'


def text(x: float, y: float, what: str, kind: str = "ink", style: str = "") -> str:
    style = f' style="{style}"' if style else ""
    return f'<text x="{x:g}" y="{y:g}" class="{kind}"{style}>{escape(what)}</text>'


def canvas(run: Run, clock: Clock) -> list[str]:
    """The left half: the end of the document, the question, and the answer, a cell for each of its tokens."""
    lines = wrap(run.document, LETTERS)
    shown = lines[:LINES]
    if len(lines) > LINES:
        shown[-1] += " ..."
    out = [text(LEFT, 34, "The canvas", "ink head"),
           text(EDGE, 34, f"a prefix of {run.prefix} tokens, a question, masks", "dim small end"),
           box(LEFT, 46, 3, 15 * len(shown) - 2, "shared", round=1)]
    out += [text(LEFT + 11, 57 + 15 * i, line, "dim") for i, line in enumerate(shown)]
    y = 57 + 15 * len(shown) + 8
    out.append(text(LEFT + 11, y, run.question, "ink", "font-weight: 600"))
    out.append(box(LEFT, y - 11, 3, 16 + ROW * -(-places(run) // COLUMNS), "computed", round=1))
    y += 10
    for step, committed in enumerate(run.committed):
        for place, word in committed:
            out += cell(LEFT + 11 + place % COLUMNS * CELL, y + place // COLUMNS * ROW, step, word, clock)
    return out


def places(run: Run) -> int:
    return 1 + max(place for committed in run.committed for place, _ in committed)


def cell(x: float, y: float, step: int, word: str, clock: Clock) -> list[str]:
    """A token of the answer: a mask, then a flash, then the word and the step that set it."""
    w, h = CELL - 4, ROW - 5
    size = min(12, 1.7 * w / max(len(word), 1))
    style = f"{clock.since(step)}; font-size: {size:.1f}px"
    flash = clock.pulse(f"set{step}", [step], 0, 1.4)
    return [box(x, y, w, h, "cell"),
            box(x, y, w, h, "mask", f"{clock.until(step)}; opacity: 0"),
            box(x, y, w, h, "computed", f"{flash}; opacity: 0"),
            text(x + w / 2, y + 21, word or "end", "ink middle" if word else "dim middle", style),
            text(x + w - 3, y + 9, str(step), "dim tiny end", clock.since(step))]


def stack(run: Run, clock: Clock) -> list[str]:
    """The right half: the layers, last on top; the prefix in pages, then the suffix, as wide as long."""
    steps = range(len(run.refreshes))
    refreshes = [step for step in steps if run.refreshes[step]]
    out = [text(RIGHT, 34, "The layers", "ink head")]
    out.append(text(RIGHT + SPAN, 34, "all masked", "dim end", f"{clock.during(-1)}; opacity: 0"))
    for step in steps:
        kind, word = ("computed number end", "refresh") if run.refreshes[step] else ("ink end", "reuse")
        style = clock.during(step) + ("" if step == steps[-1] else "; opacity: 0")
        out.append(text(RIGHT + SPAN, 34, f"step {step}: {word}", kind, style))
    left, room = RIGHT + 16, SPAN - 16 - 5
    wide = room * run.prefix / (run.prefix + run.suffix)
    for layer in range(run.layers):
        y = 46 + (run.layers - 1 - layer) * LAYER
        out.append(text(RIGHT + 9, y + 13, str(layer), "dim small end"))
        lag = f"animation-delay: {0.045 * layer:.3f}s"
        for first in range(0, run.prefix, PAGE):
            x, w = left + wide * first / run.prefix, wide * min(PAGE, run.prefix - first) / run.prefix - 1.5
            if layer < run.depth:
                out.append(box(x, y, w, LAYER - 3, "shared"))
            else:
                out.append(box(x, y, w, LAYER - 3, "mask"))
                out.append(box(x, y, w, LAYER - 3, "private", clock.since(0)))
                flash = clock.pulse("refresh", refreshes, 0, 1.6)
                out.append(box(x, y, w, LAYER - 3, "computed", f"{flash}; {lag}; opacity: 0"))
        x, w = left + wide + 4, room - wide
        out.append(box(x, y, w, LAYER - 3, "bar"))
        flash = clock.pulse("step", list(steps), 0.6, 0.8)
        out.append(box(x, y, w, LAYER - 3, "computed", f"{flash}; {lag}"))
    y = 46 + run.layers * LAYER + 12
    out.append(text(left + wide / 2, y, f"prefix, {run.prefix} tokens", "dim small middle"))
    out.append(text(RIGHT + SPAN, y, f"own, {run.suffix}", "dim small end"))
    return out + legend(run, y + 24)


def legend(run: Run, y: float) -> list[str]:
    out = []
    words = {"shared": f"shared: below the depth, {run.depth}; the same for all requests on this text",
             "private": "private: kept by this request since its last refresh",
             "computed": "computed in this step"}
    for i, (kind, word) in enumerate(words.items()):
        out.append(box(RIGHT + 16, y - 9 + 17 * i, 10, 10, kind))
        out.append(text(RIGHT + 32, y + 17 * i, word, "ink small"))
    return out


def trace(run: Run, clock: Clock, y: float) -> list[str]:
    """Under the canvas: a column for each step, a dot for each layer, as `generate.py --trace` prints it."""
    pitch, dot = (EDGE + 3 - LEFT) / len(run.refreshes), 7
    out = [text(LEFT, y, "the prefix in each layer, step by step", "dim small")]
    for step, refresh in enumerate(run.refreshes):
        x = LEFT + step * pitch
        for layer in range(run.layers):
            kind = "shared" if layer < run.depth else "computed" if refresh else "private"
            top = y + 8 + (run.layers - 1 - layer) * (dot + 1)
            out.append(box(x, top, pitch - 3, dot, kind, clock.since(step), 1))
        low = y + 19 + run.layers * (dot + 1)
        out.append(text(x + (pitch - 3) / 2, low, str(step), "dim tiny middle", clock.since(step)))
    return out


def counter(run: Run, clock: Clock, y: float) -> list[str]:
    """Under the layers: two bars of token-layers, and their numbers."""
    most, left, room = run.none[-1], RIGHT + 58, SPAN - 58 - 52
    out = [text(RIGHT, y, "token-layers so far (the prefix was encoded by an earlier request)", "dim small"),
           text(left + room * run.work[-1] / most + 10, y + 21, f"{most / run.work[-1]:.1f} times less work",
                "dim", clock.since(len(run.work) - 1))]
    for i, (name, sums, kind) in enumerate((("bicache", run.work, "computed"), ("none", run.none, "bar"))):
        top = y + 9 + 23 * i
        grow = clock.grow(f"grow-{name}", [n / sums[-1] for n in sums])
        out.append(text(RIGHT, top + 12, name, "ink"))
        wide = room * sums[-1] / most
        out.append(box(left, top, wide, 16, kind, f"{grow}; transform-origin: {left:g}px 0"))
        out.append(text(RIGHT + SPAN, top + 13, "0", "ink number end", f"{clock.during(-1)}; opacity: 0"))
        for step, n in enumerate(sums):
            style = clock.during(step) + ("" if step == len(sums) - 1 else "; opacity: 0")
            out.append(text(RIGHT + SPAN, top + 13, f"{n:,.0f}", "ink number end", style))
    return out


def draw(run: Run) -> str:
    """The SVG: what is drawn without animation is the last step."""
    clock = Clock(len(run.refreshes))
    below = 46 + run.layers * LAYER + 12 + 24 + 17 * 3
    parts = canvas(run, clock) + stack(run, clock) + trace(run, clock, 284) + counter(run, clock, below + 8)
    title = (f"One request on a stored prefix of {run.prefix} tokens: {len(run.work)} steps, "
             f"{sum(run.refreshes)} refreshes, {run.work[-1]:,.0f} token-layers against {run.none[-1]:,.0f} "
             "without a cache")
    size = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">', f"<title>{title}</title>",
        f"<style>{STYLE}", *clock.rules.values(), "</style>",
        box(0.5, 0.5, WIDTH - 1, HEIGHT - 1, "card", round=8), *parts, "</svg>\n"])


def main(argv=None) -> int:
    """The exit code: 0, or 2 for bad input (one sentence on standard error)."""
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("--model", default=ROOT / "checkpoints" / "tiny", help="model folder (the embedded one)")
    p.add_argument("--prefix", default=ROOT / "examples" / "staff.txt", help="file with the document")
    p.add_argument("--prompt", default="Which room is Tom's manager in?", help="the question")
    p.add_argument("--gen-length", type=int, default=16, help="tokens of the answer's canvas (default 16)")
    p.add_argument("--refresh", type=int, default=4, help="R, small enough to be seen often (default 4)")
    p.add_argument("--out", default=ROOT / "docs" / "denoise.svg", help="default docs/denoise.svg")
    args = p.parse_args(argv)
    try:
        document = Path(args.prefix).read_text(encoding="utf-8").strip()
        run = record(args.model, document, args.prompt, args.gen_length, args.refresh)
        Path(f"{args.out}.tmp").write_text(draw(run), encoding="utf-8")
        os.replace(f"{args.out}.tmp", args.out)
    except (ValueError, OSError) as e:
        print(f"animate.py: {e}", file=sys.stderr)
        return 2
    print(f"{args.out}: {len(run.work)} steps, {sum(run.refreshes)} refreshes, depth {run.depth} of "
          f"{run.layers}, {run.work[-1]:,.0f} token-layers, none {run.none[-1]:,.0f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
