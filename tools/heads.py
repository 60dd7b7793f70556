"""The embedded checkpoint's initial weights: heads that lookups and marks are made of, which else form late
or never.

Upon N(0, 1/fan-in), residual outputs less and out of the named subspaces, each head has a task; all of it
is trained from step 1.

near d:   looks at the row d away: embeddings share a direction u, q and k read it so that RoPE peaks at d.
          Four of these also tell a row that it is beside `Who`, `Which`, `What`, `How` or `?`: so most
          rows of a question know that they are one.
subject:  looks at the last name before it and notes it in a subspace S.
object:   looks at the nearest room or city, into R.
count:    a city looks at its mentions and at the first row; the share that the first gets tells how many.
same:     q = k read S, on dimensions that RoPE turns slowly: rows about one person see, and copy, each
          other.
recall:   a row whose R is room 42 looks at the words "42" and takes over their S: who is in room 42?
mark:     rows of the document look at rows of the question with the same S, or R, and note in W that they
          are asked about.
spread:   as same, and it copies W: all rows about a person learn what is asked about the person.
find:     a masked row looks at the rows with most W and takes over their S. In layer 4 both marks count,
          in layer 5 a person who is named in the question counts less (who else is in Oslo?).
context:  q = k read everything. free: nothing is set.
"""
import torch
import torch.nn.functional as F

import staff
from model import Transformer
from staff import MASK, SYSTEM, Language

HEADS = (("near -1", "near 1", "subject", "object"),
         ("near -2", "count", "same", "same"),
         ("near -4", "near 2", "same", "same"),
         ("mark object", "recall", "same", "mark subject"),
         ("find", "recall", "spread", "spread"),
         ("find", "free", "same", "same"),
         ("context", "free", "same", "same"),
         ("context", "free", "context", "context"))                 # further layers as the last


@torch.no_grad()
def start(model: Transformer, lang: Language, seed: int):
    """Set the weights of a new model."""
    c, D, generator = model.config, model.config.head_dim, torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, generator=generator)
    basis = torch.linalg.qr(normal(c.hidden, c.hidden)).Q.T
    u, kinds, hole, asks, asked, W, S, R, rest = basis.split([1, 3, 1, 1, 1, 3, D, D, c.hidden - 10 - 2 * D])
    for name, p in model.named_parameters():
        if name.startswith("layers") and p.ndim == 2:
            p.copy_(normal(*p.shape) * p.shape[1] ** -0.5)
            if ".o." in name or ".down." in name:       # what is at random stays out of the named subspaces
                p.copy_(rest.T @ (rest @ p) * (2 * c.layers) ** -0.5)
    (by_object, by_subject, number), half = W.split(1), len(rest) // 2
    extra, questions = torch.zeros(c.vocab, c.hidden), lang.ids("Who Which What How") + lang.ids("Who?")[-1:]
    ids = lambda words: [lang.ids(str(word))[0] for word in words]
    members = ids(staff.NAMES), ids(staff.CITIES), ids(staff.ROOMS), [MASK], questions
    for direction, tokens in zip((*kinds, hole, asks), members):
        extra[tokens] += 1.4 * direction
    # All embeddings are of one length: equal shares of u after the norm.
    own = F.normalize(normal(c.vocab, len(rest)) @ rest)
    model.embed.weight.copy_(own * (6 - extra.square().sum(-1, keepdim=True)).sqrt() + 1.4 * u + extra)
    speed = c.theta ** (-torch.arange(0, D, 2) / D)         # radians a token, of each pair of dimensions
    pairs = lambda chosen: chosen.float().repeat(2)[:, None]
    slow, fast = pairs(speed < 0.0015), (speed > 0.03).float()[:, None]
    wide = ((speed > 0.03) & (speed < 0.4)).float()[:, None]
    last = pairs(speed == speed[-1])
    exact = (slow - last)[:, 0].bool()
    cities = own[ids(staff.CITIES)] @ rest.T                # codes tell them apart without error
    codes = torch.eye(int(exact.sum()))[:, :len(cities)] @ torch.linalg.pinv(cities).T @ rest

    def turn(pairs, d):
        return torch.cat([pairs * (d * speed[:, None]).cos(), pairs * (d * speed[:, None]).sin()])

    first = torch.cat([torch.ones(D // 2, 1), torch.zeros(D // 2, 1)])
    reads = {kind: F.normalize(normal(D, len(rest)), dim=1) @ rest for kind in ("subject", "object")}
    for i, layer in enumerate(model.layers):
        for h in range(c.heads):
            weights = layer.q.weight, layer.k.weight, layer.v.weight, layer.o.weight.T
            q, k, v, o = (w[h * D:(h + 1) * D] for w in weights)
            kind, *offset = HEADS[min(i, len(HEADS) - 1)][h].split()
            if kind == "near":
                q.mul_(0.1).add_(turn(fast, int(offset[0])) * u)
                k.mul_(0.1).add_(first * u)
                o.mul_(0.5)
                if offset[0] in ("-1", "1", "-2", "-4"):
                    v[:1], o[:1] = 0.8 * asks, asked
            elif kind in ("subject", "object"):
                at, what, where = -4, kinds[:1], S
                if kind == "object":
                    at, what, where = 0, kinds[1:].sum(0, keepdim=True), R
                q.mul_(0.1).add_(0.8 * turn(wide, at) * u)
                k.mul_(0.1).add_(0.8 * first * what)
                v.copy_(reads[kind])
                o.copy_(0.5 * where)
            elif kind == "recall":
                q.mul_(0.1).add_(2.2 * slow * R)
                k.mul_(0.1).add_(2.2 * slow * reads["object"])
                v.copy_(S)
                o.copy_(1.2 * S)
            elif kind in ("same", "spread"):
                k.copy_(q.mul_(0.1).add_((1.4 + 0.2 * i) * slow * S))
                v.zero_()[:half] = rest[:half] if h == 2 else rest[half:]
                o.copy_(0.6 * v)
                if kind == "spread":
                    v[half:half + len(W)], o[half:half + len(W)] = W, W
            elif kind == "mark":
                k.copy_(q.mul_(0.1).add_(2.2 * (slow - last) * (S if offset[0] == "subject" else R)))
                q.add_(1.2 * last * u)
                k.add_(0.4 * last * asked)
                v[:1], o[:1] = asked, by_object if offset[0] == "object" else by_subject
            elif kind == "find":
                q.mul_(0.1).add_(2 * last * hole)
                k.mul_(0.1).add_(2 * last * (by_object + (by_subject if i == 4 else -by_subject)))
                v.copy_(S)
                o.copy_(0.8 * S)
            elif kind == "count":
                q.zero_()[exact] = k.zero_()[exact] = 1.1 * codes
                q.add_(last * kinds[1])
                k.add_(last * (kinds[1] + 1.5 * own[SYSTEM]))
                v.zero_()[:1], o.zero_()[:1] = 0.8 * kinds[1], number
            elif kind == "context":
                for w in (k, v):
                    w.sub_((w @ u.T) * u)
                q.copy_(k.mul_(0.1 + 1.3 * slow))
                o.copy_(0.4 * v)
