"""The plain loop: the whole canvas through the model at each step, one request, no cache. What the engine is
tested against.

Written from the papers alone (LLaDA algorithm 5; threshold and factor: Fast-dLLM; entropy bound: EB-sampler)
and sharing no line with the engine.
"""
import torch
import torch.nn.functional as F


def plain(model, prompt, gen_length=None, block_length=None, steps=None, threshold=None, factor=None,
          entropy_bound=None, canvas=None, forward=None) -> tuple[list, int]:
    """The ids behind the prompt, uncut, and the number of forward passes.

    canvas: ids, MASK where open, instead of gen_length open places. `forward(ids (1, T)) -> logits` may be
    replaced.
    """
    c = model.config
    canvas = torch.tensor([prompt + (canvas or [c.mask_id] * gen_length)])
    undecided = (canvas[0] == c.mask_id) & (torch.arange(canvas.shape[1]) >= len(prompt))
    places = undecided.nonzero()[:, 0]
    blocks = places.split(block_length or len(places))
    forwards = 0
    for block in blocks:
        quota = min(steps // len(blocks), len(block)) if steps else len(block)
        shares = [len(block) // quota + (i < len(block) % quota) for i in range(quota)]
        while len(block):
            logits = (forward or model)(canvas)[0]
            forwards += 1
            if c.shift:
                logits = torch.cat([logits[:1], logits[:-1]])
            logp = logits[block].double().log_softmax(-1)
            choice = logits[block].clone()
            choice[:, c.mask_id] = float("-inf")
            token = choice.argmax(-1)
            score = logp.gather(1, token[:, None])[:, 0]
            confidence, entropy = score.exp(), -(logp.exp() * logp).sum(1)
            order = (score if entropy_bound is None else -entropy).argsort(descending=True, stable=True)
            if threshold is not None:
                n = max(1, int((confidence > threshold).sum()))
            elif factor is not None:
                n = count_by_factor(confidence[order].tolist(), factor)
            elif entropy_bound is not None:
                n = count_by_entropy(entropy[order].tolist(), entropy_bound)
            else:
                n = shares.pop(0)
            canvas[0, block[order[:n]]] = token[order[:n]]
            block = block[order[n:].sort().values]
    return canvas[0, len(prompt):].tolist(), forwards


def reusing(model, prefix, depth, standin=0):
    """A `forward` for `plain`: below `depth` the prefix has the K/V it had in a pass of its own, with so many
    MASK behind it; from there up its rows go on as they came out of that pass."""
    P, states, kept = len(prefix), [], []

    def run(x, layer, positions, store, shared=None):
        def attend(q, k, v):
            cos, sin = model.rope(positions)
            half = q.shape[-1] // 2
            other = lambda y: torch.cat([-y[..., half:], y[..., :half]], -1)
            q, k = (y * torch.cat([cos, cos], -1) + other(y) * torch.cat([sin, sin], -1) for y in (q, k))
            store.append((k, v))
            if shared:
                k, v = (torch.cat([old[:, :, :P], new], 2) for old, new in zip(shared, (k, v)))
            return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        return layer(x, attend)

    x = model.embed(torch.tensor([prefix + [model.config.mask_id] * standin]))
    for layer in model.layers:
        states.append(x[:, :P])
        x = run(x, layer, torch.arange(P + standin)[None], kept)

    def forward(canvas):
        at = torch.arange(canvas.shape[1])[None]
        x = model.embed(canvas[:, P:])
        for i, layer in enumerate(model.layers):
            if i == depth:
                x = torch.cat([states[i], x], 1)
            x = run(x, layer, at[:, P:], [], kept[i]) if i < depth else run(x, layer, at, [])
        return F.pad(model.logits(x), (0, 0, canvas.shape[1] - x.shape[1], 0))
    return forward


def count_by_factor(confidence: list, factor: float) -> int:
    """How many of the best: the n-th while it lies above 1 - factor / (n + 1), the first anyway."""
    n = 1
    while n < len(confidence) and confidence[n] > 1 - factor / (n + 2):     # confidence[n] is the (n + 1)-th
        n += 1
    return n


def count_by_entropy(entropy: list, bound: float) -> int:
    """How many of the calmest: go on while the entropies already taken add up to at most `bound`."""
    n, spent = 1, entropy[0]
    while n < len(entropy) and spent <= bound:
        spent += entropy[n]
        n += 1
    return n
