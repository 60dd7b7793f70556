"""The real checkpoints' shapes: their published config.json, built on the meta device (tests/configs says
where from)."""
import json
from dataclasses import dataclass, replace

import pytest
import torch
from conftest import ROOT
from safetensors.torch import save_file

from hub.checkpoint import checkpoint_names, load
from hub.families import FAMILIES, read_config
from model import Transformer

CONFIGS = ROOT / "tests" / "configs"


@dataclass
class Facts:
    """What is known of a checkpoint; nothing here is read from the table of families."""
    layers: int
    hidden: int
    heads: tuple            # query, kv, and what each is wide
    mlp: int
    vocab: int
    tensors: int
    numbers: int            # parameters
    theta: float
    eps: float
    mask: int
    eos: int
    shift: bool
    bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    named: bool = False     # the mask's id is not in config.json: the tokenizer's files name it, or the user


LLADA = Facts(
    32, 4096, (32, 32, 128), 12288, 126464, 291, 8_015_581_184, 5e5, 1e-5, 126336, 126081, False)
DREAM = Facts(
    28, 3584, (28, 4, 128), 18944, 152064, 339, 7_615_616_512, 1e6, 1e-6, 151666, 151643, True, bias=True)
CHECKPOINTS = {
    "LLaDA-8B-Base": LLADA, "LLaDA-8B-Instruct": LLADA, "LLaDA-1.5": LLADA,
    "Dream-v0-Base-7B": DREAM, "Dream-v0-Instruct-7B": DREAM, "Dream-Coder-v0-Instruct-7B": DREAM,
    "DiffuCoder-7B": DREAM,
    "Qwen3-0.6B-diffusion-mdlm-v0.1": Facts(
        28, 1024, (16, 8, 128), 3072, 151936, 310, 596_049_920, 1e6, 1e-6, 151669, 151645, False,
        qk_norm=True, tied=True, named=True),
    "Qwen2.5-Coder-0.5B-Instruct-diffusion-mdlm-v0.1": Facts(
        24, 896, (14, 2, 64), 4864, 151936, 290, 494_032_768, 1e6, 1e-6, 151665, 151645, False,
        bias=True, tied=True, named=True),
    "SmolLM2-135M-a2d": Facts(
        30, 576, (9, 3, 64), 1536, 49153, 272, 134_515_008 + 576, 1e5, 1e-5, 49152, 0, False,
        tied=True, named=True),
    "CoDA-v0-Instruct": Facts(
        28, 2048, (16, 8, 128), 6144, 151936, 310, 1_720_574_976, 1e6, 1e-6, 151669, 151645, True,
        qk_norm=True, tied=True),
    "open-dcoder-0.5B": Facts(
        24, 896, (14, 2, 64), 4864, 151936, 290, 494_032_768, 1e6, 1e-6, 151665, 151643, True,
        bias=True, tied=True, named=True),
}


def tensors(name: str, f: Facts, head: bool) -> dict:
    """name -> shape of every tensor, as the checkpoints' own indices list them (Dream's are Qwen2's)."""
    H, K, D = f.heads
    q, kv, mlp = (H * D, f.hidden), (K * D, f.hidden), (f.mlp, f.hidden)
    hidden, table = (f.hidden,), (f.vocab, f.hidden)
    if "LLaDA" in name:
        found = {"model.transformer.wte.weight": table, "model.transformer.ln_f.weight": hidden}
        if head:
            found["model.transformer.ff_out.weight"] = table
        parts = dict(attn_norm=hidden, ff_norm=hidden, q_proj=q, k_proj=kv, v_proj=kv, attn_out=q[::-1],
                     ff_proj=mlp, up_proj=mlp, ff_out=mlp[::-1])
        parts = {f"{part}.weight": shape for part, shape in parts.items()}
        return found | in_layers("model.transformer.blocks", f.layers, parts)
    found = {"model.embed_tokens.weight": table, "model.norm.weight": hidden}
    if head:
        found["lm_head.weight"] = table
    parts = {
        "input_layernorm.weight": hidden, "post_attention_layernorm.weight": hidden,
        "self_attn.q_proj.weight": q, "self_attn.k_proj.weight": kv, "self_attn.v_proj.weight": kv,
        "self_attn.o_proj.weight": q[::-1],
        "mlp.gate_proj.weight": mlp, "mlp.up_proj.weight": mlp, "mlp.down_proj.weight": mlp[::-1]}
    if f.bias:
        parts |= {f"self_attn.{x}_proj.bias": shape[:1] for x, shape in (("q", q), ("k", kv), ("v", kv))}
    if f.qk_norm:
        parts |= {f"self_attn.{x}_norm.weight": (D,) for x in "qk"}
    return found | in_layers("model.layers", f.layers, parts)


def in_layers(stem: str, layers: int, parts: dict) -> dict:
    return {f"{stem}.{i}.{part}": shape for i in range(layers) for part, shape in parts.items()}


@pytest.fixture(params=CHECKPOINTS)
def name(request):
    return request.param


def config_of(name):
    f = CHECKPOINTS[name]
    return read_config(CONFIGS / name, mask_id=f.mask if f.named else None)


def build(name):
    with torch.device("meta"):
        return Transformer(config_of(name))


def test_parameter_count(name):
    """To the last one what the bytes of the checkpoints' indices say, or their cards."""
    assert sum(p.numel() for p in build(name).parameters()) == CHECKPOINTS[name].numbers


def test_every_key_has_its_place(name):
    """Each tensor of the checkpoint is a parameter of the same shape, and there is no other. A tied model has
    a place for a head of its own, too."""
    model, f = build(name), CHECKPOINTS[name]
    kind = json.loads((CONFIGS / name / "config.json").read_text())["model_type"]
    ours = {theirs: tuple(model.state_dict()[mine].shape)
            for mine, theirs in checkpoint_names(model, FAMILIES[kind]).items()}
    assert ours == tensors(name, f, head=True)
    assert len(tensors(name, f, head=not f.tied)) == f.tensors


def test_ids_and_constants(name):
    """Mask and end-of-text ids, RoPE base, epsilon, norms, biases and the shift, as published."""
    c, f = config_of(name), CHECKPOINTS[name]
    assert (c.mask_id, c.eos_ids, c.theta, c.eps) == (f.mask, (f.eos,), f.theta, f.eps)
    assert (c.shift, c.qkv_bias, c.qk_norm, c.tied) == (f.shift, f.bias, f.qk_norm, f.tied)
    assert (c.heads, c.kv_heads, c.head_dim) == f.heads and c.max_len >= 4096
    assert c.mask_id < c.vocab == json.loads((CONFIGS / name / "config.json").read_text())["vocab_size"]


# Where each part stands in the authors' code, in layer 1 and around the layers.
LLADA_WHERE = dict(
    embed="wte", norm="ln_f", head="ff_out", attn_norm="blocks.1.attn_norm", q="blocks.1.q_proj",
    k="blocks.1.k_proj", v="blocks.1.v_proj", o="blocks.1.attn_out", mlp_norm="blocks.1.ff_norm",
    gate="blocks.1.ff_proj", up="blocks.1.up_proj", down="blocks.1.ff_out")
QWEN_WHERE = dict(
    embed="model.embed_tokens", norm="model.norm", head="lm_head", attn_norm="model.layers.1.input_layernorm",
    q="model.layers.1.self_attn.q_proj", k="model.layers.1.self_attn.k_proj",
    v="model.layers.1.self_attn.v_proj", o="model.layers.1.self_attn.o_proj",
    q_norm="model.layers.1.self_attn.q_norm", k_norm="model.layers.1.self_attn.k_norm",
    mlp_norm="model.layers.1.post_attention_layernorm", gate="model.layers.1.mlp.gate_proj",
    up="model.layers.1.mlp.up_proj", down="model.layers.1.mlp.down_proj")


@pytest.mark.parametrize("name", [
    "LLaDA-8B-Base", "Dream-v0-Base-7B", "Qwen3-0.6B-diffusion-mdlm-v0.1", "SmolLM2-135M-a2d"])
def test_no_two_tensors_are_exchanged(name, tmp_path):
    """Symptom: gate and up, or two norms, change places and nothing complains, for their shapes agree. A
    small folder under the real keys, each tensor filled with its own number: every number arrives where the
    authors' code has it."""
    big = CHECKPOINTS[name]
    H, K, D = 2, 1 if big.heads[0] > big.heads[1] else 2, 6 if big.qk_norm else 4
    f = replace(big, layers=2, hidden=8, heads=(H, K, D), mlp=12, vocab=10)
    raw = json.loads((CONFIGS / name / "config.json").read_text())
    raw |= dict(vocab_size=10, mask_token_id=9, eos_token_id=8)
    if "LLaDA" in name:
        raw |= dict(n_layers=2, d_model=8, n_heads=H, n_kv_heads=K, mlp_hidden_size=12, embedding_size=10)
    else:
        raw |= dict(num_hidden_layers=2, hidden_size=8, num_attention_heads=H, num_key_value_heads=K,
                    head_dim=D, intermediate_size=12)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    wanted = tensors(name, f, head=True)
    keys = sorted(wanted)
    weights = {key: torch.full(wanted[key], float(i)) for i, key in enumerate(keys)}
    save_file(weights, tmp_path / "model.safetensors")
    if big.tied:                            # the head is another than the embedding, and the one that counts
        with pytest.warns(UserWarning, match="lm_head.weight: that one is used"):
            model = load(tmp_path)
    else:
        model = load(tmp_path)
    prefix, where = ("model.transformer.", LLADA_WHERE) if "LLaDA" in name else ("", QWEN_WHERE)
    for part, theirs in where.items():
        for kind, p in getattr(model if hasattr(model, part) else model.layers[1], part).named_parameters():
            assert keys[int(p.flatten()[0])] == f"{prefix}{theirs}.{kind}"
            assert p.unique().numel() == 1
