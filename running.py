"""A request on its way: `Waiting` until it may start, then `Running`, both in the `Stream` of its call.

What is undecided is a boolean for each place, `masked`, and never read off the ids: a prompt may hold MASK.
It is made where a request starts (admission.py), falls with each step (engine.py), and says when the request
is done: `Running.result`. Checked in tests/test_engine.py, test_stop.py and test_infill.py.
"""
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cache import Lease
from request import Request, Result


@dataclass(eq=False)
class Running:
    """A request on its way: its canvas behind the prefix, and where it stands."""
    index: int
    request: Request
    prompt: list
    lease: Lease | None
    salt: tuple                             # of the shared prefix: the request's, and its stand-in
    prefix_len: int
    depth: int
    hit: bool
    suffix: Tensor                          # (S,) ids, MASK where undecided
    masked: Tensor                          # (G,) bool: undecided
    free_from: int                          # behind this place of the region nothing was given
    blocks: deque                           # of decoding.Block, the present one first
    encode_token_layers: float
    token_layers: float = 0
    measure_token_layers: float = 0
    table_depth: int = 0                    # what the table allows: depth is less where the guard lowered it
    forwards: int = 0
    refreshes: int = 0
    cancelled: bool = False
    shadow: "Running | None" = None         # for guidance: the same answer behind an all-mask prompt

    @property
    def own(self) -> int:
        """U: prompt tokens outside the prefix."""
        return len(self.suffix) - len(self.masked)

    @property
    def total(self) -> int:
        """T: tokens of the canvas."""
        return self.prefix_len + len(self.suffix)

    @property
    def fresh(self) -> bool:
        """The next step is the first of its block."""
        block = self.blocks[0]
        return int(self.masked[block.lo:block.hi].sum()) == block.size

    def window(self, kind: str, shift: int) -> tuple[int, int]:
        """Rows [lo, hi) of the suffix to compute: all at a block's first step, then what the window is.

        Dream's logits for a position stand one row earlier (shift 1), so its windows start there.
        """
        lo, hi = self.blocks[0].lo, self.blocks[0].hi
        if kind == "all" or self.fresh:
            return 0, len(self.suffix)
        return self.own + lo - shift, len(self.suffix) if kind == "rest" else self.own + hi

    def refreshing(self, layers: int) -> bool:
        """Whether it has prefix rows to recompute, once every R steps."""
        return self.prefix_len > 0 and self.depth < layers

    def work(self, layers: int, window: tuple, depth: int | None) -> float:
        """Token-layers of a step that computes rows [lo, hi) of the suffix and, in a refresh at `depth`,
        the prefix rows from there up, of which the last layer's give K/V only."""
        deep = 0 if depth is None else layers - depth - 0.5
        return layers * (window[1] - window[0]) + deep * self.prefix_len

    def advance(self, places: Tensor, tokens: Tensor, work: float) -> float:
        """Write tokens (m,) into the places (m,) of the canvas, go on to the next block if this one is
        full. `work`: token-layers of the step; returns them, those of a shadow included."""
        canvases = (self, self.shadow) if self.shadow else (self,)
        self.masked[places] = False
        self.forwards += 1
        for canvas in canvases:
            canvas.suffix[canvas.own + places] = tokens
            canvas.forwards = self.forwards
        self.token_layers += work * len(canvases)
        block = self.blocks[0]
        if not self.masked[block.lo:block.hi].any():
            self.blocks.popleft()
        return work * len(canvases)

    def result(self, eos_ids: set, decode=None) -> Result | None:
        """The result, or None while there is more to do. EOS and stop texts count where nothing before their
        end is undecided, EOS behind all that was given. decode: tokens -> text, if there is a tokenizer."""
        tokens, known = self.suffix[self.own:], int((self.masked.cumsum(0) == 0).sum())
        end, reason = len(tokens), "length"
        if self.cancelled:
            end, reason = known, "cancelled"
        else:
            eos = torch.isin(tokens[self.free_from:known], torch.tensor(sorted(eos_ids))).nonzero()
            if self.request.stop_at_eos and len(eos):
                end, reason = self.free_from + int(eos[0]), "eos"
            if spelled := _spelling(tokens[:min(known, end)].tolist(), self.request.stop, decode):
                end, reason = spelled, "stop"
            if reason != "length":
                self.blocks.clear()
        if self.blocks:
            return None
        tokens = tokens[:end].tolist()
        return Result(tokens, reason, self.forwards, self.refreshes, self.prefix_len, self.depth, self.hit,
                      self.token_layers, self.encode_token_layers, self.table_depth, [],
                      self.measure_token_layers, _before(decode(tokens), self.request.stop) if decode else "")


def _spelling(tokens: list, stop: tuple, decode) -> int | None:
    """How many leading tokens it takes to spell one of the stop texts; None if all together do not."""
    def spells(n):
        return any(text in decode(tokens[:n]) for text in stop)
    if stop and spells(len(tokens)):
        return bisect_left(range(len(tokens)), True, key=spells)
    return None


def _before(text: str, stop: tuple) -> str:
    """`text` up to the first of the stop texts in it."""
    places = [text.find(s) for s in stop if s in text]
    return text[:min(places, default=len(text))]


@dataclass(eq=False)
class Waiting:
    """A request that has not begun. request: None once it is cancelled. prefix_len: P once looked up."""
    index: int
    request: Request | None
    prefix_len: int | None = None


@dataclass(eq=False)
class Stream:
    """The requests of one call of `stream`: those that wait, those still to come, those that run."""
    waiting: deque
    source: object = iter(())
    running: list = field(default_factory=list)
    arrived: int = 0

    def cancel(self, request: Request) -> list:
        """Mark a request, wherever it stands; those that ran, and still hold their pages."""
        for waiting in self.waiting:
            if waiting.request is request:
                waiting.request = None
        found = [run for run in self.running if run.request is request and run.blocks]
        for run in found:
            run.cancelled = True
            run.blocks.clear()
        return found
