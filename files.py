"""`BadInput`, how we refuse; what is read for the user, and files that are written whole.

    for where, value in read_lines("chats.jsonl"):      # ("line 3 of chats.jsonl", {"prompt": ...})
        ...

Files are UTF-8, whatever the locale; a byte order mark is no part of a text. Imports nothing of ours, so that
every file may use it. Checked: tests/test_files.py.
"""
import json
import os
import sys
from contextlib import contextmanager, nullcontext, suppress
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
