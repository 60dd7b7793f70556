"""Safe depth: how many leading layers may reuse the K/V of a shared prefix, given the prefix ratio r = P / T.

A table maps a percentage to a depth: the largest key <= r wins, below the first key nothing is shared. A model folder's
own `depth.json` goes first, then a published table of that name; without either the depth is 0, and a warning says how to

    python depth.py profile --model checkpoints/tiny --text notes.txt chats.jsonl --svg depth.svg

measure one: cut texts or requests at many ratios, compare the K/V of a prefix run alone with those it has in the whole
canvas, see how many leading layers stay alike (BiCache, arXiv 2606.07571, but see `safe_depth`). Checked: tests/test_depth.py.
"""
import argparse
import json
import os
import warnings
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import chain, groupby, islice, product, zip_longest
from pathlib import Path

import torch
import torch.nn.functional as F
from tqdm import tqdm

from checkpoint import fingerprint, load
from model import Transformer, rotate

# Published with arXiv 2608.26140 (sands-lab/ACache, policies/), made by the profiler of arXiv 2606.07571: 500 samples of
# WildChat-4.8M a ratio, threshold 0.97. name: (layers, {percent: depth})
PUBLISHED = {
    "GSAI-ML/LLaDA-8B-Instruct": (32, {0: 1, 5: 2, 10: 3, 13: 5, 15: 7, 20: 8, 21: 9, 30: 10, 49: 11, 54: 13, 66: 14, 68: 15,
                                       73: 16, 87: 17, 93: 18, 95: 19, 97: 20, 98: 22, 99: 32}),
    "Dream-org/Dream-v0-Instruct-7B": (28, {0: 1, 9: 2, 10: 4, 19: 5, 32: 6, 47: 7, 56: 8, 63: 9, 76: 12, 85: 13, 86: 14,
                                            92: 16, 94: 17, 95: 18, 96: 28}),
}
RATIOS = (*range(5, 100, 5), 97, 98, 99)        # percent
FEW = 8             # a ratio with fewer samples is marked in the pictures
BINS = 1001         # of similarity, 0.001 wide from 0 up: enough for the worst decile, in memory that does not grow


class Table(dict):
    """{percent: depth}, and the mean similarity that each shared layer was held to."""
    threshold = 0.97

    def __init__(self, depths, threshold=threshold):
        super().__init__(depths)
        self.threshold = threshold


def lookup(table: dict | None, P: int, T: int) -> int:
    """The depth for a prefix of P tokens on a canvas of T. In integers: 29 of 100 are 29%, not 28.999."""
    keys = [key for key in table or () if key * T <= 100 * P]
    return table[max(keys)] if keys else 0


def find_table(folder, layers: int) -> Table | None:
    """The table of a model folder: its own, or a published one of that name and so many layers, or None.
    ValueError: its depth.json is broken or was measured on another model."""
    folder, path = Path(folder), Path(folder) / "depth.json"
    remedy = f"python depth.py profile --model {folder} --text FILE"
    if path.is_file():
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            owner, percents, depths = (raw["fingerprint"], raw["layers"]), range(101), range(raw["layers"] + 1)
            table = {percents.index(int(r)): depths.index(depth) for r, depth in raw["table"].items()}  # or ValueError
            table = Table(table, float(raw.get("threshold", Table.threshold)))
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise ValueError(f"{path} is no depth table ({e!r}); delete it or measure again: {remedy}") from e
        if owner != (fingerprint(folder), layers):
            raise ValueError(f"{path} was measured on another model; delete it or measure again: {remedy}")
        return table
    config = folder / "config.json"
    origin = json.loads(config.read_text()).get("_name_or_path") if config.is_file() else None
    last = lambda name: Path(str(name)).name.lower()
    for name, (count, table) in PUBLISHED.items():
        if count == layers and last(name) in (last(folder.resolve()), last(origin)):
            return Table({r: d if d == count else d - 1 for r, d in table.items()})     # `safe_depth`: they count layers that are alike
    warnings.warn(f"{folder} has no depth table: depth 0 is used, no layer is shared; measure one: {remedy}", stacklevel=2)
    return None


@torch.inference_mode()
def similarity(model: Transformer, canvases, prefix_lens) -> torch.Tensor:
    """How alike the K/V of each canvas' first P ids are when run alone and in the whole canvas: (n, L) float64.

    Per layer the mean over prefix tokens of the cosine, the heads of a token laid in one vector, K (after RoPE) and V
    averaged. Equal sequences, canvas or prefix, run once; those of like length run together, padded.
    """
    pairs = [(tuple(canvas[:P]), tuple(canvas)) for canvas, P in zip(canvases, prefix_lens, strict=True)]
    assert all(1 <= P == len(alone) for (alone, _), P in zip(pairs, prefix_lens)), "a prefix has 1 to all ids of its canvas"
    batches, first, rows, device = [], {}, 0, model.embed.weight.device
    longest_first = sorted({ids for pair in pairs for ids in pair}, key=lambda ids: (-len(ids), ids))
    for _, group in groupby(longest_first, lambda ids: int(len(ids) ** 0.5)):       # pads T by at most 2 sqrt(T)
        group = list(group)
        T = len(group[0])
        at, lengths = torch.arange(T, device=device), torch.tensor([len(ids) for ids in group], device=device)
        mask = (at < lengths[:, None])[:, None, None] if len(group[-1]) < T else None               # (B, 1, 1, T)
        x = model.embed(torch.tensor([ids + ids[:1] * (T - len(ids)) for ids in group], device=device))
        batches.append((x, model.rope(at[None]), mask))
        first.update((ids, rows + b * T) for b, ids in enumerate(group))
        rows += T * len(group)
    alone, within = (torch.cat([torch.arange(P) + first[ids] for ids, P in zip(side, prefix_lens)]).to(device)
                     for side in zip(*pairs))                               # (sum P,) where the prefix rows stand
    gqa, found = model.config.heads != model.config.kv_heads, []
    for i, layer in enumerate(model.layers):
        kept = []
        for g, (x, rope, mask) in enumerate(batches):
            skip = x.shape[1] if i == len(model.layers) - 1 else 0          # nobody reads the last layer: K and V only
            def attend(q, k, v):
                k = rotate(k, *rope)
                kept.append([y.transpose(1, 2).flatten(2).flatten(0, 1) for y in (k, v)])           # (B * T, K * D)
                return q if skip else F.scaled_dot_product_attention(rotate(q, *rope), k, v, mask, enable_gqa=gqa)
            batches[g] = layer(x, attend, skip), rope, mask
        kv = F.normalize(torch.stack([torch.cat(parts) for parts in zip(*kept)]).float(), dim=-1)   # (2, rows, K * D)
        found.append(closeness(kv[:, alone], kv[:, within]))
    return torch.segment_reduce(torch.stack(found, 1).cpu().double(), "mean", lengths=torch.tensor(prefix_lens))


def closeness(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The cosine of the unit vectors a and b (2, n, K * D), K and V averaged: (n,). By the chord: exactly 1 where both are
    equal, as a dot product in float32 is not."""
    return 1 - (a - b).square().sum((0, -1)) / 4


def safe_depth(alike: torch.Tensor) -> torch.Tensor:
    """The largest depth (...) at which no layer's K/V differ, from whether each layer's do not (..., L) bool, layer 0 first.

    One less than the leading layers that are alike, unless all are: a refresh at depth d starts from the stored state entering
    layer d, which has not seen the suffix, so that layer d, too, has the K/V of the prefix alone.
    """
    leading = alike.long().cumprod(-1).sum(-1)
    return torch.where(leading == alike.shape[-1], leading, (leading - 1).clamp(0))


def cut(sample: tuple, percent: int, config, gen_length: int | None = None) -> tuple[list, int] | None:
    """Canvas and P of a sample at a ratio, as near as whole tokens allow; None if the sample cannot meet it. A sample is
    (ids, None), a text to cut anywhere; or (ids, P), a prompt with a shared prefix, as at inference: it gets as many MASK
    (at most gen_length) as make the ratio."""
    ids, P = sample
    if P is None:
        P = (2 * percent * len(ids) + 100) // 200
        return (ids, P) if 1 <= P < len(ids) <= config.max_len else None
    P = min(P, len(ids) - 1)                    # as the engine does
    T = (200 * P + percent) // (2 * percent)
    fits = P > 0 and len(ids) < T <= min(config.max_len, len(ids) + (gen_length or T))
    return ([*ids, *[config.mask_id] * (T - len(ids))], P) if fits else None


@dataclass
class Profile:
    """What was measured at each ratio that had samples."""
    ratios: list                # percent, ascending
    samples: list               # how many
    mean: list                  # over samples, (L,) each
    worst: list                 # a tenth of the samples is below it, (L,) each
    threshold: float
    table: dict                 # {percent: depth}
    fingerprint: str = ""


def profile(model: Transformer, samples, ratios=RATIOS, *, threshold=Table.threshold, per_ratio=32, batch=4, gen_length=None,
            fingerprint="", partial=None, resume=False, key="", progress=lambda cuts: None) -> Profile:
    """Measure samples (as for `cut`; read once) at ratios (percent) until each ratio has per_ratio of them.

    The depth is that of the layers with mean >= threshold (`safe_depth`), lowered where a larger ratio has less: it grows with
    r and never passes what was measured. `batch` samples run together at all ratios, which share the canvas or the prefix.
    After each batch the sums are saved in `partial`; `resume` goes on from there, in the same run (`key` names the samples).
    """
    ratios, L = sorted(set(ratios)), model.config.layers
    key = repr((key, fingerprint, ratios, per_ratio, batch, gen_length))
    seen, counts = 0, torch.zeros(len(ratios), dtype=torch.long)
    sums, bins = torch.zeros(len(ratios), L, dtype=torch.float64), torch.zeros(len(ratios), L, BINS, dtype=torch.int32)
    if resume and Path(partial).is_file():
        was, seen, counts, sums, bins = torch.load(partial, weights_only=True)
        if was != key:
            raise ValueError(f"{partial} is of a run with other options or inputs; repeat those or leave out --resume")
    progress(int(counts.sum()))
    samples = islice(samples, seen, None)
    while (counts < per_ratio).any() and (chunk := list(islice(samples, batch))):
        tasks, seen = [], seen + len(chunk)
        for sample, (j, percent) in product(chunk, enumerate(ratios)):
            if counts[j] < per_ratio and (found := cut(sample, percent, model.config, gen_length)):
                counts[j] += 1
                tasks.append((j, *found))
        if tasks:
            at, canvases, prefix_lens = zip(*tasks)
            values, at = similarity(model, canvases, prefix_lens), torch.tensor(at)                 # (n, L)
            if not values.isfinite().all():
                raise ValueError("the model gives K/V that are not finite; check its weights, or use --dtype float32")
            sums.index_add_(0, at, values)
            bins.index_add_(0, at, F.one_hot((values * (BINS - 1)).long().clamp(0), BINS).int())
        if partial:
            _replace(partial, lambda path: torch.save([key, seen, counts, sums, bins], path))
        progress(len(tasks))
    if not counts.any():
        raise ValueError("no sample meets any ratio: a text needs --length tokens (and as the model takes), a request a prefix")
    had, n = [r for r, count in zip(ratios, counts) if count], counts[counts > 0]
    mean = sums[counts > 0] / n[:, None]
    worst = (bins[counts > 0].cumsum(-1) * 10 < n[:, None, None]).sum(-1).double() / (BINS - 1)
    depths = safe_depth(mean >= threshold).flip(0).cummin(0).values.flip(0)
    return Profile(had, n.tolist(), mean.tolist(), worst.tolist(), threshold, dict(zip(had, depths.tolist())), fingerprint)


def _replace(path, save) -> None:
    """Let `save` write a file so that whoever looks finds the old one or the new one, whole."""
    temporary = Path(path).with_name(f".{Path(path).name}.tmp")
    save(temporary)
    os.replace(temporary, path)


def write(p: Profile, path) -> None:
    """Write a depth.json for `find_table`, a line for each entry."""
    rows = lambda values: {r: [round(v, 6) for v in row] for r, row in zip(p.ratios, values)}
    content = dict(version=1, date=datetime.now(timezone.utc).isoformat(timespec="seconds"), fingerprint=p.fingerprint,
                   layers=len(p.mean[0]), threshold=p.threshold, table=p.table, samples=dict(zip(p.ratios, p.samples)),
                   mean=rows(p.mean), worst_decile=rows(p.worst))
    lines = ",\n".join(f'"{name}": {json.dumps(value)}' for name, value in content.items())
    _replace(path, lambda to: to.write_text(f"{{{lines}}}\n"))


def text_map(p: Profile) -> str:
    """The mean similarity for a terminal, layers (upwards) x ratios, in hundredths rounded down."""
    cell = lambda i, r, s: f"{'=' if i < p.table[r] else ' '}{max(0, min(99, int(s * 100 + 1e-9))):2}"
    lines = [(f"layer {i}", [cell(i, r, row[i]) for r, row in zip(p.ratios, p.mean)]) for i in range(len(p.mean[0]))][::-1]
    lines += [("ratio %", p.ratios), ("depth", p.table.values()), ("samples", [f"{n}{'*' * (n < FEW)}" for n in p.samples])]
    return "\n".join("".join([f"{name:>9}", *(f"{v:>4}" for v in values)]) for name, values in lines) + (
        f"\n= shared: mean >= {p.threshold:g} here, one layer above, below and at larger ratios; * fewer than {FEW} samples")


def svg(p: Profile) -> str:
    """The same as an SVG, with the depth as a line. No background and mid-grey text: it reads on light and dark pages."""
    L, low, w, left, top = len(p.mean[0]), min(0.9, *map(min, p.mean)), 26, 60, 46
    h = 352 // max(L, 16)
    right, bottom, width = left + w * len(p.ratios), top + h * L, max(left + w * len(p.ratios) + 12, 440)
    color = lambda s: "#" + bytes(round(a + b * ((s - low) / (1 - low))**2) for a, b in ((46, 204), (30, 184), (110, -30))).hex()
    text = lambda x, y, s, anchor="start": f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{s}</text>'
    scale = " ".join(f'<tspan fill="{color(s)}">&#9632;</tspan> {s:.2f}' for s in (low + (1 - low) * k / 4 for k in range(5)))
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" viewBox="0 0 {width} {bottom + 50}" '
           'font-family="sans-serif" font-size="11" fill="#7a7a7a">',
           text(left, 16, "Similarity of the K/V of a prefix, alone and in the whole canvas"),
           text(left, 34, f'{scale}, <tspan fill="#e5383b">line</tspan>: depth at {p.threshold:g}'),
           *(text(left - 6, bottom - (i + 0.5) * h + 4, f"layer {i}", "end") for i in range(0, L, -(-L // 16))),
           text(left, bottom + 36, f"prefix ratio r = P / T, percent (*: fewer than {FEW} samples)")]
    for x, r, row, worst, n in zip(range(left, right, w), p.ratios, p.mean, p.worst, p.samples):
        out += [f'<rect x="{x}" y="{bottom - (i + 1) * h}" width="{w}" height="{h}" fill="{color(s)}"><title>layer {i}, {r}%: '
                f'mean {s:.4f}, worst decile {worst[i]:.3f}, {n} samples</title></rect>' for i, s in enumerate(row)
                ] + [text(x + w / 2, bottom + 15, f"{r}{'*' * (n < FEW)}", "middle")]
    line = " ".join(f"{left + (j + k) * w},{bottom - d * h}" for j, d in enumerate(p.table.values()) for k in (0, 1))
    return "\n".join([*out, f'<polyline id="depth" points="{line}" fill="none" stroke="#e5383b" stroke-width="3"/>', "</svg>\n"])


def read(path: Path, tokenizer, length: int):
    """Samples of a file, piece by piece: the requests of a .jsonl, else pieces of `length` ids of a text."""
    ids = []
    with open(path, encoding="utf-8") as f:
        for number, line in enumerate(f, 1) if path.suffix == ".jsonl" else ():
            try:
                yield tokenizer.render(json.loads(line))
            except (ValueError, KeyError, TypeError) as e:
                raise ValueError(f'line {number} of {path} is no request with "messages", or "prefix" and "prompt": {e!r}') from e
        while lines := f.readlines(2**16):
            ids += tokenizer.encode("".join(lines))
            yield from ((ids[i:i + length], None) for i in range(0, len(ids) - length + 1, length))
            ids = ids[len(ids) // length * length:]


def run(a):
    """The command `profile`: read, measure, write, print. ValueError says which option or input is wrong."""
    from tokenizer import Tokenizer
    chats, out, ratios = [path.suffix == ".jsonl" for path in a.text], a.out or a.model / "depth.json", a.ratios.split(",")
    for wrong, why in (
            (not all(r.isdecimal() and 1 <= int(r) <= 99 for r in ratios), "--ratios are whole percentages from 1 to 99"),
            (not 0 < a.threshold <= 1, "--threshold must be above 0 and at most 1"),
            (0 >= min(n for n in (a.samples, a.batch, a.length, a.gen_length) if n is not None), "counts and lengths start at 1"),
            (a.length and all(chats), "--length cuts plain texts and there is none; leave it out"),
            (a.gen_length and not any(chats), "--gen-length bounds requests (.jsonl) and there are none; leave it out"),
            *((not path.is_file(), f"--text {path} is no file") for path in a.text),
            *((not path.parent.is_dir(), f"{path.parent} is no folder to write in") for path in (out, a.svg) if path)):
        if wrong:
            raise ValueError(why)
    model, tokenizer = load(a.model, a.device, getattr(torch, a.dtype)), Tokenizer.from_folder(a.model)
    if tokenizer is None:
        raise ValueError(f"{a.model} has no tokenizer to read --text with")
    length, partial = a.length or min(512, model.config.max_len), out.with_name(out.name + ".partial")
    samples = filter(None, chain.from_iterable(zip_longest(*(read(path, tokenizer, length) for path in a.text))))
    with tqdm(total=a.samples * len(set(ratios)), desc="profile", unit="cut", disable=None) as bar:
        p = profile(model, samples, map(int, ratios), threshold=a.threshold, per_ratio=a.samples, batch=a.batch,
                    gen_length=a.gen_length, fingerprint=fingerprint(a.model), partial=partial, resume=a.resume,
                    key=[length, a.dtype, [(f.name, f.stat().st_size, f.stat().st_mtime) for f in a.text]], progress=bar.update)
    write(p, out)
    if a.svg:
        _replace(a.svg, lambda path: path.write_text(svg(p)))
    partial.unlink(missing_ok=True)
    print(text_map(p))


def main():
    """The command line; exit code 2 for bad input, 130 for an interrupt."""
    parser = argparse.ArgumentParser(description="Measure the safe depth of a model: writes depth.json, prints a map.")
    parser.error = lambda message: parser.exit(2, f"depth.py: {message}\n")
    option, default = parser.add_argument, profile.__kwdefaults__
    option("command", choices=["profile"])
    option("--model", type=Path, required=True, metavar="DIR", help="model folder, with its tokenizer")
    option("--text", type=Path, required=True, nargs="+", metavar="FILE", help="plain texts; .jsonl: requests, one a line")
    option("--samples", type=int, default=default["per_ratio"], help="samples a ratio (%(default)s)")
    option("--threshold", type=float, default=default["threshold"], help="least mean of a shared layer (%(default)s)")
    option("--ratios", default=",".join(map(str, RATIOS)), help="percentages (%(default)s)")
    option("--length", type=int, help="tokens of a canvas cut from a plain text (512, or what the model takes)")
    option("--gen-length", type=int, help="most MASK behind a request (what the model takes)")
    option("--batch", type=int, default=default["batch"], help="samples run together, at all ratios (%(default)s)")
    option("--out", type=Path, metavar="FILE", help="the table (DIR/depth.json)")
    option("--svg", type=Path, metavar="FILE", help="also draw the map")
    option("--device", default="cpu", help="cpu (default) or cuda")
    option("--dtype", choices=["float32", "bfloat16", "float16"], default="float32", help="%(default)s")
    option("--resume", action="store_true", help="go on from what an interrupted run left beside --out")
    try:
        run(parser.parse_args())
    except KeyboardInterrupt:
        parser.exit(130, "depth.py: interrupted; the same command with --resume goes on\n")
    except UnicodeDecodeError as e:
        parser.error(f"a file of --text is not UTF-8 text ({e})")
    except (ValueError, OSError, RuntimeError, AssertionError) as e:    # the last two: torch, of a device that is not there
        parser.error(str(e).partition("\n")[0])


if __name__ == "__main__":
    main()
