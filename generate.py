"""Answer questions about a shared text with a masked diffusion language model, reusing the text's K/V.

    python generate.py                              the embedded model, a document and questions of examples/
    python generate.py --model DIR --prefix @doc.txt --prompt "Who ..." --prompt "Where ..."
    python generate.py --model DIR --requests chats.jsonl --json

What is parsed is cli/options.py; what is run and what is told of it stands here. The engine's events are all
there is to a run: result lines (cli/lines.py), answers, table, live canvas and trace (cli/terminal.py) listen
to them, each an object with `event` and `end`. Bad input ends with exit code 2 and one sentence, a signal
with 128 + its number; a traceback is a bug of ours. Checked: tests/test_generate.py.
"""
import os
import signal
import sys
import threading
import time
import warnings
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from cli import infill
from cli.lines import Chat, Lines, Results, say
from cli.options import files_read, given, parse, read_chats, read_conversation, refuse
from cli.terminal import Trace, Watch
from files import BadInput, read_json


# -- what is run ---------------------------------------------------------------------------------------------


def answer(args) -> None:
    """Everything between the command line and the exit code."""
    if args.chat:
        return converse(args)
    chats = read_chats(args)
    with Lines(args.output, files_read(args)) if args.output else nullcontext() as output:
        engine = load(args)
        requests = to_requests(chats, engine, args.model)
        stream = engine.stream(requests)                # all were checked, before anything runs or is printed
        if not args.json:
            say(headline(args.model, engine))
        if args.warm_up:
            prepare(engine, requests, args.json)
        told = listeners(args, engine, chats, requests, output)
        seconds = run(stream, told, len(requests), bar=not args.watch)
    if not args.json:
        tally = told[-1]
        say(tally.table())
        say(f"\n{engine.mode:8} {tally.work:12,.0f} token-layers  {seconds:6.2f} s")
        if tally.tokens is not None:
            compare(engine, requests, tally, seconds)


def converse(args) -> None:
    """--chat."""
    from cli import chat
    document, options = read_conversation(args)
    engine = load(args)
    say(headline(args.model, engine))
    chat.converse(engine, document, options, default_length(args.model))


def load(args):
    """The engine that the options ask for."""
    import torch

    from engine import Engine
    known = Engine.__init__.__kwdefaults__ | Engine.from_folder.__kwdefaults__
    engine = Engine.from_folder(os.path.expanduser(args.model), **given(args, known))
    if engine.device.type == "cuda":
        torch.cuda.set_device(engine.device)        # Triton's kernels run on the present one
    if engine.tokenizer is None:
        refuse(f"{args.model} has no tokenizer files, and text needs them; use engine.Engine with token ids")
    if args.warm_up and not engine.compiled:
        refuse("--warm-up has an effect only where the steps are compiled; add --compile or leave it out")
    if sum(p.numel() for p in engine.model.parameters()) < 2e7:
        torch.set_num_threads(1)        # so small a model waits for a second thread more than it gains
    return engine


def prepare(engine, requests: list, quiet: bool) -> None:
    """Compile first, so that the seconds of the run are its own."""
    from warmup import warm_up
    graphs, seconds = warm_up(engine, requests, bar=True)
    if not quiet:
        say(f"compiled    {graphs:9} graphs        {seconds:6.2f} s\n")


def to_requests(chats: list[Chat], engine, folder: str) -> list:
    """A checked `Request` for each chat."""
    from request import Request
    requests, capped, default, most = [], [], default_length(folder), engine.model.config.max_len
    for chat in chats:
        try:
            ids, P, canvas = render(chat, engine.tokenizer, engine.model.config.mask_id)
            options = {"prefix_len": P, "canvas": canvas, **chat.options}
            if options["canvas"] is None and "gen_length" not in options:
                options["gen_length"] = min(default, max(most - len(ids), 1))
                if options["gen_length"] < default:
                    capped.append(options["gen_length"])
            requests.append(Request(ids, **options))
            engine.check(requests[-1])
        except BadInput as e:
            refuse(f"{chat.where}: {e}")
    if capped:
        warnings.warn(f"{len(capped)} of {len(chats)} answers get less than the default of {default} tokens, "
                      f"{min(capped)} at the least: prompt and answer have {most} in all; set --gen-length")
    return requests


def render(chat: Chat, tokenizer, mask_id: int) -> tuple[list[int], int | None, list[int] | None]:
    """Ids, how many of them stand before the last question, the prefix (None: nothing does), and the canvas
    of a text with holes."""
    canvas = None
    if "infill" in chat.text:
        ids, P, canvas = infill.read(chat.text["infill"], chat.text.get("prefix", ""), tokenizer, mask_id)
    else:
        ids, P = tokenizer.render(chat.text | {"raw": True} if chat.raw else chat.text)
    return ids, P if "prefix" in chat.text or len(chat.text.get("messages", ())) > 1 else None, canvas


def default_length(folder: str) -> int:
    """gen_length where nobody says one: what generation_config.json, the hub's file, calls max_new_tokens."""
    from request import Request
    path = Path(os.path.expanduser(folder)) / "generation_config.json"
    length = read_json(path).get("max_new_tokens") if path.is_file() else None
    if length is None:
        return Request.gen_length
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        refuse(f"max_new_tokens is {length!r} in {path}; it must be at least 1: mend it, or set --gen-length")
    return length


def run(stream, told: list, total: int, bar: bool) -> float:
    """Let all listen to the engine's events; the seconds that it took, less those slept for the eye."""
    from tqdm import tqdm
    start = time.perf_counter()
    hidden = not bar or not sys.stderr.isatty()
    with tqdm(total=total, unit="answer", leave=False, disable=hidden) as progress:
        for event in stream:
            if event.result:
                progress.clear()        # what is printed now stands above the bar
            for listener in told:
                listener.event(event)
            if event.result:
                progress.update()
    seconds = time.perf_counter() - start - sum(getattr(listener, "slept", 0) for listener in told)
    for listener in told:
        listener.end()
    return seconds


# -- what is told --------------------------------------------------------------------------------------------


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


def main(argv=None) -> int:
    """The exit code: 0; 2 for bad input or a full disk; 128 + n for signal n; 1 if the reader has gone."""
    warnings.showwarning = lambda message, *_: complain(message)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")   # what the terminal cannot show does not end a run
    with signals_interrupt():
        try:
            answer(parse(argv))
            return 0
        except BadInput as e:
            complain(e, notes(e))
            drop_stdout()
            return 2
        except KeyboardInterrupt as e:
            complain("interrupted", notes(e))
            return 128 + (e.args[0] if e.args else signal.SIGINT)
        except BrokenPipeError as e:
            if notes(e):
                complain("standard output was closed", notes(e))
            drop_stdout()
            return 1


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


if __name__ == "__main__":
    sys.exit(main())
