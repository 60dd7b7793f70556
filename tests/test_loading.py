"""Loading a folder of shards: never two copies of the weights, a bar on a terminal, one sentence when it is
broken."""
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, tiny
from safetensors.torch import save_file

from depth import find_table
from hub import checkpoint
from hub.checkpoint import checkpoint_names, load
from hub.families import FAMILIES
from model import Config, Transformer

MEASURE = """
import os, sys
sys.path.insert(0, sys.argv[1])
from hub.checkpoint import load

def status(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field)) * 1024

def touch(folder, dtype):
    model = load(folder, dtype=dtype)
    [float(p.flatten()[::512].sum()) for p in model.parameters()]   # every page: mapped weights count as well
    return sum(p.nbytes for p in model.parameters())

for case in sys.argv[3:]:
    if os.fork() == 0:                              # each in a process of its own, torch imported once
        folder, dtype = case.split("=")
        touch(sys.argv[2], dtype)                   # a tiny model first: the libraries are not the weights
        before = status("VmRSS")
        weights = touch(folder, dtype)
        print(status("VmHWM") - before, weights, flush=True)
        os._exit(0)
    os.wait()
"""


def save_shards(folder: Path, model: Transformer, shards: int, dtype=torch.float32) -> Path:
    """A LLaDA folder as the hub has it: shards with an index."""
    c, family = model.config, FAMILIES["llada"]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(
        {"model_type": "llada", **{theirs: getattr(c, ours) for ours, theirs in family.keys.items()}}))
    state, names = model.state_dict(), checkpoint_names(model, family)
    parts = [list(names)[i::shards] for i in range(shards)]
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    for file, part in zip(files, parts):
        save_file({names[ours]: state[ours].to(dtype) for ours in part}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps(
        {"weight_map": {names[ours]: file for file, part in zip(files, parts) for ours in part}}))
    return folder


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_peak_memory(tmp_path):
    """76.6 million parameters, 306 MB in float32, in five shards. The peak of resident memory while loading,
    mapped pages of the files included, stays below 1.3 times the weights as they are in the end: a cast holds
    one tensor twice, not one shard."""
    c = Config(layers=5, hidden=1024, heads=8, kv_heads=8, mlp=3072, vocab=4096, max_len=64, theta=1e4,
               eps=1e-6, mask_id=1, eos_ids=(2,), qkv_bias=False, tied=False)
    with torch.device("meta"):
        model = Transformer(c)
    model = model.to_empty(device="cpu").requires_grad_(False)
    for p in model.parameters():
        p.fill_(1.5)
    folders = {dtype: save_shards(tmp_path / dtype, model, 5, getattr(torch, dtype))
               for dtype in ("float32", "bfloat16")}
    small = save_shards(tmp_path / "small", tiny(), 2)
    cases = [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float32")]
    args = [f"{folders[stored]}={wanted}" for stored, wanted in cases]
    out = subprocess.run([sys.executable, "-c", MEASURE, ROOT, small, *args], capture_output=True, text=True,
                         env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert out.returncode == 0 and not out.stderr, out.stderr
    for line, (stored, wanted) in zip(out.stdout.splitlines(), cases, strict=True):
        peak, weights = map(int, line.split())
        assert weights == sum(p.numel() for p in model.parameters()) * (4 if wanted == "float32" else 2)
        assert 0.9 * weights < peak < 1.3 * weights, (stored, wanted, peak / weights)


def test_a_cast_is_the_stored_value_rounded(tmp_path):
    """Each tensor is cast by itself: the same values as casting the whole model, and the head in its
    place."""
    model = tiny()
    folder = save_shards(tmp_path / "model", model, 3)
    cast = load(folder, dtype="bfloat16").state_dict()
    assert all(torch.equal(cast[name], p.bfloat16()) for name, p in model.state_dict().items())
    same = load(folder, dtype="auto" if not torch.cuda.is_available() else "float32").state_dict()
    assert all(torch.equal(same[name], p) for name, p in model.state_dict().items())


def test_progress_bar(tmp_path, monkeypatch):
    """A bar in bytes on a terminal, nothing elsewhere: a log must not fill with bars. It counts up to the
    whole."""
    folder = save_shards(tmp_path / "model", tiny(), 3)
    seen = []

    def eager(**settings):                      # a bar that does not wait its second
        assert settings["delay"] == 1
        seen.append(real(**settings | dict(delay=0, mininterval=0)))
        return seen[-1]

    real = checkpoint.tqdm
    monkeypatch.setattr(checkpoint, "tqdm", eager)
    for terminal in (True, False):
        stream = io.StringIO()
        stream.isatty = lambda: terminal
        monkeypatch.setattr(sys, "stderr", stream)
        load(folder, dtype="bfloat16")
        assert ("loading model" in stream.getvalue()) == terminal == bool(stream.getvalue())
    assert 0.8 < seen[0].n / seen[0].total <= 1


def test_quick_loads_show_no_bar(tmp_path, monkeypatch):
    """On a terminal, too, a load of less than a second writes nothing."""
    folder = save_shards(tmp_path / "model", tiny(), 3)
    stream = io.StringIO()
    stream.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", stream)
    load(folder)
    assert stream.getvalue() == ""


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_broken_shards_in_one_sentence(tmp_path, dtype):
    """Symptom: a download that was cut ends in a traceback of the safetensors library, where dtype is auto.
    It is one ValueError that names the file; so is an index that is none."""
    folder = save_shards(tmp_path / "model", tiny(), 2)
    shard = folder / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"model-00001-of-00002.* cannot be read .*; download it again"):
        load(folder, dtype=dtype)
    for text in ("<html>", "{}", "[]", '{"weight_map": 3}'):
        (folder / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ValueError, match="model.safetensors.index.json is no index of shards"):
            load(folder, dtype=dtype)


def save_qwen(folder: Path, model: Transformer, head=None, shards=2) -> Path:
    """An A2D folder in shards, with this output head stored, or none."""
    family, names = FAMILIES["a2d-qwen3"], checkpoint_names(model, FAMILIES["a2d-qwen3"])
    weights = {names[ours]: p.contiguous() for ours, p in model.state_dict().items() if ours != "head.weight"}
    if head is not None:
        weights["lm_head.weight"] = head.contiguous()
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "a2d-qwen3"} | {
        key: getattr(model.config, field) for field, key in family.keys.items()}))
    where = {}
    for i in range(shards):
        part = sorted(weights)[i::shards]
        save_file({name: weights[name] for name in part}, folder / f"part-{i}.safetensors")
        where |= dict.fromkeys(part, f"part-{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


def qwen(tied: bool) -> Transformer:
    return tiny(qk_norm=True, kv_heads=2, head_dim=20, tied=tied)


def test_a_head_stored_all_the_same(tmp_path, recwarn):
    """Symptom: Qwen2.5-Coder-0.5B-mdlm is tied and stores lm_head.weight, equal to the embedding, and was
    refused for a tensor left over. It loads, without a word, and the matrix is in memory once."""
    model = qwen(tied=True)
    for name, head in (("stored", model.embed.weight), ("left out", None)):
        ours = load(save_qwen(tmp_path / name, model, head))
        assert ours.config.tied and ours.head.weight is ours.embed.weight
        assert torch.equal(ours.embed.weight, model.embed.weight)
    assert not recwarn.list


def test_a_head_that_is_not_the_embedding(tmp_path):
    """config.json says tied and the files hold another head: that one counts, and one warning says so."""
    model, other = qwen(tied=True), qwen(tied=False)
    folder = save_qwen(tmp_path / "model", model, other.head.weight)
    with pytest.warns(UserWarning, match="files hold another, lm_head.weight: that one is used") as warned:
        ours = load(folder)
    assert len(warned) == 1 and not ours.config.tied
    assert torch.equal(ours.head.weight, other.head.weight)
    assert torch.equal(ours.embed.weight, model.embed.weight)


def test_an_untied_model_wants_its_head(tmp_path):
    model = qwen(tied=False)
    with pytest.raises(ValueError, match="missing: lm_head.weight"):
        load(save_qwen(tmp_path / "without", model))
    ours = load(save_qwen(tmp_path / "with", model, model.head.weight))
    assert torch.equal(ours.head.weight, model.head.weight) and not ours.config.tied


def test_published_table_in_the_hubs_cache(tmp_path):
    """Symptom: from_folder on a path of the hub's cache finds no table, for the folder bears its revision's
    name."""
    path = tmp_path / "models--GSAI-ML--LLaDA-8B-Instruct" / "snapshots" / "08b83a6feb34df1a"
    path.mkdir(parents=True)
    (tmp_path / "blob").write_text("{}")
    (path / "config.json").symlink_to(tmp_path / "blob")
    assert find_table(path, 32)[99] == 32
    with pytest.warns(UserWarning, match="has no depth table"):
        assert find_table(path, 28) is None
