"""Answer questions about a shared text with a masked diffusion language model, reusing the text's K/V.

    python generate.py                              the embedded model, a document and questions of examples/
    python generate.py --model DIR --prefix @doc.txt --prompt "Who ..." --prompt "Where ..."
    python generate.py --model DIR --requests chats.jsonl --json

What is parsed is cli/options.py, what is run stands here, what is told of it is cli/told.py. The engine's
events are all there is to a run: result lines (cli/lines.py), answers, table, live canvas and trace
(cli/terminal.py) listen to them. Bad input ends with exit code 2 and one sentence, a signal with 128 + its
number; a traceback is a bug of ours. Checked: tests/test_generate.py.
"""
import os
import signal
import sys
import time
import warnings
from contextlib import nullcontext

from cli.lines import Lines, say
from cli.options import files_read, given, parse, read_chats, read_conversation, refuse
from cli.requests import default_length, to_requests
from cli.told import compare, complain, drop_stdout, headline, listeners, notes, signals_interrupt
from files import BadInput


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
    from cli.warmup import warm_up
    graphs, seconds = warm_up(engine, requests, bar=True)
    if not quiet:
        say(f"compiled    {graphs:9} graphs        {seconds:6.2f} s\n")


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


if __name__ == "__main__":
    sys.exit(main())
