"""Answer questions about a shared text with a masked diffusion language model, reusing the text's K/V.

    python generate.py                                          the embedded model, a document and questions of examples/
    python generate.py --model DIR --prefix @doc.txt --prompt "Who ..." --prompt "Where ..."
    python generate.py --model DIR --requests chats.jsonl --json

From top to bottom: what is parsed, what is run, what is told of it. The engine's events are all there is to a run; result
lines, answers, live canvas and trace (terminal.py) listen to them, each an object with `event` and `end`. Bad input ends with
exit code 2 and one sentence, an interrupt with 130. Checked: tests/test_generate.py.
"""
import argparse
import json
import os
import sys
import time
import warnings
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path

from files import BadInput, Lines, Results, read_text
from terminal import Trace, Watch

HERE = Path(__file__).parent


# -- what is parsed ---------------------------------------------------------------------------------------------------


def parse(argv=None) -> argparse.Namespace:
    """The command line. An option named like a field of `Request` or an argument of `Engine` goes there, and stays None
    if it is not given, so that defaults are written once: there."""
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    p.error = refuse
    add = p.add_argument_group("model").add_argument
    add("--model", metavar="DIR", default=str(HERE / "checkpoints" / "tiny"),
        help="model folder (default: the embedded one)")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="where to run (auto: the GPU if there is one)")
    add("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto",
        help="auto: as stored, where that is fast")
    add("--compile", action="store_true", default=None, help="compile the steps: for GPUs, on a CPU it does not pay")
    add = p.add_argument_group("input").add_argument
    add("--prefix", metavar="TEXT|@FILE",
        help="the text that all prompts share: a chat's system message, else what they follow on")
    add("--prompt", metavar="TEXT|@FILE", action="append", help="one request; give it as often as you like")
    add("--requests", metavar="FILE.jsonl",
        help='a request a line: {"prefix": ..., "prompt": ...} or {"messages": [...]}')
    add = p.add_argument_group("decoding").add_argument
    add("--gen-length", type=int,
        help="tokens to generate at most (max_new_tokens of generation_config.json, else 128)")
    add("--steps", type=int, help="forward passes for the whole answer (default: one a token)")
    add("--block-length", type=int, help="decide the answer in blocks of so many tokens, in order (default: one block)")
    add("--threshold", type=float,
        help="commit all tokens above this probability, at least one a step; instead of --steps")
    add("--factor", type=float,
        help="commit the n-th best token while its probability lies above 1 - FACTOR / (n + 1); instead of --steps")
    add("--entropy-bound", type=float, metavar="NATS",
        help="commit the surest tokens while the entropies of those before add up to no more; instead of --steps")
    add("--temperature", type=float, help="0 (default) takes the likeliest token, above draws")
    add("--remasking", help="low_confidence (default), random, maskgit_plus, entropy, topk_margin or origin")
    add("--seed", type=int, help="of the draws (default 0)")
    add("--no-eos", dest="stop_at_eos", action="store_false", default=None,
        help="do not stop at the end-of-text token")
    add("--eps", type=float, help="Dream's schedule: timesteps linear from 1 to EPS (Dream uses 0.001)")
    add("--alg-temp", type=float,
        help="draw the rows to commit at this temperature (Dream; default 0: take the best)")
    add("--top-p", type=float, help="draw from the likeliest tokens of this total probability")
    add("--top-k", type=int, help="draw from this many likeliest tokens")
    add("--cfg-scale", type=float, help="guidance away from the answer to an empty prompt (LLaDA; default 0: none)")
    add("--logits-eos-inf", action="store_true", default=None, help="never choose the end-of-text token (LLaDA)")
    add("--confidence-eos-eot-inf", action="store_true", default=None,
        help="commit end-of-text and end-of-turn last (LLaDA)")
    add = p.add_argument_group("cache").add_argument
    add("--cache", choices=["bicache", "none", "naive", "intra"], help="what is reused (default bicache)")
    add("--depth", type=depth,
        help="layers whose shared K/V are reused, or auto (default): from the model's table by prefix ratio")
    add("--measure", type=int, metavar="N",
        help="at one refresh in N see whether the table holds for the prefix, and lower its depth where not "
             "(default 16; 0: never)")
    add("--self-profile", type=float, nargs="?", const=0.97, metavar="S",
        help="no table: measure each prefix at its first request, then share the layers that are alike by S (0.97)")
    add("--refresh", type=int, help="steps between recomputations of the prefix above the depth (default 16)")
    add("--window", choices=["all", "rest", "block"],
        help="rows computed after a block's first step: all of the request's own (default), the rest from the block on, "
             "or the block's")
    add("--cache-mb", type=float, help="memory for K/V, allocated at the start (default 256)")
    add("--max-batch", type=int, help="requests that step together at most (default 8)")
    add("--auto-prefix", action=argparse.BooleanOptionalAction,
        help="share what prompts turn out to have in common (default)")
    add("--attention", choices=["auto", "torch", "triton"], help="kernels (auto: triton on a GPU)")
    add("--salt", help="requests with another salt never share a prefix with these")
    add = p.add_argument_group("output").add_argument
    add("--json", action="store_true", help="one JSON object a line on standard output, and nothing else there")
    add("--output", metavar="FILE", help="write the results there as well, one JSON object a line")
    add("--watch", action="store_true", help="show the answers as they are denoised, in a terminal")
    add("--trace", action="store_true", help="show what each layer computed and read at each step")
    add("--compare", action="store_true", help="run once more without a cache and compare (done when no input is given)")
    args = p.parse_args(argv)
    check_options(args)
    return args


def refuse(message: str):
    raise BadInput(message)


def depth(value: str) -> int | str:
    """The type of --depth."""
    if value == "auto":
        return value
    if not value.isdecimal():
        raise argparse.ArgumentTypeError(f"{value!r} is neither auto nor a number of layers")
    return int(value)


def check_options(a: argparse.Namespace) -> None:
    """Refuse what has no effect in the chosen mode, or excludes each other."""
    shares = a.cache in (None, "bicache")
    looks_up = shares and a.depth in (None, "auto")
    draws = a.temperature or a.alg_temp or a.remasking in ("random", "origin")
    for bad, why in (
            (a.requests and (a.prompt or a.prefix), "--requests brings its own prompts; leave out --prompt and --prefix"),
            (a.prefix and not a.prompt, "--prefix needs at least one --prompt"),
            (a.depth is not None and not shares, "--depth has an effect only with --cache bicache"),
            (a.measure and not looks_up, "--measure has an effect only with --cache bicache and --depth auto"),
            (a.self_profile is not None and not looks_up,
             "--self-profile has an effect only with --cache bicache and --depth auto"),
            (a.auto_prefix is not None and not shares, "--auto-prefix has an effect only with --cache bicache"),
            (a.salt and a.cache in ("none", "intra"), f"--salt has no effect with --cache {a.cache}"),
            (a.seed and not draws,
             "--seed has an effect only with --temperature, --alg-temp, or --remasking random or origin"),
            (a.refresh is not None and a.cache in ("none", "naive"), f"--refresh has no effect with --cache {a.cache}"),
            (a.json and (a.trace or a.compare or a.watch), "--json wants standard output for itself; leave it out"),
            (a.watch and not sys.stdout.isatty(), "--watch draws in a terminal, and standard output is none"),
            (a.compare and a.cache == "none", "--compare compares with --cache none; give another --cache")):
        if bad:
            raise BadInput(why)


def text(value: str) -> str:
    """The value itself, or for @FILE what stands in the file."""
    return read_text(value[1:]) if value.startswith("@") else value


def read_chats(args) -> list[dict]:
    """What to answer: a list of {"prefix", "prompt"} or {"messages"}."""
    if args.requests:
        lines = read_text(args.requests).rstrip().split("\n")
        return [read_chat(line, f"line {number} of {args.requests}") for number, line in enumerate(lines, 1)]
    if args.prompt:
        prefix = {"prefix": text(args.prefix).strip()} if args.prefix else {}
        return [{**prefix, "prompt": text(prompt).strip()} for prompt in args.prompt]
    document, questions = (read_text(HERE / "examples" / name).strip() for name in ("staff.txt", "questions.txt"))
    return [{"prefix": document, "prompt": question} for question in questions.split("\n")]


def read_chat(line: str, where: str) -> dict:
    """A line of a file of requests."""
    try:
        chat = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as e:
        raise BadInput(f"{where} is no JSON ({e})") from e
    keys = set(chat) if isinstance(chat, dict) else None
    known = keys in ({"prefix", "prompt"}, {"prompt"}, {"messages"})
    if not known or not all(isinstance(chat[key], str) for key in keys - {"messages"}):
        raise BadInput(f'{where} must be {{"prefix": text, "prompt": text}} or {{"messages": [...]}}')
    return chat


# -- what is run ------------------------------------------------------------------------------------------------------


def answer(args: argparse.Namespace) -> None:
    """Everything between the command line and the exit code."""
    chats = read_chats(args)
    warnings.showwarning = lambda message, *_: print(f"generate.py: {message}", file=sys.stderr)
    engine = load(args)
    requests = to_requests(chats, engine.tokenizer, request_options(args), args.requests)
    stream = engine.stream(requests)                    # refuses bad input, before anything runs or is printed
    with Lines(args.output) if args.output else nullcontext() as output:
        if not args.json:
            print(headline(args.model, engine))
        results, seconds = run(stream, listeners(args, engine, chats, requests, output), len(requests), args.watch)
    if args.json:
        return
    work = sum(r.token_layers + r.encode_token_layers + r.measure_token_layers for r in results)
    print(table(results, [len(r.prompt) + r.gen_length for r in requests]))
    print(f"\n{engine.mode:8} {work:12,.0f} token-layers  {seconds:6.2f} s")
    demo = not (args.prompt or args.requests)
    if args.compare or demo and engine.mode != "none":
        compare(engine, requests, results, work, seconds)


def load(args):
    """The engine that the options ask for. torch is imported only now: --help and a bad option do not wait for it."""
    import torch

    from engine import Engine
    known = Engine.__init__.__kwdefaults__ | Engine.from_folder.__kwdefaults__
    engine = Engine.from_folder(args.model, **given(args, known))
    if engine.tokenizer is None:
        raise BadInput(f"{args.model} has no tokenizer files, and text needs them; use engine.Engine with token ids")
    if sum(p.numel() for p in engine.model.parameters()) < 2e7:
        torch.set_num_threads(1)            # so small a model waits for a second thread more than that does for it
    return engine


def given(args, names) -> dict:
    """The options of these names that were given."""
    return {name: value for name, value in vars(args).items() if name in names and value is not None}


def request_options(args) -> dict:
    """What the options, and the folder's generation_config.json, say of each request."""
    from request import Request
    options = given(args, {f.name for f in fields(Request)} - {"prompt"})
    config = Path(args.model) / "generation_config.json"        # the hub's file, and its name for what we call gen_length
    if "gen_length" not in options and config.is_file():
        options["gen_length"] = json.loads(read_text(config)).get("max_new_tokens") or Request.gen_length
    return options


def to_requests(chats: list, tokenizer, options: dict, file: str | None) -> list:
    """Chats, or prefixes and prompts, as a `Request` each; what stands before the last question is its prefix, if
    anything does."""
    from request import Request
    requests = []
    for number, chat in enumerate(chats, 1):
        try:
            ids, length = tokenizer.render(chat)
        except ValueError as e:
            raise BadInput(f"line {number} of {file}: {e}" if file else str(e)) from None
        shared = "prefix" in chat or len(chat.get("messages", ())) > 1
        requests.append(Request(ids, prefix_len=length if shared else None, **options))
    return requests


def run(stream, listeners: list, total: int, quiet: bool) -> tuple[list, float]:
    """Let all listen to the engine's events: the results in the order of the requests, and the seconds that it took."""
    from tqdm import tqdm
    results, start = [None] * total, time.perf_counter()
    with tqdm(total=total, unit="answer", leave=False, disable=quiet or not sys.stderr.isatty()) as bar:
        for event in stream:
            if event.result:
                bar.clear()                 # what is printed now stands above the bar
            for listener in listeners:
                listener.event(event)
            if event.result:
                results[event.index] = event.result
                bar.update()
    seconds = time.perf_counter() - start - sum(getattr(listener, "slept", 0) for listener in listeners)
    for listener in listeners:
        listener.end()
    return results, seconds


# -- what is told -----------------------------------------------------------------------------------------------------


def listeners(args, engine, chats: list, requests: list, output: Lines | None) -> list:
    """Who listens to the events, in the order in which they print."""
    decode, layers = engine.tokenizer.decode, engine.model.config.layers
    found = [Results(decode, output, args.json)]
    if args.watch:
        found.append(Watch(requests, decode))
    if not args.json:
        found.append(Answers(decode, [question(chat) for chat in chats], late=args.watch))
    if args.trace:
        found.append(Trace(requests, layers))
    return found


class Answers:
    """Questions with their answers, in the order of the questions; `late`: all at the end."""

    def __init__(self, decode, questions: list, late: bool):
        self.decode, self.questions, self.late = decode, questions, late
        self.texts, self.shown = {}, 0

    def event(self, event) -> None:
        if event.result:
            self.texts[event.index] = self.decode(event.result.tokens).strip()
            if not self.late:
                self.end()

    def end(self) -> None:
        while self.shown in self.texts:
            print(f"Q  {self.questions[self.shown]}\nA  {self.texts.pop(self.shown)}\n")
            self.shown += 1


def question(chat: dict) -> str:
    return chat["prompt"] if "prompt" in chat else chat["messages"][-1]["content"]


def headline(folder: str, engine) -> str:
    """What runs, and on what."""
    weights = engine.model.parameters()
    return (f"{os.path.relpath(folder)}: {engine.model.config.layers} layers, {sum(p.numel() for p in weights) / 1e6:.1f} M "
            f"parameters, {str(engine.model.embed.weight.dtype)[6:]} on {engine.device}, {engine.attention} kernels, cache "
            f"{engine.mode}\n")


def table(results: list, totals: list[int]) -> str:
    """A line for each result, then those that got less than the table's depth; `totals`: lengths of the canvases."""
    lines = ["request  prefix  ratio  depth  cache  refreshes  steps  generated"]
    lowered = {}                            # what is said -> of which requests
    for number, (r, total) in enumerate(zip(results, totals), 1):
        cache = "hit" if r.hit else "miss" if r.encode_token_layers else "-"
        lines.append(f"{number:7}  {r.prefix_tokens:6}  {r.prefix_tokens / total:5.2f}  {r.depth:5}  {cache:>5}"
                     f"  {r.refreshes:9}  {r.forwards:5}  {len(r.tokens):9}")
        if r.table_depth and r.depth < r.table_depth and r.similarity:
            layers = " ".join(f"{s:.3f}" for s in r.similarity)
            what = f"depth {r.depth}, not the table's {r.table_depth}, where the similarity by layer is {layers}"
            lowered.setdefault(what, []).append(str(number))
    lines += [f"{what}: request {', '.join(which)}" for what, which in lowered.items()]
    return "\n".join(lines)


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
