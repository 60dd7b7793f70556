"""What is parsed: the command line of generate.py, and what it says is to be answered.

    args = parse(["--requests", "chats.jsonl", "--seed", "3"])
    chats = read_chats(args)                # lines.Chat: a text, and the fields of `Request` for it

An option named like a field of `Request` or an argument of `Engine` goes there, and stays None if it is not
given, so that defaults are written once: there. A new one is one line. What has no effect, is empty or
excludes another is refused here, before a model is loaded. Checked: tests/test_options.py.
"""
import argparse
import json
import sys
from dataclasses import fields, replace
from pathlib import Path

from cli.infill import lead
from cli.lines import Chat, check_chat
from files import BadInput, read_lines, read_text

HERE = Path(__file__).resolve().parent.parent
EMBEDDED = str(HERE / "checkpoints" / "tiny")
NO_DRAW = ("nothing is drawn: a seed has an effect only with temperature, alg_temp, or remasking random or "
           "origin")


def parse(argv=None) -> argparse.Namespace:
    p = argparse.ArgumentParser(
        prog="generate.py", allow_abbrev=False, description="Answer questions about a shared text with a "
        "masked diffusion language model, reusing the text's K/V.")
    p.error = refuse
    add = p.add_argument_group("model").add_argument
    add("--model", metavar="DIR", default=EMBEDDED,
        help="model folder (default: the embedded one)")
    add("--mask-token", metavar="TOKEN", help="how the mask is spelled, where the folder does not say: '<M>'")
    add("--shift", action=argparse.BooleanOptionalAction,
        help="the logits for a position stand one row early (default: as the family has it)")
    add("--device", default="auto", help="cpu, cuda or cuda:N (auto: the GPU if there is one)")
    add("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto",
        help="auto: as stored, where that is fast")
    add("--compile", action=argparse.BooleanOptionalAction,
        help="compile the steps (default: on a GPU; on a CPU it does not pay)")
    add("--warm-up", action="store_true",
        help="compile all that the run needs before it starts, and tell how long that took")
    add = p.add_argument_group("input").add_argument
    add("--prefix", metavar="TEXT|@FILE|-", action=Once,
        help="the text that all prompts share: a chat's system message, else what they follow on; @FILE: "
             "what stands in the file, -: on standard input, @@TEXT: @TEXT itself")
    add("--prompt", metavar="TEXT|@FILE|-", action="append", help="one request; give it as often as you like")
    add("--requests", metavar="FILE.jsonl|-", action=Once,
        help='a request a line: {"prefix": ..., "prompt": ...} or {"messages": [...]}; with "raw", "id", and '
             'what Request knows ("seed", "gen_length", ...), which goes before the options here')
    add("--chat", action="store_true",
        help="a conversation: questions are typed, or piped in, and each knows what was said before")
    add("--infill", metavar="TEXT|@FILE|-", action="append",
        help="running text with holes, which are filled: ___ is a token, ___8 are eight; also behind "
             "--prefix; give it as often as you like")
    add("--raw", action="store_true",
        help="prefix and prompt are one running text, whatever chat template there is")
    add("--template-var", dest="template_vars", metavar="NAME=VALUE", action=Variable,
        help="a variable of the chat template, a JSON value or else a text: enable_thinking=true; as often "
             "as you like")
    add = p.add_argument_group("decoding").add_argument
    add("--gen-length", type=int,
        help="tokens to generate at most (max_new_tokens of generation_config.json, else 128)")
    add("--steps", type=int, help="forward passes for the whole answer (default: one a token)")
    add("--block-length", type=int,
        help="decide the answer in blocks of so many tokens, in order (default: one block)")
    add("--threshold", type=float,
        help="commit all tokens above this probability, at least one a step; instead of --steps")
    add("--factor", type=float,
        help="commit the n-th best token while its probability lies above 1 - FACTOR / (n + 1); instead of "
             "--steps")
    add("--entropy-bound", type=float, metavar="NATS",
        help="commit the surest tokens while the entropies of those before add up to no more; instead of "
             "--steps")
    add("--temperature", type=float, help="0 (default) takes the likeliest token, above draws")
    add("--remasking", help="low_confidence (default), random, maskgit_plus, entropy, topk_margin or origin")
    add("--seed", type=int, help="of the draws (default 0); request number i, from 0, gets seed + i")
    add("--n", type=int, help="answers to each prompt, one after another, where tokens are drawn (default 1)")
    add("--stop", metavar="TEXT", action="append",
        help="end an answer in front of this text; give it as often as you like")
    add("--no-eos", dest="stop_at_eos", action="store_false", default=None,
        help="do not stop at the end-of-text token")
    add("--eps", type=float, help="Dream's schedule: timesteps linear from 1 to EPS (Dream uses 0.001)")
    add("--alg-temp", type=float,
        help="draw the rows to commit at this temperature (Dream; default 0: take the best)")
    add("--top-p", type=float, help="draw from the likeliest tokens of this total probability")
    add("--top-k", type=int, help="draw from this many likeliest tokens")
    add("--cfg-scale", type=float,
        help="guidance away from the answer to an empty prompt (LLaDA; default 0: none)")
    add("--logits-eos-inf", action="store_true", default=None,
        help="never choose the end-of-text token (LLaDA)")
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
        help="no table: measure each prefix at its first request, then share the layers that are alike by S "
             "(0.97)")
    add("--standin", choices=["table", "masks", "none"],
        help="what stands behind a prefix while it is encoded: as many MASK as the power of two at or below "
             "--gen-length, none, or as the table was measured (default)")
    add("--refresh", type=int, help="steps between recomputations of the prefix above the depth (default 16)")
    add("--window", choices=["all", "rest", "block"],
        help="rows computed after a block's first step: all of the request's own (default), the rest from "
             "the block on, or the block's")
    add("--cache-mb", type=float, help="memory for K/V, allocated at the start (default 256)")
    add("--max-batch", type=int, help="requests that step together at most (default 8)")
    add("--auto-prefix", action=argparse.BooleanOptionalAction,
        help="share what prompts turn out to have in common (default)")
    add("--attention", choices=["auto", "torch", "triton"], help="kernels (auto: triton on a GPU)")
    add("--salt", help="requests with another salt never share a prefix with these")
    add = p.add_argument_group("output").add_argument
    add("--json", action="store_true",
        help="one JSON object a line on standard output, and nothing else there")
    add("--output", metavar="FILE", action=Once,
        help="write the results there as well, one JSON object a line: FILE.part, until all are done")
    add("--watch", action="store_true", help="show the answers as they are denoised, in a terminal")
    add("--trace", action="store_true", help="show what each layer computed and read at each step")
    add("--compare", action="store_true",
        help="run once more without a cache and compare (done when no input is given)")
    args = p.parse_args(argv)
    check_options(args)
    return args


def refuse(message: str):
    raise BadInput(message)


class Once(argparse.Action):
    """An option whose second value would silently replace the first."""

    def __call__(self, parser, args, value, option=None):
        if getattr(args, self.dest) is not None:
            refuse(f"{option} is given twice; give it once")
        setattr(args, self.dest, value)


class Variable(argparse.Action):
    """NAME=VALUE, gathered in a dict. The template says which names there are."""

    def __call__(self, parser, args, value, option=None):
        name, given, value = value.partition("=")
        if not (name and given):
            refuse(f"{option} is {name + given + value!r}; give it as NAME=VALUE")
        known = getattr(args, self.dest) or {}
        if name in known:
            refuse(f"{option} {name} is given twice; give it once")
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            pass                            # a text needs no quotes
        setattr(args, self.dest, {**known, name: value})


def depth(value: str) -> int | str:
    """The type of --depth."""
    if value == "auto":
        return value
    if not value.isdecimal():
        raise argparse.ArgumentTypeError(f"{value!r} is neither auto nor a number of layers")
    return int(value)


def check_options(a: argparse.Namespace) -> None:
    for name, value in vars(a).items():
        if value == "" or isinstance(value, list) and "" in value:          # an unset shell variable
            refuse(f"--{name.replace('_', '-')} is empty; give it a value or leave it out")
    shares = a.cache in (None, "bicache")
    looks_up = shares and a.depth in (None, "auto")
    looked_up = "an effect only with --cache bicache and --depth auto"
    asked = [*(a.prompt or []), *(a.infill or [])]
    stdin = [a.requests, a.prefix, *asked].count("-")
    for bad, why in (
            (a.requests and (asked or a.prefix),
             "--requests brings its own prompts; leave out --prompt, --infill and --prefix"),
            (a.infill and a.gen_length, "--infill has the length of its text; leave out --gen-length"),
            (a.infill and a.stop, "--infill ends where its text ends; leave out --stop"),
            (a.n is not None and a.n < 1, f"--n is {a.n}; it must be at least 1"),
            (a.prefix and not (asked or a.chat), "--prefix needs a --prompt, an --infill or --chat"),
            (a.chat and (asked or a.requests or a.prefix == "-"),
             "--chat asks what is typed; leave out --prompt, --infill and --requests, and - as --prefix"),
            (a.chat and (a.json or a.output or a.watch or a.trace or a.compare or a.n),
             "--chat prints a conversation, and /save keeps it; leave out --json, --output, --watch, "
             "--trace and --compare"),
            (stdin > 1, f"standard input (-) is asked for {stdin} times, and can be read once"),
            (a.raw and not (a.prompt or a.requests), "--raw has an effect only with --prompt or --requests"),
            ((a.raw or a.infill) and a.template_vars,
             "--template-var has an effect on chats; leave out --raw and --infill"),
            (a.depth is not None and not shares, "--depth has an effect only with --cache bicache"),
            (a.measure and not looks_up, f"--measure has {looked_up}"),
            (a.self_profile is not None and not looks_up, f"--self-profile has {looked_up}"),
            (a.auto_prefix is not None and not shares,
             "--auto-prefix has an effect only with --cache bicache"),
            (a.salt and a.cache in ("none", "intra"), f"--salt has no effect with --cache {a.cache}"),
            (a.standin and a.cache in ("none", "intra"), f"--standin has no effect with --cache {a.cache}"),
            (a.refresh is not None and a.cache in ("none", "naive"),
             f"--refresh has no effect with --cache {a.cache}"),
            (a.json and (a.trace or a.compare or a.watch),
             "--json wants standard output for itself; leave out --trace, --compare and --watch"),
            (a.watch and not sys.stdout.isatty(), "--watch draws in a terminal, and standard output is none"),
            (a.compare and a.cache == "none", "--compare compares with --cache none; give another --cache")):
        if bad:
            refuse(why)


# -- what is to be answered ----------------------------------------------------------------------------------


def read_chats(a: argparse.Namespace) -> list[Chat]:
    """What to answer, each text as it is given, down to its line ends, with all its options. The seed of
    number i, from 0, is --seed + i modulo 2**32, unless its line has one of its own."""
    from request import Request             # only now: --help and a bad option do not wait for torch
    names = {f.name for f in fields(Request)} - {"prompt"}
    asked = prompts(a) + infills(a)
    chats = requests_file(a.requests, names) if a.requests else asked or demo()
    chats = [copy for chat in chats for copy in copies(chat, a.n or 1)]
    common = given(a, names)
    seed = common.get("seed", Request.seed)
    for place, chat in enumerate(chats):
        own_seed = chat.options.get("seed") is not None
        options = {**common, **chat.options}
        chat.options = {name: value for name, value in options.items() if value is not None}
        if own_seed and not draws(chat.options):
            refuse(f"{chat.where} has a seed, and {NO_DRAW}")
        if not own_seed and 0 <= seed < 2**32:          # any other is refused with the rest of the request
            chat.options["seed"] = (seed + place) % 2**32
        chat.raw = a.raw if chat.raw is None else chat.raw
        if chat.raw and "messages" in chat.text:
            refuse(f"{chat.where} is a chat, and --raw takes running text; leave one out")
        if a.n and a.n > 1 and not draws(chat.options):
            refuse(f"{chat.where} would get the same answer {a.n} times: nothing is drawn; leave out --n, or "
                   "set temperature, alg_temp, or remasking random or origin")
    if a.seed is not None and not any(draws(chat.options) for chat in chats):
        refuse(f"there is a --seed, and {NO_DRAW}")
    return chats


def copies(chat: Chat, n: int) -> list[Chat]:
    """n of a chat; if its line has a seed, they take that one and those behind it."""
    found = [replace(chat, options=dict(chat.options)) for _ in range(n)]
    if isinstance(seed := chat.options.get("seed"), int):
        for i, copy in enumerate(found):
            copy.options["seed"] = seed + i
    return found


def read_conversation(a: argparse.Namespace) -> tuple[str | None, dict]:
    """For --chat: the document, and the fields of each `Request`. The embedded model has a document of its
    own."""
    from request import Request
    options = given(a, {f.name for f in fields(Request)} - {"prompt"})
    if a.seed is not None and not draws(options):
        refuse(f"there is a --seed, and {NO_DRAW}")
    if a.prefix:
        return text(a.prefix), options
    return read_text(HERE / "examples" / "staff.txt").strip() if a.model == EMBEDDED else None, options


def requests_file(path: str, names: set) -> list[Chat]:
    chats = [check_chat(value, where, sorted(names)) for where, value in read_lines(path)]
    if not chats:
        refuse(f"{path} holds no request; give it one a line")
    return chats


def prompts(a: argparse.Namespace) -> list[Chat]:
    shared = {"prefix": text(a.prefix)} if a.prefix else {}
    return [Chat(f"--prompt number {i}", {**shared, "prompt": text(value)}, None, {}, {})
            for i, value in enumerate(a.prompt or [], 1)]


def infills(a: argparse.Namespace) -> list[Chat]:
    shared = {"prefix": text(a.prefix)} if a.prefix else {}
    texts = [text(value) for value in a.infill or []]
    return [Chat(f"--infill number {i}", {**shared, "infill": holed}, True, {}, {}, lead(holed))
            for i, holed in enumerate(texts, 1)]


def demo() -> list[Chat]:
    document, questions = (read_text(HERE / "examples" / name) for name in ("staff.txt", "questions.txt"))
    return [Chat(f"question {i}", {"prefix": document.strip(), "prompt": line}, None, {}, {})
            for i, line in enumerate(questions.split("\n"), 1) if line]


def text(value: str) -> str:
    """The value itself; for @FILE what stands in the file, for - on standard input; for @@TEXT, @TEXT."""
    if value.startswith("@@"):
        return value[1:]
    if value.startswith("@") or value == "-":
        return read_text(value.removeprefix("@"))
    return value


def files_read(a: argparse.Namespace) -> list[str]:
    """The names of all files that `read_chats` reads."""
    values = [a.prefix or "", *(a.prompt or []), *(a.infill or [])]
    names = [value[1:] for value in values if value.startswith("@") and not value.startswith("@@")]
    return names + [a.requests] * bool(a.requests)


def draws(options: dict) -> bool:
    """Whether chance has a part in the answer."""
    return bool(options.get("temperature") or options.get("alg_temp")
                or options.get("remasking") in ("random", "origin"))


def given(args, names) -> dict:
    """The options of these names that were given."""
    return {name: value for name, value in vars(args).items() if name in names and value is not None}
