"""What is told of a run, and how it ends: answers, the table, the comparison; signals and last words.

Each listener is an object with `event` and `end`, called with every event of the engine. Checked:
tests/test_generate.py.
"""
import os
import signal
import sys
import threading
import time
from contextlib import contextmanager, suppress

from cli.lines import Lines, Results, say
from cli.terminal import Trace, Watch


def listeners(args, engine, chats: list, requests: list, output: Lines | None) -> list:
    """Who listens to the events, in the order in which they print. Each keeps only what it will print."""
    told = [Results(chats, output, stdout=args.json)]
    if args.watch:
        told.append(Watch(requests, engine.tokenizer.decode, engine.model.config.mask_id))
    if args.trace:
        told.append(Trace(requests, engine.model.config.layers))
    if not args.json:
        demo = not (args.prompt or args.infill or args.requests) and engine.mode != "none"
        told += [Answers(chats, late=args.watch), Tally(requests, keep=args.compare or demo)]
    return told


class Answers:
    """Questions with their answers, in the order of the questions; `late`: all at the end."""

    def __init__(self, chats: list, late: bool):
        self.chats, self.late = chats, late
        self.texts, self.shown = {}, 0      # those that wait for an earlier one

    def event(self, event) -> None:
        if event.result:
            self.texts[event.index] = (self.chats[event.index].lead + event.result.text).strip()
            if not self.late:
                self.end()

    def end(self) -> None:
        while self.shown in self.texts:
            say(f"Q  {self.chats[self.shown].question}\nA  {self.texts.pop(self.shown)}\n")
            self.shown += 1


class Tally:
    """The table: a line for each result, then those that got less than the table's depth. work: token-layers.
    tokens: all answers, if they are to be kept."""
    HEAD = "request  prefix  ratio  depth  cache  refreshes  steps  generated"

    def __init__(self, requests: list, keep: bool):
        self.totals = [len(r.prompt) + r.gen_length for r in requests]
        self.rows, self.lowered, self.work = {}, {}, 0
        self.tokens = {} if keep else None

    def event(self, event) -> None:
        if r := event.result:
            cache = "hit" if r.hit else "miss" if r.encode_token_layers else "-"
            ratio, number = r.prefix_tokens / self.totals[event.index], event.index + 1
            self.rows[number] = (f"{number:7}  {r.prefix_tokens:6}  {ratio:5.2f}  {r.depth:5}  {cache:>5}"
                                 f"  {r.refreshes:9}  {r.forwards:5}  {len(r.tokens):9}")
            if r.table_depth and r.depth < r.table_depth and r.similarity:
                layers = " ".join(f"{s:.3f}" for s in r.similarity)
                what = (f"depth {r.depth}, not the table's {r.table_depth}, where the similarity by layer is "
                        f"{layers}")
                self.lowered.setdefault(what, []).append(number)
            self.work += r.token_layers + r.encode_token_layers + r.measure_token_layers
            if self.tokens is not None:
                self.tokens[event.index] = r.tokens

    def end(self) -> None:
        pass

    def table(self) -> str:
        lines = [self.HEAD] + [self.rows[number] for number in sorted(self.rows)]
        for what, which in self.lowered.items():
            lines.append(f"{what}: request {', '.join(map(str, sorted(which)))}")
        return "\n".join(lines)


def headline(folder: str, engine) -> str:
    """What runs, and on what."""
    millions = sum(p.numel() for p in engine.model.parameters()) / 1e6
    dtype = str(engine.model.embed.weight.dtype).removeprefix("torch.")
    return (f"{os.path.relpath(folder)}: {engine.model.config.layers} layers, {millions:.1f} M parameters, "
            f"{dtype} on {engine.device}, {engine.attention} kernels, cache {engine.mode}\n")


def compare(engine, requests: list, tally: Tally, seconds: float) -> None:
    """Run the requests once more without a cache; print what that took and whether the answers are equal."""
    from engine import Engine
    plain = Engine(engine.model, cache="none", cache_mb=engine.cache.budget / 2**20,
                   max_batch=engine.max_batch, tokenizer=engine.tokenizer)
    start = time.perf_counter()
    others = plain.generate(requests)
    plain_seconds, work = time.perf_counter() - start, sum(r.token_layers for r in others)
    same = sum(tally.tokens[i] == r.tokens for i, r in enumerate(others))
    say(f"{'none':8} {work:12,.0f} token-layers  {plain_seconds:6.2f} s\n")
    say(f"{work / tally.work:.1f} times less work, {plain_seconds / seconds:.1f} times faster; "
        f"{same} of {len(others)} answers equal")


# -- how it ends ---------------------------------------------------------------------------------------------


def complain(what, more=()) -> None:
    with suppress(OSError):                 # the terminal may be what has gone
        print(f"generate.py: {'; '.join([str(what), *more])}", file=sys.stderr)


def notes(error: BaseException) -> list[str]:
    """What `Lines` says of the answers so far."""
    return getattr(error, "__notes__", [])


def drop_stdout() -> None:
    """Python would try once more, at the end, to write what could not be written."""
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def signals_interrupt():
    """Within: SIGTERM and SIGHUP are as Ctrl-C, unless they are ignored (nohup)."""
    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    if threading.current_thread() is not threading.main_thread():
        names = []                          # Python hears signals in the main thread only

    def interrupt(number, _):
        raise KeyboardInterrupt(number)
    before = {name: signal.getsignal(getattr(signal, name)) for name in names}
    for name, handler in before.items():
        if handler == signal.SIG_DFL:
            signal.signal(getattr(signal, name), interrupt)
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(getattr(signal, name), handler)
