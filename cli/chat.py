"""A conversation in the terminal: each question is answered live, and all that stands before it is its
prefix.

    python generate.py --chat --prefix @doc.txt
    python generate.py --chat < questions.txt           # a question a line, a transcript on standard output

The line under an answer tells hit or miss, what was shared, and the work. /reset forgets all but the
document, /save FILE keeps the conversation, Ctrl-C ends an answer, Ctrl-D the conversation. Which prefix a
question gets is decided in `Conversation.prefix`; everything else is the engine's. To be rid of all this,
delete this file and the lines of generate.py and cli/options.py that name it. Checked: tests/test_chat.py.
"""
import os
import shutil
import signal
import sys
import threading
import time
from dataclasses import dataclass

from cli.lines import say
from cli.terminal import Watch, cut
from files import MARK, BadInput, replace, to_json

COMMANDS = "/reset, /save FILE, /quit"


# -- what is said


@dataclass
class Answer:
    text: str
    result: object          # request.Result
    seconds: float
    plain: int              # token-layers that as many steps take without a cache


class Conversation:
    """The messages so far, and how the next question is asked. It knows of no terminal.

    document: the system message, which `reset` keeps. options: fields of each `Request`. default: gen_length
    if they say none, and as much of it as there is room for.
    """

    def __init__(self, engine, document: str | None, options: dict, default: int):
        self.engine, self.options, self.default = engine, options, default
        self.document = [{"role": "system", "content": document}] if document else []
        self.first = ()             # ids of the prefix that the first question is asked with: the document
        self.reset()

    def reset(self) -> None:
        self.messages = list(self.document)
        self.passes = 0     # of the last answer, that computed all behind its prefix and did not refresh
        self.spent = 0      # tokens times passes that a longer prefix would have spared since one was stored

    def request(self, question: str) -> tuple:
        """The request that asks it, and how many of its ids stand before the question. ValueError: it cannot
        be asked, and why."""
        from request import Request             # torch: not before it is needed
        ids, history = self.engine.tokenizer.chat([*self.messages, {"role": "user", "content": question}])
        request = Request(ids, **self.options)
        if "gen_length" not in self.options:
            room = self.engine.model.config.max_len - len(ids)
            request.gen_length = min(self.default, max(room, 1))
        self.first = self.first or tuple(ids[:history])
        reason = None
        for request.prefix_len in self.prefixes(ids, history, self.engine.admission.salt(request)):
            try:
                self.engine.check(request)
                return request, history
            except BadInput as e:               # a shorter prefix takes less room
                reason = e
        more = "; /reset makes room" if len(self.messages) > len(self.document) else ""
        raise BadInput(f"{reason}{more}")

    def ask(self, question: str, request, history: int, listen=lambda event: None) -> Answer | None:
        """The answer, which then belongs to the conversation; None if it was stopped: nothing was said
        then."""
        start, total, passes = time.perf_counter(), len(request.prompt) + request.gen_length, 0
        with Stop() as stop:
            for event in self.engine.stream([request]):
                if stop.asked:
                    self.engine.cancel(request)
                listen(event)
                passes += event.computed == (0, total - event.prefix_tokens) and not event.refresh
        result = event.result
        if result.finish_reason == "cancelled":
            return None
        if result.encode_token_layers:
            self.spent = 0
        self.passes, self.spent = passes, self.spent + passes * (history - result.prefix_tokens)
        text = result.text.strip()
        self.messages += {"role": "user", "content": question}, {"role": "assistant", "content": text}
        plain = result.forwards * self.engine.model.config.layers * total
        return Answer(text, result, time.perf_counter() - start, plain)

    def prefixes(self, ids: list, history: int, salt: tuple) -> list[int]:
        """P for a question behind `history` ids, best first: the longest that is stored, or all, to be
        stored.

        A longer prefix costs its encoding: `history` tokens once through all layers. It spares the tokens
        that it is longer by in each pass that computes all behind the prefix and does not refresh. It is
        stored once these come to as many: those spent since the last time, and those that the coming answer
        would spend if it is like the last one. So a conversation takes little more than twice the work that
        it would if one knew how it goes on. The document is stored at the first question.
        """
        if self.engine.mode not in ("bicache", "naive"):
            return [history]                    # `intra` keeps it to the request, `none` has no use for it
        self.engine.cache.find(self.first, salt)    # the document is in use, too: it is not the first to go
        entry = self.engine.cache.find(ids[:history], salt)
        stored = len(entry.ids) if entry else 0
        if not stored or self.spent + self.passes * (history - stored) >= history:
            return [history, stored, 0]
        return [stored, 0]

    def save(self, path: str) -> None:
        """Write {"messages": [...]}. The file is there whole, or as it was."""
        if not path or os.path.exists(path) and not os.path.isfile(path):
            raise BadInput(f"/save {path}: this is no file; give the name of one")
        text = to_json({"messages": self.messages}) + "\n"
        try:
            replace(os.path.realpath(path), lambda to: to.write_bytes(text.encode()))
        except BadInput as e:
            raise BadInput(f"/save: {e}") from e


class Stop:
    """Within it the first Ctrl-C is a wish, `asked`, and the second an interrupt as ever."""

    def __enter__(self):
        self.asked, self.before = False, signal.getsignal(signal.SIGINT)
        self.hears = threading.current_thread() is threading.main_thread()
        if self.hears:                          # in another one Python hears no signal
            signal.signal(signal.SIGINT, self.ask)
        return self

    def ask(self, *_) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *_):
        if self.hears:
            signal.signal(signal.SIGINT, self.before)


# -- the terminal


def converse(engine, document: str | None, options: dict, default: int) -> None:
    """Read questions until they end. In a terminal what cannot be done is told and one goes on; of lines that
    are piped in, the first that cannot is the last: ValueError."""
    if not engine.tokenizer.has_chat:
        raise BadInput("this model has no chat template; give --prefix and --prompt, one running text then")
    conversation = Conversation(engine, document, options, default)
    typed = sys.stdin.isatty()
    if typed:
        say(f"{COMMANDS}; Ctrl-C ends an answer, Ctrl-D the conversation\n")
    for line in typed_lines() if typed else piped_lines():
        try:
            if line == "/quit":
                return
            if not command(conversation, line):
                tell(conversation, line)
        except BadInput as e:
            if not typed:
                raise
            say(f"{e}\n")


def command(conversation: Conversation, line: str) -> bool:
    """Whether the line was a command, and is done."""
    name, _, rest = line.partition(" ")
    if name == "/reset":
        conversation.reset()
        say("only the document is left\n" if conversation.document else "nothing is left\n")
    elif name == "/save":
        conversation.save(rest.strip())
        say(f"{len(conversation.messages)} messages are in {rest.strip()}\n")
    elif name.startswith("/"):
        raise BadInput(f"{name} is no command: {COMMANDS}; a question does not begin with /")
    return name.startswith("/")


def tell(conversation: Conversation, question: str) -> None:
    """Ask, and print what came of it."""
    request, history = conversation.request(question)
    engine, live = conversation.engine, None
    if sys.stdout.isatty():
        live = Live([request], engine.tokenizer.decode, engine.model.config.mask_id)
    try:
        answer = conversation.ask(question, request, history, live.event if live else lambda event: None)
    except KeyboardInterrupt as e:          # the second one: the engine has put down what it held
        if e.args:
            raise                           # it was another signal, which ends us
        answer = None
    finally:
        if live:
            live.end()
    if answer:
        say(f"{answer.text}\n{summary(answer, live.slept if live else 0)}\n")
    else:
        say("stopped; the question is forgotten\n")


def summary(answer: Answer, slept: float = 0) -> str:
    """hit or miss, what was shared, what it took, and what that is less than without a cache."""
    r = answer.result
    work = r.token_layers + r.encode_token_layers + r.measure_token_layers
    cache = "hit" if r.hit else "miss" if r.encode_token_layers else "no prefix shared"
    depth = f"depth {r.depth}" + (f" (the table's {r.table_depth})" if r.depth < (r.table_depth or 0) else "")
    cut_off = f", cut at {len(r.tokens)} tokens" if r.finish_reason == "length" else ""
    saved = f"{answer.plain - work:,.0f} saved ({1 - work / answer.plain:.0%})"
    return (f"[{cache}, prefix {r.prefix_tokens}, {depth}, {r.forwards} steps, "
            f"{answer.seconds - slept:.2f} s, {work:,.0f} token-layers, {saved}{cut_off}]")


def typed_lines():
    """Lines of a terminal, with a history where there is readline. Ctrl-C takes a line back."""
    try:
        import readline  # noqa: F401       input() finds it
    except ImportError:                     # not on every system
        pass
    while True:
        try:
            line = input("> ").strip()
        except KeyboardInterrupt as e:
            if e.args:                      # another signal
                raise
            say()
            continue
        except EOFError:
            say()
            return
        if line:
            yield line


def piped_lines():
    """Lines of a file or another program, printed as they come. UTF-8, whatever the locale."""
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(encoding="utf-8")
    try:
        for line in map(str.strip, sys.stdin):
            if line := line.removeprefix(MARK).strip():
                say(f"> {line}")
                yield line
    except UnicodeDecodeError as e:
        raise BadInput("standard input is not UTF-8 text") from e


class Live(Watch):
    """The one answer on its way, in as many lines as it takes; at the end none is left of it."""

    def draw(self, finished: list[str], running: list[str], room: int) -> None:
        columns = shutil.get_terminal_size().columns
        lines = fold(self.text(0), columns)[:room] if running else []
        sys.stdout.write((f"\033[{self.drawn}F" if self.drawn else "") + "\033[J")
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.flush()
        self.drawn = len(lines)

    def end(self) -> None:
        self.draw([], [], 0)


def fold(text: str, columns: int) -> list[str]:
    """All of a text, in lines of so many columns."""
    lines = []
    while text:
        lines.append(cut(text, columns) or text[0])
        text = text[len(lines[-1]):]
    return lines
