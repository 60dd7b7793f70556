"""Model folders that cannot be read, or not here: one sentence that names what is wrong and the remedy."""
import json
import shutil

import pytest
import torch
from conftest import GOLDEN, prompt
from safetensors.torch import load_file, save_file

from hub.checkpoint import load
from engine import Engine, Request


@pytest.fixture(params=["llada", "dream"])
def folder(request, tmp_path):
    return shutil.copytree(GOLDEN / request.param, tmp_path / "model")


def edit_config(folder, **values):
    path = folder / "config.json"
    path.write_text(json.dumps({k: v for k, v in (json.loads(path.read_text()) | values).items()
                                if v is not ...}))


def test_unknown_model_type(folder):
    edit_config(folder, model_type="gpt2")
    with pytest.raises(ValueError, match="model_type 'gpt2'; known are llada, Dream"):
        load(folder)


@pytest.mark.parametrize("option, says",
                         [(dict(dtype="float12"), "dtype is float12"), (dict(dtype="int8"), "dtype is int8"),
                                          (dict(device="foo"), "device is foo")])
def test_bad_device_and_dtype(folder, option, says):
    with pytest.raises(ValueError, match=says):
        load(folder, **option)


def test_config_of_another_kind(folder):
    """Symptom: a config.json that is a list, or holds a text where a number belongs, ends in a traceback."""
    edit_config(folder, n_layers="4", num_hidden_layers="4")
    with pytest.raises(ValueError, match="(n|num_hidden)_layers = '4'; these must be numbers"):
        load(folder)
    edit_config(folder, model_type=["llada"])
    with pytest.raises(ValueError, match="model_type None; known|model_type \\['llada'\\]; known"):
        load(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="config.json holds no JSON object"):
        load(folder)


def test_config_missing_or_broken(folder):
    edit_config(folder, mask_token_id=...)
    with pytest.raises(ValueError, match="config.json names no mask token; .* name it with mask_token"):
        load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="no config.json"):
        load(folder)


def test_tensors_that_do_not_fit_are_all_named_at_once(folder):
    """Symptom: a missing head is silently random. Missing, left-over and mis-shaped tensors come in one
    message."""
    weights = load_file(folder / "model.safetensors")
    gone, bent = sorted(weights)[0], sorted(weights)[5]
    del weights[gone]
    weights[bent] = torch.zeros(3, 5)
    weights["extra.weight"] = torch.zeros(1)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError) as e:
        load(folder)
    message = str(e.value)
    assert f"missing: {gone};" in message and "left over: extra.weight" in message
    assert f"{bent} is (3, 5), not" in message


def test_truncated_and_missing_files(folder):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:len(whole) // 2])
    with pytest.raises(ValueError, match="cannot be read .*; download it again"):
        load(folder)
    path.unlink()
    with pytest.raises(ValueError, match="lacks model.safetensors"):
        load(folder)


def test_shards(folder):
    """A folder of shards with an index loads to the same model; a missing shard is named."""
    whole = load(folder)
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    keys = sorted(weights)
    parts = {"model-1.safetensors": keys[:20], "model-2.safetensors": keys[20:]}
    for name, part in parts.items():
        save_file({k: weights[k] for k in part}, folder / name)
    index = {"weight_map": {k: name for name, part in parts.items() for k in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    ids = torch.tensor([prompt(9)])
    assert torch.equal(load(folder)(ids), whole(ids))
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(ValueError, match="lacks model-2.safetensors"):
        load(folder)


@pytest.mark.parametrize("name",
                         ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "weights.Q4_K_M.gguf"])
def test_weights_in_another_format(folder, name):
    """Symptom: a folder with pytorch_model.bin or a .gguf only "lacks model.safetensors; download it again".
    The file is named, and what is read instead."""
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(ValueError, match=f"has its weights in {name}, and safetensors are read"):
        load(folder)


def test_a_foreign_prefix(folder):
    """Symptom: names saved from inside a wrapper give 30,000 letters in one line. A few names and their
    count, and what is wrong with them."""
    weights = load_file(folder / "model.safetensors")
    save_file({f"module.{name}": w for name, w in weights.items()}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing: .*, \.\.\. \(\d+ in all\); left over: module\..* in all\)"
                       ".*each name has 'module.' before it") as e:
        load(folder)
    assert len(str(e.value)) < 1200


def test_weights_larger_than_memory(folder, monkeypatch):
    """Symptom: weights that this machine cannot hold are read until the system kills the process."""
    monkeypatch.setattr("hub.checkpoint.memory", lambda: 1000.0)
    with pytest.raises(ValueError,
                       match="take 0.0 GB as float32 and this machine has 0.0; use dtype bfloat16"):
        load(folder)


@pytest.mark.parametrize("device, says", [
    ("cuda:x", "it must be auto, cpu, cuda or cuda:N"), ("cpu:1", "it must be auto"),
    ("mps", "it must be auto"),
    ("cuda:2", "device is cuda:2 and the last of 2 is cuda:1")])
def test_one_of_several_gpus(folder, monkeypatch, device, says):
    """Symptom: --device cuda:1 is refused; cuda:9 fails somewhere in the allocator."""
    from hub.checkpoint import resolve
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve(folder, "cuda:1", "float32") == (torch.device("cuda:1"), torch.float32)
    with pytest.raises(ValueError, match=says):
        resolve(folder, device, "float32")


def test_tied_heads_share_storage(folder):
    """A tied checkpoint holds no head; the head is the embedding, not a copy and not random."""
    weights = load_file(folder / "model.safetensors")
    head = next(k for k in weights if k.endswith("transformer.ff_out.weight") or k == "lm_head.weight")
    del weights[head]
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ValueError, match=f"missing: {head}"):
        load(folder)
    edit_config(folder, weight_tying=True, tie_word_embeddings=True)
    model = load(folder)
    assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()
    result, = Engine(model, cache="none", cache_mb=4).generate([Request(prompt(5), gen_length=4)])
    assert len(result.tokens) <= 4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtypes(folder, dtype):
    """Weights are cast while they are read, and the engine runs in that dtype, cache included."""
    engine = Engine.from_folder(folder, depth=2, dtype=dtype, cache_mb=4)
    assert engine.model.embed.weight.dtype == engine.cache.kv.dtype == getattr(torch, dtype)
    first, second = engine.generate([Request(prompt(20), prefix_len=9, gen_length=4)] * 2)
    assert first.tokens == second.tokens and second.hit
