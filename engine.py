"""The engine: requests in, tokens out, with the K/V of shared prompt prefixes reused at a safe depth.

    engine = Engine.from_folder("checkpoints/tiny", cache="bicache")
    results = engine.generate([Request(prompt=[...], prefix_len=40, gen_length=32)])

One loop serves all modes; they differ in three numbers of a request, never in code:

    cache     prefix P               depth b             refreshed
    none      0                      -                   -             the whole canvas is suffix
    intra     named, or all but one  0                   each R steps  prefix K/V kept inside the request only
    bicache   named, or found        from the table      each R steps  BiCache (arXiv 2606.07571)
    naive     named, or found        L (all layers)      never         what an autoregressive engine would do

The loop is `Engine._run`: measure, admit, step and commit, finish. admission.py says who may start, step.py
what a pass computes, decoding.py what it commits, cache.py where K/V lie. One read from the device per
pass: tokens and confidences. Checked against a plain loop (tests/reference.py) and golden outputs.
"""
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
from admission import Admission
from cache import Cache, count_pages
from files import BadInput, enough_memory, ran_out
from hub.checkpoint import fingerprint, load
from model import Transformer
from request import Event, Request, Result, check, whole
from running import Running, Stream, Waiting
from step import Layout, Step, bucket, exact, lay_out, prefix_rows, shared_pages

CHOICES = dict(cache=("none", "intra", "bicache", "naive"), window=("all", "rest", "block"),
               standin=("table", *depths.STANDINS))


class NotFinite(BadInput):
    """The model gave NaN or infinity, and has written some into its pages; `index` names the request."""

    def __init__(self, message: str, index: int):
        super().__init__(message)
        self.index = index


class Engine:
    """A model, its cache, and the denoising loop.

    refresh: R, in steps. window: the rows computed after a block's first step, `all` of the suffix, the
    `rest` from the block on (Fast-dLLM's prefix cache) or the `block` (its dual cache). cache_mb: MB for
    K/V and boundary states, allocated here. auto_prefix: leading ids that two requests had in common become
    a shared prefix. attention: triton, torch or auto. measure: at one refresh in so many (0: none) the
    guard looks whether the table holds for the prefix (guard.py). self_profile: no table; each prefix gets
    the depth at which its own K/V were measured to be that much alike (0.97, say). standin: `masks` to encode
    a prefix with MASK behind it, `none`, or as the `table` was measured.
    """

    def __init__(self, model: Transformer, *, cache="bicache", depth="auto", refresh=16, window="all",
                 cache_mb=256, max_batch=8, compile="auto", attention="auto", auto_prefix=True, measure=None,
                 self_profile=None, standin="table", table=None, tokenizer=None, key=""):
        L, weight = model.config.layers, model.embed.weight
        _check_options(L, depth, dict(cache=cache, window=window, standin=standin), refresh=refresh,
                       max_batch=max_batch, cache_mb=cache_mb)
        auto = cache == "bicache" and depth == "auto"
        guard.check(measure, self_profile, table, auto)
        if auto and table is None and not self_profile:
            warnings.warn("this model has no depth table: depth 0 is used, no layer is shared; measure one "
                          "(python tools/profiler.py --model DIR --text FILE) and pass it as table, or set "
                          "self_profile", stacklevel=2)
        self.model, self.mode, self.tokenizer, self.self_profile = model, cache, tokenizer, self_profile
        self.window, self.max_batch, self.device = window, max_batch, weight.device
        self.refresh = refresh if cache in ("intra", "bicache") else 1    # the others have nothing to refresh
        self.eos_ids = {*model.config.eos_ids, *(tokenizer.eos_ids if tokenizer else ())}
        boundaries = _boundaries(L) if cache == "bicache" else ()
        self.cache = Cache(model.config, int(cache_mb * 2**20), boundaries, max_batch, weight.device,
                           weight.dtype, key)
        self.guard = None
        if auto and measure != 0 and (table or self_profile):
            threshold = self_profile or getattr(table, "threshold", depths.Table.threshold)
            self.guard = guard.Guard(model, self.cache, threshold, trust=not self_profile, every=measure)
        self.attention = kernels.choose(weight.device, attention)
        self.compiled = weight.is_cuda if compile == "auto" else compile
        self.step = Step(model, self.cache.kv, self.cache.table, self.attention, self.compiled)
        self.bucket = bucket if self.compiled else exact
        self.streams, self.counts = weakref.WeakSet(), Counter()       # passes, host_reads, token_layers, ...
        self.admission = Admission(
            model, self.cache, self.step, self.guard, self.counts, mode=cache, depth=depth, table=table,
            self_profile=self_profile, auto_prefix=auto_prefix, bucket=self.bucket,
            suffix_layers=1 if window == "all" else L, standin=standin)

    @classmethod
    def from_folder(cls, path, *, cache="bicache", depth="auto", refresh=16, window="all", device="cpu",
                    dtype="float32", cache_mb=256, max_batch=8, mask_token=None, shift=None,
                    template_vars=None, **options):
        """An engine on a model folder: weights, depth table and, if there is one, the tokenizer.

        mask_token: how the mask is spelled, where the folder does not say. shift: whether logits stand one
        row early, where that is not as the family has it. template_vars: values for the variables of the chat
        template, as {"enable_thinking": True}. Raises ValueError for a folder that cannot be used, naming
        what is wrong with it.
        """
        from tokenizer import Tokenizer
        tokenizer = Tokenizer.from_folder(path, mask_token=mask_token, template_vars=template_vars)
        with enough_memory(f"the weights of {path} as {dtype} on {device}",
                           'use dtype "bfloat16", another device or a smaller model'):
            model = load(path, device, dtype, mask_id=tokenizer and tokenizer.mask_id, shift=shift)
            if options.get("compile", "auto") in ("auto", False):
                model.pack()                    # does nothing on a GPU
        _check_ends(path, tokenizer, model.config.vocab)
        table = None
        if cache == "bicache" and depth == "auto" and not options.get("self_profile"):
            table = depths.find_table(path, model.config.layers) or {}      # {}: it has warned already
        return cls(model, cache=cache, depth=depth, refresh=refresh, window=window, cache_mb=cache_mb,
                   max_batch=max_batch, table=table, tokenizer=tokenizer, key=fingerprint(path), **options)

    # -- the public calls ------------------------------------------------------------------------------------

    def generate(self, requests) -> list[Result]:
        """Results in the order of the requests."""
        requests = list(requests)
        results = [None] * len(requests)
        for event in self.stream(requests):
            results[event.index] = event.result     # None but for each request's last
        return results

    def stream(self, requests):
        """Events as they happen, `Event.result` set on each request's last.

        A list is checked whole before this returns. Any other iterable is asked for the next request when
        there is a place for it (None: nothing now) and may never end. ValueError names the request, what is
        wrong and the remedy.
        """
        items = requests if isinstance(requests, (list, tuple)) else []
        stream = Stream(deque(), iter(()) if items is requests else iter(requests))
        for request in items:
            self._arrive(stream, request)
        self.streams.add(stream)
        return self._run(stream)

    def check(self, request: Request) -> None:
        """ValueError unless the request can be served. Its prompt becomes a list of ints."""
        check(request, self.model.config, spells=self.tokenizer is not None)
        self.admission.check(request)

    def cancel(self, request: Request) -> None:
        """Stop a request of `stream`: its pages are free at once, its last event says "cancelled"."""
        for stream in self.streams:
            for run in stream.cancel(request):
                self.admission.close(run)

    # -- the loop --------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _run(self, stream: Stream):
        """A stream from its first request to its last event."""
        try:
            while stream.running or stream.waiting or stream.source:
                for run in stream.running:
                    self._measure(run)
                yield from self._admit(stream)
                for depth, group in self._groups([run for run in stream.running if not run.cancelled]):
                    if group := [run for run in group if not run.cancelled]:    # by the listener, just now
                        yield from self._step(group, depth)
                yield from self._finish(stream)
        except NotFinite:
            for run in stream.running:
                self.admission.close(run)
            self.cache.scrub()
            raise
        except (MemoryError, RuntimeError) as e:
            if not ran_out(e):
                raise
            raise BadInput(f"there is not enough memory for a step on {self.device} with "
                           f"{len(stream.running)} running; set max_batch ({self.max_batch}) or cache_mb "
                           f"({self.cache.budget / 2**20:g}) to less") from e
        finally:                            # the caller may stop listening at any step
            for run in stream.running:
                self.admission.close(run)
            self.streams.discard(stream)

    def _measure(self, run: Running) -> None:
        """At a refresh, or where one would be, let the guard compare. It changes no token of this request."""
        if self.guard and run.lease and run.forwards % self.refresh == 0:
            if self.guard.refreshed(run, self.counts["token_layers"]):
                self.counts.update(host_reads=1, measurements=1)

    def _admit(self, stream: Stream):
        """Let those that wait join, in order, while there is room; only where the deep layers of all that
        run are recomputed anyway, so that all refresh at the same steps. Yields the event of one that was
        cancelled before it began."""
        running = stream.running
        if any(run.forwards % self.refresh for run in running if run.refreshing(self.model.config.layers)):
            return
        while len(running) < self.max_batch and self._next(stream, patient=not running):
            waiting = stream.waiting[0]
            if waiting.request is None:
                yield Event(waiting.index, 0, False, (0, 0), [], 0, 0, Result.cancelled())
            elif run := self.admission.admit(waiting, alone=not running):
                running.append(run)
                self._measure(run)
            else:
                return
            stream.waiting.popleft()

    def _next(self, stream: Stream, patient: bool) -> bool:
        """Whether a request waits; if none does, ask the source, with nothing else to do for a moment."""
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
            raise BadInput(f"request {stream.arrived}: {e}") from None
        stream.waiting.append(Waiting(stream.arrived, request))
        stream.arrived += 1

    def _groups(self, running: list) -> list:
        """Who shares a forward pass: a list of (depth of the refresh or None, requests).

        A refresh runs once for each depth; requests due for all suffix rows and those in a window go apart.
        """
        groups = {}
        for run in running:
            due = run.refreshing(self.model.config.layers) and run.forwards % self.refresh == 0
            whole_suffix = self.window == "all" or run.fresh
            groups.setdefault((run.depth if due else None, whole_suffix), []).append(run)
        return [(depth, group) for (depth, _), group in groups.items()]

    def _finish(self, stream: Stream):
        """Let those go that are done. Yields the event of one that was cancelled on its way."""
        for run in [run for run in stream.running if not run.blocks]:
            stream.running.remove(run)
            self.admission.close(run)
            if run.cancelled:
                yield Event(run.index, run.forwards, False, (0, 0), [], run.prefix_len, run.depth,
                            self._result(run))

    # -- one step --------------------------------------------------------------------------------------------

    def _step(self, group: list, depth: int | None):
        """One forward pass over a group, a refresh at `depth` or a reuse step, then commit: an `Event` for
        each request."""
        shadows = [run.shadow for run in group if run.shadow]
        layout = lay_out(group, shadows, self.window, self.model.config, self.bucket)
        runs = group + shadows
        prefix = None if depth is None else prefix_rows(
            self.model, self.cache, runs, depth, len(layout.batch.ids), self.bucket)
        pages = max(count_pages(run.prefix_len) + count_pages(len(run.suffix)) for run in runs)
        pages = min(self.bucket(pages, 1), self.cache.table.shape[2] - 1)
        verdict, _ = self.step(layout.batch.to(self.device), layout.rules.to(self.device), pages, depth,
                               prefix, (), (0, 0) if self.compiled else shared_pages(runs))
        M = sum(len(places) for places in layout.places)
        token, *stats = verdict[:, :M].cpu()                                # the only read from the device
        self.counts.update(passes=1, host_reads=1, head_rows=layout.head_rows)
        _require_finite(stats[0], group, layout)
        yield from self._commit(group, layout, depth, token.long(), stats)

    def _commit(self, group: list, layout: Layout, depth: int | None, token: Tensor, stats: list):
        """Put the best tokens into the canvases and move each request on: yields an `Event` for each."""
        sizes = [len(places) for places in layout.places]
        tokens, stats = token.split(sizes), [x.split(sizes) for x in stats]
        scores = torch.full((len(group), max(sizes)), float("-inf"), dtype=torch.float64)   # (B, most rows)
        for b, (run, places) in enumerate(zip(group, layout.places)):
            own = [x[b] for x in stats]
            scores[b, :sizes[b]] = decoding.scores_for(run.request, run.forwards, places, tokens[b], own,
                                                       self.model.config.vocab, self.eos_ids)
        shares = [run.blocks[0].shares.popleft() for run in group]
        chosen = decoding.select(scores, torch.tensor(shares, dtype=torch.float64))
        for run, window, places, new, picked in zip(group, layout.windows, layout.places, tokens, chosen):
            if run.cancelled:               # by the listener, since this pass began
                continue
            picked = picked[:len(places)]
            committed = list(zip(places[picked].tolist(), new[picked].tolist()))
            run.refreshes += depth is not None
            work = run.work(self.model.config.layers, window, depth)
            self.counts["token_layers"] += run.advance(places[picked], new[picked], work)
            yield Event(run.index, run.forwards - 1, depth is not None, window, committed, run.prefix_len,
                        run.depth, self._result(run))

    def _result(self, run: Running) -> Result | None:
        """The result, with what the guard knows, once a request is done."""
        result = run.result(self.eos_ids, self.tokenizer and self.tokenizer.decode)
        if result and self.guard:
            result.similarity = self.guard.similarity(run)
            result.table_depth = None if self.self_profile else run.table_depth
        return result


def _check_ends(path, tokenizer, vocab: int) -> None:
    """An end of text that the model cannot say: tokenizer files of other weights. Fillers may be missing."""
    beyond = sorted(i for i in tokenizer.ends if i >= vocab) if tokenizer else []
    if beyond:
        raise BadInput(f"the tokenizer of {path} ends an answer with id {beyond[0]}, and the model's ids run "
                       f"to {vocab - 1}; take the tokenizer files of these weights")


def _require_finite(confidence: Tensor, group: list, layout: Layout) -> None:
    """NotFinite, naming the request, if any of its rows' confidences is no number."""
    finite = confidence.isfinite().split([len(places) for places in layout.places])
    for run, rows in zip(group, finite):
        if not rows.all():
            raise NotFinite(f"the model gave non-finite logits at step {run.forwards} of request "
                            f"{run.index}; check its weights, or load it with dtype float32", run.index)


def _boundaries(layers: int) -> range:
    """The layers that a refresh can start from: all of a small model, else 3, 7, 11, ...
    (depth.safe_depth)."""
    return range(1, layers) if layers <= 16 else range(3, layers - 1, 4)


def _check_options(layers: int, depth, chosen: dict, **positive) -> None:
    for name, value in chosen.items():
        if value not in CHOICES[name]:
            raise BadInput(f"{name} is {value!r}; it must be one of {', '.join(CHOICES[name])}")
    if depth != "auto" and not (isinstance(depth, int) and 0 <= depth <= layers):
        raise BadInput(f"depth is {depth!r}; it must be 'auto' or a layer count from 0 to {layers}")
    for name, value in positive.items():
        if not isinstance(value, (int, float)) or not 0 < value < 2**40:
            raise BadInput(f"{name} is {value!r}; it must be a positive number")
        if name != "cache_mb":
            whole(name, value)
