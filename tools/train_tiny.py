"""Trains the embedded checkpoint from scratch: a small LLaDA that is asked about staff lists (staff.py).

    python tools/train_tiny.py --state tiny.pt             # an hour on one core, into checkpoints/tiny
    python tools/train_tiny.py --state tiny.pt --resume    # goes on after a stop
    python tools/train_tiny.py --state tiny.pt --eval-only --eval-docs 400

The objective is LLaDA's: answers masked with t uniform in (0.05, 1), often 1 (the whole answer), the loss
weighted min(1/t, 4) and values three times as much. What makes it quick: weights that start as the heads a
lookup is made of (heads.py), a small learning rate that keeps them until they are used, and documents told
twice. The rate falls to 0 twice: counting comes while it is small. What rows do not see of each other while
training makes some questions depend on more than a prefix run alone can know (sequences.py). Documents are
made on the fly; held-out ones have seeds of their own.
checkpoints/tiny is one run of this script with its defaults.
"""
import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
import staff  # noqa: E402
from heads import start  # noqa: E402
from hub.checkpoint import checkpoint_names  # noqa: E402
from hub.families import FAMILIES  # noqa: E402
from model import Config, Transformer, rotate  # noqa: E402
from sequences import LATE, STATS, Mix, batch  # noqa: E402
from staff import EOS, MASK, SPECIAL, Language  # noqa: E402

# What is drawn: at first; from 0.4 of --tokens on; while the rate falls again.
MIXES = Mix(), Mix(long=0.75, counting=3), Mix(long=0.9, single=0.3, shown=0.25, counting=8)


def block(layer, x, cos, sin, bias):
    """One layer, attention written out: on a CPU bfloat16 products and a fused softmax beat the library's
    kernel."""
    def attend(q, k, v):
        scores = rotate(q, cos, sin) @ rotate(k, cos, sin).mT * q.shape[-1] ** -0.5 + bias
        return scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v
    return layer(x, attend)


def hidden(model: Transformer, ids, biases, block=block):
    """ids (B, T), biases as in `batch` -> the last layer's rows (B, T, hidden); logits are made only where
    they are needed."""
    x, (cos, sin) = model.embed(ids), model.rope(torch.arange(ids.shape[1])[None])
    for i, layer in enumerate(model.layers):
        x = block(layer, x, cos, sin, biases[i >= LATE])
    return x


@torch.no_grad()
def answer(model: Transformer, prompts: list[list[int]], gen: int, per_step: int) -> list[list[int]]:
    """The slow, plain loop: the whole canvas at each step, the most confident tokens stay. Answers are cut
    at EOS."""
    lengths = torch.tensor([len(p) + gen for p in prompts])
    ids = torch.tensor([p + [EOS] * (int(lengths.max()) - len(p)) for p in prompts])
    bias = torch.where(torch.arange(ids.shape[1]) < lengths[:, None], 0.0, -1e9)[:, None, None]
    region = torch.stack([torch.arange(len(p), len(p) + gen) for p in prompts])                 # (B, gen)
    new, fixed = torch.full_like(region, MASK), torch.zeros_like(region, dtype=torch.bool)
    while not fixed.all():
        rows = hidden(model, ids.scatter(1, region, new), (bias, bias))
        logits = model.logits(rows.gather(1, region[..., None].expand(-1, -1, rows.shape[-1])))
        logits[..., MASK] = -torch.inf
        confidence, best = logits.softmax(-1).max(-1)
        chosen = confidence.masked_fill(fixed, -1).topk(min(per_step, gen), -1).indices
        commit = torch.zeros_like(fixed).scatter(1, chosen, True) & ~fixed
        new, fixed = torch.where(commit, best, new), fixed | commit
    return [row[:row.index(EOS)] if EOS in row else row for row in new.tolist()]


def evaluate(model: Transformer, lang: Language, documents: int, per_step: int = 1, gen: int = 16) -> dict:
    """Exact match, one question of each kind on held-out documents of 3 to 30 people: {kind: {people:
    [right, n]}}."""
    right = {kind: {} for kind in staff.KINDS}
    sizes = torch.linspace(3, 30, documents).round().int().tolist()
    for first in tqdm(range(0, documents, 4), "measuring", leave=False, disable=None):  # like sizes
        asked = []
        for i in range(first, min(first + 4, documents)):
            for kind in staff.KINDS:
                document, question, truth = staff.ask(random.Random(f"held-out/{i}"), kind, sizes[i])
                low = (sizes[i] - 1) // 6 * 6 + 1
                asked.append((kind, low, lang.prompt(document, question), lang.ids(truth)))
        for (kind, low, _, truth), got in zip(asked, answer(model, [a[2] for a in asked], gen, per_step)):
            bucket = right[kind].setdefault(f"{low}-{low + 5} people", [0, 0])
            bucket[0] += got == truth
            bucket[1] += 1
    return right


def export(model: Transformer, lang: Language, folder: Path, metrics: dict):
    """Write the checkpoint; each file appears whole or not at all."""
    c = model.config
    config = dict(
        model_type="llada", architectures=["LLaDAModelLM"], d_model=c.hidden, n_heads=c.heads,
        n_kv_heads=c.kv_heads, n_layers=c.layers, mlp_hidden_size=c.mlp, vocab_size=c.vocab,
        embedding_size=c.vocab, weight_tying=c.tied, rope=True, rope_theta=c.theta, rms_norm_eps=c.eps,
        include_qkv_bias=False, include_bias=False, alibi=False, max_sequence_length=c.max_len,
        mask_token_id=MASK, eos_token_id=EOS, pad_token_id=EOS, block_type="llama", activation_type="silu",
        layer_norm_type="rms", torch_dtype="float32")
    plain = dict(special=True, normalized=False, lstrip=False, rstrip=False, single_word=False)
    tokenizer = dict(
        tokenizer_class="PreTrainedTokenizerFast",
        added_tokens_decoder={i: dict(content=token, **plain) for i, token in enumerate(SPECIAL)},
        eos_token=SPECIAL[EOS], pad_token=SPECIAL[EOS],
        mask_token=SPECIAL[MASK], additional_special_tokens=SPECIAL[2:], model_max_length=c.max_len,
        chat_template=staff.TEMPLATE)
    names = checkpoint_names(model, FAMILIES["llada"])
    state = model.state_dict()
    tensors = {theirs: state[ours].clone() for ours, theirs in names.items()
               if ours != "head.weight"}                    # tied: the head is the embedding
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        for name, content in (("config", config), ("tokenizer_config", tokenizer), ("metrics", metrics)):
            Path(scratch, f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
        lang.tokenizer.save(f"{scratch}/tokenizer.json")
        save_file(tensors, f"{scratch}/model.safetensors", metadata={"format": "pt"})
        for path in Path(scratch).iterdir():
            path.chmod(0o644)
            os.replace(path, folder / path.name)


def train(args):
    torch.set_num_threads(1)
    lang = Language()
    model = Transformer(Config(
        layers=args.layers, hidden=args.width, heads=args.heads, kv_heads=args.heads, mlp=args.mlp,
        vocab=lang.size, max_len=1024, theta=args.theta, eps=1e-5, mask_id=MASK, eos_ids=(EOS,),
        qkv_bias=False, tied=True))
    start(model, lang, args.seed)
    matrices = {n: p for n, p in model.named_parameters() if n.startswith("layers") and p.ndim == 2}
    others = [p for n, p in model.named_parameters() if n not in matrices]
    optimizers = [(args.lr, torch.optim.Muon(matrices.values(), weight_decay=0.02)),
                  (args.adam_lr, torch.optim.Adam(others, betas=(0.9, 0.98)))]
    at = dict(step=0, tokens=0, seconds=0.0, most=3, grown=0,
              right=[0.0] * len(STATS), loss=[0.0] * len(STATS))
    if args.resume:
        saved = torch.load(args.state)
        model.load_state_dict(saved["model"])
        at = saved["at"]
        for (_, optimizer), state in zip(optimizers, () if args.eval_only else saved["optimizers"]):
            optimizer.load_state_dict(state)
    is_value = torch.zeros(lang.size, dtype=torch.bool)
    is_value[list(lang.values)] = True
    compiled = torch.compile(block, dynamic=True) if args.compile else block
    end = args.tokens + args.again
    bar = tqdm(total=end, initial=at["tokens"], unit="tok", unit_scale=True, disable=None)
    last = dict(save=time.time(), evaluate=time.time(), tell=time.time(), step=time.time())

    def save():
        states = [optimizer.state_dict() for _, optimizer in optimizers]
        torch.save(dict(model=model.state_dict(), at=at, optimizers=states), f"{args.state}.part")
        os.replace(f"{args.state}.part", args.state)

    def measure(documents, per_step=1):
        right = evaluate(model, lang, documents, per_step)

        def rate(pairs):
            count = sum(n for _, n in pairs)
            return dict(exact_match=round(sum(a for a, _ in pairs) / count, 4), n=count)

        result = {kind: rate(by.values()) for kind, by in right.items()}
        tqdm.write(f"held-out exact match: {json.dumps(result)}", file=sys.stderr)
        by_size = {kind: {size: rate([x]) for size, x in by.items()} for kind, by in right.items()}
        leave = ("out", "state", "resume", "eval_only", "compile")
        export(model, lang, Path(args.out), dict(
            held_out=result, by_size=by_size,
            decoding=f"full recomputation, 16 positions, {per_step} token(s) a step, most confident first",
            tokens=at["tokens"], steps=at["step"], seconds=round(at["seconds"]),
            parameters=sum(p.numel() for p in model.parameters()),
            recipe={k: v for k, v in vars(args).items() if k not in leave}))

    while not args.eval_only and at["tokens"] < end:
        # 1. Documents of this step, whatever came before: a resumed run sees what an unbroken one would.
        rng = random.Random(f"train/{args.seed}/0/{at['step']}")    # the 0 stands for nothing
        first = ("lookup", "reverse", "blind")
        boost = {kind: 4 if kind in first or at["most"] >= 5 else 0 for kind in STATS}
        mix = MIXES[(at["tokens"] > 0.4 * args.tokens) + (at["tokens"] >= args.tokens)]
        boost["counting"] *= mix.counting
        right = zip(STATS[1:], at["right"][1:])
        shares = [0.25 + boost[kind] * (1 - r) for kind, r in right]        # more of what is not yet known
        tokens = args.batch if at["most"] > 8 else args.batch // 2
        ids, weights, kinds, biases, total = batch(rng, lang, at["most"], shares, tokens, mix)
        # 2. Forward and backward: logits at the masked rows only.
        masked = weights > 0
        truth, weight, kind = ids[masked], weights[masked], kinds[masked]
        with torch.autocast("cpu", torch.bfloat16):
            rows = hidden(model, ids.masked_fill(masked, MASK), biases, compiled)[masked]
            logits = model.logits(rows).float()
        losses = F.cross_entropy(logits, truth, reduction="none")
        ((losses * weight).sum() / weight.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        # 3. Update; the rate warms up, and falls to 0 twice, the second time from less.
        left = 1 - at["tokens"] / args.tokens
        rate = min(1, (at["step"] + 1) / 100, left / args.decay)
        if left <= 0:
            rate = 0.4 * (end - at["tokens"]) / args.again
        for lr, optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = lr * rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        # 4. Count; one person more whenever what can be looked up is looked up, above 8 also blindly.
        for k in range(len(STATS)):
            values = is_value[truth] & (kind == k)
            if n := int(values.sum()):
                keep = 0.95 ** min(2, n / 50)
                right = float((logits.argmax(-1) == truth)[values].float().mean())
                at["right"][k] = keep * at["right"][k] + (1 - keep) * right
                at["loss"][k] = keep * at["loss"][k] + (1 - keep) * float(losses.detach()[values].mean())
        at["step"] += 1
        at["tokens"] += total
        known = at["right"][1] > 0.9 and (at["most"] < 8 or at["right"][-1] > 0.7)
        if at["most"] < 30 and known and at["step"] - at["grown"] > 20:
            at["most"], at["grown"] = at["most"] + 1, at["step"]
        at["seconds"] += time.time() - last["step"]
        last["step"] = time.time()
        # 5. Tell and save.
        bar.update(total)

        def due(what, every):
            return time.time() - last[what] > every and not last.update({what: time.time()})

        if due("tell", 20):
            told = ", ".join(f"{s} {l:.3f}/{r:.3f}" for s, l, r in zip(STATS, at["loss"], at["right"]))
            tqdm.write(f"{at['step']} {at['tokens'] / 1e6:.2f}M {at['seconds'] / 60:.1f}min "
                       f"people {at['most']}, loss/right of values: {told}", file=sys.stderr)
        if due("save", 60):
            save()
        if due("evaluate", 60 * args.eval_every):
            measure(40, per_step=4)
    bar.close()
    if not args.eval_only:
        save()
    measure(args.eval_docs)


def main():
    parser = argparse.ArgumentParser(description="train the embedded checkpoint",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--out", default=str(ROOT / "checkpoints/tiny"), help="folder of the checkpoint")
    add("--state", default="tiny.pt", help="file that a stopped run goes on from, written every minute")
    add("--resume", action="store_true", help="go on from --state")
    add("--eval-only", action="store_true", help="only measure --state and write the checkpoint")
    add("--tokens", type=int, default=36_000_000, help="the rate falls to 0 after so many")
    add("--again", type=int, default=16_000_000,
        help="and once more in so many, most of them spent on counting")
    add("--batch", type=int, default=4096, help="tokens a step")
    add("--seed", type=int, default=1, help="seed of weights and documents")
    add("--layers", type=int, default=8, help="layers")
    add("--width", type=int, default=128, help="hidden size")
    add("--heads", type=int, default=4, help="attention heads")
    add("--mlp", type=int, default=256, help="inner size of SwiGLU")
    add("--theta", type=float, default=1e6, help="RoPE base")
    add("--lr", type=float, default=0.003, help="learning rate of Muon (layers)")
    add("--adam-lr", type=float, default=0.001, help="learning rate of Adam (embeddings, norms)")
    add("--decay", type=float, default=0.7, help="share of the run in which the learning rate falls to 0")
    add("--eval-every", type=float, default=10,
        help="minutes between short measurements (each writes the checkpoint)")
    add("--eval-docs", type=int, default=120, help="held-out documents of the last measurement")
    add("--no-compile", dest="compile", action="store_false",
        help="do not compile the layer (compiling needs a C++ compiler)")
    args = parser.parse_args()
    # Large blocks from the heap, not fresh pages from the system at each step: a third of the time. glibc
    # reads this at start.
    heap = dict(MALLOC_MMAP_MAX_="0", MALLOC_TRIM_THRESHOLD_="100000000000", MALLOC_TOP_PAD_="268435456",
                OMP_NUM_THREADS="1")
    if os.environ.get("MALLOC_MMAP_MAX_") != "0":
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | heap)
    args.resume |= args.eval_only
    train(args)


if __name__ == "__main__":
    main()
