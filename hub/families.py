"""Which models run: what their config.json says, in one vocabulary, by a table of families.

    config = read_config("checkpoints/tiny")            # -> model.Config

A family is a row of the table FAMILIES, chosen by `model_type` alone: how config.json calls our fields, how
the files call our parameters. A setting that changes what a model computes is one of our fields, or it is
refused by its name and value (FINE); so are models whose attention is causal between blocks. Checked on the
published configurations (tests/test_shapes.py) and setting by setting (tests/test_families.py).
"""
import json
import re
from dataclasses import dataclass, replace
from pathlib import Path

from files import BadInput
from model import Config


@dataclass(frozen=True)
class Family:
    """A row of the table: where a checkpoint of that family keeps what we need."""
    keys: dict              # a field of `Config` -> its key in config.json
    defaults: dict          # fields whose key may be absent
    fixed: dict             # fields that config.json does not tell
    layers: str             # what stands before a layer's tensors, {} for its number
    names: dict             # a part of the model or of a layer -> its tensors, less ".weight" or ".bias"
    plain: bool = False     # ordinary autoregressive models have the same model_type

    def but(self, *, plain=False, defaults=(), **fixed) -> "Family":
        """The same layout with other defaults and fixed fields."""
        return replace(self, plain=plain, defaults=self.defaults | dict(defaults), fixed=self.fixed | fixed)


LLADA = Family(
    keys=dict(
        layers="n_layers", hidden="d_model", heads="n_heads", kv_heads="n_kv_heads", mlp="mlp_hidden_size",
        vocab="embedding_size", max_len="max_sequence_length", theta="rope_theta", eps="rms_norm_eps",
        mask_id="mask_token_id", eos_ids="eos_token_id", qkv_bias="include_qkv_bias", tied="weight_tying"),
    defaults=dict(eps=1e-5, theta=5e5, qkv_bias=False, tied=False),
    fixed=dict(shift=False),
    layers="model.transformer.blocks.{}.",
    names=dict(
        embed="model.transformer.wte", norm="model.transformer.ln_f", head="model.transformer.ff_out",
        attn_norm="attn_norm", q="q_proj", k="k_proj", v="v_proj", o="attn_out",
        mlp_norm="ff_norm", gate="ff_proj", up="up_proj", down="ff_out"))
QWEN2 = Family(
    keys=dict(
        layers="num_hidden_layers", hidden="hidden_size", heads="num_attention_heads",
        kv_heads="num_key_value_heads", head_dim="head_dim", mlp="intermediate_size", vocab="vocab_size",
        max_len="max_position_embeddings", theta="rope_theta", eps="rms_norm_eps", mask_id="mask_token_id",
        eos_ids="eos_token_id", qkv_bias="attention_bias", tied="tie_word_embeddings"),
    defaults=dict(eps=1e-6, theta=1e4, qkv_bias=True, tied=False),
    fixed=dict(shift=False),
    layers="model.layers.{}.",
    names=dict(
        embed="model.embed_tokens", norm="model.norm", head="lm_head", attn_norm="input_layernorm",
        q="self_attn.q_proj", k="self_attn.k_proj", v="self_attn.v_proj", o="self_attn.o_proj",
        q_norm="self_attn.q_norm", k_norm="self_attn.k_norm", mlp_norm="post_attention_layernorm",
        gate="mlp.gate_proj", up="mlp.up_proj", down="mlp.down_proj"))
# With attention_bias, these two have one on the output projection, too; so it is not theirs to read but
# refused.
LLAMA = replace(QWEN2, keys={field: key for field, key in QWEN2.keys.items() if field != "qkv_bias"},
                fixed=dict(shift=False, qkv_bias=False))
QWEN3 = LLAMA.but(qk_norm=True, defaults=dict(head_dim=128))

FAMILIES = {
    "llada": LLADA,
    "Dream": QWEN2.but(shift=True, defaults=dict(theta=1e6)),
    "a2d-llama": LLAMA,                                                     # these three: as dllm converts
    "a2d-qwen2": QWEN2,
    "a2d-qwen3": QWEN3,
    "CoDA": QWEN3.but(shift=True, defaults=dict(theta=1e6, tied=True, mask_id=151669, eos_ids=151645)),
    "llama": LLAMA.but(shift=True, plain=True),                             # DiffuLLaMA
    "qwen2": QWEN2.but(shift=True, plain=True),                             # open-dCoder
    "qwen3": QWEN3.but(shift=True, plain=True),
}

# Settings that change what a model computes, and the values at which they do not; one table for all families.
# A row may read a key itself, which is then fine. So is null; and an object goes by its type, as {"type":
# "yarn"}.
FINE = {
    "activation_type": ("silu",),
    "alibi": (False,),
    "attention_bias": (False,),
    "attention_layer_norm": (False,),
    "attn_logit_softcapping": (False,),
    "bias_for_layer_norm": (False,),
    "block_type": ("llama",),
    "causal": (False,),
    "clip_qkv": (False,),
    "embedding_multiplier": (1,),
    "hidden_act": ("silu", "swish"),
    "include_bias": (False,),
    "include_qkv_bias": (False,),
    "input_emb_norm": (False,),
    "is_causal": (False,),
    "layer_norm_type": ("rms",),
    "layer_norm_with_affine": (True,),
    "layer_types": ("full_attention",),
    "logit_scale": (1,),
    "mlp_bias": (False,),
    "multi_query_attention": (False,),
    "n_experts": (0,),
    "no_rope_layers": (False,),
    "norm_after": (False,),
    "num_experts": (0,),
    "num_local_experts": (0,),
    "partial_rotary_factor": (1,),
    "residual_multiplier": (1,),
    "quantization_config": (False,),
    "rope": (True,),
    "rope_parameters": (False, "default"),
    "rope_scaling": (False, "default"),
    "scale_logits": (False,),
    "use_mrope": (False,),
    "use_sliding_window": (False,),
}

# Models of these layouts whose attention is causal between blocks: by model_type, by how a word of the name
# begins, by key.
BLOCK_CAUSAL = ("sdar", "sdar_moe", "llada2_moe", "Fast_dLLM_Qwen", "nemotron_labs_diffusion", "bd3lm")
BLOCK_CAUSAL_NAMES = ("bd3lm", "sdar", "opdlm", "fast_dllm", "efficient-dlm", "stable-diffcoder")
BLOCK_KEYS = ("block_size", "bd_size", "block_length", "diffusion_block_size", "dlm_paradigm")

SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "mlp", "vocab", "max_len")


def hub_name(folder) -> str:
    """ORG/NAME of a folder in the hub's cache, models--ORG--NAME/snapshots/REVISION; else the folder's
    name."""
    folder = Path(folder).resolve()
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/", 1)
    return folder.name


def read_json(path: Path) -> dict:
    """The JSON object in a file; empty if there is no such file."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8-sig")) if path.is_file() else {}
    except (ValueError, RecursionError) as e:
        raise BadInput(f"{path} is not valid JSON ({e})") from e
    if not isinstance(raw, dict):
        raise BadInput(f"{path} holds no JSON object")
    return raw


def read_config(folder, mask_id: int | None = None, shift: bool | None = None) -> Config:
    """The `Config` of a model folder.

    mask_id: the mask token's id, where the tokenizer's files or the user name it. shift: whether the logits
    for position i stand in row i-1, where the family does it otherwise. eos_ids are those of config.json and
    of generation_config.json. ValueError, one sentence, for what is unknown, missing, contradictory or not
    done.
    """
    folder = Path(folder)
    path = folder / "config.json"
    if not path.is_file():
        raise BadInput(f"{folder} is no model folder: it has no config.json")
    raw, generation = read_json(path), read_json(folder / "generation_config.json")
    _refuse_block_causal(folder, raw)
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise BadInput(f"{path} names model_type {kind!r}; known are {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    _refuse_other_arithmetic(path, raw, family)
    given = {field: raw.get(key) for field, key in family.keys.items()} | dict(theta=_theta(path, raw))
    if given["vocab"] is None:
        given["vocab"] = raw.get("vocab_size")              # LLaDA's embedding_size may be absent
    if given["kv_heads"] is None:
        given["kv_heads"] = given["heads"]
    values = family.defaults | family.fixed
    values |= {field: value for field, value in given.items() if value is not None}
    values["shift"] = values["shift"] if shift is None else bool(shift)
    mask_id = generation.get("mask_token_id") if mask_id is None else mask_id
    values["mask_id"] = _mask_id(path, family, values.get("mask_id"), mask_id)
    eos = [*_as_list(values.get("eos_ids")), *_as_list(generation.get("eos_token_id"))]
    values["eos_ids"] = tuple(dict.fromkeys(eos)) or None
    missing = [key for field, key in family.keys.items() if values.get(field) is None and field != "head_dim"]
    if missing:
        raise BadInput(f"{path} lacks {', '.join(missing)}")
    _check_numbers(path, family, values)
    return Config(**values)


def _as_list(value) -> list:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _theta(path: Path, raw: dict):
    """RoPE's base: newer configs have it inside rope_parameters."""
    found = {"rope_theta": raw.get("rope_theta")}
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(raw.get(key), dict):
            found[f"{key}.rope_theta"] = raw[key].get("rope_theta")
    found = {key: value for key, value in found.items() if value is not None}
    if any(value != other for value in found.values() for other in found.values()):
        both = ", ".join(f"{key} = {value!r}" for key, value in found.items())
        raise BadInput(f"{path} contradicts itself: {both}")
    return next(iter(found.values()), None)


def _mask_id(path: Path, family: Family, own, named):
    """The mask token's id: config.json's own (or its class' default) and what else names one must agree."""
    if own is not None and named is not None and own != named:
        raise BadInput(f"{path} gives the mask token the id {own}, and the tokenizer (its files, "
                       f"generation_config.json or mask_token) gives it {named}; mend the one that is wrong")
    if own is None and named is None:
        start = f"{path} names no mask token"
        if family.plain:
            start += ", so that this may be an ordinary autoregressive model"
        raise BadInput(f"{start}; if it is a masked diffusion model, its tokenizer has one: name it with "
                       "mask_token (--mask-token '<M>')")
    return named if own is None else own


def _refuse_block_causal(folder: Path, raw: dict) -> None:
    names = [hub_name(folder).lower(), Path(str(raw.get("_name_or_path"))).name.lower()]
    why = []
    if raw.get("model_type") in BLOCK_CAUSAL:
        why.append(f"model_type {raw['model_type']!r}")
    why += [f"{part!r} in its name" for part in BLOCK_CAUSAL_NAMES
            if any(re.search(f"(?<![a-z]){part}", name) for name in names)]
    why += [f"{key} = {raw[key]!r} in config.json" for key in BLOCK_KEYS if raw.get(key) is not None]
    if why:
        raise BadInput(
            f"{folder} is a block-causal model ({', '.join(why)}): its attention is causal between blocks, "
            "so that its prefix K/V are exact and need no safe depth; this engine attends both ways and "
            "would run it wrong")


def _refuse_other_arithmetic(path: Path, raw: dict, family: Family) -> None:
    read = set(family.keys.values())
    wrong = []
    for key, fine in FINE.items():
        if key in raw and key not in read and not all(value in fine for value in _settings(raw[key], fine)):
            wrong.append(f"{key} = {json.dumps(raw[key])}")
    if wrong:
        raise BadInput(f"{path} has {', '.join(wrong)}: that changes what the model computes, and is not "
                       "done here")


def _settings(value, fine: tuple) -> list:
    """A value as FINE has it: none for null (which switches off what must be on), the entries of a list, of
    an object its type."""
    if value is None and fine == (True,):
        return [False]
    if not isinstance(value, dict):
        return _as_list(value)
    if value.get("partial_rotary_factor", 1) != 1:
        return [value]
    only_theta = value.keys() <= {"rope_theta", "partial_rotary_factor"}
    return [value.get("rope_type", value.get("type", "default" if only_theta else value))]


def _check_numbers(path: Path, family: Family, values: dict) -> None:
    """ValueError unless all values are numbers that a model can have."""
    wrong = []
    for field, value in values.items():
        for number in value if field == "eos_ids" else [value]:
            fits = isinstance(number, (int, float)) and number >= (1 if field in SIZES else 0)
            if not fits or field in (*SIZES, "mask_id", "eos_ids") and not float(number).is_integer():
                wrong.append(f"{family.keys.get(field, field)} = {number!r}")
    if wrong:
        raise BadInput(f"{path} has {', '.join(wrong)}; these must be numbers, or true or false")
    for what, i in [("mask token", values["mask_id"]), *(("EOS token", i) for i in values["eos_ids"])]:
        if i >= values["vocab"]:
            raise BadInput(f"the {what} of {path.parent} has the id {i} and no row in the embedding, whose "
                           f"ids run from 0 to {values['vocab'] - 1}")
