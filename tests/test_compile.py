"""What is compiled: one graph a pass without a break, few graphs for mixed traffic, the tokens of the eager
step."""
import json
import os
import random
import shutil
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, prompt, tiny

import engine as engine_module
import generate
import step as step_module
from engine import Engine, Request
from test_counts import graphs, reset
from test_engine import mixed_requests
from cli.warmup import shapes, warm_up


@pytest.fixture(scope="module")
def traced(tmp_path_factory):
    """What tests/fake_cuda.py found, in a process of its own."""
    compiler = shutil.which("c++")
    if not compiler:
        pytest.skip("tracing for cuda takes a device guard, which a C++ compiler makes")
    pytest.importorskip("triton")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, ROOT / "tests" / "fake_cuda.py", tmp_path_factory.mktemp("guard"), compiler]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_step_for_a_gpu_is_one_graph(traced):
    """Refresh and reuse, LLaDA and Dream, with no rule and with all of `Rules`, on fake cuda tensors,
    Triton kernels in the graph: fullgraph raises at a graph break, and there is one graph for each. As far
    as the compiler goes without a device: TorchDynamo, AOT autograd, Inductor's decompositions and its
    passes over the graph; code is not generated."""
    assert len(traced) == 10 and all(case["graphs"] == 1 for case in traced)
    # A layer stores and attends; the choice takes two kernels, judge and verdict.
    assert all(case["kernels"] == 2 * case["layers"] + 2 for case in traced if case["impl"] == "triton")
    assert all(case["stores"] == case["layers"] for case in traced if case["impl"] == "torch")


def test_a_step_for_a_gpu_copies_no_cache_and_reads_nothing(traced):
    """Symptom: 13 ms for 52 MB, since the compiler makes a copy of the whole cache where a layer writes
    into it; or no CUDA graph at all, since a constant lies on the CPU (`before[:, 0] = 0` was one). The
    cache is written in place, no tensor of its size is made, nothing lies on the CPU, and what comes out is
    a verdict (2 or 4, M)."""
    for case in traced:
        assert not case["copies"] and not case["host"], case
        assert case["outputs"] == [[4 if case["rules"] == "every" else 2, case["rows"]]]


@pytest.mark.parametrize("window, most", [("all", 60), ("block", 110)])
def test_two_hundred_requests_take_few_graphs(window, most):
    """Symptom: a graph for every number of undecided rows. 200 requests of random lengths on five prefixes,
    three depths, two strategies, take no more than `most` graphs, and a quarter of them meets more than
    half. On a GPU a graph is fixed by what `shapes` says; here the passes are counted by it and run
    eagerly."""
    rng, model = random.Random(0), tiny(layers=4)
    prefixes = [prompt(n, seed=n) for n in (30, 70, 130, 200, 260)]
    requests = []
    for i in range(200):
        prefix = rng.choice(prefixes)
        requests.append(Request(
            prefix + prompt(rng.randint(3, 40), seed=i), prefix_len=len(prefix), gen_length=16,
            block_length=8, threshold=rng.choice([None, 0.3])))
    engine = Engine(model, table={30: 1, 60: 2, 80: 3}, measure=0, cache_mb=16, window=window)
    step, met = engine.step, []
    engine.compiled, engine.bucket, engine.admission.bucket = True, step_module.bucket, step_module.bucket
    engine.step = engine.admission.step = lambda *args: met.append(shapes(args)) or step(*args)
    engine.generate(requests[:50])
    early = len(set(met))
    engine.generate(requests[50:])
    assert early <= len(set(met)) <= most < len(met) / 4 and early > len(set(met)) / 2


@pytest.mark.parametrize("cache, depth, window", [
    ("none", "auto", "all"), ("intra", "auto", "rest"), ("bicache", 2, "all"), ("bicache", 3, "block"),
    ("naive", "auto", "all")])
def test_compiled_equals_eager(model, cache, depth, window, monkeypatch):
    """The compiled step, rows and pages rounded up to buckets, gives the tokens of the eager one, whatever
    the mode, for a batch in which every strategy stands beside every other."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **kw: compile(f, **kw, backend="eager"))
    kw = dict(cache=cache, depth=depth, window=window, refresh=4, cache_mb=8, max_batch=4)
    eager = [r.tokens for r in Engine(model, **kw).generate(mixed_requests())]
    reset()
    compiled = Engine(model, compile=True, **kw)
    assert [r.tokens for r in compiled.generate(mixed_requests())] == eager and graphs() > 0


def test_a_warm_up_makes_the_graphs_of_a_run(monkeypatch):
    """Symptom: the first answers wait for the compiler, and a bench reports its time as the engine's. After
    a warm-up the run compiles nothing, and is as if there had been none: no entry, no hit, no count, no
    remembered prompt."""
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **kw: compile(f, **kw, backend="eager"))
    shared = prompt(70)
    options = dict(gen_length=8, block_length=4, threshold=0.2)
    ask = lambda: [Request(shared + prompt(3 + i, seed=i), **options) for i in range(5)]
    kw = dict(depth=2, refresh=4, window="block", cache_mb=8, max_batch=2)
    cold = Engine(tiny(), **kw)
    expected = [(r.tokens, r.hit, r.prefix_tokens) for r in cold.generate(ask())]
    reset()
    engine = Engine(tiny(), compile=True, **kw)
    free = len(engine.cache.free)
    made, seconds = warm_up(engine, ask())
    assert made > 4 and seconds > 0 and not engine.counts
    assert not engine.cache.entries and len(engine.cache.free) == free
    before = graphs()
    assert [(r.tokens, r.hit, r.prefix_tokens) for r in engine.generate(ask())] == expected
    assert graphs() == before and engine.counts["passes"] == cold.counts["passes"]


@pytest.mark.parametrize("compile, cuda, compiled", [
    ("auto", False, False), ("auto", True, True), (False, True, False)])
def test_auto_compiles_on_a_gpu_and_nowhere_else(compile, cuda, compiled, monkeypatch):
    """compile="auto", the default, is on for cuda and off for the CPU, where it does not pay; and may be
    overruled."""
    asked = []
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: cuda))
    monkeypatch.setattr(engine_module, "Step", lambda *args: asked.append(args[-1]))
    engine = Engine(tiny(), depth=1, cache_mb=1, compile=compile)
    assert asked == [compiled] and (engine.bucket is step_module.bucket) == compiled


def test_a_warm_up_without_compiling_is_refused(text_folder, capsys):
    """An option without effect is an error, before anything is printed."""
    assert generate.main(["--model", str(text_folder), "--prompt", "Who?", "--warm-up"]) == 2
    out, err = capsys.readouterr()
    assert not out and "--warm-up has an effect only where the steps are compiled" in err
