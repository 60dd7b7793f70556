"""The real checkpoints' shapes: their published config.json, built on the meta device (tests/configs says
where from)."""
import json
import re

import pytest
import torch
from conftest import ROOT
from safetensors.torch import save_file

from hub.checkpoint import FAMILIES, checkpoint_names, load, read_config
from model import Transformer

CONFIGS = ROOT / "tests" / "configs"
LLADA, DREAM = ["LLaDA-8B-Base", "LLaDA-8B-Instruct", "LLaDA-1.5"], [
    "Dream-v0-Base-7B", "Dream-v0-Instruct-7B", "Dream-Coder-v0-Instruct-7B", "DiffuCoder-7B"]

# As the checkpoints' own indices list them; nothing here is read from the table in model.py.
LLADA_KEYS = {"model.transformer.wte.weight", "model.transformer.ln_f.weight", "model.transformer.ff_out.weight"} | {
    f"model.transformer.blocks.{i}.{part}.weight" for i in range(32)
    for part in ("attn_norm", "q_proj", "k_proj", "v_proj", "attn_out", "ff_norm", "ff_proj", "up_proj", "ff_out")}
DREAM_KEYS = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"} | {
    f"model.layers.{i}.{part}" for i in range(28)
    for part in ("input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.o_proj.weight",
                 *(f"self_attn.{x}_proj.{kind}" for x in "qkv" for kind in ("weight", "bias")),
                 *(f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")))}
LLADA_SHAPES = {"wte": (126464, 4096), "ln_f": (4096,), "attn_norm": (4096,), "ff_norm": (4096,), "q_proj": (4096, 4096),
                "k_proj": (4096, 4096), "v_proj": (4096, 4096), "attn_out": (4096, 4096), "ff_proj": (12288, 4096),
                "up_proj": (12288, 4096), "ff_out": (4096, 12288)}
DREAM_SHAPES = {"embed_tokens": (152064, 3584), "norm": (3584,), "lm_head": (152064, 3584), "input_layernorm": (3584,),
                "post_attention_layernorm": (3584,), "q_proj": (3584, 3584), "k_proj": (512, 3584), "v_proj": (512, 3584),
                "o_proj": (3584, 3584), "gate_proj": (18944, 3584), "up_proj": (18944, 3584), "down_proj": (3584, 18944)}


def shape_of(key, shapes):
    if key == "model.transformer.ff_out.weight":            # LLaDA's head has the name of its layers' last matrix
        return 126464, 4096
    shape = shapes[key.split(".")[-2]]
    return shape[:1] if key.endswith("bias") else shape


@pytest.fixture(params=LLADA + DREAM)
def name(request):
    return request.param


def build(name):
    with torch.device("meta"):
        return Transformer(read_config(CONFIGS / name))


def test_parameter_count(name):
    """8.02 billion for LLaDA, 7.62 for Dream: to the last one what the bytes of their indices say."""
    count = sum(p.numel() for p in build(name).parameters())
    assert count == (16_031_162_368 if name in LLADA else 15_231_233_024) // 2
    assert round(count / 1e9, 2) == (8.02 if name in LLADA else 7.62)


def test_every_key_has_its_place(name):
    """Each tensor of the checkpoint is a parameter of the same shape, and there is no other."""
    expected, shapes = (LLADA_KEYS, LLADA_SHAPES) if name in LLADA else (DREAM_KEYS, DREAM_SHAPES)
    model = build(name)
    family = FAMILIES["llada" if name in LLADA else "Dream"]
    ours = {theirs: tuple(model.state_dict()[mine].shape) for mine, theirs in checkpoint_names(model, family).items()}
    assert len(expected) == (291 if name in LLADA else 339)
    assert ours == {key: shape_of(key, shapes) for key in expected}


def test_ids_and_constants(name):
    """Mask and end-of-text ids, RoPE base, epsilon and the shift, as published."""
    c = read_config(CONFIGS / name)
    expected = (126336, 126081, 5e5, 1e-5, False, False) if name in LLADA else (151666, 151643, 1e6, 1e-6, True, True)
    assert (c.mask_id, c.eos_id, c.theta, c.eps, c.shift, c.qkv_bias) == expected
    assert c.head_dim == 128 and not c.tied and c.max_len >= 4096
    raw = json.loads((CONFIGS / name / "config.json").read_text())
    assert c.mask_id < c.vocab == raw["vocab_size"]


LLADA_SMALL = dict(n_layers=2, d_model=8, n_heads=2, n_kv_heads=2, mlp_hidden_size=12, embedding_size=10, vocab_size=10)
DREAM_SMALL = dict(num_hidden_layers=2, hidden_size=8, num_attention_heads=2, num_key_value_heads=1, intermediate_size=12,
                   vocab_size=10)
LLADA_WHERE = dict(embed="wte", norm="ln_f", head="ff_out", q="blocks.1.q_proj", k="blocks.1.k_proj", v="blocks.1.v_proj",
                   o="blocks.1.attn_out", gate="blocks.1.ff_proj", up="blocks.1.up_proj", down="blocks.1.ff_out",
                   attn_norm="blocks.1.attn_norm", mlp_norm="blocks.1.ff_norm")
DREAM_WHERE = dict(embed="model.embed_tokens", norm="model.norm", head="lm_head",
                   **{x: f"model.layers.1.self_attn.{x}_proj" for x in "qkvo"},
                   **{x: f"model.layers.1.mlp.{x}_proj" for x in ("gate", "up", "down")},
                   attn_norm="model.layers.1.input_layernorm", mlp_norm="model.layers.1.post_attention_layernorm")


@pytest.mark.parametrize("name", ["LLaDA-8B-Base", "Dream-v0-Base-7B"])
def test_no_two_tensors_are_exchanged(name, tmp_path):
    """Symptom: gate and up, or two norms, change places and nothing complains, for their shapes agree. A
    small folder under the real keys, each tensor filled with its own number: every number arrives where the
    authors' code has it."""
    keys, shapes, small, where = ((LLADA_KEYS, LLADA_SHAPES, LLADA_SMALL, LLADA_WHERE) if name in LLADA else
                                  (DREAM_KEYS, DREAM_SHAPES, DREAM_SMALL, DREAM_WHERE))
    raw = json.loads((CONFIGS / name / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | small))
    keys = sorted(k for k in keys if not re.search(r"\.([2-9]|\d\d)\.", k))         # of two layers
    size = {126464: 10, 152064: 10, 4096: 8, 3584: 8, 12288: 12, 18944: 12, 512: 4}
    save_file({k: torch.full([size[n] for n in shape_of(k, shapes)], float(i)) for i, k in enumerate(keys)},
              tmp_path / "model.safetensors")
    model = load(tmp_path)
    prefix = "model.transformer." if name in LLADA else ""
    for part, theirs in where.items():
        for kind, p in getattr(model if hasattr(model, part) else model.layers[1], part).named_parameters():
            assert keys[int(p.flatten()[0])] == f"{prefix}{theirs}.{kind}"
            assert p.unique().numel() == 1
