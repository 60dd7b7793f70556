"""Online measurement of the safe depth: do the shared K/V resemble the exact ones for real prefixes?

A depth table is an average over other texts. The guard compares, for the first request on a new prefix and
then at one refresh in `every`, the shared K/V with those of the whole canvas run from layer 0, and keeps a
running mean per layer, prefix and ratio bin. Where the mean contradicts the table, that prefix gets the
smaller depth from the next admission on; it never gets more than the table allows, and if it comes down to 0,
new requests have nothing stored to compare with: it stays there. Measuring waits while it has had its SHARE
of the work. Without a table (`self_profile`) a prefix shares nothing until it was measured, and that does not
wait.

A measurement stands beside the decoding and changes no token of the request it looks at. It goes beyond arXiv
2606.07571, whose table is fixed. Checked: tests/test_guard.py, test_guard_cost.py.
"""
from collections import OrderedDict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import depth as depths
from cache import PAGE, Cache, Entry, count_pages
from files import BadInput
from model import Transformer, rotate
from request import whole
from running import Running

# The part of all token-layers that may go into measuring, half of it into the first look at a prefix, half
# into further ones.
SHARE = 0.02
FREE = 8                # measurements of an engine that need not wait for that
BINS = (0, *depths.RATIOS)


@torch.inference_mode()
def compare(model: Transformer, cache: Cache, entry: Entry, canvas: Tensor, layers: int) -> Tensor:
    """Similarity (layers,) float64 of the stored K/V of `entry` with those its tokens have in canvas (T,),
    for the first layers; as `profiler.similarity` computes it, but of the K/V that requests really read. One
    read from the device."""
    P, device, found = len(entry.ids), model.embed.weight.device, []
    unit = lambda kv: F.normalize(kv.float(), dim=-1)
    x, rope = model.embed(canvas.to(device)[None]), model.rope(torch.arange(len(canvas), device=device)[None])
    gqa = model.config.heads != model.config.kv_heads
    for i, layer in enumerate(model.layers[:layers]):
        pages = cache.kv[cache.table[entry.id, i, :count_pages(P)].long()]              # (n, 2, K, page, D)
        shared = pages.permute(1, 0, 3, 2, 4).reshape(2, len(pages) * PAGE, -1)[:, :P]  # (2, P, K * D)
        skip = len(canvas) if i == layers - 1 else 0            # nobody reads what comes out of the last one

        def attend(q, k, v):
            k = rotate(k, *rope)
            exact = torch.cat([k, v])[:, :, :P].transpose(1, 2).flatten(2)              # (2, P, K * D)
            found.append(depths.closeness(unit(shared), unit(exact)))
            return q if skip else F.scaled_dot_product_attention(rotate(q, *rope), k, v, enable_gqa=gqa)
        x = layer(x, attend, skip)
    return torch.stack(found).mean(1).double().cpu()


def check(measure, self_profile, table, auto: bool) -> None:
    """ValueError unless the engine's options fit each other and a depth that is looked up (`auto`)."""
    if not auto and (measure or self_profile):
        raise BadInput("measure and self_profile have an effect only with cache 'bicache' and depth "
                       "'auto'; leave them out")
    if self_profile is not None:
        number = isinstance(self_profile, (int, float)) and not isinstance(self_profile, bool)
        if not number or not 0 < self_profile <= 1:
            raise BadInput(f"self_profile is {self_profile!r}; it must be a similarity above 0 and at most "
                           "1, like 0.97")
        if table:
            raise BadInput("self_profile and table exclude each other: either measures or trusts; give one")
    if measure is not None and whole("measure", measure) < (1 if self_profile else 0):
        least = "1 or more with self_profile" if self_profile else "1 or more, or 0 for never"
        raise BadInput(f"measure is {measure}; it must be {least}")
    if measure and not table and not self_profile:
        raise BadInput(f"measure is {measure} and there is no depth table to hold against; leave it out, "
                       "or set self_profile")


@dataclass
class Bin:
    """One prefix at one ratio."""
    refreshes: int = 0
    samples: int = 0
    mean: Tensor | None = None              # (layers,)


class Guard:
    """What was measured of each prefix, and the depth that follows from it.

    threshold: least mean similarity of a shared layer. trust: a prefix that was not measured gets the table's
    depth; if not, 0. every: one refresh in so many is measured (16). A request with guidance is measured, its
    all-mask shadow goes along. The latest KNOWN pairs of prefix and ratio are remembered, also when the K/V
    are evicted.
    """
    KNOWN = 1024

    def __init__(self, model: Transformer, cache: Cache, threshold: float, trust: bool,
                 every: int | None = None):
        self.model, self.cache = model, cache
        self.threshold, self.trust, self.every = threshold, trust, every or 16
        self.bins = OrderedDict()               # (prefix, percent, table's depth) -> Bin
        self.samples, self.spent = 0, [0, 0]    # token-layers of first and of further measurements

    def advise(self, ids: list, salt: tuple, T: int, limit: int) -> tuple[int, bool]:
        """Layers to share, at most `limit`, for prefix `ids` on a canvas of T; and if that was measured."""
        prefix, here = hash((salt, *ids)), ratio_bin(len(ids), T)
        known = [at for at in BINS if (prefix, at, limit) in self.bins]
        table = {at: self._safe(self.bins[prefix, at, limit].mean) for at in known}
        if self.trust:
            depth = min(limit, table.get(here, limit))
        else:                                   # the larger r, the more alike: a smaller bin's depth will do
            depth = min(limit, depths.lookup(table, len(ids), T))
        return depth, here in table

    def similarity(self, run: Running) -> list[float]:
        """The running mean for a request's prefix and ratio bin, of each layer that the depth rests on; [] if
        there is none."""
        bin = self.bins.get(self._key(run))
        return bin.mean.tolist() if bin else []

    def refreshed(self, run: Running, work: float) -> bool:
        """Take note of a request about to refresh (or at a step where it would), and measure if it is its
        turn. work: all token-layers so far but those of measurements."""
        entry, key = run.lease.entry, self._key(run)
        if entry is None:
            return False
        # Depth d lives from the K/V of layer d, too.
        layers = min(run.table_depth + 1, self.model.config.layers)
        cost = (layers - 0.5) * run.total                   # the last one gives K and V only
        bin = self.bins.get(key) or Bin()
        bin.refreshes += 1
        again = bin.mean is not None
        waits = self.samples >= FREE and self.spent[again] + cost > SHARE / 2 * work
        if again and bin.refreshes % self.every or waits and (again or self.trust):
            return False
        canvas = torch.cat([torch.tensor(entry.ids), run.suffix])
        values = compare(self.model, self.cache, entry, canvas, layers)
        self.spent[again] += cost
        run.measure_token_layers += cost
        if not values.isfinite().all():         # the step will say so; of the prefix it says nothing
            return True
        self.samples += 1
        bin.samples += 1
        bin.mean = bin.mean + (values - bin.mean) / bin.samples if again else values
        self.bins[key] = bin
        self.bins.move_to_end(key)
        while len(self.bins) > self.KNOWN:
            self.bins.popitem(last=False)
        return True

    def _key(self, run: Running) -> tuple:
        # A hash and no ids to confirm it: the wrong prefix' mean could only choose a depth up to the table's.
        prefix = hash((run.salt, *run.prompt[:run.prefix_len]))
        return prefix, ratio_bin(run.prefix_len, run.total), run.table_depth

    def _safe(self, mean: Tensor) -> int:
        unknown = self.model.config.layers - len(mean)      # deeper than the table goes
        return int(depths.safe_depth(F.pad(mean >= self.threshold, (0, unknown))))


def ratio_bin(P: int, T: int) -> int:
    """The largest ratio that the profiler measures, in percent, which P tokens of T reach."""
    return max(percent for percent in BINS if percent * T <= 100 * P)
