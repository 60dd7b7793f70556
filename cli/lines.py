"""Requests as JSON lines in, results as JSON lines out.

    chat = check_chat(value, where, options)            # what a line of --requests says, or BadInput
    with Lines("answers.jsonl") as lines:               # answers.jsonl.part until all is done
        lines.write(to_json(found))

What is written is whole lines, and a file gets its name when it is complete. Checked: tests/test_files.py.
"""
import os
import sys
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import count

from files import BadInput, to_json, write_whole


@dataclass
class Chat:
    """What to answer.

    where: its place, for messages: "line 3 of FILE". text: {"prompt"} with or without "prefix", or
    {"messages"}, as `Tokenizer.render` takes it; or {"infill"} with or without "prefix". raw: no chat
    template, if there is one; None: not said. options: fields of `Request`. passed: what goes to the result
    unread: {"id"}, or nothing. lead: what the answer's text goes on from, and is told with.
    """
    where: str
    text: dict
    raw: bool | None
    options: dict
    passed: dict
    lead: str = ""

    @property
    def question(self) -> str:
        if "messages" in self.text:
            return self.text["messages"][-1]["content"]
        return self.text["prompt" if "prompt" in self.text else "infill"]


def check_chat(value, where: str, known) -> Chat:
    """A request as JSON; `known`: the fields of `Request` that it may hold. BadInput names what is wrong."""
    if not isinstance(value, dict) or ("prompt" in value) == ("messages" in value):
        raise BadInput(f'{where} must be {{"prompt": text}}, or with "prefix", or {{"messages": [...]}}')
    names = ("prefix", "prompt", "messages", "raw", "id", *known)
    if unknown := [key for key in value if key not in names]:
        raise BadInput(f"{where} has {unknown[0]!r}; a request knows {', '.join(names)}")
    kinds = ("prefix", str, "a text"), ("prompt", str, "a text"), ("raw", bool, "true or false")
    for name, kind, what in kinds:
        if name in value and not isinstance(value[name], kind):
            raise BadInput(f"{where} has {name} {value[name]!r}; it must be {what}")
    for name, other in (("messages", "prefix"), ("messages", "raw"), ("prefix_len", "prefix")):
        if name in value and value.get(other, False) is not False:
            raise BadInput(f"{where} has {name} and {other}, which exclude each other; leave one out")
    text = {name: value[name] for name in ("prefix", "prompt", "messages") if name in value}
    options = {name: value[name] for name in known if name in value}
    passed = {name: value[name] for name in ("id",) if name in value}
    return Chat(where, text, value.get("raw"), options, passed)


class Lines:
    """A file of whole lines: FILE.part, until it is complete and becomes FILE.

    When the block ends early, what is done becomes FILE if there is none; else it stays FILE.part, and the
    older FILE is as it was. The exception gets a note that says which. Nothing of the user's is written over
    but FILE, by a complete one: where FILE.part is taken, FILE.part2 stands for it.
    """

    def __init__(self, path: str, inputs=()):
        self.path = os.path.realpath(os.path.expanduser(path))      # through a link, to what it stands for
        self.count = 0
        if os.path.exists(self.path) and not os.path.isfile(self.path):
            raise BadInput(f"--output {path} is no ordinary file; give another name")
        for other in inputs:
            if os.path.realpath(os.path.expanduser(other)) == self.path:
                raise BadInput(f"--output {path} is what the questions are read from; give another name")
        try:
            if os.path.exists(self.path):
                open(self.path, "ab").close()           # may it be written?
            self.file = self._open_part()
        except OSError as e:
            raise BadInput(f"--output {path} cannot be written: {e.strerror}") from e

    def _open_part(self):
        for number in count(1):
            self.part = f"{self.path}.part{'' if number == 1 else number}"
            try:
                return open(self.part, "xb", buffering=0)
            except FileExistsError:
                pass

    def __enter__(self):
        return self

    def write(self, line: str) -> None:
        try:
            write_whole(self.file, line.encode() + b"\n")
        except OSError as e:
            raise BadInput(f"{self.path} cannot be written: {e.strerror}; give another name") from e
        self.count += 1

    def __exit__(self, kind, error, _):
        self.file.close()
        if error is None or self.count and not os.path.exists(self.path):
            os.replace(self.part, self.path)
            kept = self.path
        elif self.count:
            kept = f"{self.part}, and {self.path} is as it was"
        else:
            os.remove(self.part)
            return
        if error is not None:
            error.add_note(f"done so far: {self.count}, in {kept}")


class Results:
    """One JSON object a line for each result, as it comes: in the output file, on standard output."""

    def __init__(self, chats: list, output: Lines | None, stdout: bool):
        self.chats, self.output, self.stdout = chats, output, stdout

    def event(self, event) -> None:
        if not event.result:
            return
        chat = self.chats[event.index]
        found = {"index": event.index, **chat.passed, "text": "", **asdict(event.result)}
        found["text"] = chat.lead + found["text"]
        if self.output:
            self.output.write(to_json(found))
        if self.stdout:
            print_json(found)

    def end(self) -> None:
        pass


def print_json(value) -> None:
    """A whole line on standard output: UTF-8 or, where that is not what the reader expects, ASCII."""
    utf8 = (sys.stdout.encoding or "utf-8").lower().replace("-", "") == "utf8"
    line = to_json(value, ascii=not utf8)
    buffer = getattr(sys.stdout, "buffer", None)
    if buffer is None:                          # somebody's io.StringIO
        sys.stdout.write(line + "\n")
        return
    sys.stdout.flush()
    with stdout_errors():
        write_whole(getattr(buffer, "raw", buffer), line.encode() + b"\n")


def say(text: str = "") -> None:
    """`print`, at once, and with a sentence for a full disk."""
    with stdout_errors():
        print(text, flush=True)


@contextmanager
def stdout_errors():
    """Within: that standard output cannot be written is a sentence, unless its reader has gone."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as e:
        raise BadInput(f"standard output cannot be written: {e.strerror}") from e
