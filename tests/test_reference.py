"""A second, independent check of the model: transformers' own Qwen2, Qwen3 and Llama with a full attention
mask.

    pip install -r tests/requirements-reference.txt && python -m pytest tests/test_reference.py

Dream, open-dCoder and A2D's models are Qwen2, Qwen3 or Llama without the causal mask, CoDA is Qwen3, LLaDA is
Llama. Random weights of theirs give their logits: under our names, and through a folder that they wrote.
"""
import json

import pytest
import torch
from conftest import prompt

from engine import Engine, Request
from hub.checkpoint import load
from model import Config, Transformer
from reference import plain

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed; see tests/requirements-reference.txt")

# a part of our name -> the same part of theirs; the rest of a name is equal
THEIRS = {
    "embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head", "attn_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm", "q": "self_attn.q_proj", "k": "self_attn.k_proj",
    "v": "self_attn.v_proj", "o": "self_attn.o_proj", "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm", "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}


def rename(ours: str) -> str:
    parts = ours.split(".")                     # layers.3.q.weight -> model.layers.3.self_attn.q_proj.weight
    if parts[0] == "layers":
        return ".".join(["model.layers", parts[1], THEIRS[parts[2]], parts[3]])
    return ".".join([THEIRS[parts[0]], parts[1]])


def make(family: str, ratio=1, head_dim=16, tied=False):
    """A random model of theirs and the Config that says the same. 16 is hidden / heads."""
    c = Config(layers=3, hidden=64, heads=4, kv_heads=4 // ratio, head_dim=head_dim, mlp=112, vocab=90,
               max_len=128, theta=1e6, eps=1e-6, mask_id=89, eos_ids=(88,), qkv_bias=family == "Qwen2",
               tied=tied, shift=family == "Qwen2", qk_norm=family == "Qwen3")
    torch.manual_seed(ratio)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=c.vocab, hidden_size=c.hidden, intermediate_size=c.mlp, num_hidden_layers=c.layers,
        num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, max_position_embeddings=c.max_len,
        head_dim=head_dim, rms_norm_eps=c.eps, tie_word_embeddings=tied, eos_token_id=88,
        rope_parameters={"rope_type": "default", "rope_theta": c.theta}, attn_implementation="eager")
    theirs = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    for name, p in theirs.named_parameters():   # theirs are near 0 or 1: a wrong one would not show
        if p.ndim == 1:
            torch.nn.init.normal_(p, 1.0 if "norm" in name else 0.0, 0.3)
        else:
            torch.nn.init.normal_(p, 0.0, 1.0 if "embed" in name else p.shape[1] ** -0.5)
    return theirs, c


def both_ways(theirs, ids):
    """Their logits with a full attention mask, and with their own causal one."""
    T = ids.shape[1]
    seen = torch.zeros(len(ids), 1, T, T)       # added to the scores: nothing is masked, so nothing is causal
    with torch.no_grad():
        return [theirs(ids, attention_mask=mask, use_cache=False).logits for mask in (seen, None)]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("head_dim", [16, 32], ids=["heads fill hidden", "heads are wider"])
@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Llama"])
def test_logits_of_transformers(family, ratio, head_dim, tied):
    """Their logits to 1e-4 in float32, for GQA ratios 1 and 4, heads that fill the hidden size and wider
    ones, with and without qkv bias, norms on q and k, and a tied head."""
    theirs, c = make(family, ratio, head_dim, tied)
    ours, weights = Transformer(c), theirs.state_dict()
    assert {rename(name) for name in ours.state_dict()} == set(weights)
    ours.load_state_dict({name: weights[rename(name)] for name in ours.state_dict()})
    ids = torch.tensor([prompt(21, vocab=c.vocab), prompt(21, seed=1, vocab=c.vocab)])
    full, causal = both_ways(theirs, ids)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), full, atol=1e-4, rtol=0)
    assert (full - causal).abs().max() > 0.1    # the mask was heard: a causal pass gives other logits


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", ["Qwen2", "Qwen3", "Llama"])
def test_a_folder_that_transformers_wrote(family, tied, tmp_path):
    """save_pretrained as it is today (rope_theta inside rope_parameters, layer_types, no head where it is
    tied), the model_type of dllm's conversion: it loads, and answers as the plain loop on their logits
    does."""
    theirs, c = make(family, ratio=2, head_dim=32, tied=tied)
    theirs.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | dict(model_type=f"a2d-{family.lower()}")))
    ours = load(tmp_path, mask_id=89)
    c = ours.config
    assert (c.theta, c.head_dim, c.tied, c.shift) == (1e6, 32, tied, False)
    ids = prompt(15, vocab=88)
    expected, _ = plain(ours, ids, 8, 4, forward=lambda canvas: both_ways(theirs, canvas)[0])
    result, = Engine(ours, depth=0, refresh=1, cache_mb=4).generate(
        [Request(ids, prefix_len=9, gen_length=8, block_length=4, stop_at_eos=False)])
    assert result.tokens == expected
