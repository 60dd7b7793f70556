"""A second, independent check of the model: transformers' own Qwen2 and Llama with a full attention mask.

    pip install -r tests/requirements-reference.txt && python -m pytest tests/test_reference.py

Dream is Qwen2 and LLaDA is Llama, each without the causal mask. Random weights of theirs under our names give
their logits.
"""
import pytest
import torch
from conftest import prompt

from model import Config, Transformer

transformers = pytest.importorskip("transformers", reason="transformers is not installed; see tests/requirements-reference.txt")

# a part of our name -> the same part of theirs; the rest of a name is equal
THEIRS = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head", "attn_norm": "input_layernorm",
          "mlp_norm": "post_attention_layernorm", "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj",
          "o": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj"}


def rename(ours: str) -> str:
    parts = ours.split(".")                     # layers.3.q.weight -> model.layers.3.self_attn.q_proj.weight
    if parts[0] == "layers":
        return ".".join(["model.layers", parts[1], THEIRS[parts[2]], parts[3]])
    return ".".join([THEIRS[parts[0]], parts[1]])


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("family, bias", [("Qwen2", True), ("Llama", False)])
def test_logits_of_transformers(family, bias, ratio, tied):
    """Their logits to 1e-4 in float32, for GQA ratios 1 and 4, with and without qkv bias, with and without a
    tied head."""
    c = Config(layers=3, hidden=64, heads=4, kv_heads=4 // ratio, mlp=112, vocab=90, max_len=128, theta=1e6, eps=1e-6,
               mask_id=89, eos_id=88, qkv_bias=bias, tied=tied, shift=bias)
    torch.manual_seed(ratio)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=c.vocab, hidden_size=c.hidden, intermediate_size=c.mlp, num_hidden_layers=c.layers,
        num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, max_position_embeddings=c.max_len,
        rms_norm_eps=c.eps, tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": c.theta}, attn_implementation="eager")
    theirs = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
    for name, p in theirs.named_parameters():   # their own start is near zero, and biases at zero: a wrong one would not show
        std = 0.3 if p.ndim == 1 else 1.0 if "embed" in name else p.shape[1] ** -0.5
        torch.nn.init.normal_(p, 1.0 if "norm" in name else 0.0, std)

    ours, weights = Transformer(c), theirs.state_dict()
    assert {rename(name) for name in ours.state_dict()} == set(weights)
    ours.load_state_dict({name: weights[rename(name)] for name in ours.state_dict()})
    ids = torch.tensor([prompt(21, vocab=c.vocab), prompt(21, seed=1, vocab=c.vocab)])
    seen = torch.zeros(2, 1, 21, 21)            # added to the scores: nothing is masked, so nothing is causal
    with torch.no_grad():
        full, causal = (theirs(ids, attention_mask=mask, use_cache=False).logits for mask in (seen, None))
        logits = ours(ids)
    torch.testing.assert_close(logits, full, atol=1e-4, rtol=0)
    assert (full - causal).abs().max() > 0.1    # the mask was heard: a causal pass gives other logits
