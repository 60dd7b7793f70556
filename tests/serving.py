"""What the tests of the servers share: documents and questions, the answers the engine gives, a server as a
process.

Importing this skips a test file where the packages of examples/requirements.txt are missing.
"""
import contextlib
import os
import random
import subprocess
import sys
import time

import pytest
from conftest import ROOT

for package in ("starlette", "uvicorn", "prometheus_client"):
    pytest.importorskip(package)
httpx, openai = pytest.importorskip("httpx"), pytest.importorskip("openai")
sys.path += [str(ROOT / "examples"), str(ROOT / "tools")]

from engine import Request                              # noqa: E402
from staff import sample                                # noqa: E402

TINY = ROOT / "checkpoints" / "tiny"
# (document, [(kind, question, answer), ...])
TEXTS = [sample(random.Random(seed), people=6) for seed in range(9)]
FAST = {"threshold": 0.9}


@contextlib.contextmanager
def serving(*flags, model=TINY):
    """(base URL, process) of a server; it is killed at the end if it has not ended."""
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "examples" / "serve.py"), "--model", str(model), "--port", "0", *flags],
        stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        line = process.stdout.readline()
        assert " on http://" in line, "the server did not start; what it said stands above"
        yield line.split(" on ")[1].strip(), process
    finally:
        process.kill()
        process.wait()


def client(url, key="-", **kw):
    return openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0, timeout=120, **kw)


def chat(text: int, question: int) -> list:
    document, questions = TEXTS[text]
    _, question, _ = questions[question % len(questions)]
    return [dict(role="system", content=document), dict(role="user", content=question)]


def expected(engine, messages, length=24, **how) -> tuple[str, int]:
    """(text, P) of the answer as the engine gives it to one alone."""
    ids, P = engine.tokenizer.render({"messages": messages})
    result, = engine.generate([Request(ids, prefix_len=P, gen_length=length, **how)])
    return engine.tokenizer.decode(result.tokens), P


def figures(url, **kw) -> dict:
    """The metrics, once nothing runs."""
    for _ in range(600):
        lines = httpx.get(url + "/metrics", **kw).text.splitlines()
        values = {name: float(v) for name, v in (line.rsplit(" ", 1) for line in lines if line[:1] != "#")}
        if values["bicache_running"] == values["bicache_waiting"] == 0:
            return values
        time.sleep(0.1)
    raise AssertionError(f"the server does not come to rest: {values}")


def said(stream) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
