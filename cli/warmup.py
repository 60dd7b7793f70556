"""Compile what a run will need before it starts, so that no answer waits for the compiler.

    graphs, seconds = warm_up(engine, requests)         # only where engine.step compiles

A graph is fixed by the shapes of a pass and by its depth (step.py). The requests go through the engine's
own loop, but a pass whose shapes were met before is not computed: its verdict is made up, one token a step.
So each graph is made and run once, and nothing remains of it: no entry in the cache, no count, no
measurement. Checked: tests/test_compile.py.
"""
import time
from dataclasses import replace

import torch
from torch import Tensor
from tqdm import tqdm

from cache import Repeats


def shapes(x):
    """What of a pass's arguments fixes its graph: shapes of tensors, and all else as it is."""
    if isinstance(x, Tensor):
        return tuple(x.shape)
    return tuple(map(shapes, x)) if isinstance(x, (tuple, list)) else x


class Recorder:
    """Stands in for `Step`: runs the first pass of each graph, makes up the others."""

    def __init__(self, step, told):
        self.step, self.told, self.met = step, told, set()

    def __call__(self, batch, rules, pages_read, depth=None, prefix=None, boundaries=(), shared=(0, 0)):
        key = shapes((batch, rules, pages_read, depth, prefix, boundaries, shared))
        encodes = not len(batch.active)             # what it computes is stored: it runs each time
        if key not in self.met or encodes:
            self.told(key not in self.met)
            self.met.add(key)
            verdict, entering = self.step(batch, rules, pages_read, depth, prefix, boundaries, shared)
        else:
            M = len(batch.active) if rules.guide is None else len(rules.guide[0])
            verdict, entering = batch.ids.new_zeros(4 if rules.stats else 2, M, dtype=torch.float64), []
        verdict = torch.zeros_like(verdict)         # token 0, of scores so low that no threshold takes two
        verdict[1:] = -1e9
        return verdict, entering


@torch.inference_mode()
def warm_up(engine, requests, bar: bool = False) -> tuple[int, float]:
    """How many graphs were made, and in how many seconds, for a run of `requests` on this engine."""
    stored, start = set(engine.cache.entries), time.perf_counter()
    kept = engine.step, engine.guard, engine.admission.repeats, dict(engine.counts)
    hits, misses = engine.cache.hits, engine.cache.misses
    with tqdm(desc="compiling", unit="graph", leave=False, disable=None if bar else True) as shown:
        recorder = Recorder(engine.step, shown.update)
        engine.step = engine.admission.step = recorder
        engine.guard = engine.admission.guard = None
        engine.admission.repeats = Repeats() if engine.admission.repeats else None
        try:
            engine.generate([replace(r, stop_at_eos=False) for r in requests])
        finally:
            engine.step, engine.guard, engine.admission.repeats, counts = kept
            engine.admission.step, engine.admission.guard = engine.step, engine.guard
            engine.cache.hits, engine.cache.misses = hits, misses
            engine.counts.clear()
            engine.counts.update(counts)
            for entry in [e for id, e in engine.cache.entries.items() if id not in stored]:
                engine.cache.discard(entry)
    return len(recorder.met), time.perf_counter() - start
