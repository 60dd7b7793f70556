"""What is read and written for the user: texts, requests as JSON lines, results; `BadInput`, how we refuse.

    for where, value in read_lines("chats.jsonl"):      # ("line 3 of chats.jsonl", {"prompt": ...})
        chat = check_chat(value, where, options)
    with Lines("answers.jsonl") as lines:               # answers.jsonl.part until all is done
        lines.write(to_json(found))

Files are UTF-8, whatever the locale; a byte order mark is no part of a text. What is written is whole lines,
and a file gets its name when it is complete. Imports nothing of ours, so that every file may use it. Checked:
tests/test_files.py.
"""
import json
import os
import sys
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

MARK = "\ufeff"         # the byte order mark that some editors put before a text


class BadInput(ValueError):
    """What the user gave cannot be used. One sentence: the value, the limit, the remedy."""


def memory() -> float:
    """Bytes of this machine's memory, as far as it tells."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return float("inf")


def ran_out(error: BaseException) -> bool:
    """Whether an error says that memory, a GPU's or the machine's, did not suffice: torch has many words."""
    words = "out of memory", "allocate memory", "size calculation overflow"
    of_torch = isinstance(error, RuntimeError) and any(word in str(error) for word in words)
    return of_torch or isinstance(error, MemoryError)


@contextmanager
def enough_memory(what: str, remedy: str):
    """Within: if memory runs out, a sentence: what was asked for, and what to set."""
    try:
        yield
    except (MemoryError, RuntimeError) as e:
        if not ran_out(e):
            raise
        raise BadInput(f"there is not enough memory for {what}; {remedy}") from e


# -- texts ---------------------------------------------------------------------------------------------------


def read_text(path) -> str:
    """All of a file (~ is the user's home, - standard input) as it stands, line ends included."""
    name = file_name(path)
    try:
        with open_bytes(path) as file:
            return file.read().decode().removeprefix(MARK)
    except OSError as e:
        raise BadInput(f"{name} cannot be read: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise BadInput(f"{name} cannot be read: it is not UTF-8 text at byte {e.start}; save it so") from e


def open_bytes(path):
    """A file or, for -, standard input, which stays open."""
    if str(path) != "-":
        return open(os.path.expanduser(path), "rb")
    if sys.stdin is None:
        raise BadInput("standard input cannot be read: it is closed")
    return nullcontext(sys.stdin.buffer)


def file_name(path) -> str:
    return "standard input" if str(path) == "-" else str(path)


def read_json(path) -> dict:
    """The JSON object in a file."""
    try:
        value = parse_json(read_text(path))
    except ValueError as e:
        raise e if isinstance(e, BadInput) else BadInput(f"{path} is no JSON ({e})") from e
    if not isinstance(value, dict):
        raise BadInput(f"{path} is no JSON object: it must be {{...}}")
    return value


def parse_json(text: str):
    """What JSON says, and no more: ValueError also for NaN, and for a key that stands twice and hides one."""
    def once(pairs: list) -> dict:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = next(key for n, (key, _) in enumerate(pairs) if key in dict(pairs[:n]))
            raise ValueError(f"{twice!r} stands there twice")
        return found

    def refuse(name: str):
        raise ValueError(f"{name} is no JSON number")
    try:
        return json.loads(text, object_pairs_hook=once, parse_constant=refuse)
    except json.JSONDecodeError as e:
        raise ValueError(f"{e.msg} at character {e.pos + 1}") from e
    except RecursionError as e:
        raise ValueError("it is nested too deeply") from e


def to_json(value, ascii=False) -> str:
    """One line. Half of a surrogate pair, which JSON can spell and UTF-8 cannot, is escaped."""
    line = json.dumps(value, ensure_ascii=ascii)
    return line if line.isascii() or not any("\ud800" <= c <= "\udfff" for c in line) else json.dumps(value)


# -- requests ------------------------------------------------------------------------------------------------


def read_lines(path):
    """The JSON values of a file, one a line, each with its place: yields ("line 3 of FILE", value). Blank
    lines are passed over; only a newline ends a line."""
    name = file_name(path)
    try:
        with open_bytes(path) as file:
            for number, line in enumerate(file, 1):
                where = f"line {number} of {name}"
                try:
                    text = line.decode().removeprefix(MARK)     # on any: two files may have been joined
                    if text.strip():
                        yield where, parse_json(text)
                except UnicodeDecodeError as e:
                    raise BadInput(f"{where} is not UTF-8 text; save the file as UTF-8") from e
                except ValueError as e:
                    raise e if isinstance(e, BadInput) else BadInput(f"{where} is no JSON ({e})") from e
    except OSError as e:
        raise BadInput(f"{name} cannot be read: {e.strerror}") from e


@dataclass
class Chat:
    """What to answer.

    where: its place, for messages: "line 3 of FILE". text: {"prompt"} with or without "prefix", or
    {"messages"}, as `Tokenizer.render` takes it. raw: no chat template, if there is one; None: not said.
    options: fields of `Request`. passed: what goes to the result unread: {"id"}, or nothing.
    """
    where: str
    text: dict
    raw: bool | None
    options: dict
    passed: dict

    @property
    def question(self) -> str:
        return self.text["prompt"] if "prompt" in self.text else self.text["messages"][-1]["content"]


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


# -- results -------------------------------------------------------------------------------------------------


def write_whole(file, data: bytes) -> None:
    """All of `data` to an unbuffered file, or nothing: what a full disk took of it is taken back."""
    done = 0
    try:
        while done < len(data):
            done += file.write(data[done:])
    except BaseException:
        if done and file.seekable():
            file.truncate(file.seek(0, os.SEEK_END) - done)
            file.seek(0, os.SEEK_END)
        raise


def replace(path, save) -> None:
    """Let save(path) write a file so that whoever looks finds the old one or the new one, whole."""
    temporary = Path(path).with_name(f".{Path(path).name}.tmp")
    try:
        save(temporary)
        os.replace(temporary, path)
    except BaseException as e:              # a full disk, an interrupt
        with suppress(OSError):
            temporary.unlink()
        if not isinstance(e, OSError):
            raise
        raise BadInput(f"{path} cannot be written: {e.strerror}; give another name") from e


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
        found = {"index": event.index, **self.chats[event.index].passed, "text": "", **asdict(event.result)}
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
