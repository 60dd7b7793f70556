"""What is read and written for the user: texts and JSON in, result lines out, and `BadInput`, how we refuse.

Everything is UTF-8, whatever the locale. A file that is written holds whole lines, and gets its name when it is complete.
This file imports nothing of ours, so that every other one may use it. Checked: tests/test_generate.py.
"""
import json
import os
from dataclasses import asdict
from pathlib import Path


class BadInput(ValueError):
    """What the user gave cannot be used. One sentence: the value, the limit, the remedy."""


def read_text(path: str) -> str:
    """All of a file."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as e:
        raise BadInput(f"{path} cannot be read: {e.strerror}") from e
    except UnicodeDecodeError as e:
        raise BadInput(f"{path} cannot be read: it is not UTF-8 text") from e


class Lines:
    """A file of whole lines: written beside the name it will have, renamed to it at the end, also after an interrupt."""

    def __init__(self, path: str):
        self.path = os.path.realpath(path)              # through a link, to what it stands for
        if os.path.exists(path) and not os.path.isfile(path):
            raise BadInput(f"--output {path} is no ordinary file; give another name")
        try:
            self.file = open(self.path + ".tmp", "wb", buffering=0)     # unbuffered: a line is one write, or none
        except OSError as e:
            raise BadInput(f"--output {path} cannot be written: {e.strerror}") from e

    def __enter__(self):
        return self

    def write(self, line: str) -> None:
        self.file.write(line.encode() + b"\n")

    def __exit__(self, kind, *_):
        some = self.file.tell()
        self.file.close()
        if some or not kind:
            os.replace(self.path + ".tmp", self.path)
        else:
            os.remove(self.path + ".tmp")


class Results:
    """One JSON object a line for each result, as it comes: in the output file, on standard output."""

    def __init__(self, decode, output: Lines | None, stdout: bool):
        self.decode, self.output, self.stdout = decode, output, stdout

    def event(self, event) -> None:
        if not event.result:
            return
        found = {"index": event.index, "text": self.decode(event.result.tokens).strip(), **asdict(event.result)}
        line = json.dumps(found, ensure_ascii=False)
        if self.output:
            self.output.write(line)
        if self.stdout:
            print(line, flush=True)

    def end(self) -> None:
        pass
