"""Token for token against outputs of the authors' loops and of a second implementation of the paper
(tests/golden)."""
import json

import pytest
import torch
from conftest import GOLDEN
from safetensors.torch import load_file

from hub.checkpoint import load
from engine import Engine, Request


def cases(kind):
    return [pytest.param(family, case, id=f"{family}-{i}-{case.get('kind', case.get('window'))}")
            for family in ("llada", "dream")
            for i, case in enumerate(json.loads((GOLDEN / family / "golden.json").read_text())[kind])]


@pytest.fixture(scope="module")
def models():
    return {family: load(GOLDEN / family) for family in ("llada", "dream")}


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_logits(models, family):
    """The model is the authors' model: logits within 1e-4 of theirs."""
    golden = load_file(GOLDEN / family / "golden.safetensors")
    for key in (k for k in golden if k.endswith(".ids")):
        logits = models[family](golden[key][None].long())[0]
        torch.testing.assert_close(logits, golden[key[:-3] + "out"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("family, case", cases("generate"))
def test_generate(models, family, case):
    """The authors' loops: LLaDA whole canvas, prefix cache and dual cache; Dream's algorithms with its
    schedule. Alone and as the second of a batch of two."""
    window = {"prefix_cache": "rest", "dual_cache": "block"}.get(case["kind"], "all")
    if "eps" in case:
        how = dict(eps=case["eps"], steps=case["steps"], remasking=case["kind"])
    else:
        how = dict(block_length=case["block_length"])
        how |= dict(threshold=case["threshold"]) if case["threshold"] else dict(steps=case["steps"])
    engine = Engine(models[family], cache="none", window=window, cache_mb=8)
    request = Request(case["prompt"], gen_length=case["gen_length"], **how)
    other = Request(case["prompt"][:5], gen_length=11)
    alone, = engine.generate([request])
    assert alone.tokens == case["output"]
    assert engine.generate([other, request])[1].tokens == case["output"]
    if "forwards" in case:
        assert alone.forwards <= case["forwards"]


@pytest.mark.parametrize("family, case", cases("bicache"))
def test_bicache(models, family, case):
    """The paper's algorithm at fixed depths, intervals and windows: the miss, the hit, and the hit beside a
    neighbour."""
    engine = Engine(models[family], cache="bicache", depth=case["depth"], refresh=case["interval"],
                    window=case["window"], cache_mb=8)
    how = dict(threshold=case["threshold"]) if case["threshold"] else dict(steps=case["steps"])
    request = Request(case["prompt"], prefix_len=case["prefix_len"], gen_length=case["gen_length"],
                      block_length=case["block_length"], **how)
    other = Request(case["prompt"][:-2], prefix_len=min(9, case["prefix_len"]), gen_length=13)
    miss, = engine.generate([request])
    _, hit = engine.generate([other, request])
    assert miss.tokens == hit.tokens == case["output"]
    assert miss.forwards == hit.forwards == case["forwards"]
    assert not miss.hit and hit.hit == (case["depth"] > 0)
