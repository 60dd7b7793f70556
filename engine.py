"""The engine: requests in, tokens out, with the K/V of shared prompt prefixes reused at a safe depth.

    engine = Engine.from_folder("checkpoints/tiny", cache="bicache")
    results = engine.generate([Request(prompt=[...], prefix_len=40, gen_length=32)])

One loop serves all modes; they differ in three numbers of a request, never in code:

    cache     prefix P               depth b             refreshed
    none      0                      -                   -             the whole canvas is suffix
    intra     given, or all but one  0                   each R steps  prefix K/V kept inside the request only
    bicache   given, or found        from the table      each R steps  BiCache (arXiv 2606.07571)
    naive     given, or found        L (all layers)      never         what an autoregressive engine would do

Checked against: a plain loop of thirty lines (tests/reference.py), golden outputs of the authors' loops and of a second
implementation (tests/golden). The loop reads from the device once per forward pass: tokens and confidences together.
"""
import math
from collections import Counter, deque
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import decoding
import depth as depths
import kernels
from cache import PAGE, Cache, Entry, Lease, count_pages
from decoding import Request, Rules
from model import Transformer, fingerprint, load

CACHE_MODES = ("none", "intra", "bicache", "naive")
WINDOWS = ("all", "rest", "block")


@dataclass
class Result:
    """What a request came to. token_layers counts its denoising (DESIGN section 8); what the encoding of a new prefix
    cost stands apart in encode_token_layers and is 0 on a hit."""
    tokens: list                # without the EOS and what follows it
    finish_reason: str          # "eos" or "length"
    forwards: int
    refreshes: int
    prefix_tokens: int
    depth: int
    hit: bool
    token_layers: float
    encode_token_layers: float


@dataclass
class Event:
    """One step of one request: what was computed and what was committed; `result` on the last one.

    computed: rows [lo, hi) of the suffix. refresh: the deep layers computed the prefix rows as well. committed: pairs
    (place in the generated region, token).
    """
    index: int                  # of the request in the list
    step: int
    refresh: bool
    computed: tuple
    committed: list
    prefix_tokens: int
    depth: int
    result: Result | None = None


class Pass(NamedTuple):
    """What one forward pass reads, all int64. Padded requests and rows are inert: they write to page 0."""
    ids: Tensor                 # (B, W) window rows: token ids
    first: Tensor               # (B,)   place in the suffix of the first window row
    rows: Tensor                # (B,)   how many window rows are real
    prefix_id: Tensor           # (B,)   row of the page table
    prefix_len: Tensor          # (B,)   P
    suffix_len: Tensor          # (B,)   S
    active: Tensor              # (M,)   rows that can be committed, in the flat (B * W) order


def step(model: Transformer, kv: Tensor, table: Tensor, batch: Pass, rules: Rules, pages_read: int,
         depth: int | None = None, prefix: Tensor | None = None, boundaries: tuple = (), impl: str = "torch"):
    """One forward pass over a batch: what `decoding.choose` says of the active rows (2 or 4, M) float64, and the states
    entering the layers `boundaries`.

    Reuse step (depth None): window rows only, in every layer. Refresh step: the prefix rows `prefix` (B, P, hidden), as
    they enter layer `depth`, join the window rows there; from there on their K/V are written to the request's own pages.
    In the last layer they give K/V only. Every layer writes K/V of the rows it computes, then attends to all pages.
    """
    W = batch.ids.shape[1]
    dev, trash = batch.ids.device, (table.shape[2] - 1) * PAGE
    pages = table[batch.prefix_id]                                                          # (B, L, n)
    place = batch.first[:, None] + torch.arange(W, device=dev)                              # (B, W)
    start = (batch.prefix_len + PAGE - 1) // PAGE * PAGE                                    # the suffix' first column
    real = torch.arange(W, device=dev) < batch.rows[:, None]
    columns = torch.where(real, start[:, None] + place, trash)                              # (B, W)
    positions = batch.prefix_len[:, None] + place
    x = model.embed(batch.ids)                                                              # (B, W, hidden)
    rope, skip, entering = model.rope(positions), 0, []
    for i, layer in enumerate(model.layers):
        if i == depth:
            P = prefix.shape[1]
            j = torch.arange(P, device=dev).expand(len(prefix), P)                          # (B, P)
            x = torch.cat([prefix, x], 1)                                                   # (B, P + W, hidden)
            rope = model.rope(torch.cat([j, positions], 1))
            columns = torch.cat([torch.where(j < batch.prefix_len[:, None], j, trash), columns], 1)
            skip = P
        if i in boundaries:
            entering.append(x)

        def attend(q, k, v):
            q = kernels.rope_store(q, k, v, *rope, kv, pages[:, i], columns)
            return kernels.attend(q, kv, pages[:, i, :pages_read], batch.prefix_len, batch.suffix_len)

        x = layer(x, attend, skip if i == len(model.layers) - 1 else 0)
    logits = model.logits(x.flatten(0, 1)[batch.active])                                    # (M, V)
    chosen = decoding.choose(logits, rules, model.config.mask_id, model.config.eos_id)
    return torch.stack([x.double() for x in chosen]), entering


@dataclass
class Running:
    """A request on its way: its canvas behind the prefix, and where it stands."""
    index: int
    request: Request
    prompt: list
    lease: Lease
    prefix_len: int
    depth: int
    hit: bool
    suffix: Tensor                          # (S,) ids, MASK where undecided
    masked: Tensor                          # (G,) bool: undecided. Never read off the ids: a prompt may hold MASK
    blocks: deque                           # of decoding.Block, the present one first
    encode_token_layers: float
    token_layers: float = 0
    forwards: int = 0
    refreshes: int = 0
    shadow: "Running | None" = None         # for guidance: the same answer behind an all-mask prompt

    @property
    def own(self) -> int:
        """U: prompt tokens outside the prefix."""
        return len(self.suffix) - len(self.masked)

    @property
    def fresh(self) -> bool:
        """The next step is the first of its block."""
        return bool(self.masked[self.blocks[0].lo:self.blocks[0].hi].all())


class Engine:
    """A model, its cache, and the denoising loop."""

    def __init__(self, model: Transformer, *, cache="bicache", depth="auto", refresh=16, window="all", cache_mb=256,
                 max_batch=8, compile=False, table=None, tokenizer=None, key=""):
        c = model.config
        if cache not in CACHE_MODES:
            raise ValueError(f"cache is {cache!r}; it must be one of {', '.join(CACHE_MODES)}")
        if window not in WINDOWS:
            raise ValueError(f"window is {window!r}; it must be one of {', '.join(WINDOWS)}")
        if depth != "auto" and not (isinstance(depth, int) and 0 <= depth <= c.layers):
            raise ValueError(f"depth is {depth!r}; it must be 'auto' or a layer count from 0 to {c.layers}")
        for name, value in (("refresh", refresh), ("max_batch", max_batch), ("cache_mb", cache_mb)):
            if not value > 0 or (name != "cache_mb" and value != int(value)):
                raise ValueError(f"{name} is {value}; it must be a positive {'number' if name == 'cache_mb' else 'integer'}")
        self.model, self.mode, self.depth, self.table, self.tokenizer = model, cache, depth, table, tokenizer
        self.window, self.max_batch = window, max_batch
        self.refresh = refresh if cache in ("intra", "bicache") else 1       # steps; the others refresh nothing
        interval = 1 if c.layers <= 16 else 4
        boundaries = range(interval, c.layers, interval) if cache == "bicache" else ()
        weight = model.embed.weight
        self.device, self.eos_ids = weight.device, {c.eos_id} | (tokenizer.eos_ids if tokenizer else set())
        self.cache = Cache(c, int(cache_mb * 2**20), boundaries, max_batch, weight.device, weight.dtype, key)
        self.bucket = (lambda n, least: n) if not compile else _bucket
        # The one place that compiles. A graph is fixed by the shapes, the depth and the step kind, and by nothing else.
        self.step = torch.compile(step, fullgraph=True, dynamic=False) if compile else step
        self.counts = Counter()             # passes, host_reads, head_rows, encoded_prefixes

    @classmethod
    def from_folder(cls, path, *, cache="bicache", depth="auto", refresh=16, window="all", device="cpu",
                    dtype="float32", cache_mb=256, max_batch=8, compile=False):
        """An engine on a model folder: weights, depth table and, if there is one, the tokenizer.

        Raises ValueError for a folder that cannot be used, naming what is wrong with it.
        """
        from tokenizer import Tokenizer
        model = load(path, device, dtype)
        table = depths.find_table(path, model.config.layers) if cache == "bicache" and depth == "auto" else None
        return cls(model, cache=cache, depth=depth, refresh=refresh, window=window, cache_mb=cache_mb,
                   max_batch=max_batch, compile=compile, table=table, tokenizer=Tokenizer.from_folder(path),
                   key=fingerprint(path))

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
        """Events as they happen, `Event.result` set on each request's last. All requests are checked before this
        returns: ValueError names the request, what is wrong with it and the remedy."""
        requests = list(requests)
        for i, request in enumerate(requests):
            try:
                self._check(request)
            except ValueError as e:
                raise ValueError(f"request {i}: {e}" if len(requests) > 1 else str(e)) from None
        return self._stream(deque(enumerate(requests)))

    @torch.inference_mode()
    def _stream(self, waiting):
        running = []
        try:
            while waiting or running:
                # Requests join where the deep layers are recomputed anyway, so that all refresh at the same steps.
                if all(run.forwards % self.refresh == 0 for run in running):
                    while waiting and len(running) < self.max_batch and (run := self._admit(*waiting[0], not running)):
                        running.append(run)
                        waiting.popleft()
                for depth, group in self._groups(running):
                    yield from self._advance(group, depth)
                for run in [run for run in running if not run.blocks]:
                    running.remove(run)
                    self._close(run)
        finally:                            # the caller may stop listening at any step
            for run in running:
                self._close(run)

    # -- admission ------------------------------------------------------------------------------------------------

    def _check(self, r: Request) -> None:
        """ValueError unless the request can be served alone by an otherwise empty cache."""
        decoding.check(r, self.model.config.vocab, self.model.config.max_len)
        P = self._prefix_len(r) or 0
        pages = self._pages(P, len(r.prompt) + r.gen_length) * (2 if r.cfg_scale else 1)
        total = self.cache.kv.shape[0]
        if pages >= total:
            need = self.cache.budget / total * (pages + 1) / 2**20
            raise ValueError(f"the request needs {need:.1f} MB of cache and the budget is {self.cache.budget / 2**20:.1f} "
                             f"MB; set cache_mb to {math.ceil(need)} or more")

    def _pages(self, P: int, T: int) -> int:
        """All kv pages that a request needs in an otherwise empty cache, its shared prefix included."""
        depth = self._depth(P, T)
        return self.cache.pages_needed(P, T - P, depth, self._suffix_layers) + self.model.config.layers * (
            count_pages(P) if depth else 0)

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
        """The safe depth b for P shared of T tokens, floored to a boundary."""
        L = self.model.config.layers
        if not P or self.mode in ("none", "intra"):
            return 0
        if self.mode == "naive":
            return L
        depth = depths.lookup(self.table, P, T) if self.depth == "auto" else self.depth
        return max(b for b in (0, *self.cache.boundaries, L) if b <= depth)

    def _admit(self, index: int, r: Request, alone: bool) -> Running | None:
        """Start a request: None while there is no room for its pages."""
        P, G = self._prefix_len(r), r.gen_length
        if P is None:
            found = self.cache.find(r.prompt[:-1], r.salt)
            fits = found and self._pages(len(found.ids), len(r.prompt) + G) < self.cache.kv.shape[0]
            P = len(found.ids) if fits else 0
            self.cache.misses += not fits
        run = self._open(index, r, r.prompt, P)
        if run and r.cfg_scale:             # the same canvas behind a prompt of masks, stepped along in the same passes
            run.shadow = self._open(index, r, [self.model.config.mask_id] * len(r.prompt), P)
            if run.shadow is None:
                self.cache.close(run.lease)
                run = None
            else:
                run.shadow.masked, run.shadow.blocks = run.masked, run.blocks
        if run is None and alone:
            raise RuntimeError("the cache is held by another stream of this engine; finish or close that one first")
        if run and run.depth:
            self.cache.hits += run.hit
            self.cache.misses += not run.hit
        return run

    def _open(self, index: int, r: Request, prompt: list, P: int) -> Running | None:
        """Give a request its pages, and encode its prefix if it is the first to name it."""
        L, G, T = self.model.config.layers, r.gen_length, len(prompt) + r.gen_length
        depth = self._depth(P, T)
        found = self.cache.find(prompt[:P], r.salt, P) if depth else None
        entry = found or (self.cache.allocate(prompt[:P], r.salt) if depth else None)
        if depth and entry is None:
            return None
        lease = self.cache.open(entry, P, T - P, depth, self._suffix_layers)
        if entry and not found:
            try:
                if lease:
                    self._encode(entry)
                else:
                    self.cache.discard(entry)
            except BaseException:           # an interrupt, too, must not leave half an entry
                self.cache.close(lease)
                self.cache.discard(entry)
                raise
        if lease is None:
            return None
        suffix = torch.full((T - P,), self.model.config.mask_id)
        suffix[:T - P - G] = torch.tensor(prompt[P:])
        new = entry is not None and not found
        return Running(index, r, prompt, lease, P, depth, found is not None, suffix, torch.ones(G, dtype=torch.bool),
                       decoding.plan_blocks(r), (L - 0.5) * P * new)

    def _close(self, run: Running) -> None:
        for r in (run, run.shadow):
            if r:
                self.cache.close(r.lease)

    def _encode(self, entry: Entry) -> None:
        """Run the prefix alone, all its rows in both directions, and publish its K/V and boundary states."""
        P = len(entry.ids)
        one = lambda n: torch.tensor([n], device=self.device)
        none = torch.empty(1, 0, dtype=torch.long, device=self.device)
        x = self.model.embed(torch.tensor([entry.ids], device=self.device))                     # (1, P, hidden)
        batch = Pass(none, one(0), one(0), one(entry.id), one(P), one(0), none[0])
        *_, entering = step(self.model, self.cache.kv, self.cache.table, batch, Rules(),
                            count_pages(P), 0, x, tuple(self.cache.boundaries))
        self.cache.write_boundaries(entry, entering)
        self.cache.publish(entry)
        self.counts["encoded_prefixes"] += 1

    # -- steps ----------------------------------------------------------------------------------------------------

    def _groups(self, running: list) -> list:
        """Who shares a forward pass: a list of (depth of the refresh or None, requests).

        A refresh runs once for each depth; requests due for all suffix rows and those in a window go apart.
        """
        groups = {}
        for run in running:
            due = run.prefix_len and run.depth < self.model.config.layers and run.forwards % self.refresh == 0
            whole = self.window == "all" or run.fresh
            groups.setdefault((run.depth if due else None, whole), []).append(run)
        return [(depth, group) for (depth, _), group in groups.items()]

    def _window(self, run: Running) -> tuple[int, int]:
        """Rows [lo, hi) of the suffix to compute: all at a block's first step, then what `window` says.

        Dream's logits for a position stand one row earlier, so its windows start there.
        """
        lo, hi = run.blocks[0].lo, run.blocks[0].hi
        if self.window == "all" or run.fresh:
            return 0, len(run.suffix)
        return run.own + lo - self.model.config.shift, len(run.suffix) if self.window == "rest" else run.own + hi

    def _advance(self, group: list, depth: int | None):
        """One forward pass over a group, then commit: yields an `Event` for each request."""
        c, cache = self.model.config, self.cache
        runs = group + [run.shadow for run in group if run.shadow]
        windows = [self._window(run) for run in runs]
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
        if unguided:
            rules, rows = self._guide(group, rules, rows, active[:len(group)], unguided)
        batch = Pass(*(t.to(self.device) for t in (ids, *fields, rows)))

        prefix = None
        if depth is not None:
            prefix = self._entering(runs, depth, B, self.bucket(max(run.prefix_len for run in runs), PAGE))
        pages = self.bucket(max(count_pages(run.prefix_len) + count_pages(len(run.suffix)) for run in runs), 1)
        out = self.step(self.model, cache.kv, cache.table, batch, rules.to(self.device), min(pages, cache.table.shape[2]),
                        depth, prefix)[0]
        token, *stats = out[:, :M].cpu()                                                # the only read from the device
        self.counts.update(passes=1, host_reads=1, head_rows=M + sum(map(len, unguided)))
        if not stats[0].isfinite().all():
            raise ValueError(f"the model gave non-finite logits at step {group[0].forwards} of request {group[0].index}; "
                             "check its weights, or load it with dtype float32")
        yield from self._commit(group, windows, depth, places, token.long(), stats)

    def _guide(self, group, rules, rows, active, unguided):
        """Append the shadows' rows to the active ones and tell each row where its unguided logits stand."""
        at, scale, rest = [], [], len(rows)
        for run, own in zip(group, active):
            n = len(own)
            at.append(torch.arange(n) + (rest if run.shadow else sum(map(len, at))))
            scale.append(torch.full((n,), run.request.cfg_scale))
            rest += n if run.shadow else 0
        pad = len(rows) - sum(map(len, at))
        at, scale = (torch.cat([*x, x[0].new_zeros(pad)]) for x in (at, scale))
        return rules._replace(guide=(at, scale)), torch.cat([rows, *unguided])

    def _entering(self, group: list, depth: int, B: int, P: int) -> Tensor:
        """The prefix rows (B, P, hidden) as they enter layer `depth`, behind each prefix' end whatever comes."""
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
            at, new = at[picked[:len(at)]], new[picked[:len(at)]]
            run.masked[at] = False
            for canvas in (run, run.shadow) if run.shadow else (run,):
                canvas.suffix[canvas.own + at] = new
                canvas.forwards = run.forwards + (canvas is run)
                run.token_layers += L * (hi - lo) + (0 if depth is None else (L - depth - 0.5) * run.prefix_len)
            run.refreshes += depth is not None
            if not run.masked[run.blocks[0].lo:run.blocks[0].hi].any():
                run.blocks.popleft()
            yield Event(run.index, run.forwards - 1, depth is not None, (lo, hi), list(zip(at.tolist(), new.tolist())),
                        run.prefix_len, run.depth, self._result(run))

    def _result(self, run: Running) -> Result | None:
        """The result of a request that is done, else None. An EOS ends it once nothing before it is undecided."""
        tokens, reason = run.suffix[run.own:], "length"
        if run.request.stop_at_eos:
            eos = torch.isin(tokens, torch.tensor(sorted(self.eos_ids))) & ~run.masked
            if eos.any() and not run.masked[:(end := int(eos.int().argmax()))].any():
                tokens, reason = tokens[:end], "eos"
                run.blocks.clear()
        if run.blocks:
            return None
        return Result(tokens.tolist(), reason, run.forwards, run.refreshes, run.prefix_len, run.depth, run.hit,
                      run.token_layers, run.encode_token_layers)


def _bucket(n: int, least: int) -> int:
    """n rounded up to least * (1, 2, 3, 4, 6, 8, 12, ...): a compiled graph serves all lengths of a bucket."""
    size = least
    while size < n:
        size = size * 3 // 2 if size & (size - 1) == 0 and size > least else size * 4 // 3 if size > least else size * 2
    return size
