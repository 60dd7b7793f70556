"""Model folders: config.json and safetensors files, as they come from the hub, read without `transformers`.

    model = load("checkpoints/tiny", device="cpu", dtype="auto")        # -> model.Transformer
    config = read_config("checkpoints/tiny")                            # -> model.Config, no weights touched

A model family is a row of the table FAMILIES, chosen by `model_type` alone: how config.json calls our fields,
how the files call our parameters. Every tensor name and shape is checked; what is missing, left over or
misshapen stands in one ValueError. Checked on the published configurations (tests/test_shapes.py) and small
folders (test_loading.py).
"""
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from model import Config, Transformer


@dataclass(frozen=True)
class Family:
    """A row of the table of model families: where a checkpoint of that family keeps what we need."""
    keys: dict          # a field of `Config` -> its key in config.json
    defaults: dict      # fields whose key may be absent
    fixed: dict         # fields that config.json does not tell
    layers: str         # what stands before a layer's tensors, {} for its number
    names: dict         # a part of the model or of a layer -> its name in the files, less ".weight" or ".bias"


FAMILIES = {
    "llada": Family(
        keys=dict(
            layers="n_layers", hidden="d_model", heads="n_heads", kv_heads="n_kv_heads",
            mlp="mlp_hidden_size", vocab="embedding_size", max_len="max_sequence_length",
            theta="rope_theta", eps="rms_norm_eps", mask_id="mask_token_id", eos_id="eos_token_id",
            qkv_bias="include_qkv_bias", tied="weight_tying"),
        defaults=dict(eps=1e-5, theta=5e5, qkv_bias=False, tied=False),
        fixed=dict(shift=False),
        layers="model.transformer.blocks.{}.",
        names=dict(
            embed="model.transformer.wte", norm="model.transformer.ln_f", head="model.transformer.ff_out",
            attn_norm="attn_norm", q="q_proj", k="k_proj", v="v_proj", o="attn_out",
            mlp_norm="ff_norm", gate="ff_proj", up="up_proj", down="ff_out")),
    "Dream": Family(
        keys=dict(
            layers="num_hidden_layers", hidden="hidden_size", heads="num_attention_heads",
            kv_heads="num_key_value_heads", mlp="intermediate_size", vocab="vocab_size",
            max_len="max_position_embeddings", theta="rope_theta", eps="rms_norm_eps",
            mask_id="mask_token_id", eos_id="eos_token_id", tied="tie_word_embeddings"),
        defaults=dict(eps=1e-6, theta=1e6, tied=False),
        fixed=dict(shift=True, qkv_bias=True),
        layers="model.layers.{}.",
        names=dict(
            embed="model.embed_tokens", norm="model.norm", head="lm_head", attn_norm="input_layernorm",
            q="self_attn.q_proj", k="self_attn.k_proj", v="self_attn.v_proj", o="self_attn.o_proj",
            mlp_norm="post_attention_layernorm",
            gate="mlp.gate_proj", up="mlp.up_proj", down="mlp.down_proj")),
}


def read_config(folder) -> Config:
    """The `Config` of a model folder. Raises ValueError for an unknown `model_type` or a missing key."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} is no model folder: it has no config.json")
    try:
        raw = json.loads(path.read_text())
    except json.JSONDecodeError as e:
        raise ValueError(f"{path} is not valid JSON ({e})") from e
    kind = raw.get("model_type") if isinstance(raw, dict) else None
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise ValueError(f"{path} names model_type {kind!r}; known are {', '.join(FAMILIES)}")
    family = FAMILIES[kind]
    values = {field: raw.get(key, family.defaults.get(field)) for field, key in family.keys.items()}
    values |= family.fixed
    if values["vocab"] is None:
        values["vocab"] = raw.get("vocab_size")         # LLaDA's embedding_size may be absent
    if values["kv_heads"] is None:
        values["kv_heads"] = values["heads"]
    if missing := [family.keys[field] for field, value in values.items() if value is None]:
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    wrong = [f"{family.keys[field]} = {value!r}" for field, value in values.items()
             if not isinstance(value, (int, float)) or value < 0]
    if wrong:
        raise ValueError(f"{path} has {', '.join(wrong)}; these must be numbers, or true or false")
    return Config(**values)


def checkpoint_names(model: Transformer, family: Family) -> dict[str, str]:
    """The name that each parameter of `model` has in the family's checkpoints."""
    names = {}
    for ours in model.state_dict():
        *layer, part, kind = ours.split(".")            # layers.7.q.bias, or norm.weight
        stem = family.layers.format(layer[1]) if layer else ""
        names[ours] = f"{stem}{family.names[part]}.{kind}"
    return names


def _shards(folder: Path) -> list[Path]:
    """The safetensors files of a folder: those its index names, else the single one."""
    index = folder / "model.safetensors.index.json"
    files = [folder / "model.safetensors"]
    if index.is_file():
        try:
            names = set(json.loads(index.read_text())["weight_map"].values())
            files = [folder / name for name in sorted(names)]
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise ValueError(f"{index} is no index of shards ({e!r}); download it again") from e
    absent = [f.name for f in files if not f.is_file()]
    if absent:
        raise ValueError(f"{folder} lacks {', '.join(absent)}; download the folder again")
    return files


def _open(path: Path):
    """A safetensors file, mapped: its tensors are views, read when they are touched."""
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as e:
        raise ValueError(f"{path} cannot be read ({e}); download it again") from e


def resolve(folder, device: str, dtype) -> tuple[torch.device, torch.dtype]:
    """What "auto" stands for: the GPU if there is one; the dtype the weights are stored in, but float32 for
    bfloat16 weights on a processor that is slow at it. Names become torch objects."""
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else str(device)
    if device.split(":")[0] not in ("cpu", "cuda") or device != "cpu" and not torch.cuda.is_available():
        found = "it not" if "cuda" not in device else "no GPU"
        raise ValueError(f"device is {device} and torch finds {found} here; use cpu or auto")
    device, names = torch.device(device), ("float32", "bfloat16", "float16")
    if dtype not in ("auto", *names, *(getattr(torch, name) for name in names)):
        raise ValueError(f"dtype is {dtype}; it must be auto, {', '.join(names)}")
    if dtype == "auto":
        with _open(_shards(Path(folder))[0]) as f:
            stored = next((f.get_slice(key).get_dtype() for key in f.keys()), None)
        dtype = {"BF16": torch.bfloat16, "F16": torch.float16}.get(stored, torch.float32)
        if device.type == "cpu" and not (dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported()):
            dtype = torch.float32
    return device, getattr(torch, dtype) if isinstance(dtype, str) else dtype


def load(folder, device="cpu", dtype="float32") -> Transformer:
    """Read a model folder: config.json and model.safetensors, or shards with model.safetensors.index.json.

    The model is built without storage, and each tensor is read, cast and moved by itself, so that the weights
    are never in memory twice; those that need no cast stay mapped and are read when first used. A bar on a
    terminal, if it takes longer than a second. Raises ValueError naming every missing, left-over and
    mis-shaped tensor in one message.
    """
    folder = Path(folder)
    config = read_config(folder)
    device, dtype = resolve(folder, device, dtype)
    family = FAMILIES[json.loads((folder / "config.json").read_text())["model_type"]]
    with torch.device("meta"):
        model = Transformer(config)
    names = checkpoint_names(model, family)
    if config.tied:
        del names["head.weight"]
    ours = {theirs: name for name, theirs in names.items()}
    shapes = {name: tuple(p.shape) for name, p in model.state_dict().items()}
    state, wrong, left, shards = {}, [], [], _shards(folder)
    # disable=None: no bar where stderr is no terminal
    bar = tqdm(total=sum(path.stat().st_size for path in shards), desc=f"loading {folder.name}", unit="B",
               unit_scale=True, leave=False, delay=1, disable=None)
    for path in shards:
        with _open(path) as f:
            for key in f.keys():
                name = ours.get(key)
                if name is None:
                    if not key.endswith("rotary_emb.inv_freq"):     # a buffer that some exports carry along
                        left.append(key)
                    continue
                shape = tuple(f.get_slice(key).get_shape())
                if shape != shapes[name]:
                    wrong.append(f"{key} is {shape}, not {shapes[name]}")
                    state[name] = None
                    continue
                state[name] = mapped = f.get_tensor(key)
                if mapped.dtype != dtype or device.type != "cpu":
                    with _open(path) as own:            # its mapping ends here, and with it the pages read
                        state[name] = own.get_tensor(key).to(device, dtype)
                bar.update(mapped.nbytes)
    bar.close()
    lacking = [theirs for name, theirs in names.items() if name not in state]
    faults = [f"{what}: {', '.join(keys)}" for what, keys in
              (("missing", lacking), ("left over", left), ("wrong shape", wrong)) if keys]
    if faults:
        raise ValueError(f"the tensors of {folder} do not fit its config.json; " + "; ".join(faults))
    if config.tied:
        state["head.weight"] = state["embed.weight"]
    model.load_state_dict(state, assign=True)
    if config.tied:
        model.head.weight = model.embed.weight
    return model.eval().requires_grad_(False)


def fingerprint(folder) -> str:
    """A short name for the model in a folder: a hash over config.json and 64 samples of 4 kB of each weight
    file."""
    digest = hashlib.sha256((Path(folder) / "config.json").read_bytes())
    for path in _shards(Path(folder)):
        size = path.stat().st_size
        with open(path, "rb") as f:
            for i in range(64):
                f.seek(max(size - 4096, 0) * i // 63)
                digest.update(f.read(4096))
    return digest.hexdigest()[:16]
