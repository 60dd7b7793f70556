"""The pictures of a profile: mean similarity of a prefix' K/V, layers x ratios, and the depth that follows
from it.

`text_map` for a terminal, `svg` for a page; both take a `profiler.Profile`, hold nothing and measure nothing.
The SVG has no background and mid-grey text, so that it reads on light and dark pages. Checked:
tests/test_profiler.py, against the numbers of a profile of a small model.
"""
FEW = 8                     # a ratio with fewer samples is marked
TITLE = "Similarity of the K/V of a prefix, alone and in the whole canvas"
RED = "#e5383b"
CELL, LEFT, TOP = 26, 60, 46        # width of a ratio; where the map begins


def _marked(value, samples: int) -> str:
    return f"{value}{'*' * (samples < FEW)}"


def text_map(p) -> str:
    """The mean similarity for a terminal, layers (upwards) x ratios, in hundredths rounded down."""
    def cell(layer: int, percent: int, mean: float) -> str:
        shared = "=" if layer < p.table[percent] else " "
        return f"{shared}{max(0, min(99, int(mean * 100 + 1e-9))):2}"

    def line(name: str, values) -> str:
        return f"{name:>9}" + "".join(f"{value:>4}" for value in values)

    layers = [line(f"layer {i}", [cell(i, r, row[i]) for r, row in zip(p.ratios, p.mean)])
              for i in range(len(p.mean[0]))]
    return "\n".join([
        *reversed(layers), line("ratio %", p.ratios), line("depth", p.table.values()),
        line("samples", [_marked(n, n) for n in p.samples]),
        f"= shared: mean >= {p.threshold:g} here, one layer above, below and at larger ratios; "
        f"* fewer than {FEW} samples"])


def svg(p) -> str:
    """The same as an SVG, with the depth as a line and each cell's numbers where the mouse rests on it."""
    L, low = len(p.mean[0]), min(0.9, *map(min, p.mean))
    height = 352 // max(L, 16)                                          # of a layer
    right, bottom = LEFT + CELL * len(p.ratios), TOP + height * L
    width = max(right + 12, 440)

    def color(mean: float) -> str:
        part = ((mean - low) / (1 - low)) ** 2
        return "#" + bytes(round(a + b * part) for a, b in ((46, 204), (30, 184), (110, -30))).hex()

    steps = [low + (1 - low) * k / 4 for k in range(5)]
    scale = " ".join(f'<tspan fill="{color(s)}">&#9632;</tspan> {s:.2f}' for s in steps)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" viewBox="0 0 {width} {bottom + 50}" '
           'font-family="sans-serif" font-size="11" fill="#7a7a7a">',
           _text(LEFT, 16, TITLE),
           _text(LEFT, 34, f'{scale}, <tspan fill="{RED}">line</tspan>: depth at {p.threshold:g}'),
           *(_text(LEFT - 6, bottom - (i + 0.5) * height + 4, f"layer {i}", "end")
             for i in range(0, L, -(-L // 16))),
           _text(LEFT, bottom + 36, f"prefix ratio r = P / T, percent (*: fewer than {FEW} samples)")]
    for x, r, row, worst, n in zip(range(LEFT, right, CELL), p.ratios, p.mean, p.worst, p.samples):
        for i, s in enumerate(row):
            out.append(f'<rect x="{x}" y="{bottom - (i + 1) * height}" width="{CELL}" height="{height}" '
                       f'fill="{color(s)}"><title>layer {i}, {r}%: mean {s:.4f}, '
                       f'worst decile {worst[i]:.3f}, {n} samples</title></rect>')
        out.append(_text(x + CELL / 2, bottom + 15, _marked(r, n), "middle"))
    points = []
    for x, depth in zip(range(LEFT, right, CELL), p.table.values()):
        y = bottom - depth * height
        points += [f"{x},{y}", f"{x + CELL},{y}"]
    points = " ".join(points)
    out.append(f'<polyline id="depth" points="{points}" fill="none" stroke="{RED}" stroke-width="3"/>')
    return "\n".join([*out, "</svg>\n"])


def _text(x: float, y: float, content: str, anchor: str = "start") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{content}</text>'
