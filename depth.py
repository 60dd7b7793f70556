"""Safe depth: how many leading layers may reuse the K/V of a shared prefix, given the prefix ratio r = P / T.

A table maps a percentage to a depth: the largest key <= r wins, below the first key nothing is shared. A
model folder's own `depth.json` goes first, then a published table of that name; without either the depth is
0, and a warning names the command that measures one (tools/profiler.py).

When layers count as alike and what depth follows from that is here, too: the profiler and the guard share it
(BiCache, arXiv 2606.07571, but see `safe_depth`). Checked: tests/test_depth.py.
"""
import warnings
from pathlib import Path

import torch

from files import BadInput, read_json
from hub.checkpoint import fingerprint
from hub.families import hub_name

# Published with arXiv 2608.26140 (sands-lab/ACache, policies/), made by the profiler of arXiv 2606.07571: 500
# samples of WildChat-4.8M a ratio, threshold 0.97. name: (layers, {percent: leading layers that are alike})
PUBLISHED = {
    "GSAI-ML/LLaDA-8B-Instruct": (32, {
        0: 1, 5: 2, 10: 3, 13: 5, 15: 7, 20: 8, 21: 9, 30: 10, 49: 11, 54: 13,
        66: 14, 68: 15, 73: 16, 87: 17, 93: 18, 95: 19, 97: 20, 98: 22, 99: 32}),
    "Dream-org/Dream-v0-Instruct-7B": (28, {
        0: 1, 9: 2, 10: 4, 19: 5, 32: 6, 47: 7, 56: 8, 63: 9,
        76: 12, 85: 13, 86: 14, 92: 16, 94: 17, 95: 18, 96: 28}),
}
RATIOS = (*range(5, 100, 5), 97, 98, 99)        # percent, at which depths are measured
STANDINS = ("none", "masks")


class Table(dict):
    """{percent: depth}, the mean similarity that each shared layer was held to, and its stand-in."""
    threshold, standin = 0.97, "none"

    def __init__(self, depths, threshold=threshold, standin=standin):
        super().__init__(depths)
        self.threshold, self.standin = threshold, standin


def lookup(table: dict | None, P: int, T: int) -> int:
    """The depth for a prefix of P tokens on a canvas of T. In integers: 29 of 100 are 29%, not 28.999."""
    keys = [key for key in table or () if key * T <= 100 * P]
    return table[max(keys)] if keys else 0


def find_table(folder, layers: int) -> Table | None:
    """The table of a model folder: its own, or a published one of that name and so many layers, or None.
    ValueError: its depth.json is broken or was measured on another model."""
    folder = Path(folder)
    remedy = f"python tools/profiler.py --model {folder} --text FILE"
    if (folder / "depth.json").is_file():
        return _own_table(folder, layers, remedy)
    table = _published_table(folder, layers)
    if table is None:
        warnings.warn(f"{folder} has no depth table: depth 0 is used, no layer is shared; "
                      f"measure one: {remedy}", stacklevel=2)
    return table


def _own_table(folder: Path, layers: int, remedy: str) -> Table:
    path = folder / "depth.json"
    try:
        raw = read_json(path)
        owner = raw["fingerprint"], raw["layers"]
        percents, depths = range(101), range(raw["layers"] + 1)
        # `index` raises ValueError for what is not in the range.
        table = {percents.index(int(percent)): depths.index(depth) for percent, depth in raw["table"].items()}
        standin = STANDINS[STANDINS.index(raw.get("standin", Table.standin))]
        table = Table(table, float(raw.get("threshold", Table.threshold)), standin)
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise BadInput(f"{path} is no depth table ({e!r}); delete it or measure again: {remedy}") from e
    if owner != (fingerprint(folder), layers):
        raise BadInput(f"{path} was measured on another model; delete it or measure again: {remedy}")
    return table


def _published_table(folder: Path, layers: int) -> Table | None:
    """By the folder's name (of what a link leads to; in the hub's cache, the model's), or by where
    config.json says the model comes from."""
    config = folder / "config.json"
    origin = read_json(config).get("_name_or_path") if config.is_file() else None
    names = [_last_part(hub_name(folder)), _last_part(origin)]
    for name, (count, table) in PUBLISHED.items():
        if count == layers and _last_part(name) in names:
            # In our count, see `safe_depth`: one less, unless all layers are alike.
            return Table({percent: d if d == count else d - 1 for percent, d in table.items()})
    return None


def _last_part(name) -> str:
    return Path(str(name)).name.lower()


def count_standin(standin: str, gen_length: int) -> int:
    """How many MASK stand behind a prefix while it is encoded, in place of a request's own rows: the power of
    two at or below G, so that those of like length share an entry, and none meets more than it has."""
    return 1 << gen_length.bit_length() - 1 if standin == "masks" else 0


def closeness(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """How alike K/V are: the cosine of the unit vectors a and b (2, n, K * D), K and V averaged: (n,). By the
    chord: exactly 1 where both are equal, as a dot product in float32 is not."""
    return 1 - (a - b).square().sum((0, -1)) / 4


def safe_depth(alike: torch.Tensor) -> torch.Tensor:
    """The largest depth (...) at which no layer's K/V differ, from whether each layer's do not (..., L) bool,
    layer 0 first.

    One less than the leading layers that are alike, unless all are: a refresh at depth d starts from the
    stored state entering layer d, which has not seen the suffix, so that layer d, too, has the K/V of the
    prefix alone.
    """
    leading = alike.long().cumprod(-1).sum(-1)
    return torch.where(leading == alike.shape[-1], leading, (leading - 1).clamp(0))
