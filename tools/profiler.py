"""The profiler: measures the safe depth of a model, as a table of ratio -> layers in the model's folder.

    python tools/profiler.py --model checkpoints/tiny --text notes.txt chats.jsonl --svg depth.svg

Cuts texts or requests at many prefix ratios, compares the K/V of a prefix run alone with those it has in the
whole canvas, and sees how many leading layers stay alike (offline profiling of BiCache, arXiv 2606.07571, but
see `depth.safe_depth`). A tool, since no request ever passes through it: it is run once a model, and what it
leaves behind is a depth.json. An interrupted run goes on with --resume. Checked against a plain loop over one
sample at a time: tests/test_profiler.py.
"""
import argparse
import json
import sys
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from itertools import chain, groupby, islice, product, repeat, zip_longest
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
from depth import RATIOS, STANDINS, Table, closeness, count_standin, safe_depth  # noqa: E402
from cli.lines import check_chat  # noqa: E402
from files import BadInput, read_lines, replace  # noqa: E402
from hub.checkpoint import fingerprint, load  # noqa: E402
from model import Transformer, rotate  # noqa: E402
from profiler_map import svg, text_map  # noqa: E402
from request import Request  # noqa: E402
from tokenizer import Tokenizer  # noqa: E402

BINS = 1001         # of similarity, 0.001 wide from 0 up: enough for the worst decile


# -- one measurement


@torch.inference_mode()
def similarity(model: Transformer, canvases, prefix_lens, standins=repeat(0)) -> Tensor:
    """How alike the K/V of each canvas' first P ids are when run alone (or before so many MASK) and in the
    whole canvas: (n, L) float64.

    Per layer the mean over prefix tokens of the cosine, the heads of a token laid in one vector, K (after
    RoPE) and V averaged. Equal sequences run once; those of like length run together, padded.
    """
    assert all(1 <= P <= len(canvas) for canvas, P in zip(canvases, prefix_lens, strict=True))
    pairs = [((*canvas[:P], *[model.config.mask_id] * n), tuple(canvas))
             for canvas, P, n in zip(canvases, prefix_lens, standins)]
    batches, first = _lay_out(model, {ids for pair in pairs for ids in pair})
    device = model.embed.weight.device

    def prefix_rows(side: int) -> Tensor:                                       # (sum P,)
        rows = [torch.arange(P) + first[pair[side]] for pair, P in zip(pairs, prefix_lens)]
        return torch.cat(rows).to(device)

    alone, within, found = prefix_rows(0), prefix_rows(1), []
    for i, layer in enumerate(model.layers):
        last, kept = i == len(model.layers) - 1, []
        for batch in batches:
            batch.run(layer, kept, last, model.config.heads != model.config.kv_heads)
        kv = torch.stack([torch.cat(parts) for parts in zip(*kept)])            # (2, rows, K * D)
        kv = F.normalize(kv.float(), dim=-1)
        found.append(closeness(kv[:, alone], kv[:, within]))
    values = torch.stack(found, 1).cpu().double()                               # (sum P, L)
    return torch.segment_reduce(values, "mean", lengths=torch.tensor(prefix_lens))


@dataclass
class Batch:
    """Sequences of like length on their way through the layers."""
    x: Tensor                   # (B, T, hidden)
    rope: tuple
    mask: Tensor | None         # (B, 1, 1, T), None if nothing is padded

    def run(self, layer, kept: list, last: bool, gqa: bool) -> None:
        """Through one layer; its K (after RoPE) and V are appended to `kept`, (B * T, K * D) each."""
        skip = self.x.shape[1] if last else 0                   # nobody reads the last layer: K and V only

        def attend(q, k, v):
            k = rotate(k, *self.rope)
            kept.append([y.transpose(1, 2).flatten(2).flatten(0, 1) for y in (k, v)])
            if last:
                return q
            return F.scaled_dot_product_attention(rotate(q, *self.rope), k, v, self.mask, enable_gqa=gqa)
        self.x = layer(self.x, attend, skip)


def _lay_out(model: Transformer, sequences: set) -> tuple[list[Batch], dict]:
    """Batches of sequences, and for each sequence its first row, counted through all batches."""
    batches, first, rows, device = [], {}, 0, model.embed.weight.device
    longest_first = sorted(sequences, key=lambda ids: (-len(ids), ids))
    for _, group in groupby(longest_first, lambda ids: int(len(ids) ** 0.5)):   # pads T by at most 2 sqrt(T)
        group = list(group)
        T = len(group[0])
        at = torch.arange(T, device=device)
        lengths = torch.tensor([len(ids) for ids in group], device=device)
        mask = (at < lengths[:, None])[:, None, None] if len(group[-1]) < T else None
        padded = torch.tensor([ids + ids[:1] * (T - len(ids)) for ids in group], device=device)
        batches.append(Batch(model.embed(padded), model.rope(at[None]), mask))
        for b, ids in enumerate(group):
            first[ids] = rows + b * T
        rows += T * len(group)
    return batches, first


def cut(sample: tuple, percent: int, config, gen_length: int | None = None) -> tuple[list, int] | None:
    """Canvas and P of a sample at a ratio, as near as whole tokens allow; None if the sample cannot meet it.
    A sample is (ids, None), a text to cut anywhere; or (ids, P), a prompt with a shared prefix, as at
    inference: it gets as many MASK (at most gen_length) as make the ratio."""
    ids, P = sample
    if P is None:
        P = (2 * percent * len(ids) + 100) // 200
        return (ids, P) if 1 <= P < len(ids) <= config.max_len else None
    P = min(P, len(ids) - 1)                    # as the engine does
    T = (200 * P + percent) // (2 * percent)
    fits = P > 0 and len(ids) < T <= min(config.max_len, len(ids) + (gen_length or T))
    return ([*ids, *[config.mask_id] * (T - len(ids))], P) if fits else None


# -- many of them


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
    standin: str = "none"


class Sums:
    """What a run has added up so far, for n ratios and L layers, in memory that does not grow with the
    samples."""

    def __init__(self, n: int, L: int):
        self.seen = 0                                               # samples read, used or not
        self.counts = torch.zeros(n, dtype=torch.long)
        self.sums = torch.zeros(n, L, dtype=torch.float64)
        self.bins = torch.zeros(n, L, BINS, dtype=torch.int32)      # how often a similarity was seen

    def add(self, at: Tensor, values: Tensor) -> None:
        """Similarities (m, L) of samples at the ratios numbered `at` (m,)."""
        self.sums.index_add_(0, at, values)
        self.bins.index_add_(0, at, F.one_hot((values * (BINS - 1)).long().clamp(0), BINS).int())

    def save(self, path, key: str) -> None:
        replace(path, lambda to: torch.save([key, self.seen, self.counts, self.sums, self.bins], to))

    def load(self, path, key: str) -> None:
        was, self.seen, self.counts, self.sums, self.bins = torch.load(path, weights_only=True)
        if was != key:
            raise BadInput(f"{path} is of a run with other options or inputs; repeat those or leave out "
                           "--resume")

    def result(self, ratios: list, threshold: float, max_depth: int | None, *origin: str) -> Profile:
        had = self.counts > 0
        if not had.any():
            raise BadInput("no sample meets any ratio: a text needs --length tokens (and as the model takes),"
                           " a request a prefix")
        ratios, n = [r for r, count in zip(ratios, self.counts) if count], self.counts[had]
        mean = self.sums[had] / n[:, None]
        below = self.bins[had].cumsum(-1) * 10 < n[:, None, None]           # (n, L, BINS) not a tenth yet
        worst = below.sum(-1).double() / (BINS - 1)
        depths = safe_depth(mean >= threshold).clamp(0, max_depth)
        depths = depths.flip(0).cummin(0).values.flip(0).tolist()           # no more than at any larger ratio
        return Profile(ratios, n.tolist(), mean.tolist(), worst.tolist(), threshold,
                       dict(zip(ratios, depths)), *origin)


def profile(model: Transformer, samples, ratios=RATIOS, *, threshold=Table.threshold, max_depth=None,
            per_ratio=32, batch=4, gen_length=None, standin="none", fingerprint="", partial=None,
            resume=False, key="", progress=lambda cuts: None) -> Profile:
    """Measure samples (as for `cut`; read once) at ratios (percent) until each ratio has per_ratio of them.

    The depth is that of the layers with mean >= threshold (`safe_depth`), at most max_depth, lowered where a
    larger ratio has less: it grows with r and never passes what was measured. `batch` samples run together at
    all ratios, which share the canvas or the prefix. After each batch the sums are saved in `partial`;
    `resume` goes on from there, in the same run (`key` names the samples).
    """
    ratios, sums = sorted(set(ratios)), Sums(len(set(ratios)), model.config.layers)
    key = repr((key, fingerprint, ratios, per_ratio, batch, gen_length, standin))
    if resume and Path(partial).is_file():
        sums.load(partial, key)
    progress(int(sums.counts.sum()))
    samples = islice(samples, sums.seen, None)
    while (sums.counts < per_ratio).any() and (chunk := list(islice(samples, batch))):
        sums.seen += len(chunk)
        tasks = []
        for sample, (j, percent) in product(chunk, enumerate(ratios)):
            if sums.counts[j] < per_ratio and (found := cut(sample, percent, model.config, gen_length)):
                sums.counts[j] += 1
                tasks.append((j, *found, count_standin(standin, len(found[0]) - len(sample[0]))))
        if tasks:
            at, canvases, prefix_lens, standins = zip(*tasks)
            values = similarity(model, canvases, prefix_lens, standins)             # (tasks, L)
            if not values.isfinite().all():
                raise BadInput("the model gives K/V that are not finite; check its weights, or use --dtype "
                               "float32")
            sums.add(torch.tensor(at), values)
        if partial:
            sums.save(partial, key)
        progress(len(tasks))
    return sums.result(ratios, threshold, max_depth, fingerprint, standin)


def write(p: Profile, path) -> None:
    """Write a depth.json for `depth.find_table`, a line for each entry."""
    rows = lambda values: {r: [round(v, 6) for v in row] for r, row in zip(p.ratios, values)}
    content = dict(
        version=1, date=datetime.now(timezone.utc).isoformat(timespec="seconds"), fingerprint=p.fingerprint,
        layers=len(p.mean[0]), threshold=p.threshold, table=p.table, standin=p.standin,
        samples=dict(zip(p.ratios, p.samples)), mean=rows(p.mean), worst_decile=rows(p.worst))
    lines = ",\n".join(f'"{name}": {json.dumps(value)}' for name, value in content.items())
    replace(path, lambda to: to.write_text(f"{{{lines}}}\n", "utf-8"))


# -- the command


def read(path: Path, tokenizer, length: int, raw: bool):
    """Samples of a file, piece by piece: the requests of a .jsonl, else pieces of `length` ids of a text."""
    return _chats(path, tokenizer, raw) if path.suffix == ".jsonl" else _pieces(path, tokenizer, length)


def _chats(path: Path, tokenizer, raw: bool):
    """Requests as generate.py takes them; `raw`: without chat template, unless their line says otherwise."""
    known = sorted({f.name for f in fields(Request)} - {"prompt"})
    for where, value in read_lines(path):
        chat = check_chat(value, where, known)
        if raw and "messages" in chat.text:
            raise BadInput(f"{where} is a chat, and --raw takes running text; leave one out")
        if "prompt" in chat.text:
            chat.text["raw"] = raw if chat.raw is None else chat.raw
        try:
            yield tokenizer.render(chat.text)
        except BadInput as e:
            raise BadInput(f"{where}: {e}") from e


def _pieces(path: Path, tokenizer, length: int):
    ids = []
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            while lines := file.readlines(2**16):
                ids += tokenizer.encode("".join(lines))
                whole = len(ids) // length * length
                for i in range(0, whole, length):
                    yield ids[i:i + length], None
                ids = ids[whole:]
    except OSError as e:
        raise BadInput(f"{path} cannot be read: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise BadInput(f"{path} cannot be read: it is not UTF-8 text; save it so") from e


def check(a) -> None:
    """ValueError says which option is wrong, before anything is loaded."""
    chats = [path.suffix == ".jsonl" for path in a.text]
    counts = a.samples, a.batch, a.length, a.gen_length, a.max_depth
    percentages = all(r.isdecimal() and 1 <= int(r) <= 99 for r in a.ratios.split(","))
    for wrong, why in (
            (not percentages, "--ratios are whole percentages from 1 to 99"),
            (not 0 < a.threshold <= 1, "--threshold must be above 0 and at most 1"),
            (any(n is not None and n < 1 for n in counts), "counts and lengths start at 1"),
            (a.length and all(chats), "--length cuts plain texts and there is none; leave it out"),
            (a.standin != "none" and not all(chats), "--standin masks is for requests (.jsonl) only"),
            (a.gen_length and not any(chats),
             "--gen-length bounds requests (.jsonl) and there are none; leave it out"),
            (a.raw and not any(chats), "--raw is for requests (.jsonl) and there are none; leave it out")):
        if wrong:
            raise BadInput(why)
    if missing := [path for path in a.text if not path.is_file()]:
        raise BadInput(f"--text {missing[0]} is no file")
    written = [path for path in (a.out, a.svg) if path]
    if len({path.resolve() for path in (*written, *a.text)}) < len(written) + len(set(a.text)):
        raise BadInput("--out, --svg and --text name one file twice; nothing is written over what is read")
    for path in written:
        if not path.parent.is_dir():
            raise BadInput(f"{path.parent} is no folder to write in")


def run(a) -> None:
    """Read, measure, write, print. ValueError says which option or input is wrong."""
    a.out = a.out or a.model / "depth.json"
    check(a)
    tokenizer = Tokenizer.from_folder(a.model, mask_token=a.mask_token)
    model = load(a.model, a.device, getattr(torch, a.dtype), mask_id=tokenizer and tokenizer.mask_id)
    if tokenizer is None:
        raise BadInput(f"{a.model} has no tokenizer to read --text with")
    length, partial = a.length or min(512, model.config.max_len), a.out.with_name(a.out.name + ".partial")
    ratios = sorted({int(r) for r in a.ratios.split(",")})
    one_of_each_file = zip_longest(*(read(path, tokenizer, length, a.raw) for path in a.text))
    files = [(f.name, f.stat().st_size, f.stat().st_mtime) for f in a.text]
    with tqdm(total=a.samples * len(ratios), desc="profile", unit="cut", disable=None) as bar:
        p = profile(model, filter(None, chain.from_iterable(one_of_each_file)), ratios, threshold=a.threshold,
                    max_depth=a.max_depth, per_ratio=a.samples, batch=a.batch, gen_length=a.gen_length,
                    standin=a.standin, fingerprint=fingerprint(a.model), key=[length, a.dtype, a.raw, files],
                    partial=partial, resume=a.resume, progress=bar.update)
    write(p, a.out)
    if a.svg:
        replace(a.svg, lambda path: path.write_text(svg(p), "utf-8"))
    partial.unlink(missing_ok=True)
    print(text_map(p))


def main():
    """The command line; exit code 2 for bad input, 130 for an interrupt."""
    parser = argparse.ArgumentParser(
        description="Measure the safe depth of a model: writes depth.json, prints a map.")
    parser.error = lambda message: parser.exit(2, f"profiler.py: {message}\n")
    option, default = parser.add_argument, profile.__kwdefaults__
    option("--model", type=Path, required=True, metavar="DIR", help="model folder, with its tokenizer")
    option("--text", type=Path, required=True, nargs="+", metavar="FILE",
           help="plain texts; .jsonl: requests, one a line")
    option("--samples", type=int, default=default["per_ratio"], help="samples a ratio (%(default)s)")
    option("--threshold", type=float, default=default["threshold"], help="least mean shared (%(default)s)")
    option("--max-depth", type=int, metavar="N", help="no depth above N: where a larger one loses answers")
    option("--ratios", default=",".join(map(str, RATIOS)), help="percentages (%(default)s)")
    option("--length", type=int,
           help="tokens of a canvas cut from a plain text (512, or what the model takes)")
    option("--gen-length", type=int, help="most MASK behind a request (what the model takes)")
    option("--standin", choices=STANDINS, default="none", help="encoded with MASK behind (%(default)s)")
    option("--raw", action="store_true", help="requests are running text, whatever chat template there is")
    option("--batch", type=int, default=default["batch"],
           help="samples run together, at all ratios (%(default)s)")
    option("--out", type=Path, metavar="FILE", help="the table (DIR/depth.json)")
    option("--svg", type=Path, metavar="FILE", help="also draw the map")
    option("--mask-token", metavar="TOKEN",
           help="how the mask is spelled, where the folder does not say: '<M>'")
    option("--device", default="cpu", help="cpu or cuda (%(default)s)")
    option("--dtype", choices=["float32", "bfloat16", "float16"], default="float32", help="%(default)s")
    option("--resume", action="store_true", help="go on from what an interrupted run left beside --out")
    try:
        run(parser.parse_args())
    except KeyboardInterrupt:
        parser.exit(130, "profiler.py: interrupted; the same command with --resume goes on\n")
    except BadInput as e:
        parser.error(str(e))


if __name__ == "__main__":
    main()
