"""The transformer of masked diffusion language models (LLaDA, Dream and their kin), in one file.

A bidirectional stack of RMSNorm, rotary embedding (half-split), grouped-query attention and SwiGLU. It holds
weights and arithmetic only: where K and V are kept and what a query sees is decided by the `attend` function
that the caller hands to each layer, so this file knows nothing of caches, steps or batches of requests.

    model = checkpoint.load("checkpoints/tiny")
    logits = model(ids)                         # (B, T) -> (B, T, V): the plain pass, nothing cached

Shape letters, used in every file: B requests, N rows (token positions) of a request in this pass, T tokens of
a canvas, L layers, H query heads, K kv heads, D head dim, V vocabulary. Checked against the authors' layouts
in tests/golden and against transformers in tests/test_reference.py.
"""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


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
    eos_ids: tuple              # each ends an answer
    qkv_bias: bool
    tied: bool                  # the output head is the embedding matrix
    shift: bool = False         # Dream: the logits for position i stand in row i-1
    qk_norm: bool = False       # Qwen3: q and k are normed, head by head
    head_dim: int | None = None     # hidden // heads, unless said

    def __post_init__(self):
        if self.head_dim is None:
            object.__setattr__(self, "head_dim", self.hidden // self.heads)


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
    """A linear map whose weight can be laid out once for the CPU's matrix product, instead of anew at every
    call.

    A step has few rows, so that laying out the weight takes as long as using it: packed, 8 to 70 rows take
    0.5 to 0.8 of the time (docs/log.md). The layout is oneDNN's own; the plain weight is given up and stays
    as a shape without storage.
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
        D = self.head_dim = c.head_dim
        self.attn_norm, self.mlp_norm = RMSNorm(c.hidden, c.eps), RMSNorm(c.hidden, c.eps)
        self.q = Linear(c.hidden, c.heads * D, bias=c.qkv_bias)
        self.k = Linear(c.hidden, c.kv_heads * D, bias=c.qkv_bias)
        self.v = Linear(c.hidden, c.kv_heads * D, bias=c.qkv_bias)
        self.q_norm, self.k_norm = ((RMSNorm(D, c.eps), RMSNorm(D, c.eps)) if c.qk_norm else
                                    (nn.Identity(), nn.Identity()))
        self.o = Linear(c.heads * D, c.hidden, bias=False)
        self.gate = Linear(c.hidden, c.mlp, bias=False)
        self.up = Linear(c.hidden, c.mlp, bias=False)
        self.down = Linear(c.mlp, c.hidden, bias=False)

    def forward(self, x: Tensor, attend, skip: int = 0) -> Tensor:
        """One layer over rows x (B, N, hidden); returns (B, N - skip, hidden).

        `attend(q, k, v)` gets q (B, H, N - skip, D) and k, v (B, K, N, D), rotates q and k by their positions
        and returns what q sees, shaped like q. The first `skip` rows give K and V only: in a refresh nobody
        reads the last layer's prefix rows.
        """
        h = self.attn_norm(x)
        split = lambda y: y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, N, h*D) -> (B, h, N, D)
        q, k, v = self.q_norm(split(self.q(h[:, skip:]))), self.k_norm(split(self.k(h))), split(self.v(h))
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
        """Lay out the weights for the CPU, for good: they can be neither trained nor saved nor compiled
        after."""
        weight = self.embed.weight
        if weight.is_cpu and weight.dtype != torch.float16 and torch.backends.mkldnn.is_available():
            for m in self.modules():
                if isinstance(m, Linear) and m.weight is not weight:        # a tied head is the embedding
                    m.pack()
        return self

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin, each (B, 1, N, D/2) float32, for positions (B, N)."""
        D = self.config.head_dim
        exponent = -torch.arange(0, D, 2, device=positions.device, dtype=torch.float32) / D
        inverse = self.config.theta ** exponent
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
            mask = (torch.arange(T, device=ids.device) < lengths[:, None])[:, None, None]   # (B, 1, 1, T)
        gqa = self.config.heads != self.config.kv_heads

        cos, sin = self.rope(torch.arange(T, device=ids.device)[None])

        def attend(q, k, v):
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=gqa)

        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, attend)
        return self.logits(x)
