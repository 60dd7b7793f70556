"""Which tokens a step commits: the plan of blocks and shares, and the choice from logits.

All strategies go through one path: `choose` turns the logits of the active rows into a token and a score each
(on the device, inside the step), `select` takes the best scores (on the host). How rows are ranked is a row
of `request.REMASKING`: which score, and whether it is read at the sampling temperature; how many are taken is
a `Share`. Checked against the authors' loops (tests/golden) and plain ones (tests/reference.py). Shape
letters as in model.py; M active rows: those that can be committed in this step, and no others.
"""
import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from request import Request

# -- the plan ------------------------------------------------------------------------------------------------


class Share(NamedTuple):
    """What a step commits of rows ranked by score: the n-th best, n = 1, 2, ..., if one of three holds.

    n <= count; its score lies above log(above - factor / (n + 1)); the scores of those before it, which are
    negative entropies then, add up to -entropy_bound or more. What stands here is met by none.
    """
    count: int
    above: float = math.inf
    factor: float = 0.0
    entropy_bound: float = -math.inf


@dataclass
class Block:
    """The `size` open ones of the places [lo, hi) behind the prompt, decided together: a `Share` for each
    step still to come."""
    lo: int
    hi: int
    size: int
    shares: deque


def plan_blocks(r: Request, masked: Tensor) -> deque:
    """The blocks of a request over the open places of masked (G,), from left to right; the last may be
    shorter.

    With steps: even shares, the remainder on the first steps (LLaDA), or Dream's schedule. Without: at least
    one token a step. A step that would commit nothing is left out: it would change nothing.
    """
    places = masked.nonzero()[:, 0]
    spans = places.split(r.block_length or len(places))
    blocks = deque()
    for span in spans:
        size = len(span)
        steps = size if r.steps is None else min(r.steps // len(spans), size)
        if r.eps is not None:
            shares = _dream_shares(size, steps, r)
        elif r.steps is not None:
            shares = [Share(size // steps + (i < size % steps)) for i in range(steps)]
        else:
            shares = [_parallel(r)] * size
        blocks.append(Block(int(span[0]), int(span[-1]) + 1, size, deque(shares)))
    return blocks


def _parallel(r: Request) -> Share:
    """The best row, and all that are sure enough."""
    if r.threshold is not None:                 # Fast-dLLM, algorithm 1
        return Share(1, above=r.threshold)
    if r.factor is not None:                    # Fast-dLLM, theorem 1: so n rows are sure together
        return Share(1, above=1, factor=r.factor)
    if r.entropy_bound is not None:             # EB-sampler (arXiv 2505.24857)
        return Share(1, entropy_bound=r.entropy_bound)
    return Share(1)


def _dream_shares(masks: int, steps: int, r: Request) -> list:
    t = torch.linspace(1, r.eps, steps + 1)                     # float32, as the authors compute it
    if r.remasking == "origin":             # uniform draws above s/t: each row with probability 1 - s/t
        return [Share(0, above=float(t[i + 1] / t[i])) for i in range(steps - 1)] + [Share(masks)]
    shares = []
    for i in range(steps):
        n = int(masks * (1 - t[i + 1] / t[i])) if i < steps - 1 else masks
        masks -= n
        if n:
            shares.append(Share(n))
    return shares


# -- the choice ----------------------------------------------------------------------------------------------


class Rules(NamedTuple):
    """How to choose at each active row, all (M,); a group is None where no request of the batch asks for it,
    so that a compiled step holds only what is used."""
    sample: tuple | None = None         # temperature float32, seed, step, place int64: what keys a draw
    tempered: Tensor | None = None      # bool: read the scores at the sampling temperature
    nucleus: tuple | None = None        # top_p float32, top_k int64
    no_eos: Tensor | None = None        # bool: EOS is never chosen
    guide: tuple | None = None     # the row (in active order) with the unguided logits, and cfg_scale float32
    stats: bool = False                 # entropy and margin are wanted, too

    def to(self, device) -> "Rules":
        def move(x):
            if isinstance(x, tuple):
                return tuple(map(move, x))
            return x.to(device) if isinstance(x, Tensor) else x
        return Rules(*map(move, self))


def rules_for(requests: list, steps: list, places: list, rows: int, vocab: int) -> Rules:
    """`Rules` for the active rows `places` (a tensor for each request), padded to `rows`, on the CPU. The
    unguided rows of those with guidance come behind, in the same order."""
    sizes = torch.tensor([len(p) for p in places])

    def spread(values, dtype=torch.long):
        flat = torch.tensor(values, dtype=dtype).repeat_interleave(sizes)
        return F.pad(flat, (0, rows - len(flat)))

    sample = tempered = nucleus = no_eos = guide = None
    if any(r.temperature for r in requests):
        temperature = spread([r.temperature for r in requests], torch.float32)
        place = F.pad(torch.cat(places), (0, rows - int(sizes.sum())))
        sample = temperature, spread([r.seed for r in requests]), spread(steps), place
        if any(r.temperature and r.score[1] for r in requests):
            tempered = spread([r.score[1] for r in requests], torch.bool)
    if any(r.top_p < 1 or r.top_k for r in requests):
        top_p = spread([r.top_p for r in requests], torch.float32)
        nucleus = top_p, spread([r.top_k or vocab for r in requests])
    if any(r.logits_eos_inf for r in requests):
        no_eos = spread([r.logits_eos_inf for r in requests], torch.bool)
    stats = any(r.score[0] in ("entropy", "margin") for r in requests)
    if any(r.cfg_scale for r in requests):
        guided = spread([r.cfg_scale > 0 for r in requests], torch.bool)
        at = torch.arange(rows)                          # a row without guidance is its own guide, at scale 0
        at[guided] = rows + torch.arange(int(guided.sum()))
        guide = at, spread([r.cfg_scale for r in requests], torch.float32)
    return Rules(sample, tempered, nucleus, no_eos, guide, stats)


def choose(logits: Tensor, rules: Rules, mask_id: int, eos_ids: tuple, impl: str = "torch") -> tuple:
    """From logits (M, V): token (M,), log-probability (M,), and with `rules.stats` negative entropy and
    margin (M,)."""
    noise = None
    if rules.guide is not None:
        row, scale = rules.guide
        logits = logits[row] + (scale[:, None] + 1) * (logits[:len(row)] - logits[row])
    if rules.no_eos is not None:
        column = torch.arange(logits.shape[1], device=logits.device)
        eos = torch.stack([column == i for i in eos_ids]).any(0)                            # (V,)
        logits = logits.masked_fill(rules.no_eos[:, None] & eos, float("-inf"))
    if rules.sample is not None:
        temperature, *key = rules.sample
        if rules.tempered is not None:
            scaled = rules.tempered & (temperature > 0)
            logits = logits / torch.where(scaled, temperature, 1.0)[:, None]
            temperature = torch.where(scaled, 1.0, temperature)
        noise = (temperature, *key)
    if rules.nucleus is not None:
        top_p, top_k = rules.nucleus
        asked = ((top_p < 1) | (top_k < logits.shape[1]))[:, None]      # a filter leaves its neighbours alone
        mask = torch.arange(logits.shape[1], device=logits.device) == mask_id
        logits = torch.where(asked, _keep_top(logits.masked_fill(mask, float("-inf")), top_p, top_k), logits)
    return kernels.confidence(logits, mask_id, noise, stats=rules.stats, impl=impl)


def _keep_top(logits: Tensor, top_p: Tensor, top_k: Tensor) -> Tensor:
    """-inf outside the smallest set whose probability reaches top_p, and outside the top_k largest."""
    ordered, index = logits.sort(dim=1, descending=True)
    before = F.pad(ordered.float().softmax(1).cumsum(1)[:, :-1], (1, 0))  # probability in front of each entry
    drop = (before > top_p[:, None]) | (torch.arange(logits.shape[1], device=logits.device) >= top_k[:, None])
    return logits.masked_fill(drop.scatter(1, index, drop), float("-inf"))


def scores_for(r: Request, step: int, places: Tensor, token: Tensor, stats: list, vocab: int,
               last: set) -> Tensor:
    """The scores (m,) float64 by which `select` ranks one request's rows, from what
    `choose` told of them: log-probability, negative entropy, margin, each (m,)."""
    kind = r.score[0]

    def draw(stream):                   # behind the token draws
        key = torch.full_like(places, r.seed), torch.full_like(places, step), places
        return kernels.uniform(*key, torch.tensor([vocab + stream]))[:, 0].double()

    score = draw(0).log() if kind == "random" else stats[("probability", "entropy", "margin").index(kind)]
    if r.alg_temp:             # Gumbel-top-k: drawing without replacement from softmax(confidence / alg_temp)
        score = (score.exp() if kind == "probability" else score) / r.alg_temp - (-draw(1).log()).log()
    if r.confidence_eos_eot_inf:
        score = score - 1e6 * torch.isin(token, torch.tensor(sorted(last)))
    return score


def select(scores: Tensor, shares: Tensor) -> Tensor:
    """Which rows to commit, bool (B, C): what the shares (B, 4), a `Share` each, say of the scores (B, C),
    -inf where there is no row. Of equal scores the earlier row is the better one."""
    count, above, factor, entropy_bound = shares[:, :, None].unbind(1)                      # (B, 1) each
    order = scores.argsort(dim=1, descending=True, stable=True)
    ranked, n = scores.gather(1, order), torch.arange(1, scores.shape[1] + 1)
    spent = F.pad(-ranked.cumsum(1)[:, :-1], (1, 0))        # by the better rows
    sure = ranked > (above - factor / (n + 1)).clamp(min=0).log()
    taken = (n <= count) | sure | (spent <= entropy_bound)
    return (taken & (ranked > float("-inf"))).gather(1, order.argsort(dim=1))
