"""The engine: requests in, tokens out, with the K/V of shared prompt prefixes reused at a safe depth.

    engine = Engine.from_folder("checkpoints/tiny", cache="bicache")
    results = engine.generate([Request(prompt=[...], prefix_len=40, gen_length=32)])

One loop serves all modes; they differ in three numbers of a request, never in code:

    cache     prefix P               depth b             refreshed
    none      0                      -                   -             the whole canvas is suffix
    intra     named, or all but one  0                   each R steps  prefix K/V kept inside the request only
    bicache   named, or found        from the table      each R steps  BiCache (arXiv 2606.07571)
    naive     named, or found        L (all layers)      never         what an autoregressive engine would do

This file says who runs when; step.py what a pass computes, decoding.py what it commits, cache.py where K/V lie. Checked
against a plain loop (tests/reference.py) and golden outputs. One read from the device per pass: tokens and confidences.
"""
import math
import time
import warnings
import weakref
from collections import Counter, deque

import torch
from torch import Tensor

import decoding
import depth as depths
import guard
import kernels
from cache import PAGE, Cache, Entry, Repeats, count_pages
from decoding import Rules
from model import Transformer, fingerprint, load
from request import Event, Request, Result, Running, Stream, check, whole
from step import Pass, Step, bucket

CACHE_MODES = ("none", "intra", "bicache", "naive")
WINDOWS = ("all", "rest", "block")


class NotFinite(ValueError):
    """The model gave NaN or infinity, and has written some into its pages."""


class Engine:
    """A model, its cache, and the denoising loop.

    refresh: R, in steps. window: the rows computed after a block's first step, `all` of the suffix, the `rest` from the
    block on (Fast-dLLM's prefix cache) or the `block` (its dual cache). cache_mb: MB for K/V and boundary states, allocated
    here. auto_prefix: leading ids that two requests had in common become a shared prefix. attention: triton, torch or auto.
    measure: at one refresh in so many (0: none) the guard looks whether the table holds for the prefix (guard.py).
    self_profile: no table; each prefix gets the depth at which its own K/V were measured to be that much alike (0.97, say).
    """

    def __init__(self, model: Transformer, *, cache="bicache", depth="auto", refresh=16, window="all", cache_mb=256,
                 max_batch=8, compile=False, attention="auto", auto_prefix=True, measure=None, self_profile=None, table=None,
                 tokenizer=None, key=""):
        c, weight = model.config, model.embed.weight
        for name, value, known in (("cache", cache, CACHE_MODES), ("window", window, WINDOWS)):
            if value not in known:
                raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(known)}")
        if depth != "auto" and not (isinstance(depth, int) and 0 <= depth <= c.layers):
            raise ValueError(f"depth is {depth!r}; it must be 'auto' or a layer count from 0 to {c.layers}")
        for name, value in (("refresh", refresh), ("max_batch", max_batch), ("cache_mb", cache_mb)):
            if not isinstance(value, (int, float)) or not 0 < (value if name == "cache_mb" else whole(name, value)) < 2**40:
                raise ValueError(f"{name} is {value!r}; it must be a positive number")
        auto = cache == "bicache" and depth == "auto"
        guard.check(measure, self_profile, table, auto)
        if auto and table is None and not self_profile:
            warnings.warn("this model has no depth table: depth 0 is used, no layer is shared; measure one (python depth.py "
                          "profile --model DIR --text FILE) and pass it as table, or set self_profile", stacklevel=2)
        self.model, self.mode, self.depth, self.table, self.tokenizer = model, cache, depth, table, tokenizer
        self.window, self.max_batch, self.device = window, max_batch, weight.device
        self.refresh = refresh if cache in ("intra", "bicache") else 1      # the others have nothing to refresh
        self.eos_ids = {c.eos_id} | (tokenizer.eos_ids if tokenizer else set())
        boundaries = () if cache != "bicache" else range(1, c.layers) if c.layers <= 16 else range(3, c.layers - 1, 4)
        self.cache = Cache(c, int(cache_mb * 2**20), boundaries, max_batch, weight.device, weight.dtype, key)
        self.self_profile, threshold = self_profile, self_profile or getattr(table, "threshold", depths.Table.threshold)
        use = auto and measure != 0 and (table or self_profile)
        self.guard = guard.Guard(model, self.cache, threshold, trust=not self_profile, every=measure) if use else None
        self.repeats = Repeats() if auto_prefix and cache == "bicache" else None
        self.attention = kernels.choose(weight.device, attention)
        self.step = Step(model, self.cache.kv, self.cache.table, self.attention, compile)
        self.bucket = bucket if compile else lambda n, least: n
        self.streams, self.counts = weakref.WeakSet(), Counter()       # passes, host_reads, token_layers, ...

    @classmethod
    def from_folder(cls, path, *, cache="bicache", depth="auto", refresh=16, window="all", device="cpu",
                    dtype="float32", cache_mb=256, max_batch=8, **options):
        """An engine on a model folder: weights, depth table and, if there is one, the tokenizer.

        Raises ValueError for a folder that cannot be used, naming what is wrong with it.
        """
        from tokenizer import Tokenizer
        model = load(path, device, dtype)
        model = model if options.get("compile") else model.pack()
        looked_up = cache == "bicache" and depth == "auto" and not options.get("self_profile")
        table = depths.find_table(path, model.config.layers) or {} if looked_up else None       # {}: it has warned already
        return cls(model, cache=cache, depth=depth, refresh=refresh, window=window, cache_mb=cache_mb,
                   max_batch=max_batch, table=table, tokenizer=Tokenizer.from_folder(path), key=fingerprint(path), **options)

    # -- the public calls -----------------------------------------------------------------------------------------

    def generate(self, requests) -> list[Result]:
        """Results in the order of the requests."""
        requests = list(requests)
        results = [None] * len(requests)
        for event in self.stream(requests):
            if event.result:
                results[event.index] = event.result
        return results

    def stream(self, requests):
        """Events as they happen, `Event.result` set on each request's last.

        A list is checked whole before this returns. Any other iterable is asked for the next request when there is a place
        for it (None: nothing now) and may never end. ValueError names the request, what is wrong and the remedy.
        """
        items = requests if isinstance(requests, (list, tuple)) else []
        stream = Stream(deque(), iter(()) if items is requests else iter(requests))
        for request in items:
            self._arrive(stream, request)
        self.streams.add(stream)
        return self._stream(stream)

    def cancel(self, request: Request) -> None:
        """Stop a request that was handed to `stream`: its pages are free at once, its last event says "cancelled"."""
        for stream in self.streams:
            for item in stream.waiting:
                item[1] = None if item[1] is request else item[1]
            for run in stream.running:
                if run.request is request and run.blocks:
                    run.cancelled = True
                    run.blocks.clear()
                    self._close(run)

    @torch.inference_mode()
    def _stream(self, stream: Stream):
        running = stream.running
        try:
            while running or stream.waiting or stream.source:
                for run in running:
                    self._measure(run)
                # Requests join where the deep layers are recomputed anyway, so that all refresh at the same steps.
                if all(run.forwards % self.refresh == 0 for run in running if self._refreshes(run)):
                    while len(running) < self.max_batch and self._next(stream, patient=not running):
                        index, request, _ = stream.waiting[0]
                        if request is None:
                            yield Event(index, 0, False, (0, 0), [], 0, 0, Result([], "cancelled", 0, 0, 0, 0, False, 0, 0))
                        elif run := self._admit(stream.waiting[0], alone=not running):
                            running.append(run)
                            self._measure(run)
                        else:
                            break
                        stream.waiting.popleft()
                for depth, group in self._groups([run for run in running if not run.cancelled]):
                    if group := [run for run in group if not run.cancelled]:        # the listener may have, just now
                        yield from self._advance(group, depth)
                for run in [run for run in running if not run.blocks]:
                    running.remove(run)
                    self._close(run)
                    if run.cancelled:
                        yield Event(run.index, run.forwards, False, (0, 0), [], run.prefix_len, run.depth, self._result(run))
        except NotFinite:
            for run in running:
                self._close(run)
            self.cache.scrub()
            raise
        finally:                            # the caller may stop listening at any step
            for run in running:
                self._close(run)
            self.streams.discard(stream)

    def _next(self, stream: Stream, patient: bool) -> bool:
        """Whether a request waits; if none does, ask the source. With nothing else to do, give it a moment."""
        if not stream.waiting and stream.source:
            try:
                request = next(stream.source)
                if request is not None:
                    self._arrive(stream, request)
                elif patient:
                    time.sleep(0.001)
            except StopIteration:
                stream.source = None
        return bool(stream.waiting)

    def _arrive(self, stream: Stream, request: Request) -> None:
        try:
            self.check(request)
        except ValueError as e:
            raise ValueError(f"request {stream.arrived}: {e}") from None
        stream.waiting.append([stream.arrived, request, None])
        stream.arrived += 1

    # -- admission ------------------------------------------------------------------------------------------------

    def check(self, r: Request) -> None:
        """ValueError unless the request can be served alone by an otherwise empty cache. Makes its prompt a list of ints."""
        r.prompt = check(r, self.model.config.vocab, self.model.config.max_len)
        pages, hidden = self._pages(r, self._prefix_len(r) or 0)
        if not self._fits(r, self._prefix_len(r) or 0):
            need = self.cache.budget_for(pages, hidden) / 2**20
            raise ValueError(f"the request needs {need:.2f} MB of cache and the budget is {self.cache.budget / 2**20:.2f} "
                             f"MB; set cache_mb to {math.ceil(need * 100) / 100:g} or more")

    def _pages(self, r: Request, P: int, depth: int | None = None) -> tuple[int, int]:
        """All kv pages and hidden pages that a request takes in an otherwise empty cache, its shared prefix included, at the
        depth for P or, with that prefix stored, at another."""
        T, twice = len(r.prompt) + r.gen_length, 2 if r.cfg_scale else 1
        limit = self._depth(P, T)
        shared = count_pages(P) if limit else 0
        if depth is None:
            depth = 0 if self.self_profile else limit       # there a prefix' first request is stored and shares nothing
        own = self.cache.pages_needed(P, T - P, depth, self._suffix_layers)
        return twice * (own + self.cache.layers * shared), twice * len(self.cache.boundaries) * shared

    def _fits(self, r: Request, P: int, depth: int | None = None) -> bool:
        pages, hidden = self._pages(r, P, depth)
        return pages <= len(self.cache.kv) - 2 and hidden < len(self.cache.hidden)

    @property
    def _suffix_layers(self) -> int:
        """Layers whose suffix K/V outlive a pass: all if a window reads them later, else one set of pages serves all."""
        return 1 if self.window == "all" else self.model.config.layers

    def _prefix_len(self, r: Request) -> int | None:
        """P of a request, or None where it is whatever is stored. One prompt token is always left to the suffix."""
        if self.mode == "none":
            return 0
        if r.prefix_len is None:
            return len(r.prompt) - 1 if self.mode == "intra" else None
        return min(r.prefix_len, len(r.prompt) - 1)

    def _depth(self, P: int, T: int) -> int:
        """The most that a request may share: the safe depth b for P of T tokens, floored to a boundary."""
        L = self.model.config.layers
        if not P or self.mode in ("none", "intra"):
            return 0
        if self.mode == "naive":
            return L
        depth = L if self.self_profile else depths.lookup(self.table, P, T) if self.depth == "auto" else self.depth
        return self._floor(depth)

    def _floor(self, depth: int) -> int:
        return max(b for b in (0, *self.cache.boundaries, self.model.config.layers) if b <= depth)

    def _refreshes(self, run: Running) -> bool:
        return run.prefix_len > 0 and run.depth < self.model.config.layers

    def _find(self, r: Request) -> int:
        """P of a request that names no prefix: what is stored, or what it has in common with an earlier one, if anything
        of it can be shared and fits beside the request. Raises the count of misses if not."""
        ids = r.prompt[:-1]
        stored, known = self.cache.find(ids, r.salt), self.repeats.count(ids, r.salt) if self.repeats else 0
        stored = len(stored.ids) if stored else 0
        for P in (known if known >= stored + PAGE or not stored else 0, stored):    # not one more entry for a few ids
            if self._plan(r, P)[2] and self._fits(r, P):
                return P
        self.cache.misses += 1
        return 0

    def _plan(self, r: Request, P: int) -> tuple[int, int, bool]:
        """For a prefix of P tokens: the most that may be shared, the depth, and whether to look it up and keep it if it is new."""
        T = len(r.prompt) + r.gen_length
        limit = depth = self._depth(P, T)
        store = limit > 0
        if self.guard and limit:
            depth, known = self.guard.advise(r.prompt[:P], r.salt, T, limit)
            depth = self._floor(depth)
            store = depth > 0 or not known
            if not self._fits(r, P, depth):                 # sharing less takes more pages; without the prefix it always fits
                depth, store = 0, False
        return limit, depth, store

    def _admit(self, item: list, alone: bool) -> Running | None:
        """Start the waiting request [index, request, P]: None while there is no room for its pages."""
        index, r, P = item
        if P is None:
            named = self._prefix_len(r)
            P = item[2] = self._find(r) if named is None else named         # once: a second look would meet itself
        T, cache, (limit, depth, store) = len(r.prompt) + r.gen_length, self.cache, self._plan(r, P)
        # For guidance a shadow steps along in the same passes: the same canvas behind a prompt of masks.
        prompts = [r.prompt, [self.model.config.mask_id] * len(r.prompt)][:2 if r.cfg_scale else 1]
        entries = [cache.find(prompt[:P], r.salt, P) if store else None for prompt in prompts]
        new = sum(store and entry is None for entry in entries)
        own = cache.pages_needed(P, T - P, depth, self._suffix_layers)
        if not cache.make_room(len(prompts) * own + new * count_pages(P) * cache.layers,
                               new * count_pages(P) * len(cache.boundaries), len(prompts) + new, keep=entries):
            if alone:
                raise RuntimeError("the cache is held by another stream of this engine; finish or close that one first")
            return None
        runs = []
        try:
            for prompt, entry in zip(prompts, entries):
                runs.append(self._open(index, r, prompt, P, depth, store and entry is None, entry))
        except BaseException:               # an interrupt, too, must not keep what the first one got
            for run in runs:
                self._close(run)
            raise
        run, *shadow = runs
        run.table_depth = limit
        if shadow:
            run.shadow, = shadow
            run.shadow.masked, run.shadow.blocks = run.masked, run.blocks
            run.encode_token_layers += run.shadow.encode_token_layers
        if store:
            cache.hits += run.hit
            cache.misses += not run.hit
        return run

    def _open(self, index: int, r: Request, prompt: list, P: int, depth: int, new: bool, found: Entry | None) -> Running:
        """Give a request its pages, for which there is room, and encode its prefix if it is `new`."""
        L, G, S = self.model.config.layers, r.gen_length, len(prompt) + r.gen_length - P
        suffix = torch.full((S,), self.model.config.mask_id)
        suffix[:S - G] = torch.tensor(prompt[P:])
        blocks = decoding.plan_blocks(r)
        entry = self.cache.allocate(prompt[:P], r.salt) if new else found
        lease = self.cache.open(entry, P, S, depth, self._suffix_layers)
        if new:
            try:
                self._encode(entry)
            except BaseException:           # nor must it leave half an entry
                self.cache.close(lease)
                self.cache.discard(entry)
                raise
        return Running(index, r, prompt, lease, P, depth, depth > 0 and not new, suffix, torch.ones(G, dtype=torch.bool), blocks,
                       (L - 0.5) * P * new)

    def _close(self, run: Running) -> None:
        for r in (run, run.shadow):
            if r and r.lease:
                self.cache.close(r.lease)
                r.lease = None

    def _measure(self, run: Running) -> None:
        """At a refresh, or where one would be, let the guard compare. It changes no token of this request."""
        if self.guard and run.lease and run.forwards % self.refresh == 0:
            if self.guard.refreshed(run, self.counts["token_layers"]):
                self.counts.update(host_reads=1, measurements=1)

    def _encode(self, entry: Entry) -> None:
        """Run the prefix alone, all its rows in both directions, and publish its K/V and boundary states."""
        P = len(entry.ids)
        one = lambda n: torch.tensor([n], device=self.device)
        none = torch.empty(1, 0, dtype=torch.long, device=self.device)
        padding = min(self.bucket(P, PAGE), self.model.config.max_len) - P
        x = self.model.embed(torch.tensor([entry.ids + (0,) * padding], device=self.device))    # (1, P + padding, hidden)
        batch = Pass(none, one(0), one(0), one(entry.id), one(P), one(0), none[0])
        _, entering = self.step(batch, Rules(), count_pages(P + padding), 0, x, tuple(self.cache.boundaries))
        self.cache.write_boundaries(entry, [x[:, :P] for x in entering])
        self.cache.publish(entry)
        self.counts.update(encoded_prefixes=1, token_layers=(self.model.config.layers - 0.5) * P)

    # -- steps ----------------------------------------------------------------------------------------------------

    def _groups(self, running: list) -> list:
        """Who shares a forward pass: a list of (depth of the refresh or None, requests).

        A refresh runs once for each depth; requests due for all suffix rows and those in a window go apart.
        """
        groups = {}
        for run in running:
            due = self._refreshes(run) and run.forwards % self.refresh == 0
            whole = self.window == "all" or run.fresh
            groups.setdefault((run.depth if due else None, whole), []).append(run)
        return [(depth, group) for (depth, _), group in groups.items()]

    def _advance(self, group: list, depth: int | None):
        """One forward pass over a group, then commit: yields an `Event` for each request."""
        c, cache = self.model.config, self.cache
        runs = group + [run.shadow for run in group if run.shadow]
        windows = [run.window(self.window, c.shift) for run in runs]
        W = self.bucket(max(hi - lo for lo, hi in windows), 16)
        B = self.bucket(len(runs), 1)
        ids, fields = torch.full((B, W), c.mask_id), torch.zeros(5, B, dtype=torch.long)
        places, active = [], []             # of the rows that can be committed: in the generated region, in the batch
        for b, (run, (lo, hi)) in enumerate(zip(runs, windows)):
            ids[b, :hi - lo] = run.suffix[lo:hi]
            fields[:, b] = torch.tensor([lo, hi - lo, run.lease.id, run.prefix_len, len(run.suffix)])
            block = run.blocks[0]
            places.append(run.masked[block.lo:block.hi].nonzero()[:, 0] + block.lo)
            active.append(places[-1] + (run.own - c.shift - lo + b * W))
        places, unguided = places[:len(group)], active[len(group):]
        M = sum(len(p) for p in places)
        rows = torch.zeros(self.bucket(M, 8), dtype=torch.long)
        rows[:M] = torch.cat(active[:len(group)])
        rules = decoding.rules_for([run.request for run in group], [run.forwards for run in group], places, len(rows), c.vocab)
        if unguided:                        # behind all others, where rules.guide points at them
            unguided = torch.cat(unguided)
            rows = torch.cat([rows, unguided, unguided.new_zeros(self.bucket(len(unguided), 8) - len(unguided))])
        batch = Pass(*(t.to(self.device) for t in (ids, *fields, rows)))

        prefix = None
        if depth is not None:
            prefix = self._entering(runs, depth, B, min(self.bucket(max(run.prefix_len for run in runs), PAGE), c.max_len))
        pages = self.bucket(max(count_pages(run.prefix_len) + count_pages(len(run.suffix)) for run in runs), 1)
        entries, shared = {id(run.lease.entry) for run in runs}, (0, 0)
        if len(runs) > 1 and len(entries) == 1 and self.bucket is not bucket:       # in a graph it would be one more shape
            shared = count_pages(runs[0].prefix_len), min(run.depth for run in runs)
        verdict, _ = self.step(batch, rules.to(self.device), min(pages, cache.table.shape[2] - 1), depth, prefix, (), shared)
        token, *stats = verdict[:, :M].cpu()                                                # the only read from the device
        self.counts.update(passes=1, host_reads=1, head_rows=M + len(unguided))
        if not (finite := stats[0].isfinite()).all():
            run = next(run for run, ok in zip(group, finite.split([len(p) for p in places])) if not ok.all())
            raise NotFinite(f"the model gave non-finite logits at step {run.forwards} of request {run.index}; check its "
                            "weights, or load it with dtype float32")
        yield from self._commit(group, windows, depth, places, token.long(), stats)

    def _entering(self, group: list, depth: int, B: int, P: int) -> Tensor:
        """The prefix rows (B, P, hidden) as they enter layer `depth`, behind each prefix's end whatever comes."""
        if depth:
            ids = [run.lease.entry.id for run in group]
            return self.cache.read_boundary(torch.tensor(ids + ids[:1] * (B - len(ids)), device=self.device), depth, P)
        ids = torch.zeros(B, P, dtype=torch.long)
        for b, run in enumerate(group):
            ids[b, :run.prefix_len] = torch.tensor(run.prompt[:run.prefix_len])
        return self.model.embed(ids.to(self.device))

    def _commit(self, group: list, windows: list, depth: int | None, places: list, token: Tensor, stats: list):
        """Put the best tokens into the canvases and move each request on: yields an `Event` for each."""
        L, sizes = self.model.config.layers, [len(p) for p in places]
        tokens, stats = token.split(sizes), [x.split(sizes) for x in stats]
        scores = torch.full((len(group), max(sizes)), float("-inf"), dtype=torch.float64)
        for b, run in enumerate(group):
            scores[b, :sizes[b]] = decoding.scores_for(run.request, run.forwards, places[b], tokens[b],
                                                       [x[b] for x in stats], self.model.config.vocab, self.eos_ids)
        shares = torch.tensor([run.blocks[0].shares.popleft() for run in group], dtype=torch.float64)       # (B, 2)
        chosen = decoding.select(scores, shares[:, 0], shares[:, 1])
        for run, (lo, hi), at, new, picked in zip(group, windows, places, tokens, chosen):
            if run.cancelled:               # by the listener, since this pass began
                continue
            at, new = at[picked[:len(at)]], new[picked[:len(at)]]
            run.masked[at] = False
            for canvas in (run, run.shadow) if run.shadow else (run,):
                canvas.suffix[canvas.own + at] = new
                canvas.forwards = run.forwards + (canvas is run)
                work = L * (hi - lo) + (0 if depth is None else (L - depth - 0.5) * run.prefix_len)
                run.token_layers += work
                self.counts["token_layers"] += work
            run.refreshes += depth is not None
            if not run.masked[run.blocks[0].lo:run.blocks[0].hi].any():
                run.blocks.popleft()
            yield Event(run.index, run.forwards - 1, depth is not None, (lo, hi), list(zip(at.tolist(), new.tolist())),
                        run.prefix_len, run.depth, self._result(run))

    def _result(self, run: Running) -> Result | None:
        result = run.result(self.eos_ids)
        if result and self.guard:
            result.similarity = self.guard.similarity(run)
            result.table_depth = None if self.self_profile else run.table_depth
        return result
