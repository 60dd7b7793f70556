"""Which tokens a step commits: the request, its plan of blocks and shares, and the choice from logits.

All remasking strategies of LLaDA and Dream go through one path: `choose` turns the logits of the active rows into a token
and a score each (on the device, inside the step), `select` takes the best scores (on the host). A strategy is a row of
`REMASKING`: which score, and whether the score is read at the sampling temperature. Checked against the authors' loops in
tests/golden. Shape letters as in model.py; M active rows: those that can be committed in this step, and no others.
"""
import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels

# name: (score, tempered). LLaDA scores a token at temperature 1 however it was drawn, Dream at the drawing temperature.
REMASKING = {
    "low_confidence": ("probability", False),       # LLaDA: keep the most confident, remask the rest
    "random": ("random", False),
    "maskgit_plus": ("probability", True),          # Dream's names from here on
    "entropy": ("entropy", True),
    "topk_margin": ("margin", True),
    "origin": ("random", True),                     # each row by itself, with probability 1 - s/t
}


@dataclass
class Request:
    """One prompt to complete. Lengths are in tokens.

    prefix_len: how many leading ids are shared with other requests; None takes the longest stored prefix, if any. At
    least one prompt token is left outside the prefix. steps counts the whole request; steps and threshold exclude each
    other, neither means one token a step. block_length None: one block. temperature 0 is arg-max. salt separates
    tenants: a prefix is found only under the salt it was stored with.

    eps: Dream's schedule, timesteps linear from 1 to eps over `steps`, int(masks * (1 - s/t)) tokens each. alg_temp: draw
    the rows to commit instead of taking the best (Dream). top_p, top_k: draw from a part of the vocabulary. cfg_scale:
    guidance away from the answer to an all-mask prompt. logits_eos_inf: EOS is never chosen. confidence_eos_eot_inf: EOS
    and end-of-turn are committed last (both: LLaDA, appendix B.4).
    """
    prompt: list
    prefix_len: int | None = None
    gen_length: int = 128
    steps: int | None = None
    block_length: int | None = None
    threshold: float | None = None
    temperature: float = 0.0
    seed: int = 0
    remasking: str = "low_confidence"
    stop_at_eos: bool = True
    salt: str = ""
    eps: float | None = None
    alg_temp: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    cfg_scale: float = 0.0
    logits_eos_inf: bool = False
    confidence_eos_eot_inf: bool = False


@dataclass
class Result:
    """What a request came to. token_layers counts its denoising (DESIGN section 8); what the encoding of a new prefix
    cost stands apart in encode_token_layers and is 0 on a hit."""
    tokens: list                # without the EOS and what follows it
    finish_reason: str          # "eos", "length" or "cancelled"
    forwards: int
    refreshes: int
    prefix_tokens: int
    depth: int
    hit: bool
    token_layers: float
    encode_token_layers: float


def check(r: Request, vocab: int, max_len: int) -> None:
    """ValueError with the value, the limit and the remedy, unless the request can be decoded."""
    n, G = len(r.prompt), r.gen_length
    if not n:
        raise ValueError("the prompt is empty; give at least one token")
    if bad := [t for t in r.prompt if not 0 <= t < vocab]:
        raise ValueError(f"the prompt holds token id {bad[0]}; ids run from 0 to {vocab - 1}")
    if G < 1:
        raise ValueError(f"gen_length is {G}; it must be at least 1")
    if n + G > max_len:
        raise ValueError(f"prompt ({n}) and gen_length ({G}) make {n + G} tokens and the model takes {max_len}; shorten one")
    if r.prefix_len is not None and not 0 <= r.prefix_len <= n:
        raise ValueError(f"prefix_len is {r.prefix_len}; the prompt has {n} tokens, and a prefix of it at most that many")
    block = G if r.block_length is None else r.block_length
    if not 1 <= block <= G:
        raise ValueError(f"block_length is {block}; it must be from 1 to gen_length ({G})")
    blocks = -(-G // block)
    if r.steps is not None and r.threshold is not None:
        raise ValueError(f"steps ({r.steps}) and threshold ({r.threshold}) exclude each other; give one")
    if r.steps is not None and (r.steps % blocks or not blocks <= r.steps <= G):
        raise ValueError(f"steps is {r.steps}; it must be a multiple of the number of blocks ({blocks}), from {blocks} to "
                         f"gen_length ({G}), so that each step commits a token")
    if r.threshold is not None and not 0 < r.threshold <= 1:
        raise ValueError(f"threshold is {r.threshold}; it must be above 0 and at most 1")
    if r.remasking not in REMASKING:
        raise ValueError(f"remasking is {r.remasking!r}; it must be one of {', '.join(REMASKING)}")
    if r.threshold is not None and REMASKING[r.remasking][0] != "probability":
        raise ValueError(f"threshold compares probabilities and remasking {r.remasking!r} has none; give steps instead")
    for name in ("temperature", "alg_temp", "cfg_scale"):
        if not 0 <= getattr(r, name) < math.inf:
            raise ValueError(f"{name} is {getattr(r, name)}; it must be 0 (off) or above")
    if r.alg_temp and (r.threshold is not None or REMASKING[r.remasking][0] == "random"):
        raise ValueError("alg_temp draws the rows to commit by their scores; it has no effect with a threshold or with "
                         f"remasking {r.remasking!r}: leave it at 0")
    if not 0 < r.top_p <= 1:
        raise ValueError(f"top_p is {r.top_p}; it must be above 0 and at most 1")
    if r.top_k is not None and not 1 <= r.top_k <= vocab:
        raise ValueError(f"top_k is {r.top_k}; it must be from 1 to the vocabulary's size ({vocab})")
    if r.eps is not None and not 0 < r.eps < 1:
        raise ValueError(f"eps is {r.eps}; it must be between 0 and 1")
    if r.remasking == "origin" and r.eps is None:
        raise ValueError("remasking 'origin' follows Dream's schedule; give eps (Dream uses 0.001)")
    if r.eps is not None and (r.threshold is not None or block < G):
        raise ValueError("eps sets Dream's schedule over the whole answer; it goes with neither threshold nor block_length")


# -- the plan ---------------------------------------------------------------------------------------------------------


@dataclass
class Block:
    """Places [lo, hi) of the generated region, decided together. `shares`: for each step still to come, how many rows to
    commit at least, and the score above which all are."""
    lo: int
    hi: int
    shares: deque


def plan_blocks(r: Request) -> deque:
    """The blocks of a request, in order; the last may be shorter.

    With steps: even shares, the remainder on the first steps (LLaDA), or Dream's schedule. With a threshold, or with
    neither, at least one token a step. A step that would commit nothing is left out: it would change nothing.
    """
    G, block = r.gen_length, r.block_length or r.gen_length
    spans = [(lo, min(lo + block, G)) for lo in range(0, G, block)]
    blocks = deque()
    for lo, hi in spans:
        size = hi - lo
        steps = size if r.steps is None else min(r.steps // len(spans), size)
        share, rest = divmod(size, steps)
        shares = [(share + (i < rest), math.inf) for i in range(steps)]
        if r.threshold is not None:
            shares = [(1, math.log(r.threshold))] * size
        if r.eps is not None:
            shares = _dream_shares(size, steps, r)
        blocks.append(Block(lo, hi, deque(shares)))
    return blocks


def _dream_shares(masks: int, steps: int, r: Request) -> list:
    t = torch.linspace(1, r.eps, steps + 1)                     # float32, as the authors compute it
    if r.remasking == "origin":                                 # uniform scores above s/t: with probability 1 - s/t
        return [(0, float(t[i + 1] / t[i])) for i in range(steps - 1)] + [(masks, math.inf)]
    shares = []
    for i in range(steps):
        n = int(masks * (1 - t[i + 1] / t[i])) if i < steps - 1 else masks
        masks -= n
        shares += [(n, math.inf)] * (n > 0)
    return shares


# -- the choice -------------------------------------------------------------------------------------------------------


class Rules(NamedTuple):
    """How to choose at each active row, all (M,); a group is None where no request of the batch asks for it, so that a
    compiled step holds only what is used."""
    sample: tuple | None = None         # temperature float32, seed, step, place int64: what keys a draw
    tempered: Tensor | None = None      # bool: read the scores at the sampling temperature
    nucleus: tuple | None = None        # top_p float32, top_k int64
    no_eos: Tensor | None = None        # bool: EOS is never chosen
    guide: tuple | None = None          # the row (in active order) with the unguided logits, and cfg_scale float32
    stats: bool = False                 # entropy and margin are wanted, too

    def to(self, device) -> "Rules":
        move = lambda x: tuple(map(move, x)) if isinstance(x, tuple) else x.to(device) if isinstance(x, Tensor) else x
        return Rules(*map(move, self))


def rules_for(requests: list, steps: list, places: list, rows: int, vocab: int) -> Rules:
    """`Rules` for the active rows `places` (a tensor for each request), padded to `rows`; on the CPU."""
    sizes = torch.tensor([len(p) for p in places])

    def spread(values, dtype):
        flat = torch.tensor(values, dtype=dtype).repeat_interleave(sizes)
        return F.pad(flat, (0, rows - len(flat)))

    sample = tempered = nucleus = no_eos = None
    if any(r.temperature for r in requests):
        sample = (spread([r.temperature for r in requests], torch.float32), spread([r.seed for r in requests], torch.long),
                  spread(steps, torch.long), F.pad(torch.cat(places), (0, rows - int(sizes.sum()))))
        tempered = spread([REMASKING[r.remasking][1] for r in requests], torch.bool)
    if any(r.top_p < 1 or r.top_k for r in requests):
        nucleus = (spread([r.top_p for r in requests], torch.float32), spread([r.top_k or vocab for r in requests], torch.long))
    if any(r.logits_eos_inf for r in requests):
        no_eos = spread([r.logits_eos_inf for r in requests], torch.bool)
    stats = any(REMASKING[r.remasking][0] in ("entropy", "margin") for r in requests)
    return Rules(sample, tempered, nucleus, no_eos, stats=stats)


def choose(logits: Tensor, rules: Rules, mask_id: int, eos_id: int, impl: str = "torch") -> tuple:
    """From logits (M, V): token (M,), log-probability (M,), and with `rules.stats` negative entropy and margin (M,)."""
    noise = None
    if rules.guide is not None:
        row, scale = rules.guide
        logits = logits[row] + (scale[:, None] + 1) * (logits[:len(row)] - logits[row])
    if rules.no_eos is not None:
        eos = torch.arange(logits.shape[1], device=logits.device) == eos_id
        logits = logits.masked_fill(rules.no_eos[:, None] & eos, float("-inf"))
    if rules.sample is not None:
        temperature, *key = rules.sample
        scaled = rules.tempered & (temperature > 0)
        logits = logits / torch.where(scaled, temperature, 1.0)[:, None]
        noise = (torch.where(scaled, 1.0, temperature), *key)
    if rules.nucleus is not None:
        top_p, top_k = rules.nucleus
        asked = ((top_p < 1) | (top_k < logits.shape[1]))[:, None]          # a filter changes nothing for its neighbours
        mask = torch.arange(logits.shape[1], device=logits.device) == mask_id
        logits = torch.where(asked, _keep_top(logits.masked_fill(mask, float("-inf")), top_p, top_k), logits)
    return kernels.confidence(logits, mask_id, noise, stats=rules.stats, impl=impl)


def _keep_top(logits: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """-inf outside the smallest set whose probability reaches top_p, and outside the top_k largest (Dream's order)."""
    ordered, index = logits.sort(dim=1, descending=True)
    before = ordered.float().softmax(1).cumsum(1).roll(1, 1)        # probability in front of each entry
    before[:, 0] = 0
    drop = (before > top_p[:, None]) | (torch.arange(logits.shape[1], device=logits.device) >= top_k[:, None])
    return logits.masked_fill(drop.scatter(1, index, drop), float("-inf"))


def scores_for(r: Request, step: int, places: Tensor, token: Tensor, stats: list, vocab: int, last: set) -> Tensor:
    """The scores (m,) float64 by which `select` ranks one request's rows, from what
    `choose` told of them: log-probability, negative entropy, margin, each (m,)."""
    kind = REMASKING[r.remasking][0]
    draw = lambda stream: kernels.uniform(*(torch.full_like(places, k) for k in (r.seed, step)), places,
                                          torch.tensor([vocab + stream]))[:, 0].double()    # behind the token draws
    score = draw(0) if kind == "random" else stats[("probability", "entropy", "margin").index(kind)]
    if r.alg_temp:                  # Gumbel-top-k: drawing without replacement from softmax(confidence / alg_temp)
        score = (score.exp() if kind == "probability" else score) / r.alg_temp - (-draw(1).log()).log()
    if r.confidence_eos_eot_inf:
        score = score - 1e6 * torch.isin(token, torch.tensor(sorted(last)))
    return score


def select(scores: Tensor, count: Tensor, above: Tensor) -> Tensor:
    """Which rows to commit: scores (B, C), -inf where there is no row; count and above (B,). Returns bool (B, C).

    The `count` best, and all that score higher than `above`. Equal scores: the earlier row first.
    """
    rank = scores.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
    return ((rank < count[:, None]) | (scores > above[:, None])) & (scores > float("-inf"))
