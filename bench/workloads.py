"""What the bench runs: models of random weights in the layouts of LLaDA, Dream and Qwen, requests that share
a prefix, engines, and the plain loop that they are held against.

No network and no model files. There is no tokenizer either: a text is cut into pieces of up to four letters,
about as many as a byte-level BPE makes of English, and each is hashed into the vocabulary. The same text
gives the same ids, which is all that a prefix cache can tell; lengths, and so the prefix ratios, are near
those of a real tokenizer and not equal to them.
"""
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

import depth
from engine import Engine, Request
from files import BadInput, read_lines
from model import Config, Transformer

MODES = {                                   # name: what makes an engine of it
    "none": dict(cache="none"),
    "intra": dict(cache="intra"),
    "fast": dict(cache="none", window="block"),
    "bicache": dict(cache="bicache"),
    "bicache+block": dict(cache="bicache", window="block"),
}
OURS = Path(__file__).with_name("questions.jsonl")
SHAPES = {
    "tiny": Config(
        layers=4, hidden=128, heads=2, kv_heads=2, mlp=256, vocab=2048, max_len=4096, theta=5e5, eps=1e-5,
        mask_id=2047, eos_ids=(2046,), qkv_bias=False, tied=False),
    "llada-110m": Config(
        layers=12, hidden=768, heads=12, kv_heads=12, mlp=2048, vocab=50368, max_len=4096, theta=5e5,
        eps=1e-5, mask_id=50367, eos_ids=(50366,), qkv_bias=False, tied=False),
    "llada-8b": Config(
        layers=32, hidden=4096, heads=32, kv_heads=32, mlp=12288, vocab=126464, max_len=4096, theta=5e5,
        eps=1e-5, mask_id=126336, eos_ids=(126081,), qkv_bias=False, tied=False),
    "dream-7b": Config(
        layers=28, hidden=3584, heads=28, kv_heads=4, mlp=18944, vocab=152064, max_len=131072, theta=1e6,
        eps=1e-6, mask_id=151666, eos_ids=(151643,), qkv_bias=True, tied=False, shift=True),
    "qwen3-0.6b": Config(
        layers=28, hidden=1024, heads=16, kv_heads=8, head_dim=128, mlp=3072, vocab=151936, max_len=40960,
        theta=1e6, eps=1e-6, mask_id=151669, eos_ids=(151645,), qkv_bias=False, qk_norm=True, tied=True),
    "coder-0.5b": Config(
        layers=24, hidden=896, heads=14, kv_heads=2, mlp=4864, vocab=151936, max_len=32768, theta=1e6,
        eps=1e-6, mask_id=151665, eos_ids=(151645,), qkv_bias=True, tied=True),
}
FEW_SHOT = {1: 0.30, 4: 0.75, 8: 0.85}      # examples: the prefix ratio that their choice aims at
DOCUMENT = 0.95                             # the ratio at which the long document is cut
NAMES = (*(f"{n}-shot" for n in FEW_SHOT), "document")


@dataclass
class Workload:
    """Requests that share `prefix`: ids of each one's own prompt, and tokens left for the answer."""
    name: str
    prefix: list
    own: list
    gen_length: int

    @property
    def ratio(self) -> float:
        return len(self.prefix) / (len(self.prefix) + len(self.own[0]) + self.gen_length)


def random_model(config: Config, device, dtype, seed: int, compile: bool) -> Transformer:
    """A model of normal weights, deviation 1 / sqrt(fan-in) (1 for the embedding), made where it is used."""
    with torch.device("meta"):
        model = Transformer(config).to(dtype)
    model.to_empty(device=device).eval().requires_grad_(False)
    if config.tied:
        model.head.weight = model.embed.weight                  # to_empty makes two of one
    generator = torch.Generator(device).manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            weight.normal_(std=1 if name == "embed.weight" else weight.shape[1] ** -0.5, generator=generator)
        else:
            weight.fill_(name.endswith("norm.weight"))          # norms are 1, biases 0
    return model if compile else model.pack()


def encode(text: str, config: Config) -> list:
    """Ids of a text, the special ones never among them."""
    room = min(config.mask_id, *config.eos_ids)
    return [zlib.crc32(piece.encode()) % room for piece in re.findall(r" ?\w{1,4}| ?[^\w\s]|\s", text)]


def read_questions(path) -> list:
    """Pairs (question, answer) of a JSON-lines file. Raises ValueError with the line that is none."""
    pairs = []
    for where, raw in read_lines(path):
        try:
            pairs.append((raw["question"] + "", raw["answer"] + ""))
        except (KeyError, TypeError) as e:
            raise BadInput(f'{where} is no object with the texts "question" and "answer" ({e!r})') from e
    return pairs


def build(pairs: list, config: Config, batch: int, gen_length: int) -> list[Workload]:
    """Few-shot prefixes of 1, 4 and 8 examples, and a long document; `batch` questions of middling length ask
    of each.

    Out of the examples, sorted by length, the neighbours are taken whose ratio comes nearest to the one aimed
    at. The document is made of all that is not asked, numbered, and again with higher numbers while it is too
    short.
    """
    if len(pairs) < batch + max(FEW_SHOT):
        raise BadInput(f"{len(pairs)} questions are too few; {batch} are asked and {max(FEW_SHOT)} are "
                       "examples")
    pairs = sorted(pairs, key=lambda pair: len(pair[0]))
    at = (len(pairs) - batch) // 2
    own = [encode(f"Question: {q}\nAnswer:", config) for q, _ in pairs[at:at + batch]]
    pairs = pairs[:at] + pairs[at + batch:]
    limit = config.max_len - max(map(len, own)) - gen_length
    if limit < 1:
        raise BadInput(f"gen_length {gen_length} is too long; the model takes {config.max_len} tokens, "
                       "prompt and all")
    aim = lambda r: min(round(r / (1 - r) * (len(own[0]) + gen_length)), limit)
    shots = sorted((encode(f"Question: {q}\nAnswer: {a}\n\n", config) for q, a in pairs), key=len)
    made = []
    for n, r in FEW_SHOT.items():
        windows = [sum(shots[i:i + n], []) for i in range(len(shots) - n + 1)]
        prefix = min(windows, key=lambda w: abs(len(w) - aim(r)))
        made.append(Workload(f"{n}-shot", prefix[:limit], own, gen_length))
    return made + [Workload("document", document(pairs, config, aim(DOCUMENT)), own, gen_length)]


def document(pairs: list, config: Config, tokens: int) -> list:
    """The first `tokens` ids of a text that never comes to an end and never repeats a paragraph."""
    ids, n = [], 0
    while len(ids) < tokens:
        q, a = pairs[n % len(pairs)]
        n += 1
        ids += encode(f"Note {n}. {q} {a}\n\n", config)
    return ids[:tokens]


def make_requests(w: Workload, block: int, pace: int, shared: bool = True) -> list[Request]:
    """The requests of a workload, `pace` tokens a step in blocks of `block`; without their prefix if not
    `shared`."""
    steps = -(-block // pace) * (w.gen_length // block)
    prefix = w.prefix if shared else []
    return [Request(prefix + own, prefix_len=len(prefix), gen_length=w.gen_length, steps=steps,
                    block_length=block, stop_at_eos=False) for own in w.own]


def make_engine(model: Transformer, workloads: list, args, **options) -> Engine:
    """An engine whose cache holds the longest of the prefixes and `args.batch` requests on it; a next prefix
    evicts the last. Depths are LLaDA's published ones (Dream's for its layout), scaled to the layers of the
    model, which has random weights: so nothing is measured that could lower them."""
    c = model.config
    name = "Dream-org/Dream-v0-Instruct-7B" if c.shift else "GSAI-ML/LLaDA-8B-Instruct"
    layers, published = depth.PUBLISHED[name]
    table = {percent: d * c.layers // layers for percent, d in published.items()}
    batch = args.batch + 1                                                      # + 1: a neighbour
    options = dict(max_batch=batch, refresh=args.refresh, compile=args.compile, measure=0) | options
    P = max(len(w.prefix) for w in workloads)
    own = max(max(map(len, w.own)) + w.gen_length for w in workloads)
    shared = options.get("cache") == "bicache"
    tokens = shared * (P + 64) + args.batch * (P + own + 192) + own + 192       # 192: pages' tails
    size = c.layers * (2 * c.kv_heads * c.head_dim + shared * c.hidden) * model.embed.weight.element_size()
    return Engine(model, table=table, cache_mb=tokens * size / 2**20 + 32, **options)      # + 32: page tables


@torch.inference_mode()
def plain_loop(model: Transformer, request: Request, all_rows: bool) -> list:
    """The reference: the whole canvas at each step, nothing kept, the most confident committed.

    all_rows: logits of every row, as the authors' loops have it. Without, only of the rows that can be
    committed, which is what the engine does and the harder rival in time.
    """
    c, n, G, block = model.config, len(request.prompt), request.gen_length, request.block_length
    ids = torch.tensor([request.prompt + [c.mask_id] * G], device=model.embed.weight.device)
    masked = torch.ones(G, dtype=torch.bool, device=ids.device)
    share, rest = divmod(block, steps := request.steps * block // G)
    head = model.logits
    try:
        for lo in range(0, G, block):
            for i in range(steps):
                places = masked[lo:lo + block].nonzero()[:, 0] + lo                         # (M,)
                rows = n + places - int(c.shift)
                if not all_rows:
                    model.logits = lambda x: head(x[:, rows])       # covers the method until taken off again
                logits = model(ids)[0]                                                      # (T or M, V)
                score = (logits[rows] if all_rows else logits).float().log_softmax(-1)      # (M, V)
                score[:, c.mask_id] = float("-inf")
                score, token = score.max(-1)
                best = score.argsort(descending=True, stable=True)[:share + (i < rest)]
                ids[0, n + places[best]] = token[best]
                masked[places[best]] = False
    finally:
        vars(model).pop("logits", None)
    return ids[0, n:].tolist()
