"""The training recipe runs, is reproducible, and goes on after a stop."""
import json
import subprocess
import sys

import torch
from conftest import ROOT
from safetensors.torch import load_file

SMALL = ["--layers", "5", "--width", "128", "--batch", "512", "--no-compile", "--eval-docs", "1"]


def train(folder, name, *args):
    out = folder / name
    run = subprocess.run([sys.executable, ROOT / "tools" / "train_tiny.py", "--out", out, "--state", folder / "state.pt", *SMALL, *args],
                         capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    return load_file(out / "model.safetensors"), json.loads((out / "metrics.json").read_text())


def test_training_is_reproducible_and_resumable(tmp_path):
    """The same seed gives the same weights; --resume goes on from the state and counts on; both write a folder that the
    engine loads."""
    weights, first = train(tmp_path, "a", "--tokens", "2000")
    again, _ = train(tmp_path, "b", "--tokens", "2000")
    assert weights.keys() == again.keys() and all(torch.equal(weights[k], again[k]) for k in weights)
    more, second = train(tmp_path, "c", "--tokens", "4000", "--resume")
    assert second["steps"] > first["steps"] and second["tokens"] >= 4000 > first["tokens"]
    assert any(not torch.equal(weights[k], more[k]) for k in weights)
    from engine import Engine, Request
    engine = Engine.from_folder(tmp_path / "c", cache="none", cache_mb=4)
    ids, _ = engine.tokenizer.render({"prefix": "Staff list: Kim leads the team.", "prompt": "Who leads the team?"})
    assert engine.generate([Request(ids, gen_length=4)])[0].forwards <= 4
