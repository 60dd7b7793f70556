"""Who may start, and with what: the prefix looked up, the depth chosen, room made, a new prefix encoded.

    admission.check(request)                    # can there ever be room? ValueError if not
    run = admission.admit(waiting, alone)       # its pages are its own now; None: there is no room yet
    admission.close(run)                        # and now they are free again

What the modes of caching differ in is decided here, once a request: the prefix P, the most it may share
(`limit`), the depth b it gets. From then on the page table says where to read, and neither the loop
(engine.py) nor the pass (step.py) knows of modes. Checked: tests/test_engine.py (the identities),
test_errors.py (limits), test_serving.py (nothing is left behind).
"""
import math
from typing import NamedTuple

import torch

import decoding
import depth as depths
from cache import PAGE, Cache, Entry, Lease, Repeats, count_pages
from files import BadInput
from model import Transformer
from request import Request
from running import Running, Waiting
from step import Pass


class Plan(NamedTuple):
    """What a request with a prefix of P tokens would get."""
    limit: int                  # the most that may be shared: what the table (or the mode) says
    depth: int                  # b: what is shared, at most `limit`
    store: bool                 # look the prefix up, and keep it if it is new


class Admission:
    """Decides for one engine; its options are explained there.

    table and self_profile matter with depth "auto" alone. suffix_layers: in how many layers suffix K/V
    outlive a pass, all if a window reads them later, else 1, and one set of pages serves all. bucket:
    rounds lengths up (step.bucket). counts: the engine's, which an encoded prefix adds to.
    """

    def __init__(self, model: Transformer, cache: Cache, step, guard, counts, *, mode: str, depth, table,
                 self_profile, auto_prefix: bool, suffix_layers: int, bucket, standin: str):
        self.model, self.cache, self.step, self.guard, self.counts = model, cache, step, guard, counts
        self.mode, self.depth, self.table, self.self_profile = mode, depth, table, self_profile
        self.suffix_layers, self.bucket = suffix_layers, bucket
        self.standin = getattr(table, "standin", "none") if standin == "table" else standin
        self.repeats = Repeats() if auto_prefix and mode == "bicache" else None

    # -- a request by itself ---------------------------------------------------------------------------------

    def check(self, r: Request) -> None:
        """ValueError unless an otherwise empty cache has room for the request, which request.check passed."""
        P = self._named(r) or 0
        if not self._fits(r, P):
            need, budget = self.cache.budget_for(*self._pages(r, P)) / 2**20, self.cache.budget / 2**20
            raise BadInput(f"the request needs {need:.2f} MB of cache and the budget is {budget:.2f} MB; "
                           f"set cache_mb to {math.ceil(need * 100) / 100:g} or more")

    def _named(self, r: Request) -> int | None:
        """P as the request names it, or None: whatever is stored. One prompt token is left to the suffix."""
        if self.mode == "none":
            return 0
        if r.prefix_len is None:
            return len(r.prompt) - 1 if self.mode == "intra" else None
        return min(r.prefix_len, len(r.prompt) - 1)

    def salt(self, r: Request) -> tuple:
        """What sets apart prefixes of equal ids: whose they are, and how many MASK stood behind them."""
        return r.salt, depths.count_standin(self.standin, r.gen_length)

    def _limit(self, P: int, T: int) -> int:
        """The most that a request may share: the safe depth b for P of T tokens, floored to a boundary."""
        L = self.model.config.layers
        if not P or self.mode in ("none", "intra"):
            return 0
        if self.mode == "naive":
            return L
        if self.depth != "auto":
            return self._floor(self.depth)
        return self._floor(L if self.self_profile else depths.lookup(self.table, P, T))

    def _floor(self, depth: int) -> int:
        """The nearest layer at or below `depth` that a refresh can start from."""
        return max(b for b in (0, *self.cache.boundaries, self.model.config.layers) if b <= depth)

    def _pages(self, r: Request, P: int, depth: int | None = None) -> tuple[int, int]:
        """All kv pages and hidden pages that a request takes in an otherwise empty cache, its shared prefix
        included: at the depth for P or, with that prefix stored, at another."""
        T = len(r.prompt) + r.gen_length
        limit = self._limit(P, T)
        if depth is None:
            depth = 0 if self.self_profile else limit       # a prefix' first request shares nothing there
        shared = count_pages(P) if limit else 0
        own = self.cache.pages_needed(P, T - P, depth, self.suffix_layers)
        canvases = 2 if r.cfg_scale else 1
        return canvases * (own + self.cache.layers * shared), canvases * len(self.cache.boundaries) * shared

    def _fits(self, r: Request, P: int, depth: int | None = None) -> bool:
        pages, hidden = self._pages(r, P, depth)
        return pages <= len(self.cache.kv) - 2 and hidden < len(self.cache.hidden)

    # -- a request among others ------------------------------------------------------------------------------

    def admit(self, waiting: Waiting, alone: bool) -> Running | None:
        """Start a request: None while there is no room for its pages; RuntimeError then if it is `alone`."""
        r, cache = waiting.request, self.cache
        if waiting.prefix_len is None:                      # once: a second look would meet itself
            named = self._named(r)
            waiting.prefix_len = self._find(r) if named is None else named
        P, T = waiting.prefix_len, len(r.prompt) + r.gen_length
        plan = self._plan(r, P)
        # For guidance a shadow steps along in the same passes: the same canvas behind a prompt of masks.
        prompts = [r.prompt, [self.model.config.mask_id] * len(r.prompt)] if r.cfg_scale else [r.prompt]
        entries = [cache.find(prompt[:P], self.salt(r), P) if plan.store else None for prompt in prompts]
        new = entries.count(None) if plan.store else 0
        own = len(prompts) * cache.pages_needed(P, T - P, plan.depth, self.suffix_layers)
        shared = new * count_pages(P)
        if not cache.make_room(own + shared * cache.layers, shared * len(cache.boundaries),
                               len(prompts) + new, keep=entries):
            if alone:
                raise RuntimeError("the cache is held by another stream of this engine; finish or close that "
                                   "one first")
            return None
        run = self._open_all(waiting, prompts, plan, entries)
        if plan.store:
            cache.hits += run.hit
            cache.misses += not run.hit
        return run

    def _find(self, r: Request) -> int:
        """P of a request that names no prefix: what is stored, or what it has in common with an earlier
        one, if anything of it can be shared and fits beside the request. Raises the count of misses if
        not."""
        ids = r.prompt[:-1]
        entry = self.cache.find(ids, self.salt(r))
        stored = len(entry.ids) if entry else 0
        known = self.repeats.count(ids, r.salt) if self.repeats else 0
        if stored and known < stored + PAGE:                # not one more entry for a few ids
            known = 0
        for P in (known, stored):
            if self._plan(r, P).store and self._fits(r, P):
                return P
        self.cache.misses += 1
        return 0

    def _plan(self, r: Request, P: int) -> Plan:
        """What the table allows for a prefix of P tokens, and what the guard makes of it."""
        T = len(r.prompt) + r.gen_length
        limit = self._limit(P, T)
        if not self.guard or not limit:
            return Plan(limit, limit, limit > 0)
        depth, measured = self.guard.advise(r.prompt[:P], self.salt(r), T, limit)
        depth = self._floor(depth)
        if not self._fits(r, P, depth):     # sharing less takes more pages; without the prefix it always fits
            return Plan(limit, 0, False)
        return Plan(limit, depth, depth > 0 or not measured)

    def _open_all(self, waiting: Waiting, prompts: list, plan: Plan, entries: list) -> Running:
        """A request with its pages, and with its shadow if it has guidance."""
        runs = []
        try:
            for prompt, entry in zip(prompts, entries):
                runs.append(self._open(waiting, prompt, plan, entry))
        except BaseException:               # an interrupt, too, must not keep what the first one got
            for run in runs:
                self.close(run)
            raise
        run, *shadow = runs
        run.table_depth = plan.limit
        if shadow:
            run.shadow, = shadow
            run.shadow.masked, run.shadow.blocks = run.masked, run.blocks
            run.encode_token_layers += run.shadow.encode_token_layers
        return run

    def _open(self, waiting: Waiting, prompt: list, plan: Plan, entry: Entry | None) -> Running:
        """Give a canvas its pages, for which there is room, and encode its prefix if that is to be stored."""
        r, P, mask_id = waiting.request, waiting.prefix_len, self.model.config.mask_id
        canvas = torch.tensor(r.canvas or [mask_id] * r.gen_length)                         # (G,)
        masked = canvas == mask_id          # the one place where the ids say so; from here on this does
        given = (~masked).nonzero()
        suffix = torch.cat([torch.tensor(prompt[P:]), canvas])                              # (S,)
        blocks = decoding.plan_blocks(r, masked)
        new, salt, work = plan.store and entry is None, self.salt(r), 0.0
        if new:
            entry = self.cache.allocate(prompt[:P], salt)
        lease = self.cache.open(entry, P, len(suffix), plan.depth, self.suffix_layers)
        if new:
            try:
                work = self._encode(entry, lease)
            except BaseException:           # nor must it leave half an entry
                self.cache.close(lease)
                self.cache.discard(entry)
                raise
        return Running(waiting.index, r, prompt, lease, salt, P, plan.depth, hit=plan.depth > 0 and not new,
                       suffix=suffix, masked=masked, blocks=blocks,
                       free_from=int(given[-1]) + 1 if len(given) else 0, encode_token_layers=work)

    def _encode(self, entry: Entry, lease: Lease) -> float:
        """Run the prefix, all rows in both directions, and publish its K/V and boundary states: alone (the
        paper's prefix-only K/V), or before its stand-in, whose K/V go to the request's suffix pages and are
        lost. Returns the token-layers."""
        c, P, n, device = self.model.config, len(entry.ids), entry.salt[1], self.cache.kv.device
        one = lambda n: torch.tensor([n], device=device)
        ids = entry.ids + (0,) * (min(self.bucket(P, PAGE), c.max_len) - P)
        x = self.model.embed(torch.tensor([ids], device=device))                    # (1, P + padding, hidden)
        standin = torch.full((1, self.bucket(n, 16) if n else 0), c.mask_id, device=device)
        batch = Pass(standin, one(0), one(n), one(entry.id), one(P), one(n), standin[0, :0])
        table, behind = self.cache.table, slice(count_pages(P), -1)
        table[entry.id, :, behind] = table[lease.id, :, behind]
        pages = min(count_pages(len(ids)) + count_pages(n), table.shape[2] - 1)
        _, entering = self.step(batch, decoding.Rules(), pages, 0, x, tuple(self.cache.boundaries))
        table[entry.id, :, behind] = 0
        self.cache.write_boundaries(entry, [x[:, :P] for x in entering])
        self.cache.publish(entry)
        work = (c.layers - 0.5) * P + c.layers * n
        self.counts.update(encoded_prefixes=1, token_layers=work)
        return work

    def close(self, run: Running) -> None:
        """Give back what a request holds; nothing if it has given it back already."""
        for r in (run, run.shadow):
            if r and r.lease:
                self.cache.close(r.lease)
                r.lease = None
