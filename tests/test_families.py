"""What config.json may say: ids from three places, settings done or refused, models of another attention."""
import json

import pytest
from conftest import ROOT

from hub.families import FAMILIES, FINE, hub_name, read_config

QWEN = dict(num_hidden_layers=2, hidden_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
            intermediate_size=48, vocab_size=100, max_position_embeddings=64, mask_token_id=99,
            eos_token_id=98)
LLADA = dict(n_layers=2, d_model=32, n_heads=2, n_kv_heads=2, mlp_hidden_size=48, vocab_size=100,
             max_sequence_length=64, mask_token_id=99, eos_token_id=98)


def read(path, kind, *, name="model", generation=None, mask_id=None, shift=None, **values):
    """The Config of a folder of that kind; a value of ... leaves its key out."""
    folder = path / name
    folder.mkdir(parents=True, exist_ok=True)
    raw = dict(model_type=kind) | (LLADA if kind == "llada" else QWEN) | values
    raw = {key: value for key, value in raw.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(raw))
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return read_config(folder, mask_id, shift)


# -- the rows -----------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind, bias, norm, shift", [
    ("a2d-llama", False, False, False), ("a2d-qwen2", True, False, False), ("a2d-qwen3", False, True, False),
    ("llama", False, False, True), ("qwen2", True, False, True), ("qwen3", False, True, True),
    ("CoDA", False, True, True), ("Dream", True, False, True), ("llada", False, False, False)])
def test_what_sets_the_families_apart(tmp_path, kind, bias, norm, shift):
    """Bias on q, k, v, norms on q and k, and in which row logits stand: by the family alone, but for the
    option."""
    c = read(tmp_path, kind)
    assert (c.qkv_bias, c.qk_norm, c.shift) == (bias, norm, shift)
    assert read(tmp_path, kind, shift=not shift).shift is not shift


def test_head_dim(tmp_path):
    """Symptom: Qwen3-0.6B has 16 heads of 128 on a hidden size of 1,024, and heads of 64 were computed. What
    the file says counts, else what the family's class does: 128 for Qwen3, hidden / heads for the others."""
    assert read(tmp_path, "a2d-qwen3", head_dim=24).head_dim == 24
    assert read(tmp_path, "a2d-qwen3", head_dim=...).head_dim == 128
    for kind in ("a2d-qwen2", "llama", "llada"):
        assert read(tmp_path, kind, head_dim=None).head_dim == 16


# -- ids ----------------------------------------------------------------------------------------------------

def test_mask_from_one_place_or_another(tmp_path):
    """config.json, or whoever calls (the tokenizer's files, the option); both, where they agree."""
    assert read(tmp_path, "a2d-qwen3").mask_id == 99
    assert read(tmp_path, "a2d-qwen3", mask_token_id=..., mask_id=7).mask_id == 7
    assert read(tmp_path, "a2d-qwen3", mask_id=99).mask_id == 99
    assert read(tmp_path, "CoDA", mask_token_id=..., eos_token_id=..., vocab_size=151936).mask_id == 151669


def test_a_mask_that_only_generation_config_names(tmp_path):
    """Symptom: a folder without tokenizer files whose generation_config.json names the mask was refused, and
    the remedy it was given (--mask-token) needs a tokenizer."""
    generation = {"mask_token_id": 7}
    assert read(tmp_path, "a2d-qwen3", mask_token_id=..., generation=generation).mask_id == 7
    with pytest.raises(ValueError, match="the id 99, and .*generation_config.json or mask_token. gives it 7"):
        read(tmp_path, "a2d-qwen3", generation=generation)


def test_masks_that_disagree(tmp_path):
    """Symptom: a wrong mask id gives fluent nonsense. The error names both."""
    with pytest.raises(ValueError, match=r"config.json gives the mask token the id 99, and .* gives it 7"):
        read(tmp_path, "a2d-qwen3", mask_id=7)
    with pytest.raises(ValueError, match="the id 151669, and .* gives it 7"):       # by its class' default
        read(tmp_path, "CoDA", mask_token_id=..., vocab_size=151936, mask_id=7)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "llama", "a2d-qwen3"])
def test_no_mask_at_all(tmp_path, kind):
    """A folder of an ordinary autoregressive model has the layout of open-dCoder's: it takes a mask token to
    be one of ours. The sentence names the option."""
    with pytest.raises(ValueError, match=r"names no mask token.*name it with mask_token \(--mask-token"):
        read(tmp_path, kind, mask_token_id=...)
    try:
        read(tmp_path, kind, mask_token_id=None)
    except ValueError as e:
        assert ("ordinary autoregressive" in str(e)) == (kind != "a2d-qwen3") and "\n" not in str(e)


def test_eos_of_all_files(tmp_path):
    """A number or a list, in config.json, generation_config.json or both: each id once, in that order."""
    assert read(tmp_path, "llada").eos_ids == (98,)
    assert read(tmp_path, "a2d-qwen2", eos_token_id=[5, 6]).eos_ids == (5, 6)
    both = read(tmp_path, "a2d-qwen2", eos_token_id=[5, 6], generation=dict(eos_token_id=[7, 5]))
    assert both.eos_ids == (5, 6, 7)
    assert read(tmp_path, "a2d-qwen2", eos_token_id=..., generation=dict(eos_token_id=4)).eos_ids == (4,)
    with pytest.raises(ValueError, match="lacks eos_token_id"):
        read(tmp_path, "a2d-qwen2", name="another", eos_token_id=...)


@pytest.mark.parametrize("values, says", [
    (dict(mask_token_id=100),
     "the mask token of .* has the id 100 and no row in the embedding, whose ids run from 0 to 99"),
    (dict(mask_token_id=..., mask_id=151665), "the mask token of .* has the id 151665"),
    (dict(eos_token_id=100), "the EOS token of .* has the id 100"),
    (dict(eos_token_id=[1, 300]), "has the id 300")])
def test_an_id_without_a_row(tmp_path, values, says):
    """Symptom: the mask was added to the tokenizer and the embedding not resized; the first step dies in an
    index error of torch. It is refused when the folder is read."""
    with pytest.raises(ValueError, match=says):
        read(tmp_path, "a2d-qwen2", **values)


@pytest.mark.parametrize("values", [
    dict(num_hidden_layers="4"), dict(hidden_size=-1), dict(num_attention_heads=0), dict(vocab_size=10.5),
    dict(eos_token_id=["<|im_end|>"]), dict(eos_token_id=[1.5]), dict(head_dim=0), dict(mask_token_id="<M>"),
    dict(rms_norm_eps=float("nan")), dict(max_position_embeddings=float("inf"))])
def test_what_is_no_number(tmp_path, values):
    """A text, a fraction or nothing where a count belongs: one sentence with the key and the value."""
    (key, value), = values.items()
    with pytest.raises(ValueError, match=f"has {key} = .*; these must be numbers, or true or false"):
        read(tmp_path, "a2d-qwen2", **values)


# -- settings -----------------------------------------------------------------------------------------------

REFUSED = [
    ("attn_logit_softcapping", 30.0), ("causal", True), ("embedding_multiplier", 12.0), ("is_causal", True),
    ("logit_scale", 0.5), ("no_rope_layers", [1, 0]), ("residual_multiplier", 0.2), ("rope", None),
    ("rope_scaling", {"type": "linear", "factor": 4.0}),
    ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}),
    ("rope_scaling", {"factor": 2.0}), ("rope_scaling", {"rope_type": "dynamic", "type": "default"}),
    ("rope_parameters", {"rope_type": "llama3", "rope_theta": 1e4}),
    ("rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}),
    ("rope_parameters", {"full_attention": {"rope_type": "default"}, "chunked": {"rope_type": "yarn"}}),
    ("hidden_act", "gelu"), ("hidden_act", "relu2"), ("use_sliding_window", True), ("alibi", True),
    ("layer_types", ["full_attention", "sliding_attention"]), ("partial_rotary_factor", 0.5),
    ("mlp_bias", True), ("rope", False),
    ("layer_norm_type", "default"), ("layer_norm_type", "low_precision"), ("activation_type", "swiglu"),
    ("input_emb_norm", True), ("scale_logits", True), ("clip_qkv", 8.0), ("attention_layer_norm", True),
    ("bias_for_layer_norm", True), ("include_bias", True), ("layer_norm_with_affine", False),
    ("block_type", "sequential"), ("multi_query_attention", True), ("num_experts", 64), ("norm_after", True),
    ("quantization_config", {"quant_method": "awq", "bits": 4})]
PASSED = [
    ("rope_scaling", None), ("rope_scaling", False), ("rope_scaling", {}),
    ("rope_scaling", {"type": "default"}),
    ("rope_scaling", {"rope_type": "default", "factor": 1.0}), ("rope_parameters", {"rope_theta": 1e4}),
    ("rope_parameters", {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0}),
    ("hidden_act", "silu"), ("hidden_act", None), ("use_sliding_window", False), ("sliding_window", 4096),
    ("layer_types", ["full_attention"] * 2), ("mlp_bias", False), ("alibi", False), ("rope", True),
    ("layer_norm_type", "rms"), ("activation_type", "silu"), ("clip_qkv", None), ("num_experts", 0),
    ("partial_rotary_factor", 1.0), ("max_window_layers", 28), ("attention_dropout", 0.0)]


@pytest.mark.parametrize("kind", ["llada", "Dream", "a2d-qwen3", "llama"])
@pytest.mark.parametrize("key, value", REFUSED)
def test_refused_by_name_and_value(tmp_path, kind, key, value):
    """Symptom: a model with YaRN loads without a word and answers with the wrong positions. One table refuses
    what changes the arithmetic, in whichever family's file it stands."""
    with pytest.raises(ValueError) as e:
        read(tmp_path, kind, **{key: value})
    assert f"{key} = {json.dumps(value)}" in str(e.value)
    assert "changes what the model computes" in str(e.value)


@pytest.mark.parametrize("kind", ["llada", "Dream", "a2d-qwen3", "llama"])
@pytest.mark.parametrize("key, value", PASSED)
def test_a_setting_that_changes_nothing(tmp_path, kind, key, value):
    """Values that switch a thing off pass: null, false, the type "default"; and what is no arithmetic."""
    assert read(tmp_path, kind, rope_theta=1e4, **{key: value}) == read(tmp_path, kind, rope_theta=1e4)


def test_every_setting_of_the_table_is_tested():
    """Each key is refused above for some value, but for those that speak of biases and experts in other
    words."""
    assert FINE.keys() - {key for key, _ in REFUSED} == {
        "attention_bias", "include_qkv_bias", "n_experts", "num_local_experts", "use_mrope"}


def test_biases(tmp_path):
    """attention_bias is Qwen2's q, k and v; in Llama and Qwen3 the output projection has one, too:
    refused."""
    assert read(tmp_path, "a2d-qwen2", attention_bias=True).qkv_bias
    assert read(tmp_path, "llada", include_qkv_bias=True).qkv_bias
    for kind in ("a2d-qwen3", "llama", "llada"):
        with pytest.raises(ValueError, match="attention_bias = true"):
            read(tmp_path, kind, attention_bias=True)


def test_two_wrong_settings_in_one_sentence(tmp_path):
    with pytest.raises(ValueError, match='hidden_act = "gelu", rope_scaling = .*yarn') as e:
        read(tmp_path, "Dream", rope_scaling={"type": "yarn"}, hidden_act="gelu")
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("kind", ["a2d-qwen3", "Dream", "llama"])
def test_rope_theta_of_newer_files(tmp_path, kind):
    """Symptom: transformers 5 writes rope_theta inside rope_parameters, and the family's default was used
    instead."""
    assert read(tmp_path, kind, rope_parameters={"rope_type": "default", "rope_theta": 5e5}).theta == 5e5
    assert read(tmp_path, kind, rope_theta=5e5, rope_parameters={"rope_theta": 5e5}).theta == 5e5
    with pytest.raises(ValueError, match="contradicts itself: rope_theta = .*, rope_parameters.rope_theta ="):
        read(tmp_path, kind, rope_theta=1e4, rope_parameters={"rope_theta": 5e5})


# -- another attention --------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["sdar", "llada2_moe", "Fast_dLLM_Qwen", "nemotron_labs_diffusion"])
def test_block_causal_by_type(tmp_path, kind):
    says = f"is a block-causal model .model_type '{kind}'.: its attention is causal between blocks"
    with pytest.raises(ValueError, match=says):
        read(tmp_path, kind)


@pytest.mark.parametrize("name", [
    "Qwen3-0.6B-diffusion-bd3lm-v0.1", "models--dllm-hub--Qwen2.5-Coder-0.5B-diffusion-bd3lm/snapshots/abc",
    "Efficient-DLM-4B", "SDAR-1.7B-Chat", "Stable-DiffCoder-8B-Instruct"])
@pytest.mark.parametrize("kind", ["a2d-qwen3", "qwen3", "llama"])
def test_block_causal_by_name(tmp_path, kind, name):
    """Symptom: dllm's bd3lm folders say the same as its mdlm ones and would run with the wrong mask. Only the
    name tells: the folder's, the hub's, or the one that config.json remembers."""
    with pytest.raises(ValueError, match="is a block-causal model .* in its name.*need no safe depth"):
        read(tmp_path, kind, name=name)
    with pytest.raises(ValueError, match="in its name"):
        read(tmp_path, kind, _name_or_path="dllm-hub/" + name.partition("/")[0])


def test_a_name_that_only_contains_the_letters(tmp_path):
    """Symptom: a folder called hussdar was taken for SDAR."""
    assert read(tmp_path, "a2d-qwen3", name="hussdar-0.6B").layers == 2


@pytest.mark.parametrize("key, value", [
    ("block_size", 4), ("bd_size", 32), ("block_length", 4), ("dlm_paradigm", "bidirectional")])
def test_block_causal_by_key(tmp_path, key, value):
    with pytest.raises(ValueError, match=f"is a block-causal model .{key} = "):
        read(tmp_path, "a2d-qwen3", **{key: value})
    assert read(tmp_path, "a2d-qwen3", **{key: None}).layers == 2


@pytest.mark.parametrize("name", [
    "Qwen3-0.6B-diffusion-mdlm-v0.1", "DiffuCoder-7B-Instruct", "open-dcoder-0.5B", "LLaDA-1.5"])
def test_ours_by_name(tmp_path, name):
    """None of the names of what runs is taken for one that does not."""
    assert read(tmp_path, "a2d-qwen3", name=name, _name_or_path=f"x/{name}").layers == 2


def test_hub_name(tmp_path):
    """Symptom: a folder of the hub's cache is named after its revision, and no published table is found for
    it."""
    path = tmp_path / "models--GSAI-ML--LLaDA-8B-Instruct" / "snapshots" / "08b83a6feb34df1a"
    path.mkdir(parents=True)
    assert hub_name(path) == "GSAI-ML/LLaDA-8B-Instruct"
    (tmp_path / "link").symlink_to(path)
    assert hub_name(tmp_path / "link") == "GSAI-ML/LLaDA-8B-Instruct"
    assert hub_name(ROOT / "checkpoints" / "tiny") == "tiny" and hub_name(tmp_path / "snapshots" / "x") == "x"


def test_known_families_are_named(tmp_path):
    with pytest.raises(ValueError, match="model_type 'gpt2'; known are " + ", ".join(FAMILIES)):
        read(tmp_path, "gpt2")
