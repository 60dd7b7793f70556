"""The transformer of masked diffusion language models (LLaDA, Dream), in one file.

A bidirectional stack of RMSNorm, rotary embedding (half-split), grouped-query attention and SwiGLU. It holds weights
and arithmetic only: where K and V are kept and what a query sees is decided by the `attend` function that the caller
hands to each layer, so this file knows nothing of caches, steps or batches of requests.

    model = load("checkpoints/tiny")            # a folder: config.json and *.safetensors
    logits = model(ids)                         # (B, T) -> (B, T, V): the plain pass, nothing cached

Shape letters, used in every file: B requests, N rows (token positions) of a request in this pass, T tokens of a canvas,
L layers, H query heads, K kv heads, D head dim, V vocabulary. Checked against the authors' layouts in tests/golden.
"""
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm


@dataclass(frozen=True)
class Config:
    """What `config.json` says of a model, in one vocabulary for all families."""
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    mlp: int
    vocab: int
    max_len: int                # longest canvas the positions were trained for
    theta: float                # RoPE base
    eps: float                  # RMSNorm
    mask_id: int
    eos_id: int
    qkv_bias: bool
    tied: bool                  # the output head is the embedding matrix
    shift: bool = False         # Dream: the logits for position i stand in row i-1

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


@dataclass(frozen=True)
class Family:
    """A row of the table of model families: where a checkpoint of that family keeps what we need.

    `keys` maps a `Config` field to its key in config.json, `names` a parameter of `Transformer` to its name in the
    safetensors files ({} stands for the layer number).
    """
    keys: dict
    names: dict
    defaults: dict
    fixed: dict


FAMILIES = {
    "llada": Family(
        keys=dict(layers="n_layers", hidden="d_model", heads="n_heads", kv_heads="n_kv_heads", mlp="mlp_hidden_size",
                  vocab="embedding_size", max_len="max_sequence_length", theta="rope_theta", eps="rms_norm_eps",
                  mask_id="mask_token_id", eos_id="eos_token_id", qkv_bias="include_qkv_bias", tied="weight_tying"),
        names={"embed": "model.transformer.wte.weight", "norm": "model.transformer.ln_f.weight",
               "head": "model.transformer.ff_out.weight",
               "attn_norm": "model.transformer.blocks.{}.attn_norm.weight", "q": "model.transformer.blocks.{}.q_proj",
               "k": "model.transformer.blocks.{}.k_proj", "v": "model.transformer.blocks.{}.v_proj",
               "o": "model.transformer.blocks.{}.attn_out", "mlp_norm": "model.transformer.blocks.{}.ff_norm.weight",
               "gate": "model.transformer.blocks.{}.ff_proj", "up": "model.transformer.blocks.{}.up_proj",
               "down": "model.transformer.blocks.{}.ff_out"},
        defaults=dict(eps=1e-5, theta=5e5, qkv_bias=False, tied=False),
        fixed=dict(shift=False)),
    "Dream": Family(
        keys=dict(layers="num_hidden_layers", hidden="hidden_size", heads="num_attention_heads",
                  kv_heads="num_key_value_heads", mlp="intermediate_size", vocab="vocab_size",
                  max_len="max_position_embeddings", theta="rope_theta", eps="rms_norm_eps", mask_id="mask_token_id",
                  eos_id="eos_token_id", tied="tie_word_embeddings"),
        names={"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight",
               "attn_norm": "model.layers.{}.input_layernorm.weight", "q": "model.layers.{}.self_attn.q_proj",
               "k": "model.layers.{}.self_attn.k_proj", "v": "model.layers.{}.self_attn.v_proj",
               "o": "model.layers.{}.self_attn.o_proj", "mlp_norm": "model.layers.{}.post_attention_layernorm.weight",
               "gate": "model.layers.{}.mlp.gate_proj", "up": "model.layers.{}.mlp.up_proj",
               "down": "model.layers.{}.mlp.down_proj"},
        defaults=dict(eps=1e-6, theta=1e6, tied=False),
        fixed=dict(shift=True, qkv_bias=True)),
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
    values = {field: raw.get(key, family.defaults.get(field)) for field, key in family.keys.items()} | family.fixed
    if values["vocab"] is None:
        values["vocab"] = raw.get("vocab_size")     # LLaDA's embedding_size may be absent; it then is vocab_size
    values["kv_heads"] = values["heads"] if values["kv_heads"] is None else values["kv_heads"]
    missing = [family.keys[field] for field, value in values.items() if value is None]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}")
    if wrong := [f"{family.keys[field]} = {v!r}" for field, v in values.items() if not isinstance(v, (int, float)) or v < 0]:
        raise ValueError(f"{path} has {', '.join(wrong)}; these must be numbers, or true or false")
    return Config(**values)


class RMSNorm(nn.Module):
    """x / rms(x) * weight, the statistics in float32 whatever the dtype of x."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return y.to(x.dtype) * self.weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of x (B, heads, N, D); cos and sin are (B, 1, N, D/2), float32."""
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


class Linear(nn.Linear):
    """A linear map whose weight can be laid out once for the CPU's matrix product, instead of anew at every call.

    A step has few rows, so that laying out the weight takes as long as using it: packed, 8 to 70 rows take 0.5 to 0.8 of the
    time (docs/log.md). The layout is oneDNN's own; the plain weight is given up and stays as a shape without storage.
    """
    packed = None

    def pack(self) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), None)
        self.weight = nn.Parameter(self.weight.to("meta"), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.packed is None:
            return super().forward(x)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


class Layer(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        kv = c.kv_heads * c.head_dim
        self.head_dim = c.head_dim
        self.attn_norm, self.mlp_norm = RMSNorm(c.hidden, c.eps), RMSNorm(c.hidden, c.eps)
        self.q = Linear(c.hidden, c.hidden, bias=c.qkv_bias)
        self.k = Linear(c.hidden, kv, bias=c.qkv_bias)
        self.v = Linear(c.hidden, kv, bias=c.qkv_bias)
        self.o = Linear(c.hidden, c.hidden, bias=False)
        self.gate = Linear(c.hidden, c.mlp, bias=False)
        self.up = Linear(c.hidden, c.mlp, bias=False)
        self.down = Linear(c.mlp, c.hidden, bias=False)

    def forward(self, x: Tensor, attend, skip: int = 0) -> Tensor:
        """One layer over rows x (B, N, hidden); returns (B, N - skip, hidden).

        `attend(q, k, v)` gets q (B, H, N - skip, D) and k, v (B, K, N, D), rotates q and k by their positions and returns
        what q sees, shaped like q. The first `skip` rows give K and V only: in a refresh nobody reads the last layer's
        prefix rows.
        """
        h = self.attn_norm(x)
        split = lambda y: y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)      # (B, N, h*D) -> (B, h, N, D)
        q, k, v = split(self.q(h[:, skip:])), split(self.k(h)), split(self.v(h))
        x = x[:, skip:] + self.o(attend(q, k, v).transpose(1, 2).flatten(2))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Transformer(nn.Module):
    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.eps)
        self.head = Linear(config.hidden, config.vocab, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight

    def pack(self) -> "Transformer":
        """Lay out the weights for the CPU, for good: they can be neither trained nor saved nor compiled after."""
        if self.embed.weight.device.type == "cpu" and self.embed.weight.dtype != torch.float16 and torch.backends.mkldnn.is_available():
            for m in self.modules():
                if isinstance(m, Linear) and m.weight is not self.embed.weight:         # a tied head is the embedding
                    m.pack()
        return self

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, each (B, 1, N, D/2) float32, for positions (B, N)."""
        D = self.config.head_dim
        inverse = self.config.theta ** (-torch.arange(0, D, 2, device=positions.device, dtype=torch.float32) / D)
        angle = positions[:, None, :, None].float() * inverse
        return angle.cos(), angle.sin()

    def logits(self, x: Tensor) -> Tensor:
        """Final norm and output head over rows x (..., hidden) -> (..., V)."""
        return self.head(self.norm(x))

    def forward(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """The plain pass: ids (B, T) -> logits (B, T, V), row i as the model gives it (not shifted).

        `lengths` (B,) marks the tokens behind each row's end as padding that nobody sees.
        """
        B, T = ids.shape
        mask = None
        if lengths is not None:
            mask = (torch.arange(T, device=ids.device) < lengths[:, None])[:, None, None]       # (B, 1, 1, T)
        gqa = self.config.heads != self.config.kv_heads

        cos, sin = self.rope(torch.arange(T, device=ids.device)[None])

        def attend(q, k, v):
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=gqa)

        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, attend)
        return self.logits(x)


def checkpoint_names(model: Transformer, family: Family) -> dict[str, str]:
    """The name that each parameter of `model` has in the family's checkpoints."""
    names = {}
    for ours in model.state_dict():
        part = ours.split(".")                      # layers.7.q.bias, or norm.weight
        if part[0] == "layers":
            theirs = family.names[part[2]].format(part[1])
            names[ours] = theirs if theirs.endswith(".weight") else f"{theirs}.{part[3]}"
        else:
            names[ours] = family.names[part[0]]
    return names


def _shards(folder: Path) -> list[Path]:
    """The safetensors files of a folder: those its index names, else the single one."""
    index = folder / "model.safetensors.index.json"
    files = [folder / "model.safetensors"]
    if index.is_file():
        try:
            files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
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
    """What "auto" stands for: the GPU if there is one; the dtype the weights are stored in, but float32 for bfloat16
    weights on a processor that is slow at it. Names become torch objects."""
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else str(device)
    if device.split(":")[0] not in ("cpu", "cuda") or device != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"device is {device} and torch finds {'it not' if 'cuda' not in device else 'no GPU'} here; use cpu or auto")
    device, names = torch.device(device), ("float32", "bfloat16", "float16")
    if dtype not in ("auto", *names, *(getattr(torch, name) for name in names)):
        raise ValueError(f"dtype is {dtype}; it must be auto, {', '.join(names)}")
    if dtype == "auto":
        with _open(_shards(Path(folder))[0]) as f:
            dtype = next((f.get_slice(key).get_dtype() for key in f.keys()), None)
        dtype = {"BF16": torch.bfloat16, "F16": torch.float16}.get(dtype, torch.float32)
        if device.type == "cpu" and not (dtype == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported()):
            dtype = torch.float32
    return device, getattr(torch, dtype) if isinstance(dtype, str) else dtype


def load(folder, device="cpu", dtype="float32") -> Transformer:
    """Read a model folder: config.json and model.safetensors, or shards with model.safetensors.index.json.

    The model is built without storage, and each tensor is read, cast and moved by itself, so that the weights are never in
    memory twice; those that need no cast stay mapped and are read when first used. A bar on a terminal, if it takes
    longer than a second. Raises ValueError naming every missing, left-over and mis-shaped tensor in one message.
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
    bar = tqdm(total=sum(path.stat().st_size for path in shards), desc=f"loading {folder.name}", unit="B", unit_scale=True,
               leave=False, delay=1, disable=None)                  # disable None: no bar where stderr is no terminal
    for path in shards:
        with _open(path) as f:
            for key in f.keys():
                name = ours.get(key)
                if name is None:
                    if not key.endswith("rotary_emb.inv_freq"):     # a buffer that some exports carry along
                        left.append(key)
                elif (shape := tuple(f.get_slice(key).get_shape())) != shapes[name]:
                    wrong.append(f"{key} is {shape}, not {shapes[name]}")
                    state[name] = None
                else:
                    state[name] = mapped = f.get_tensor(key)
                    if mapped.dtype != dtype or device.type != "cpu":
                        with _open(path) as own:                    # its mapping ends here, and with it the pages read
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
    """A short name for the model in a folder: a hash over config.json and 64 samples of 4 kB of each weight file."""
    digest = hashlib.sha256((Path(folder) / "config.json").read_bytes())
    for path in _shards(Path(folder)):
        size = path.stat().st_size
        with open(path, "rb") as f:
            for i in range(64):
                f.seek(max(size - 4096, 0) * i // 63)
                digest.update(f.read(4096))
    return digest.hexdigest()[:16]
