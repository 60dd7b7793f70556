"""The plain loop: the whole canvas through the model at each step, one request, no cache. What the engine is
tested against.

Written from the papers alone (LLaDA algorithm 5, Fast-dLLM's threshold rule) and sharing no line with the
engine.
"""
import torch


def plain(model, prompt, gen_length, block_length=None, steps=None, threshold=None,
          forward=None) -> tuple[list, int]:
    """The generated ids, uncut, and the number of forward passes. `forward(ids (1, T)) -> logits` may be
    replaced."""
    c, block = model.config, block_length or gen_length
    canvas = torch.tensor([prompt + [c.mask_id] * gen_length])
    undecided = torch.zeros_like(canvas[0], dtype=torch.bool)
    undecided[len(prompt):] = True
    spans = [(lo, min(lo + block, gen_length)) for lo in range(0, gen_length, block)]
    forwards = 0
    for lo, hi in spans:
        here = torch.zeros_like(undecided)
        here[len(prompt) + lo:len(prompt) + hi] = True
        quota = min(steps // len(spans), hi - lo) if steps else hi - lo
        shares = [(hi - lo) // quota + (i < (hi - lo) % quota) for i in range(quota)]
        while (undecided & here).any():
            logits = (forward or model)(canvas)[0]
            forwards += 1
            if c.shift:
                logits = torch.cat([logits[:1], logits[:-1]])
            logp = logits.double().log_softmax(-1)
            choice = logits.clone()
            choice[:, c.mask_id] = float("-inf")
            token = choice.argmax(-1)
            score = logp.gather(1, token[:, None])[:, 0].masked_fill(~(undecided & here), float("-inf"))
            commit = torch.zeros_like(undecided)
            commit[score.argsort(descending=True, stable=True)[:1 if threshold else shares.pop(0)]] = True
            if threshold:
                commit |= score.exp() > threshold
            canvas[0, commit] = token[commit]
            undecided &= ~commit
    return canvas[0, len(prompt):].tolist(), forwards
