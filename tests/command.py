"""What the tests of `generate.py` share: questions, the command as a call and as a process, its results."""
import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT

import generate

DOCUMENT = ("The golden data are two tiny checkpoints with random weights. The weights are random but "
            "decisive.")
QUESTIONS = "Which weights?", "How many checkpoints are there?"
ASK = ["--prefix", DOCUMENT, "--prompt", QUESTIONS[0], "--prompt", QUESTIONS[1], "--gen-length", "12"]
ENV = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.fixture
def run(text_folder, capsys):
    """Call main on the model folder: exit code, standard output, standard error."""
    def call(*args):
        code = generate.main(["--model", str(text_folder), *map(str, args)])
        return code, *capsys.readouterr()
    return call


def start(text_folder, *args, **kw):
    """The same as a process."""
    command = [sys.executable, ROOT / "generate.py", "--model", text_folder, *map(str, args)]
    return subprocess.Popen(command, **dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENV) | kw)


def objects(text: str) -> list:
    """The results in --json's output, by index."""
    return sorted(map(json.loads, text.splitlines()), key=lambda found: found["index"])


def write_lines(path, *lines):
    path.write_text("\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines), encoding="utf-8")
    return path


def listen(monkeypatch, hear):
    """Let a function of an event listen, too, behind all others."""
    class Listener:
        event, end = staticmethod(hear), staticmethod(lambda: None)
    listeners = generate.listeners

    def one_more(*args):
        found = listeners(*args)
        return [*found[:-1], Listener, found[-1]]
    monkeypatch.setattr(generate, "listeners", one_more)
