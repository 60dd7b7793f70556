"""A look inside, for docs/how-it-works.md: a canvas step by step, and what a question does to a prefix.

    python tools/look.py canvas                         # the plain loop, one token a pass
    python tools/look.py canvas --threshold 0.9         # the same answer in fewer passes
    python tools/look.py prefix                         # how alike K/V of a prefix are under two questions

`canvas` runs tests/reference.py, which has no cache, and writes down what goes through the model. `prefix`
runs the document alone and before each question, and compares K and V of its tokens, layer by layer. Both
are of the embedded model and the example document, or of any other (--model, --document, --prompt). Checked:
tests/test_look.py.
"""
import argparse
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from engine import Engine, Request      # noqa: E402
from reference import plain             # noqa: E402

MASK = "░"
CHANGED = 0.98          # mean cosine below which a layer counts as changed; the embedded model's threshold
WORST = 4               # tokens shown of that layer


def passes(model, prompt: list, gen_length: int, **options) -> list[tuple[list, list, list]]:
    """The plain loop, pass by pass: (answer region after it, places set in it, their probabilities)."""
    seen = []

    def forward(canvas):
        logits = model(canvas)
        seen.append((canvas[0].clone(), logits[0]))
        return logits

    tokens, _ = plain(model, prompt, gen_length, forward=forward, **options)
    start, shift, found = len(prompt), int(model.config.shift), []
    after = [canvas[start:].tolist() for canvas, _ in seen[1:]] + [tokens]
    for (canvas, logits), new in zip(seen, after):
        places = [i for i, old in enumerate(canvas[start:].tolist()) if old != new[i]]
        probabilities = logits.softmax(-1)
        sure = [probabilities[start + i - shift, new[i]].item() for i in places]
        found.append((new, places, sure))
    return found


def show_canvas(engine, document: str, question: str, gen_length: int, **options) -> str:
    """A line for each pass; what it has set stands in brackets, a token that is no text as `end`."""
    decode, mask = engine.tokenizer.decode, engine.model.config.mask_id
    prompt, P = engine.tokenizer.render({"prefix": document, "prompt": question})
    engine.check(Request(prompt, prefix_len=P, gen_length=gen_length, **options))
    word = lambda token: MASK if token == mask else decode([token]).strip() or "end"
    lines = [f"{P} tokens of document, {len(prompt) - P} of question, {gen_length} masks",
             f"Q  {question}", "pass    sure  answer", f"              {' '.join([MASK] * gen_length)}"]
    for number, (tokens, places, sure) in enumerate(passes(engine.model, prompt, gen_length, **options)):
        words = [f"[{word(token)}]" if place in places else word(token) for place, token in enumerate(tokens)]
        lines.append(f"{number:4}  {min(sure):.4f}  {' '.join(words)}")
    return "\n".join(lines)


@torch.inference_mode()
def prefix_kv(model, ids: list, P: int) -> list:
    """K and V of the first P tokens, run with all of `ids`: (2, P, K * D) for each layer. K before its
    rotation, which is by position alone and leaves a cosine as it is."""
    kept, handles = [[] for _ in model.layers], []
    for kv, layer in zip(kept, model.layers):
        for part in (layer.k, layer.v):
            handles.append(part.register_forward_hook(lambda _, __, out, kv=kv: kv.append(out[0, :P])))
    try:
        model(torch.tensor([ids]))
    finally:
        for handle in handles:
            handle.remove()
    return [torch.stack(kv) for kv in kept]


def alike(a: list, b: list) -> torch.Tensor:
    """Cosine of two runs' K and V, averaged: (L, P)."""
    return torch.stack([F.cosine_similarity(x, y, dim=-1).mean(0) for x, y in zip(a, b)])


def show_prefix(engine, document: str, questions: list, gen_length: int) -> str:
    """A line of means for each pair of runs, a column a layer; then the tokens that each question changes
    most, in the first layer where a mean is below CHANGED."""
    model, decode = engine.model, engine.tokenizer.decode
    names, runs, pairs = {}, {}, []
    for letter, question in zip("ABCDEFGH", questions):
        ids, P = engine.tokenizer.render({"prefix": document, "prompt": question})
        engine.check(Request(ids, prefix_len=P, gen_length=gen_length))
        answer, *_ = passes(model, ids, gen_length, threshold=0.9)[-1]
        names[question] = letter
        runs["alone"] = prefix_kv(model, ids[:P], P)
        runs[letter] = prefix_kv(model, ids + [model.config.mask_id] * gen_length, P)
        runs[letter + "+"] = prefix_kv(model, ids + answer, P)
        pairs.append(("alone", letter))
    pairs += list(zip(names.values(), list(names.values())[1:]))
    pairs += [(letter, letter + "+") for letter in names.values()]
    lines = [f"{letter}  {question}" for question, letter in names.items()]
    lines += ["+  with the answer in place of the masks", ""]
    lines.append(f"layer     {''.join(f'{i:8}' for i in range(len(model.layers)))}")
    for one, other in pairs:
        values = "".join(f"{mean:8.4f}" for mean in alike(runs[one], runs[other]).mean(1))
        lines.append(f"{one + ', ' + other:10}{values}")
    cosines = {letter: alike(runs["alone"], runs[letter]) for letter in names.values()}
    changed = (torch.stack([cosine.mean(1) for cosine in cosines.values()]).amin(0) < CHANGED).nonzero()
    layer = int(changed[0]) if len(changed) else len(model.layers) - 1
    for letter, cosine in cosines.items():
        lines.append(f"\nwhat {letter} changes most in layer {layer}")
        for at in cosine[layer].argsort()[:WORST].tolist():
            around = ids[max(0, at - 5):at], ids[at:at + 1], ids[at + 1:P][:3]
            before, token, after = (decode(part) for part in around)
            lines.append(f"  {cosine[layer, at]:.3f}  {before.strip()} [{token.strip()}]{after}")
    return "\n".join(lines)


def main(argv=None) -> int:
    """The exit code: 0, or 2 for bad input (one sentence on standard error)."""
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.add_argument("what", choices=["canvas", "prefix"])
    p.add_argument("--model", default=ROOT / "checkpoints" / "tiny", help="model folder (the embedded one)")
    p.add_argument("--document", default=ROOT / "examples" / "staff.txt", help="file with the shared text")
    p.add_argument("--prompt", action="append", help="the question; for prefix give two or more")
    p.add_argument("--gen-length", type=int, default=8, help="masks behind the question (default 8)")
    p.add_argument("--block-length", type=int, help="canvas: decide the answer in blocks of so many tokens")
    p.add_argument("--threshold", type=float, help="canvas: set all tokens above this probability")
    args = p.parse_args(argv)
    try:
        if args.what == "prefix" and (args.block_length or args.threshold):
            raise ValueError("--block-length and --threshold have an effect only with canvas; leave them out")
        if len(args.prompt or ()) > 8:
            raise ValueError(f"--prompt is given {len(args.prompt)} times; prefix takes 8 at most")
        if args.what == "canvas" and len(args.prompt or ()) > 1:
            raise ValueError(f"--prompt is given {len(args.prompt)} times; canvas shows one answer: give one")
        engine = Engine.from_folder(args.model, cache="none")
        document = Path(args.document).read_text(encoding="utf-8").strip()
        if args.what == "prefix":
            questions = args.prompt or ["Who is in room 66?", "Who besides Ben is in Bern?"]
            print(show_prefix(engine, document, questions, args.gen_length))
        else:
            question = args.prompt[0] if args.prompt else "Who is in room 66?"
            options = dict(block_length=args.block_length, threshold=args.threshold)
            print(show_canvas(engine, document, question, args.gen_length, **options))
    except (ValueError, OSError) as e:
        print(f"look.py: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
