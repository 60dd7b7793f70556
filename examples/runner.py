"""The thread that owns the engine, and what stands between it and whoever asks: bodies in, frames of text
out.

    service = Service(engine, model, queue=64)
    async for frame in service.answer(raw, chat=True, tenant="", seed=0): ...

A handler hands jobs in and hears of each step through its event loop; one who stops listening is cancelled
between two passes. Both serve.py and each replica of cluster.py are one of these. Checked with 64 clients
at once of whom half hang up, and with a request that makes the model give NaN (tests/test_serve.py).
"""
import asyncio
import itertools
import sys
import threading
from collections import deque
from dataclasses import dataclass

import torch

from engine import Engine, NotFinite
from wire import FINISH, Model, Refused, Text, read


@dataclass(eq=False)
class Job:
    """One request on its way through the engine's thread; its listener waits at the queue `heard`."""
    request: object
    index: int                  # among the choices of its answer
    heard: asyncio.Queue        # gets (index, Event or Refused)
    loop: asyncio.AbstractEventLoop
    dropped: bool = False

    def tell(self, said) -> None:
        """From the engine's thread."""
        try:
            self.loop.call_soon_threadsafe(self.heard.put_nowait, (self.index, said))
        except RuntimeError:            # the loop has ended, and with it whoever listened
            pass


class Runner(threading.Thread):
    """The thread that owns the engine: jobs in through a bounded queue, events out, cancelled ones dropped
    between passes.

    A request that gives NaN ends the engine's stream: it fails, the others go into a new stream and say
    again what they have said, since draws depend on seed, step and place alone. Any other error fails all
    that run; `failed` then holds until a request succeeds.
    """

    def __init__(self, engine: Engine, queue: int):
        super().__init__(name="engine", daemon=True)
        self.engine, self.limit = engine, queue
        self.waiting, self.gone = deque(), deque()
        self.again, self.active = deque(), {}       # of a stream that broke off; by index in the present one
        self.changed, self.closing, self.failed = threading.Condition(), False, False
        self.prompt = self.generated = self.work_none = self.work_done = 0
        self.stats = engine.cache.stats()

    def submit(self, jobs: list) -> None:
        """Queue all of the jobs, or none: Refused if there is no room."""
        with self.changed:
            if self.closing:
                raise Refused(503, "The server is shutting down; ask another one.")
            if len(self.waiting) + len(jobs) > self.limit:
                raise Refused(429, f"{len(self.waiting)} requests wait already, of at most {self.limit}; try "
                              "again later.", "queue_full")
            self.waiting.extend(jobs)
            self.changed.notify()

    def cancel(self, jobs: list) -> None:
        """Drop jobs, wherever they are; of those that have ended there is nothing to drop."""
        with self.changed:
            for job in jobs:
                job.dropped = True
                self.waiting.remove(job) if job in self.waiting else self.gone.append(job)
            self.changed.notify()

    def close(self) -> None:
        """Take no more, and end when all is done."""
        with self.changed:
            self.closing = True
            self.changed.notify()

    # -- on the engine's thread ---------------------------------------------------------------------------

    def run(self) -> None:
        if sum(p.numel() for p in self.engine.model.parameters()) < 2e7:
            torch.set_num_threads(1)    # so small a model waits longer for a second than it gains
        while not self.serve():
            pass

    def serve(self) -> bool:
        """One stream of the engine, first the jobs of one that broke off. False if this one does, too."""
        try:
            for event in self.engine.stream(self.source()):
                self.hear(event)
                self.drop()
            return True
        except NotFinite as e:
            self.active.pop(e.index).tell(Refused(500, f"{str(e).capitalize()}."))
            self.again.extendleft(reversed(self.active.values()))
        except Exception as e:                  # whatever it is, the next requests get their chance
            self.failed = True
            print(f"serve.py: the engine failed: {e!r}", file=sys.stderr, flush=True)
            for job in self.active.values():
                job.tell(Refused(500, "The engine failed; the server's log says how."))
        self.active = {}
        return False

    def source(self):
        """What the engine asks for the next request. It sleeps here while there is nothing to do."""
        for index in itertools.count():
            while not (job := self.again.popleft() if self.again else self.take()):
                if self.closing and not self.active:
                    return
                yield None
            self.active[index] = job
            if job.dropped:                     # on its way here, when the engine did not know it
                self.gone.append(job)
            yield job.request

    def take(self) -> Job | None:
        self.stats = self.engine.cache.stats()
        with self.changed:
            while not (self.waiting or self.gone or self.active or self.closing):
                self.changed.wait()
        self.drop()
        with self.changed:
            return self.waiting.popleft() if self.waiting else None

    def drop(self) -> None:
        while self.gone:
            self.engine.cancel(self.gone.popleft().request)

    def hear(self, event) -> None:
        job, r = self.active[event.index], event.result
        # Named or found: in another stream it would be what is stored then, and the answer another one.
        job.request.prefix_len = event.prefix_tokens
        if r:
            del self.active[event.index]
            T = len(job.request.prompt) + job.request.gen_length
            canvases = 2 if job.request.cfg_scale else 1
            self.work_none += canvases * r.forwards * self.engine.model.config.layers * T
            self.work_done += r.token_layers + r.encode_token_layers + r.measure_token_layers
            self.prompt += len(job.request.prompt)
            self.generated += len(r.tokens)
            self.failed = False
        job.tell(event)

    def figures(self) -> list:
        """[(name, kind, help, value)] for whoever watches. Those of the cache are as of the
        last time that the engine asked for work."""
        c, s, held = self.engine.counts, self.stats, self.engine.cache
        return [("waiting", "gauge", "Requests in the queue", len(self.waiting)),
                ("running", "gauge", "Requests with the engine", len(self.active) + len(self.again)),
                ("prompt_tokens", "counter", "Tokens of prompts", self.prompt),
                ("generated_tokens", "counter", "Tokens of answers", self.generated),
                ("forwards", "counter", "Forward passes", c["passes"]),
                ("token_layers", "counter", "Tokens through a layer, computed", c["token_layers"]),
                ("token_layers_saved", "gauge", "And not, against no cache", self.work_none - self.work_done),
                ("encoded_prefixes", "counter", "Prefixes encoded", c["encoded_prefixes"]),
                ("cache_hits", "counter", "Requests that read a stored prefix", s["hits"]),
                ("cache_misses", "counter", "Requests that did not", s["misses"]),
                ("cache_evictions", "counter", "Prefixes evicted", s["evictions"]),
                ("cache_entries", "gauge", "Prefixes stored", s["entries"]),
                ("cache_bytes", "gauge", "Bytes in use, running requests' included", s["bytes"]),
                ("cache_entry_bytes", "gauge", "Bytes of stored prefixes", sum(
                    len(e.pages) * held.kv_bytes + len(e.hidden_pages) * held.hidden_bytes
                    for e in list(held.entries.values()))),
                ("cache_budget_bytes", "gauge", "Bytes there are", s["budget_bytes"])]


class Service:
    """Bodies in, frames out: the first frame says whether to stream, the others what was decided of which
    choice."""

    def __init__(self, engine: Engine, model: Model, queue: int):
        self.engine, self.model, self.runner = engine, model, Runner(engine, queue)
        self.runner.start()

    async def answer(self, raw: bytes, chat: bool, tenant: str, seed: int):
        """Frames {index, text, canvas?, finish?, usage?}. Raises Refused. A listener who stops has its
        requests cancelled."""
        ask = await asyncio.to_thread(read, raw, chat, tenant, self.model, seed)
        heard, decode = asyncio.Queue(), self.engine.tokenizer.decode
        jobs = [Job(r, i, heard, asyncio.get_running_loop()) for i, r in enumerate(ask.requests)]
        texts = [Text(decode, r.gen_length, r.stop) for r in ask.requests]
        self.runner.submit(jobs)
        try:
            yield dict(stream=ask.stream, usage=ask.usage)
            left, steps = len(jobs), [0] * len(jobs)
            while left:
                i, event = await heard.get()
                if isinstance(event, Refused):
                    raise event
                again, result = event.step < steps[i], event.result         # in a second stream, and known
                steps[i] = max(steps[i], event.step + 1)
                frame = dict(index=i, text=texts[i].add(event))
                if ask.canvas and not again:
                    committed = [[place, decode([token])] for place, token in event.committed]
                    frame["canvas"] = dict(step=event.step, committed=committed)
                if result:
                    left -= 1
                    once = i % ask.n == 0           # the choices of a prompt share it
                    frame |= dict(finish=FINISH[result.finish_reason], usage=dict(
                        prompt=len(ask.requests[i].prompt) * once, completion=len(result.tokens),
                        cached=result.prefix_tokens * result.hit * once))
                if frame["text"] or result or "canvas" in frame:
                    yield frame
        finally:
            self.runner.cancel(jobs)
