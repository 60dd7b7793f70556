"""What the results of accuracy.py say: intervals, tables, verdicts and the picture. It runs no model.

Exact match has Wilson's 95% interval. The difference to `none` is paired, question by question, with the
adjusted Wald interval of Bonett and Price (2012: one is added to both counts of changed answers), and
McNemar's exact test of those counts. Questions count as independent, though some share a document.
"""
from math import comb, sqrt
from statistics import mean

import depth
from files import BadInput, read_lines

Z = 1.959964                    # of a normal distribution, two-sided 95%
COLLAPSE = -5                   # points: naive reuse breaks a kind whose whole interval is below
KNOWS = 10                      # percent: below, none itself knows too little of a kind for a verdict
BOUNDS = {"published": 1.8, "ours": 0.5}      # points that bicache auto may lose to none, on every kind
TABLE, DEFAULT, NAIVE = "bicache auto table only, R 16, all", "bicache auto, R 16, all", "naive, all"
INTRA, NONE = "intra, R 16, all", "none, all"
SLOW = ", slow"
COLORS = "#4e9bd1", "#3fae5a", "#c2a32d", "#e07b39", "#d1495b", "#9a6fb0", "#8a8a8a", "#00a0a0"


def wilson(right: int, n: int) -> tuple[float, float]:
    """Bounds of a share, from 0 to 1."""
    p, z = right / n, Z * Z / n
    middle, half = p + z / 2, Z * sqrt(p * (1 - p) / n + z / n / 4)
    return max(0.0, (middle - half) / (1 + z)), min(1.0, (middle + half) / (1 + z))


def paired(lost: int, won: int, n: int) -> tuple[float, float, float]:
    """The difference in points of two shares over the same n questions, and its bounds: `won` are right in
    the first alone, `lost` in the second alone."""
    a, b = (won + 1) / (n + 2), (lost + 1) / (n + 2)
    half = Z * sqrt((a + b - (a - b) ** 2) / (n + 2))
    return 100 * (won - lost) / n, 100 * max(-1.0, a - b - half), 100 * min(1.0, a - b + half)


def mcnemar(lost: int, won: int) -> float:
    """How likely changes as uneven as these are if losing and winning were equally likely (exact,
    two-sided)."""
    n = lost + won
    return min(1.0, 2 * sum(comb(n, k) for k in range(min(lost, won) + 1)) / 2**n)


def read(paths, header=None) -> dict:
    """{"header", "rows": {setup: line}} of files that accuracy.py wrote. ValueError: a line is broken, or a
    file belongs to other questions, another model or other options than the first one, or than `header`."""
    rows = {}
    for path in paths:
        known = False
        for where, line in read_lines(path):
            try:
                name = line["setup"] if "header" not in line else None
            except (TypeError, KeyError) as e:
                raise BadInput(f"{where} is no result of accuracy.py; remove it ({e!r})") from e
            if name:
                rows.setdefault(name, line)
                continue
            header, known = header or line["header"], True
            keys = {**header, **line["header"]}
            if wrong := [key for key in keys if header.get(key) != line["header"].get(key)]:
                raise BadInput(f"{path} was measured with another {wrong[0]}; give another file, "
                               "or repeat its options")
        if not known and (rows or header is None):
            raise BadInput(f"{path} has no header; these are no results of accuracy.py")
    return dict(header=header, rows=rows)


class Results:
    """The rows of a run, held against `none` at the same pace on the same questions."""

    def __init__(self, found: dict):
        self.header = found["header"]
        self.rows = {name: found["rows"][name] for name in self.header["need"]}
        self.kinds = self.header["kinds"]
        self.states = found["rows"].get("states", {})

    def places(self, name: str) -> list[int]:
        row = self.rows[name]
        return range(len(row["right"])) if row["places"] is None else row["places"]

    def pairs(self, name: str, kind=None, target=None) -> list[tuple]:
        """(right here, right with none, equal tokens) for each question of a kind, all for None, and at a
        ratio."""
        h, base = self.header, NONE + SLOW * name.endswith(SLOW)
        none = {i: j for j, i in enumerate(self.places(base))}
        row, base = self.rows[name], self.rows[base]
        places = [(j, i) for j, i in enumerate(self.places(name))
                  if kind in (None, h["kind"][i]) and target in (None, h["target"][i])]
        return [(row["right"][j] == "1", base["right"][none[i]] == "1",
                 row["answers"][j] == base["answers"][none[i]]) for j, i in places]

    def changes(self, name: str, kind=None, target=None) -> tuple[int, int, int]:
        """(lost, won, n) against none."""
        pairs = self.pairs(name, kind, target)
        return sum(b > a for a, b, _ in pairs), sum(a > b for a, b, _ in pairs), len(pairs)

    def right(self, name: str, kind=None, target=None) -> tuple[int, int]:
        pairs = self.pairs(name, kind, target)
        return sum(a for a, _, _ in pairs), len(pairs)

    def saved(self, name: str) -> float:
        """The share of none's token-layers that are not computed, on the same questions; encoding and
        measuring count."""
        base = NONE + SLOW * name.endswith(SLOW)
        none = dict(zip(self.places(base), self.rows[base]["work"]))
        return 1 - sum(self.rows[name]["work"]) / sum(none[i] for i in self.places(name))

    def difference(self, name: str, kind=None) -> tuple[float, float, float]:
        """Points more than none, and their bounds."""
        return paired(*self.changes(name, kind))

    def verdict(self, kind: str) -> str:
        """Whether naive reuse breaks a kind: "collapses", "holds" or "cannot be told"."""
        _, low, high = self.difference(NAIVE, kind)
        return "collapses" if high < COLLAPSE else "holds" if low > COLLAPSE else "cannot be told"

    def dependence(self, kind: str) -> float | None:
        """How much the prefix' K/V change with the question: 1 - the similarity of the worst decile of tokens
        between two questions, in the layer where it is the most; None if no document has two of that kind."""
        between = self.states.get(kind, {}).get("between")
        return 1 - min(between[1]) if between else None


def within(difference: tuple, limit: float) -> str:
    """Whether a difference loses at most `limit` points: "yes", "yes, its interval not" or "NO"."""
    point, low, _ = difference
    return "yes" if low >= -limit else "yes, its interval not" if point >= -limit else "NO"


def points(x: tuple) -> str:
    return f"{x[0]:+.1f} ({x[1]:+.1f} {x[2]:+.1f})"


def show(found: dict) -> dict:
    """Print tables and verdicts; what the last line of the bench holds."""
    r = Results(found)
    h, columns, width = r.header, [*r.kinds, None], max(map(len, r.rows)) + 1
    head = "".join(f"{kind or 'all':>20}" for kind in columns)

    def table(title, names, cell, more="", rest=lambda name: ""):
        print(f"\n{title}\n{'':{width}}{head}{more}")
        for name in names:
            print(f"{name:{width}}" + "".join(f"{cell(name, kind):>20}" for kind in columns) + rest(name))

    def share(name, kind):
        right, n = r.right(name, kind)
        return f"{100 * right / n:.1f} ({'-'.join(f'{100 * x:.1f}' for x in wilson(right, n))})"

    def work(name):
        row = r.rows[name]
        steps, refreshes = mean(row["forwards"]), mean(row["refreshes"])
        return f"{len(row['right']):6}{100 * r.saved(name):7.1f}{steps:7.2f}{refreshes:6.2f}"

    def changed(name, kind):
        lost, won, _ = r.changes(name, kind)
        differ = sum(not same for *_, same in r.pairs(name, kind))
        return f"{lost} / {won}, {differ}, {mcnemar(lost, won):.3f}"

    n, lists = h["questions"].split()[0], len(set(h["document"]))
    table(f"exact match, percent, with 95% intervals; {n} questions on {lists} lists\n"
          "slow: a token a step; saved: token-layers, percent of none's; steps and refreshes: of an answer",
          r.rows, share, f"{'n':>6}{'saved':>7}{'steps':>7}{'refr.':>6}", work)
    table("difference to none on the same questions, points",
          [name for name in r.rows if not name.startswith(NONE)],
          lambda name, kind: points(r.difference(name, kind)))
    table("answers that changed: right ones lost / won, other tokens, McNemar's p",
          (DEFAULT, TABLE, NAIVE, INTRA, "none, block"), changed)

    print("\nratio   achieved       lists     T  table's depth  used (table only)  used (default)"
          "  none  auto  naive")
    ratios = [by_ratio(r, target) for target in dict.fromkeys(h["target"])]
    for x in ratios:
        print("{target:<6}  {least:.3f}-{most:.3f} {lists:7}{canvas:6.0f}{table:15}{used_table_only:19.2f}"
              "{used:16.2f}{none:6.1f}{auto:6.1f}{naive:7.1f}".format(**x))
    print("\nsimilarity of a prefix' K/V by layer: alone and with a question; between two questions; at the "
          "words of one of these")
    for kind in r.kinds:
        print(f"  {kind} ({r.states[kind]['n']} pairs)")
        for what in ("alone", "between", "named"):
            for how, values in zip(("mean", "worst decile", "lowest"), r.states[kind].get(what, ())):
                print(f"    {f'{what}, {how}':24}" + " ".join(f"{x:.4f}" for x in values))
    lines = verdicts(r)
    print("", *lines, sep="\n")

    def numbers(name, kind):
        (right, n), (lost, won, _) = r.right(name, kind), r.changes(name, kind)
        return dict(n=n, right=right, interval=wilson(right, n), difference=r.difference(name, kind),
                    lost=lost, won=won)
    setups = {}
    for name, row in r.rows.items():
        kinds = {kind or "all": numbers(name, kind) for kind in columns}
        setups[name] = dict(saved=r.saved(name), seconds=row["seconds"], total=row["total"], kinds=kinds)
    return dict(setups=setups, ratios=ratios, states=r.states, verdicts=lines)


def by_ratio(r: Results, target: float) -> dict:
    """What was aimed at and met, the depths, and the percentages of right answers of all kinds."""
    h = r.header
    at = [i for i, t in enumerate(h["target"]) if t == target]
    ratio = [h["ratio"][i] for i in at]
    used = lambda name: mean(r.rows[name]["depths"][i] for i in at)
    share = lambda name: 100 * r.right(name, None, target)[0] / len(at)
    return dict(target=target, mean=mean(ratio), least=min(ratio), most=max(ratio),
                lists=len({h["document"][i] for i in at}), canvas=mean(h["canvas"][i] for i in at),
                table=chosen(h, target), used_table_only=used(TABLE), used=used(DEFAULT),
                none=share(NONE), auto=share(DEFAULT), naive=share(NAIVE))


def chosen(header: dict, target: float) -> int:
    """The table's depth at the mean ratio of the questions that aim at one."""
    ratio = mean(x for x, t in zip(header["ratio"], header["target"]) if t == target)
    return depth.lookup({int(k): d for k, d in header["table"].items()}, round(ratio * 10**4), 10**4)


def verdicts(r: Results) -> list[str]:
    """Sentences, each decided by the data."""
    lines, said, L = [], {kind: r.verdict(kind) for kind in r.kinds}, r.header["layers"]
    knows = {kind: 100 * right / n for kind in r.kinds for right, n in [r.right(NONE, kind)]}
    little = {kind: f" (none knows only {x:.0f}%: little to lose)" * (x < KNOWS) for kind, x in knows.items()}
    for kind, word in said.items():
        falls = [str(d) for d in range(L + 1) if r.difference(f"bicache depth {d}, R 16, all", kind)[2] < 0]
        depths = f"fixed depths of {', '.join(falls)} layers surely lose"
        depths = depths if falls else "no fixed depth surely loses"
        lost = points(r.difference(NAIVE, kind))
        lines.append(f"naive reuse, {kind}: {word}{little[kind]}, {lost} points; {depths}")
    for kind in (fallen := [kind for kind, word in said.items() if word == "collapses"]):
        point, low, high = seen = r.difference(INTRA, kind)
        why = ("keep its answers: what naive reuse lacks is the question in the prefix" if low > COLLAPSE else
               "lose them as well: keeping K/V is the matter, not the question" if high < COLLAPSE else
               "leave it open")
        lines.append(f"why, {kind}: prefix K/V that saw the question at the first step and were kept "
                     f"(intra, R 16) {why}, {points(seen)} points")
    if not fallen:
        lines.append("why: no kind surely collapses under naive reuse on this model")
    change = {kind: x for kind in r.kinds if (x := r.dependence(kind)) is not None}
    hit, spared = ([x for kind, x in change.items() if said[kind] == word] for word in ("collapses", "holds"))
    most_first = sorted(change.items(), key=lambda item: -item[1])
    told = ("" if not hit or not spared else
            "; the kinds that collapse change the most" if min(hit) > max(spared) else
            "; not by itself the reason: a kind that holds changes as much as one that collapses")
    lines.append("prefix K/V change with the question (worst decile of tokens, worst layer): "
                 + ", ".join(f"{kind} {x:.3f}" for kind, x in most_first) + told)
    differences = {kind: r.difference(DEFAULT, kind) for kind in r.kinds}
    for kind, x in differences.items():
        lines.append(f"bicache auto, {kind}{little[kind]}: {points(x)} points; " + "; ".join(
            f"within {limit} ({whose}): {within(x, limit)}" for whose, limit in BOUNDS.items()))
    for whose, limit in BOUNDS.items():
        found = {within(x, limit) for x in differences.values()}
        lines.append(f"bicache auto within {limit} points of none on every kind ({whose}): " + (
            "NO" if "NO" in found else "yes" if found == {"yes"} else "yes, the intervals not of all"))
    for where, whole in (("on all", True), ("on a part of the", False)):
        names = [name for name, row in r.rows.items()
                 if name.startswith("bicache auto") and (row["places"] is None) == whole]
        worst, name, kind = min((r.difference(name, kind), name, kind) for name in names for kind in r.kinds)
        lines.append(f"the worst of bicache auto {where} questions: {points(worst)} points, {kind}, {name}")
    for base in (NONE, NONE + SLOW):
        steps = r.rows[base]["forwards"]
        lines.append(f"{base}: an answer takes {mean(steps):.1f} steps, at most {max(steps)}; from there on "
                     "all R are the same work")
    return lines


def draw(found: dict) -> str:
    """Exact match against depth as an SVG: a panel for each kind, a line for each ratio, the table's choice a
    ring, none's level dashed. No background and mid-grey text: it reads on light and dark pages."""
    r, w, h, gap = Results(found), 250, 150, 52                         # of a panel; between two
    L, targets = r.header["layers"], list(dict.fromkeys(r.header["target"]))
    color = dict(zip(targets, COLORS * len(targets)))
    rate = lambda name, *at: (lambda right, n: right / n if n else None)(*r.right(name, *at))
    text = lambda x, y, words, more="": f'<text x="{x:.0f}" y="{y:.0f}"{more}>{words}</text>'
    columns = min(3, len(r.kinds))
    width, height = columns * (w + gap) + 16, 50 + -(-len(r.kinds) // columns) * (h + 70)
    legend = " ".join(f'<tspan fill="{c}">&#9632;</tspan> {t:g}' for t, c in color.items())
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" viewBox="0 0 {width} {height}" '
           'font-family="sans-serif" font-size="11" fill="#7a7a7a">',
           text(42, 16, "Exact match against the depth of reuse (bicache, R = 16, window all), by kind of "
                "question"),
           text(42, 34, f"r = P / T: {legend}, ring: the table's depth, dashed: none")]
    for p, kind in enumerate(r.kinds):
        x0, y0 = 42 + p % columns * (w + gap), 74 + p // columns * (h + 70)
        x, y = (lambda d: x0 + d * w / L), (lambda share: y0 + h - share * h)
        naive = f"naive reuse {r.difference(NAIVE, kind)[0]:+.1f}, {r.verdict(kind)}"
        out += [f'<g id="{kind}">', text(x0, y0 - 12, f"{kind}: {naive}")]
        for share in (0, 0.25, 0.5, 0.75, 1):
            out += [f'<path d="M{x0} {y(share):.1f}h{w}" stroke="#7a7a7a" stroke-opacity="0.25"/>',
                    text(x0 - 5, y(share) + 4, f"{share:.0%}", ' text-anchor="end"')]
        out += [text(x(d), y0 + h + 15, d, ' text-anchor="middle"') for d in range(0, L + 1, -(-L // 16))]
        out.append(text(x(L / 2), y0 + h + 29, "depth, layers", ' text-anchor="middle"'))
        for i, (t, c) in enumerate(color.items()):
            line = [rate(f"bicache depth {d}, R 16, all", kind, t) for d in range(L + 1)]
            if None in line:
                continue
            title = f"r {t:g}: " + ", ".join(f"{share:.1%} at {d}" for d, share in enumerate(line))
            at = " ".join(f"{x(d):.1f},{y(share):.1f}" for d, share in enumerate(line))
            d = chosen(r.header, t)
            none = f"M{x0} {y(rate(NONE, kind, t)):.1f}h{w}"
            out += [f'<g fill="none" stroke="{c}" stroke-width="1.5"><title>{title}</title>',
                    f'<path d="{none}" stroke-dasharray="4 4" stroke-opacity="0.6"/>',
                    f'<polyline points="{at}"/>',
                    f'<circle cx="{x(d):.1f}" cy="{y(line[d]):.1f}" r="{3.5 + i:g}"/></g>']
        out.append("</g>")
    return "\n".join([*out, "</svg>\n"])
