"""Trains the embedded checkpoint from scratch: a small LLaDA that answers questions about a staff list (tools/staff.py).

    python tools/train_tiny.py --state tiny.pt             # 50 minutes on one core, into checkpoints/tiny
    python tools/train_tiny.py --state tiny.pt --resume    # goes on after a stop
    python tools/train_tiny.py --state tiny.pt --eval-only --eval-docs 400

The objective is LLaDA's: answers masked with t uniform in (0.05, 1), often 1 (the whole answer), the loss weighted min(1/t, 4)
and values three times as much; full attention.
What makes it quick: weights that start as heads a lookup is made of (`start`), a small learning rate that keeps them until
they are used, and documents told twice (`restatement`). Documents are made on the fly; held-out ones have seeds of their own.
The weights in checkpoints/tiny come from this recipe steered by hand; docs/log.md says how they differ from one run of it.
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
from model import FAMILIES, Config, Transformer, checkpoint_names, rotate  # noqa: E402
from staff import ASSISTANT, END, EOS, MASK, SPECIAL, SYSTEM, USER, Language  # noqa: E402

STATS = ("restate", *staff.KINDS)


# A sequence is (ids, weights, kinds): weight 0 is shown, above 0 is masked and counts that much in the loss.
def restatement(rng, lang: Language, people: int, wordings: int):
    """The facts twice, in another order and wording; what one copy hides the other shows, so each mask is a lookup."""
    persons = staff.team(rng, people)
    again, rate = rng.sample(persons, people), rng.uniform(0.2, 0.7)
    ids = [SYSTEM, *lang.ids(staff.tell(rng, persons, wordings)), END, ASSISTANT]
    if rng.random() < 0.6:                      # as single facts: of a sentence one value is hidden, rather the second
        weights = [0.0] * len(ids)
        for fact in staff.facts(rng, again):
            fact = lang.ids(fact)
            at = [i for i, t in enumerate(fact) if t in lang.values]
            hide = at[-1 if rng.random() < 0.75 else 0] if rng.random() < 1.3 * rate else None
            weights += [float(i == hide) for i in range(len(fact))]
            ids += fact
        return ids + [EOS], weights + [0.0], [0] * (len(ids) + 1)
    half = len(ids)
    ids += [*lang.ids(staff.tell(rng, again, wordings)), EOS]
    hidden_in = {value: rng.random() < 0.5 for value in lang.values}
    weights = [float(5 < i and (rng.random() < rate and hidden_in[t] == (i > half) if t in lang.values
                                else t > END and rng.random() < rate / 12)) for i, t in enumerate(ids)]
    return ids, weights, [0] * len(ids)


def chat(rng, lang: Language, people: int, wordings: int, turns: int, shares: list[float], tail: int):
    """Questions about one document; the last answer has `tail` EOS behind it, as a request has."""
    persons = staff.team(rng, people)
    by_kind = {kind: [] for kind in staff.KINDS}
    for kind, question, answer in staff.questions(rng, persons):
        by_kind[kind].append((question, answer))
    ids, weights, kinds = [SYSTEM, *lang.ids(staff.tell(rng, persons, wordings)), END], [], []
    for turn in range(turns):
        kind, last = rng.choices(staff.KINDS, shares)[0], turn == turns - 1
        question, answer = rng.choice(by_kind[kind] or by_kind["lookup"])
        ids += [USER, *lang.ids(question), END, ASSISTANT]
        answer = lang.ids(answer)
        region = answer + ([EOS] * tail if last else [END])
        weight = [3.0 if t in lang.values else 1.0 for t in answer] + [0.5] + [0.1] * (len(region) - len(answer) - 1)      # EOS is easy and plenty
        t = 1.0 if rng.random() < (0.4 if last else 0.2) else rng.uniform(0.05, 1)
        weights += [0.0] * (len(ids) - len(weights))
        kinds += [0] * (len(ids) - len(kinds)) + [STATS.index(kind)] * len(region)
        weights += [w * min(1 / t, 4) if rng.random() < t else 0.0 for w in weight]
        ids += region
    return ids, weights, kinds


def batch(rng, lang: Language, most: int, shares: list[float], tokens: int):
    """Sequences of one form and about one length, `tokens` in all: ids, weights, kinds (B, T), lengths (B,), tokens."""
    people = rng.randint(2, most if rng.random() < 0.4 else min(most, 12))
    form, told = rng.random(), 0.4 if most < 8 else 0.04
    turns, tail = rng.randint(5, 12), rng.randint(1, 4)
    if form > told + (1 - told) * 0.6:          # a single question, as in a request
        turns, tail = 1, rng.randint(1, 42)
    rows, total, wordings = [], 0, max(1, min(len(staff.WORDINGS), most - 3))               # one wording first
    while total < tokens:
        rows.append(restatement(rng, lang, min(people, 16), wordings) if form < told
                    else chat(rng, lang, people, wordings, turns, shares, tail))
        total += len(rows[-1][0])
    lengths = torch.tensor([len(row[0]) for row in rows])
    pad = lambda k, fill: torch.tensor([list(row[k]) + [fill] * (int(lengths.max()) - len(row[0])) for row in rows])
    return pad(0, EOS), pad(1, 0.0), pad(2, 0), lengths, total


HEADS = (("near -1", "near 1", "subject", "object"), ("near -2", "recall", "same", "same"),
         ("near -4", "near 2", "same", "same"), ("near -1", "recall", "same", "same"))


@torch.no_grad()
def start(model: Transformer, lang: Language, seed: int):
    """Initial weights: N(0, 1/fan-in), residual outputs less; upon that, heads which otherwise form late or never.

    near d:   looks at the row d away. Embeddings share a direction u; q and k read it so that RoPE peaks at d.
    subject:  looks at the last name before it and notes it in a subspace S. object: at the nearest room or city, into R.
    same:     q = k read S, on dimensions that RoPE turns slowly: rows about one person see, and copy, each other.
    recall:   a row whose R is room 42 looks at the words "42" and takes over their S: who is in room 42?
    context:  (layers 4 up) q = k read everything. One head a layer there is free. All of it is trained from step 1.
    """
    c, D, generator = model.config, model.config.head_dim, torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(shape, generator=generator)
    for name, p in model.named_parameters():
        if name.startswith("layers") and p.ndim == 2:
            p.copy_(normal(*p.shape) * p.shape[1] ** -0.5 * ((2 * c.layers) ** -0.5 if ".o." in name or ".down." in name else 1))
    u, kinds, S, R, rest = torch.linalg.qr(normal(c.hidden, c.hidden)).Q.T.split([1, 3, D, D, c.hidden - 4 - 2 * D])
    half = len(rest) // 2
    model.embed.weight.copy_(2 * normal(c.vocab, len(rest)) @ rest / len(rest) ** 0.5 + 1.4 * u)
    for direction, members in zip(kinds, (staff.NAMES, staff.CITIES, staff.ROOMS)):
        model.embed.weight[[lang.word(str(m))[0] for m in members]] += 1.4 * direction
    speed = c.theta ** (-torch.arange(0, D, 2) / D)                 # radians a token, of each pair of dimensions
    slow, fast, wide = ((speed < 0.005).float().repeat(2)[:, None], (speed > 0.03).float()[:, None],
                        ((speed > 0.03) & (speed < 0.4)).float()[:, None])
    turn = lambda pairs, d: torch.cat([pairs * (d * speed[:, None]).cos(), pairs * (d * speed[:, None]).sin()])
    first = torch.cat([torch.ones(D // 2, 1), torch.zeros(D // 2, 1)])
    reads = {kind: F.normalize(normal(D, len(rest)), dim=1) @ rest for kind in ("subject", "object")}
    for i, layer in enumerate(model.layers):
        for h in range(c.heads):
            q, k, v, o = (w[h * D:(h + 1) * D] for w in (layer.q.weight, layer.k.weight, layer.v.weight, layer.o.weight.T))
            kind, *offset = (HEADS[i][h] if i < len(HEADS) else "free" if h == 1 else "context").split()
            if kind == "near":
                q.mul_(0.2).add_(turn(fast, int(offset[0])) * u)
                k.mul_(0.2).add_(first * u)
                o.mul_(0.5)
            elif kind in reads:
                at, what, where = (-4, kinds[:1], S) if kind == "subject" else (0, kinds[1:].sum(0, keepdim=True), R)
                q.mul_(0.1).add_(0.8 * turn(wide, at) * u)
                k.mul_(0.1).add_(0.8 * first * what)
                v.copy_(reads[kind])
                o.copy_(0.5 * where)
            elif kind == "recall":
                q.mul_(0.1).add_(2.2 * slow * R)
                k.mul_(0.1).add_(2.2 * slow * reads["object"])
                v.copy_(S)
                o.copy_(1.2 * S)
            elif kind == "same":
                k.copy_(q.mul_(0.1).add_((1.4 + 0.2 * i) * slow * S))
                v.zero_()[:half] = rest[:half] if h == 2 else rest[half:]
                o.copy_(0.6 * v)
            elif kind == "context":
                for w in (k, v):
                    w.sub_((w @ u.T) * u)
                q.copy_(k.mul_(0.1 + 1.3 * slow))
                o.copy_(0.4 * v)


def block(layer, x, cos, sin, bias):
    """One layer, attention written out: on a CPU bfloat16 products and a fused softmax beat the library's kernel."""
    def attend(q, k, v):
        scores = rotate(q, cos, sin) @ rotate(k, cos, sin).mT * q.shape[-1] ** -0.5 + bias
        return scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v
    return layer(x, attend)


def hidden(model: Transformer, ids, lengths, block=block):
    """ids (B, T) -> the last layer's rows (B, T, hidden); logits are made only where they are needed."""
    T = ids.shape[1]
    bias = torch.where(torch.arange(T) < lengths[:, None], 0.0, -1e9)[:, None, None]
    x, (cos, sin) = model.embed(ids), model.rope(torch.arange(T)[None])
    for layer in model.layers:
        x = block(layer, x, cos, sin, bias)
    return x


@torch.no_grad()
def answer(model: Transformer, prompts: list[list[int]], gen: int, per_step: int) -> list[list[int]]:
    """The slow, plain loop: the whole canvas at each step, the most confident tokens stay. Answers are cut at EOS."""
    lengths = torch.tensor([len(p) + gen for p in prompts])
    ids = torch.tensor([p + [EOS] * (int(lengths.max()) - len(p)) for p in prompts])
    region = torch.stack([torch.arange(len(p), len(p) + gen) for p in prompts])                 # (B, gen)
    new, fixed = torch.full_like(region, MASK), torch.zeros_like(region, dtype=torch.bool)
    while not fixed.all():
        rows = hidden(model, ids.scatter(1, region, new), lengths)
        logits = model.logits(rows.gather(1, region[..., None].expand(-1, -1, rows.shape[-1])))
        logits[..., MASK] = -torch.inf
        confidence, best = logits.softmax(-1).max(-1)
        chosen = confidence.masked_fill(fixed, -1).topk(min(per_step, gen), -1).indices
        commit = torch.zeros_like(fixed).scatter(1, chosen, True) & ~fixed
        new, fixed = torch.where(commit, best, new), fixed | commit
    return [row[:row.index(EOS)] if EOS in row else row for row in new.tolist()]


def evaluate(model: Transformer, lang: Language, documents: int, per_step: int = 1, gen: int = 16) -> dict:
    """Exact match, one question of each kind on held-out documents of 3 to 30 people: {kind: {people: [right, n]}}."""
    right = {kind: {} for kind in staff.KINDS}
    sizes = torch.linspace(3, 30, documents).round().int().tolist()
    for first in tqdm(range(0, documents, 4), "measuring", leave=False, disable=None):  # neighbours in size: little padding
        asked = []
        for i in range(first, min(first + 4, documents)):
            document, qa = staff.sample(random.Random(f"held-out/{i}"), sizes[i])
            for kind in staff.KINDS:
                _, question, truth = next(x for x in qa if x[0] == kind)
                asked.append((kind, (sizes[i] - 1) // 6 * 6 + 1, lang.prompt(document, question), lang.ids(truth)))
        for (kind, low, _, truth), got in zip(asked, answer(model, [a[2] for a in asked], gen, per_step)):
            bucket = right[kind].setdefault(f"{low}-{low + 5} people", [0, 0])
            bucket[0] += got == truth
            bucket[1] += 1
    return right


def export(model: Transformer, lang: Language, folder: Path, metrics: dict):
    """Write the checkpoint; each file appears whole or not at all."""
    c = model.config
    config = dict(
        model_type="llada", architectures=["LLaDAModelLM"], d_model=c.hidden, n_heads=c.heads, n_kv_heads=c.kv_heads,
        n_layers=c.layers, mlp_hidden_size=c.mlp, vocab_size=c.vocab, embedding_size=c.vocab, weight_tying=c.tied,
        rope=True, rope_theta=c.theta, rms_norm_eps=c.eps, include_qkv_bias=False, include_bias=False, alibi=False,
        max_sequence_length=c.max_len, mask_token_id=MASK, eos_token_id=EOS, pad_token_id=EOS, block_type="llama",
        activation_type="silu", layer_norm_type="rms", torch_dtype="float32")
    special = {i: dict(content=s, special=True, normalized=False, lstrip=False, rstrip=False, single_word=False)
               for i, s in enumerate(SPECIAL)}
    tokenizer = dict(
        tokenizer_class="PreTrainedTokenizerFast", added_tokens_decoder=special, eos_token=SPECIAL[EOS], pad_token=SPECIAL[EOS],
        mask_token=SPECIAL[MASK], additional_special_tokens=SPECIAL[2:], model_max_length=c.max_len, chat_template=staff.TEMPLATE)
    tensors = {theirs: model.state_dict()[ours].clone() for ours, theirs in checkpoint_names(model, FAMILIES["llada"]).items()
               if ours != "head.weight"}                            # tied: the head is the embedding
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
    model = Transformer(Config(layers=args.layers, hidden=args.width, heads=args.heads, kv_heads=args.heads, mlp=args.mlp,
                               vocab=lang.size, max_len=1024, theta=args.theta, eps=1e-5, mask_id=MASK, eos_id=EOS,
                               qkv_bias=False, tied=True))
    start(model, lang, args.seed)
    matrices = {n: p for n, p in model.named_parameters() if n.startswith("layers") and p.ndim == 2}
    optimizers = [(args.lr, torch.optim.Muon(matrices.values(), weight_decay=0.02)),
                  (args.adam_lr, torch.optim.Adam([p for n, p in model.named_parameters() if n not in matrices], betas=(0.9, 0.98)))]
    at = dict(step=0, tokens=0, seconds=0.0, most=3, grown=0, right=[0.0] * len(STATS), loss=[0.0] * len(STATS))
    if args.resume:
        saved = torch.load(args.state)
        model.load_state_dict(saved["model"])
        at = saved["at"]
        for (_, optimizer), state in zip(optimizers, () if args.eval_only else saved["optimizers"]):
            optimizer.load_state_dict(state)
    is_value = torch.zeros(lang.size, dtype=torch.bool)
    is_value[list(lang.values)] = True
    compiled = torch.compile(block, dynamic=True) if args.compile else block
    bar = tqdm(total=int(args.tokens), initial=at["tokens"], unit="tok", unit_scale=True, disable=None)
    last = dict(save=time.time(), evaluate=time.time(), tell=time.time(), step=time.time())

    def save():
        torch.save(dict(model=model.state_dict(), at=at, optimizers=[o.state_dict() for _, o in optimizers]), f"{args.state}.part")
        os.replace(f"{args.state}.part", args.state)

    def measure(documents, per_step=1):
        right = evaluate(model, lang, documents, per_step)
        rate = lambda pairs: dict(exact_match=round(sum(a for a, _ in pairs) / sum(n for _, n in pairs), 4), n=sum(n for _, n in pairs))
        result = {kind: rate(by.values()) for kind, by in right.items()}
        tqdm.write(f"held-out exact match: {json.dumps(result)}", file=sys.stderr)
        export(model, lang, Path(args.out), dict(
            held_out=result, by_size={kind: {size: rate([x]) for size, x in by.items()} for kind, by in right.items()},
            decoding=f"full recomputation, 16 positions, {per_step} token(s) a step, most confident first", tokens=at["tokens"],
            steps=at["step"], seconds=round(at["seconds"]), parameters=sum(p.numel() for p in model.parameters()),
            recipe={k: v for k, v in vars(args).items() if k not in ("out", "state", "resume", "eval_only", "compile")}))

    while not args.eval_only and at["tokens"] < args.tokens:
        # 1. Documents of this step, whatever came before: a resumed run sees what an unbroken one would.
        rng = random.Random(f"train/{args.seed}/0/{at['step']}")
        shares = [0.25 + 4 * (1 - r) * (kind in ("lookup", "reverse") or at["most"] >= 5)
                  for kind, r in zip(staff.KINDS, at["right"][1:])]                         # more of what is not yet known
        tokens = args.batch if at["most"] > 8 else args.batch // 2
        ids, weights, kinds, lengths, total = batch(rng, lang, at["most"], shares, tokens)
        # 2. Forward and backward: logits at the masked rows only.
        masked = weights > 0
        truth, weight, kind = ids[masked], weights[masked], kinds[masked]
        with torch.autocast("cpu", torch.bfloat16):
            logits = model.logits(hidden(model, ids.masked_fill(masked, MASK), lengths, compiled)[masked]).float()
        losses = F.cross_entropy(logits, truth, reduction="none")
        ((losses * weight).sum() / weight.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        # 3. Update; the rate warms up, and falls to 0 at the end.
        rate = min(1, (at["step"] + 1) / 100, (1 - at["tokens"] / args.tokens) / args.decay)
        for lr, optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = lr * rate
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        # 4. Count; one person more whenever what can be looked up is looked up.
        for k in range(len(STATS)):
            rows = is_value[truth] & (kind == k)
            if n := int(rows.sum()):
                keep = 0.95 ** min(2, n / 50)
                at["right"][k] = keep * at["right"][k] + (1 - keep) * float((logits.argmax(-1) == truth)[rows].float().mean())
                at["loss"][k] = keep * at["loss"][k] + (1 - keep) * float(losses.detach()[rows].mean())
        at["step"] += 1
        at["tokens"] += total
        if at["most"] < 30 and at["right"][1] > 0.9 and at["step"] - at["grown"] > 20:
            at["most"], at["grown"] = at["most"] + 1, at["step"]
        at["seconds"] += time.time() - last["step"]
        last["step"] = time.time()
        # 5. Tell and save.
        bar.update(total)
        due = lambda what, every: time.time() - last[what] > every and not last.update({what: time.time()})
        if due("tell", 20):
            tqdm.write(f"{at['step']} {at['tokens'] / 1e6:.2f}M {at['seconds'] / 60:.1f}min people {at['most']}, loss/right of values: " + ", ".join(
                f"{s} {loss:.3f}/{r:.3f}" for s, loss, r in zip(STATS, at["loss"], at["right"])), file=sys.stderr)
        if due("save", 60):
            save()
        if due("evaluate", 60 * args.eval_every):
            measure(40, per_step=4)
    bar.close()
    if not args.eval_only:
        save()
    measure(args.eval_docs)


def main():
    parser = argparse.ArgumentParser(description="train the embedded checkpoint", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--out", default=str(ROOT / "checkpoints/tiny"), help="folder of the checkpoint")
    add("--state", default="tiny.pt", help="file that a stopped run goes on from, written every minute")
    add("--resume", action="store_true", help="go on from --state")
    add("--eval-only", action="store_true", help="only measure --state and write the checkpoint")
    add("--tokens", type=int, default=20_000_000, help="end after so many tokens; the learning rate falls to 0 there")
    add("--batch", type=int, default=4096, help="tokens a step")
    add("--seed", type=int, default=1, help="seed of weights and documents")
    add("--layers", type=int, default=8, help="layers")
    add("--width", type=int, default=128, help="hidden size")
    add("--heads", type=int, default=4, help="attention heads")
    add("--mlp", type=int, default=256, help="inner size of SwiGLU")
    add("--theta", type=float, default=1e5, help="RoPE base")
    add("--lr", type=float, default=0.003, help="learning rate of Muon (layers)")
    add("--adam-lr", type=float, default=0.001, help="learning rate of Adam (embeddings, norms)")
    add("--decay", type=float, default=0.6, help="share of the run in which the learning rate falls to 0")
    add("--eval-every", type=float, default=10, help="minutes between short measurements (each writes the checkpoint)")
    add("--eval-docs", type=int, default=200, help="held-out documents of the last measurement")
    add("--no-compile", dest="compile", action="store_false", help="do not compile the layer (compiling needs a C++ compiler)")
    args = parser.parse_args()
    # Large blocks from the heap, not fresh pages from the system at each step: a third of the time. glibc reads this at start.
    heap = dict(MALLOC_MMAP_MAX_="0", MALLOC_TRIM_THRESHOLD_="100000000000", MALLOC_TOP_PAD_="268435456", OMP_NUM_THREADS="1")
    if os.environ.get("MALLOC_MMAP_MAX_") != "0":
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | heap)
    args.resume |= args.eval_only
    train(args)


if __name__ == "__main__":
    main()
