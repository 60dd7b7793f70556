"""Answer questions about a shared text with a masked diffusion language model, reusing the text's K/V.

    python generate.py                                          the embedded model, a document and questions of examples/
    python generate.py --model DIR --prefix @doc.txt --prompt "Who ..." --prompt "Where ..."
    python generate.py --model DIR --requests chats.jsonl --json

The engine's events are all there is to it: the progress bar, the live canvas, the trace and the result lines are four ways
of listening to one stream. Bad input ends with exit code 2 and one sentence, an interrupt with 130.
"""
import argparse
import json
import os
import shutil
import sys
import time
import warnings
from dataclasses import asdict, fields
from pathlib import Path

HERE = Path(__file__).parent
PAUSE = 0.01            # seconds after each drawing of --watch: slow enough to see


def parse(argv=None) -> argparse.Namespace:
    """The command line. Whatever is not given stays None, so that defaults are written once: in Request and Engine."""
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter)
    p.error = lambda message: p.exit(2, f"generate.py: {message}\n")
    add = p.add_argument_group("model").add_argument
    add("--model", metavar="DIR", default=str(HERE / "checkpoints" / "tiny"), help="model folder (default: the embedded one)")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where to run (auto: the GPU if there is one)")
    add("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto", help="auto: as stored, where that is fast")
    add("--compile", action="store_true", help="compile the steps: for GPUs, on a CPU it does not pay")
    add = p.add_argument_group("input").add_argument
    add("--prefix", metavar="TEXT|@FILE", help="the text that all prompts share: a chat's system message, else what they follow on")
    add("--prompt", metavar="TEXT|@FILE", action="append", help="one request; give it as often as you like")
    add("--requests", metavar="FILE.jsonl", help='a request a line: {"prefix": ..., "prompt": ...} or {"messages": [...]}')
    add = p.add_argument_group("decoding").add_argument
    add("--gen-length", type=int, help="tokens to generate at most (max_new_tokens of generation_config.json, else 128)")
    add("--steps", type=int, help="forward passes for the whole answer (default: one a token)")
    add("--block-length", type=int, help="decide the answer in blocks of so many tokens, in order (default: one block)")
    add("--threshold", type=float, help="commit all tokens above this probability, at least one a step; instead of --steps")
    add("--temperature", type=float, help="0 (default) takes the likeliest token, above draws")
    add("--remasking", help="low_confidence (default), random, maskgit_plus, entropy, topk_margin or origin")
    add("--seed", type=int, help="of the draws (default 0)")
    add("--no-eos", dest="stop_at_eos", action="store_false", default=None, help="do not stop at the end-of-text token")
    add("--eps", type=float, help="Dream's schedule: timesteps linear from 1 to EPS (Dream uses 0.001)")
    add("--alg-temp", type=float, help="draw the rows to commit at this temperature (Dream; default 0: take the best)")
    add("--top-p", type=float, help="draw from the likeliest tokens of this total probability")
    add("--top-k", type=int, help="draw from this many likeliest tokens")
    add("--cfg-scale", type=float, help="guidance away from the answer to an empty prompt (LLaDA; default 0: none)")
    add("--logits-eos-inf", action="store_true", default=None, help="never choose the end-of-text token (LLaDA)")
    add("--confidence-eos-eot-inf", action="store_true", default=None, help="commit end-of-text and end-of-turn last (LLaDA)")
    add = p.add_argument_group("cache").add_argument
    add("--cache", choices=["bicache", "none", "naive", "intra"], help="what is reused (default bicache)")
    add("--depth", help="layers whose shared K/V are reused, or auto (default): from the model's table by prefix ratio")
    add("--measure", type=int, metavar="N", help="at one refresh in N see whether the table holds for the prefix, and lower its "
        "depth where not (default 16; 0: never)")
    add("--self-profile", type=float, nargs="?", const=0.97, metavar="S", help="no table: measure each prefix at its first "
        "request, then share the layers that are alike by S (0.97)")
    add("--refresh", type=int, help="steps between recomputations of the prefix above the depth (default 16)")
    add("--window", choices=["all", "rest", "block"], help="rows computed after a block's first step: all of the request's own "
        "(default), the rest from the block on, or the block's")
    add("--cache-mb", type=float, help="memory for K/V, allocated at the start (default 256)")
    add("--max-batch", type=int, help="requests that step together at most (default 8)")
    add("--auto-prefix", action=argparse.BooleanOptionalAction, help="share what prompts turn out to have in common (default)")
    add("--attention", choices=["auto", "torch", "triton"], help="kernels (auto: triton on a GPU)")
    add("--salt", help="requests with another salt never share a prefix with these")
    add = p.add_argument_group("output").add_argument
    add("--json", action="store_true", help="one JSON object a line on standard output, and nothing else there")
    add("--output", metavar="FILE", help="write the results there as well, one JSON object a line")
    add("--watch", action="store_true", help="show the answers as they are denoised, in a terminal")
    add("--trace", action="store_true", help="show what each layer computed and read at each step")
    add("--compare", action="store_true", help="run once more without a cache and compare (done when no input is given)")
    args = p.parse_args(argv)
    shares = args.cache in (None, "bicache")
    for bad, why in (
            (args.requests and (args.prompt or args.prefix), "--requests brings its own prompts; leave out --prompt and --prefix"),
            (args.prefix and not args.prompt, "--prefix needs at least one --prompt"),
            (not (args.depth or "auto").isdecimal() and args.depth not in (None, "auto"),
             f"--depth is {args.depth!r}; it must be auto or a number of layers"),
            (args.depth is not None and not shares, "--depth has an effect only with --cache bicache"),
            (args.measure and not (shares and args.depth in (None, "auto")), "--measure has an effect only with --cache bicache and --depth auto"),
            (args.self_profile is not None and not (shares and args.depth in (None, "auto")),
             "--self-profile has an effect only with --cache bicache and --depth auto"),
            (args.auto_prefix is not None and not shares, "--auto-prefix has an effect only with --cache bicache"),
            (args.salt and args.cache in ("none", "intra"), f"--salt has no effect with --cache {args.cache}"),
            (args.seed and not (args.temperature or args.alg_temp or args.remasking in ("random", "origin")),
             "--seed has an effect only with --temperature, --alg-temp, or --remasking random or origin"),
            (args.refresh is not None and args.cache in ("none", "naive"), f"--refresh has no effect with --cache {args.cache}"),
            (args.json and (args.trace or args.compare or args.watch), "--json wants standard output for itself; leave it out"),
            (args.watch and not sys.stdout.isatty(), "--watch draws in a terminal, and standard output is none"),
            (args.compare and args.cache == "none", "--compare compares with --cache none; give another --cache")):
        if bad:
            raise ValueError(why)
    args.depth = int(args.depth) if args.depth not in (None, "auto") else args.depth
    return args


def read_text(value: str) -> str:
    """The value itself, or for @FILE what stands in the file."""
    if not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ValueError(f"{value[1:]} cannot be read: {e.strerror if isinstance(e, OSError) else 'it is not UTF-8 text'}") from e


def read_chats(args) -> list[dict]:
    """What to answer: a list of {"prefix", "prompt"} or {"messages"}."""
    if args.requests:
        chats = []
        for number, line in enumerate(read_text("@" + args.requests).rstrip().split("\n"), 1):
            try:
                chat = json.loads(line)
            except (json.JSONDecodeError, RecursionError) as e:
                raise ValueError(f"line {number} of {args.requests} is no JSON ({e})") from e
            keys = set(chat) if isinstance(chat, dict) else None
            if keys not in ({"prefix", "prompt"}, {"prompt"}, {"messages"}) or not all(
                    isinstance(chat[k], str) for k in keys - {"messages"}):
                raise ValueError(f'line {number} of {args.requests} must be {{"prefix": text, "prompt": text}} or '
                                 '{"messages": [...]}')
            chats.append(chat)
        return chats
    if args.prompt:
        prefix = {"prefix": read_text(args.prefix).strip()} if args.prefix else {}
        return [{**prefix, "prompt": read_text(p).strip()} for p in args.prompt]
    examples = HERE / "examples"
    document, questions = ((examples / name).read_text().strip() for name in ("staff.txt", "questions.txt"))
    return [{"prefix": document, "prompt": question} for question in questions.split("\n")]


def to_request(chat: dict, tokenizer, options: dict):
    """A chat, or a prefix and a prompt, as a `Request`; what stands before the last question is its prefix, if anything does."""
    from engine import Request
    ids, length = tokenizer.render(chat)
    return Request(ids, prefix_len=length if "prefix" in chat or len(chat.get("messages", ())) > 1 else None, **options)


def trace_map(events: list, layers: int) -> str:
    """Layers x steps of one request: where the prefix rows were computed and where their K/V were read."""
    def cell(e, layer):
        return "." if not e.prefix_tokens else "s" if layer < e.depth else "#" if e.refresh else "p"
    lines = [f"  layer {i:3} " + "".join(cell(e, i) for e in events) for i in reversed(range(layers))]
    rows = [hi - lo for lo, hi in (e.computed for e in events)]
    return "\n".join([*lines, f"  own rows  {rows[0]} at first, {min(rows)} to {max(rows)} a step, in every layer",
                      "  prefix: # computed  s read from shared pages  p read from private pages  . there is none"])


class Watch:
    """The answers on their way, one line each, drawn over themselves; a finished one stays above them."""

    def __init__(self, decode):
        self.decode, self.running, self.drawn = decode, {}, 0

    def show(self, event, length: int) -> None:
        """Take in one event of a request that generates `length` tokens, and draw."""
        canvas = self.running.setdefault(event.index, [None] * length)
        for place, token in event.committed:
            canvas[place] = token
        lines = [self.line(event.index)] if event.result else []
        if event.result:
            del self.running[event.index]
        lines += [self.line(index) for index in self.running]
        sys.stdout.write(f"\033[{self.drawn}F" * (self.drawn > 0) + "".join(f"\033[K{line}\n" for line in lines))
        sys.stdout.flush()
        self.drawn = len(self.running)
        time.sleep(PAUSE)

    def line(self, index: int) -> str:
        room = shutil.get_terminal_size().columns - 6
        text = "".join("░" if t is None else self.decode([t]) for t in self.running[index])
        return f"{index + 1:4}  " + " ".join(text.split())[:room]


def table(results: list, totals: list[int]) -> str:
    """A line for each result, then those that got less than the table's depth; `totals`: lengths of the canvases."""
    head = "request  prefix  ratio  depth  cache  refreshes  steps  generated"
    low = {}
    for i, r in enumerate(results, 1):
        if r.table_depth and r.depth < r.table_depth and r.similarity:
            low.setdefault((r.depth, r.table_depth, " ".join(f"{s:.3f}" for s in r.similarity)), []).append(str(i))
    low = [f"depth {depth}, not the table's {most}, where the similarity by layer is {layers}: request {', '.join(which)}"
           for (depth, most, layers), which in low.items()]
    cache = lambda r: "hit" if r.hit else "miss" if r.encode_token_layers else "-"
    return "\n".join([head, *(
        f"{i:7}  {r.prefix_tokens:6}  {r.prefix_tokens / total:5.2f}  {r.depth:5}  {cache(r):>5}"
        f"  {r.refreshes:9}  {r.forwards:5}  {len(r.tokens):9}" for i, (r, total) in enumerate(zip(results, totals), 1)), *low])


def answer(args: argparse.Namespace) -> None:
    """Load, run, print: everything between the command line and the exit code."""
    chats = read_chats(args)
    import torch
    from tqdm import tqdm
    from engine import Engine, Request      # all this only now: --help and a bad option do not wait for torch
    warnings.showwarning = lambda message, *_: print(f"generate.py: {message}", file=sys.stderr)
    given = {name: value for name, value in vars(args).items() if value is not None}
    options = {f.name: given[f.name] for f in fields(Request) if f.name in given and f.name != "prompt"}
    names = ("cache", "depth", "refresh", "window", "cache_mb", "max_batch", "auto_prefix", "measure", "self_profile",
             "attention", "device", "dtype", "compile")
    engine = Engine.from_folder(args.model, **{name: given[name] for name in names if name in given})
    if sum(p.numel() for p in engine.model.parameters()) < 2e7:
        torch.set_num_threads(1)            # so small a model waits for a second thread more than that does for it
    if engine.tokenizer is None:
        raise ValueError(f"{args.model} has no tokenizer files, and text needs them; use engine.Engine with token ids")
    config = Path(args.model) / "generation_config.json"        # the hub's file, and its name for what we call gen_length
    if "gen_length" not in options and config.is_file():
        options["gen_length"] = json.loads(config.read_text()).get("max_new_tokens") or Request.gen_length
    requests = []
    for number, chat in enumerate(chats, 1):
        try:
            requests.append(to_request(chat, engine.tokenizer, options))
        except ValueError as e:
            raise ValueError(f"line {number} of {args.requests}: {e}" if args.requests else str(e)) from None
    stream, output = engine.stream(requests), Lines(args.output)    # refuse bad input, before anything runs or is printed

    say, layers = (lambda *a: None) if args.json else print, engine.model.config.layers
    say(f"{os.path.relpath(args.model)}: {layers} layers, {sum(p.numel() for p in engine.model.parameters()) / 1e6:.1f} M parameters, "
        f"{str(engine.model.embed.weight.dtype)[6:]} on {engine.device}, {engine.attention} kernels, cache {engine.mode}\n")
    results, events, shown, seconds = [None] * len(requests), [[] for _ in requests], 0, time.perf_counter()
    watch = Watch(engine.tokenizer.decode) if args.watch else None
    bar = tqdm(total=len(requests), unit="answer", leave=False, disable=args.watch or not sys.stderr.isatty())

    def spoken(i: int) -> str:
        question = chats[i]["prompt"] if "prompt" in chats[i] else chats[i]["messages"][-1]["content"]
        return f"Q  {question}\nA  {engine.tokenizer.decode(results[i].tokens).strip()}\n"

    with bar, output:
        for event in stream:
            events[event.index].append(event)
            if watch:
                watch.show(event, requests[event.index].gen_length)
            if event.result:
                results[event.index] = event.result
                bar.update()
                line = json.dumps({"index": event.index, "text": engine.tokenizer.decode(event.result.tokens).strip(),
                                   **asdict(event.result)}, ensure_ascii=False)
                output.write(line)
                if args.json:
                    print(line, flush=True)
            while not watch and shown < len(results) and results[shown]:        # in the order of the questions
                with bar.external_write_mode():
                    say(spoken(shown))
                shown += 1
    if watch:
        say("\n" + "\n".join(map(spoken, range(len(results)))))
    seconds = time.perf_counter() - seconds - PAUSE * sum(map(len, events)) * bool(watch)
    if args.trace:
        for i, seen in enumerate(events, 1):
            say(f"request {i}: {len(seen)} steps, from left to right\n{trace_map(seen, layers)}\n")
    say(table(results, [len(r.prompt) + r.gen_length for r in requests]))
    work = sum(r.token_layers + r.encode_token_layers + r.measure_token_layers for r in results)
    say(f"\n{engine.mode:8} {work:12,.0f} token-layers  {seconds:6.2f} s")
    if args.compare or not (args.prompt or args.requests or args.json or engine.mode == "none"):    # the examples: always
        compare(engine, requests, results, work, seconds)


def compare(engine, requests: list, results: list, work: float, seconds: float) -> None:
    """Run the requests once more without a cache; print what that took and whether the answers are equal."""
    from engine import Engine
    plain = Engine(engine.model, cache="none", cache_mb=engine.cache.budget / 2**20, max_batch=engine.max_batch,
                   tokenizer=engine.tokenizer)
    start = time.perf_counter()
    others = plain.generate(requests)
    plain_seconds, plain_work = time.perf_counter() - start, sum(r.token_layers for r in others)
    same = sum(a.tokens == b.tokens for a, b in zip(results, others))
    print(f"{'none':8} {plain_work:12,.0f} token-layers  {plain_seconds:6.2f} s\n\n{plain_work / work:.1f} times less work, "
          f"{plain_seconds / seconds:.1f} times faster; {same} of {len(results)} answers equal")


class Lines:
    """A file of whole lines: written beside the name it will have, renamed to it at the end, also after an interrupt."""

    def __init__(self, path: str | None):
        self.path, self.file = path, None
        if path:
            self.path = os.path.realpath(path)      # through a link, to what it stands for
            if os.path.exists(path) and not os.path.isfile(path):
                raise ValueError(f"--output {path} is no ordinary file; give another name")
            try:
                self.file = open(self.path + ".tmp", "wb", buffering=0)     # unbuffered: a line is one write, or none
            except OSError as e:
                raise ValueError(f"--output {path} cannot be written: {e.strerror}") from e

    def __enter__(self):
        return self

    def write(self, line: str) -> None:
        if self.file:
            self.file.write(line.encode() + b"\n")

    def __exit__(self, kind, *_):
        if self.file:
            some = self.file.tell()
            self.file.close()
            os.replace(self.path + ".tmp", self.path) if some or not kind else os.remove(self.path + ".tmp")


def main(argv=None) -> int:
    """The exit code: 0, 2 for bad input (one sentence on standard error), 130 for an interrupt."""
    try:
        answer(parse(argv))
        return 0
    except ValueError as e:
        print(f"generate.py: {e}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:                 # whoever read standard output has gone: nothing is left to say
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


if __name__ == "__main__":
    sys.exit(main())
