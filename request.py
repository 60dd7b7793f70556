"""What is asked and what is told: `Request` and its `check`, `Event` and `Result`.

    Request(prompt=[...ids...], prefix_len=40, gen_length=32, block_length=8, threshold=0.9)
    Request(prompt=[...ids...], canvas=[17, MASK, MASK, 5, MASK, 9])

A request that passes `check` can be decoded by any model of that vocabulary and length; whether the cache has
room for it is the engine's question. Every refusal is a ValueError that names the value, the limit and the
remedy (tests/test_errors.py).
"""
import math
import operator
from dataclasses import dataclass, field

from files import BadInput
from model import Config

# name: (score, tempered). LLaDA scores a token at temperature 1 however it was drawn, Dream as it was drawn.
REMASKING = {
    "low_confidence": ("probability", False),       # LLaDA: keep the most confident, remask the rest
    "random": ("random", False),
    "maskgit_plus": ("probability", True),          # Dream's names from here on
    "entropy": ("entropy", True),
    "topk_margin": ("margin", True),
    "origin": ("random", True),                     # each row by itself, with probability 1 - s/t
}
PACES = ("steps", "threshold", "factor", "entropy_bound")       # what says how many tokens a step commits


@dataclass
class Request:
    """One prompt to complete. Lengths are in tokens.

    prefix_len: how many leading ids are shared with other requests; None takes the longest stored prefix, if
    any. At least one prompt token is left outside the prefix. block_length None: one block. temperature 0 is
    arg-max. salt separates tenants: a prefix is found only under the salt it was stored with.

    How many tokens a step commits is said by one of: steps, forward passes for the whole request; threshold,
    all above this probability; factor, the n-th best while it lies above 1 - factor / (n + 1) (Fast-dLLM);
    entropy_bound, by rising entropy while the entropies of those before add up to no more, in nats
    (EB-sampler). All but steps take the best row anyway. Without any of them it is one token a step.

    eps: Dream's schedule, timesteps linear from 1 to eps over `steps`, int(masks * (1 - s/t)) tokens each.
    alg_temp: draw the rows to commit instead of taking the best (Dream). top_p, top_k: draw from a part of
    the vocabulary. cfg_scale: guidance away from the answer to an all-mask prompt. logits_eos_inf: EOS is
    never chosen. confidence_eos_eot_inf: EOS and end-of-turn are committed last (both: LLaDA, appendix B.4).

    stop: texts that end the answer; the engine must have a tokenizer. As with EOS, nothing before the end of
    one may be undecided. Special tokens have no text and are found by none.

    canvas: what stands behind the prompt, the mask id where it is open; it takes the place of gen_length.
    What is given is never changed, and is seen by all that is open. Blocks count open places, from left to
    right. EOS ends the request only behind all that is given.
    """
    prompt: list                # token ids: any sequence of ints, made a list when the request is checked
    prefix_len: int | None = None
    gen_length: int = 128       # with a canvas, its length from the check on
    canvas: list | None = None
    steps: int | None = None
    block_length: int | None = None
    threshold: float | None = None
    factor: float | None = None
    entropy_bound: float | None = None
    temperature: float = 0.0
    seed: int = 0
    remasking: str = "low_confidence"
    stop_at_eos: bool = True
    stop: tuple = ()
    salt: str = ""
    eps: float | None = None
    alg_temp: float = 0.0
    top_p: float = 1.0
    top_k: int | None = None
    cfg_scale: float = 0.0
    logits_eos_inf: bool = False
    confidence_eos_eot_inf: bool = False

    @property
    def score(self) -> tuple[str, bool]:
        """What ranks the rows, and whether it is read at the sampling temperature."""
        kind, tempered = REMASKING[self.remasking]
        return kind if self.entropy_bound is None else "entropy", tempered


@dataclass
class Result:
    """What a request came to. token_layers counts its denoising (docs/how-it-works.md, Cost); what the
    encoding of a new prefix cost stands apart in encode_token_layers and is 0 on a hit, what the guard
    measured in measure_token_layers.

    similarity: what the guard knows of this prefix at this ratio, a running mean for each layer that the
    table's depth rests on; [] if it was not measured. depth below table_depth (None with self_profile): that
    was less than the table's threshold, or, in a small cache, the pages did not suffice to share less than
    the table says.
    """
    tokens: list             # in front of EOS, or the fewest from the first on that spell a stop text, or all
    finish_reason: str          # "eos", "stop", "length" or "cancelled"
    forwards: int
    refreshes: int
    prefix_tokens: int
    depth: int
    hit: bool
    token_layers: float
    encode_token_layers: float
    table_depth: int | None = 0
    similarity: list = field(default_factory=list)
    measure_token_layers: float = 0
    text: str = ""              # what the tokens spell, in front of a stop text; "" without a tokenizer

    @classmethod
    def cancelled(cls) -> "Result":
        """Of a request that was cancelled before it began."""
        return cls([], "cancelled", 0, 0, 0, 0, False, 0, 0)


@dataclass
class Event:
    """One step of one request: what was computed and what was committed; `result` on the last one.

    computed: rows [lo, hi) of the suffix. refresh: the deep layers computed the prefix rows as well.
    committed: pairs (place in the generated region, token).
    """
    index: int                  # of the request in the list
    step: int
    refresh: bool
    computed: tuple
    committed: list
    prefix_tokens: int
    depth: int
    result: Result | None = None


def whole(name: str, value) -> int:
    """`value` as an int; ValueError for True, 2.0 and "2"."""
    try:
        if not isinstance(value, bool):
            return operator.index(value)
    except TypeError:
        pass
    raise BadInput(f"{name} is {value!r}; it must be a whole number")


def check(r: Request, config: Config, spells: bool) -> None:
    """ValueError (value, limit, remedy) unless a model of this config can decode the request. Its prompt and
    canvas become lists of ints. spells: there is a tokenizer."""
    if not isinstance(r, Request):
        raise BadInput(f"{r!r} is no Request")
    ids = _token_ids("prompt", r.prompt, config.vocab)
    _check_types(r)
    if not ids:
        raise BadInput("the prompt is empty; give at least one token id")
    canvas = None if r.canvas is None else _check_canvas(r, config)
    n, G = len(ids), r.gen_length if canvas is None else len(canvas)
    if G < 1:
        raise BadInput(f"gen_length is {G}; it must be at least 1")
    if n + G > config.max_len:
        behind = "gen_length" if canvas is None else "canvas"
        raise BadInput(f"prompt ({n}) and {behind} ({G}) make {n + G} tokens and the model takes "
                       f"{config.max_len}; shorten one")
    if r.prefix_len is not None and not 0 <= r.prefix_len <= n:
        raise BadInput(f"prefix_len is {r.prefix_len}; the prompt has {n} tokens, and a prefix of it at "
                       "most that many")
    if r.stop and not spells:
        raise BadInput(f"stop is {r.stop!r}; the engine has no tokenizer to find texts with: give it one")
    _check_choice(r, config.vocab)
    if canvas is None:
        _check_pace(r, G, f"gen_length ({G})")
    else:
        places = canvas.count(config.mask_id)
        _check_pace(r, places, f"the number of open places ({places})")
    r.prompt, r.canvas, r.gen_length, r.stop = ids, canvas, G, tuple(r.stop)


def _token_ids(name: str, ids, vocab: int) -> list[int]:
    """`ids` as a list of ints; ValueError unless they are token ids."""
    try:
        ids = [whole(f"a token of the {name}", t) for t in ([] if isinstance(ids, str) else ids)]
    except TypeError:
        raise BadInput(f"the {name} is {ids!r}; it must be a list of token ids") from None
    if bad := [t for t in ids if not 0 <= t < vocab]:
        raise BadInput(f"the {name} holds token id {bad[0]}; ids run from 0 to {vocab - 1}")
    return ids


def _check_canvas(r: Request, config: Config) -> list[int]:
    """The canvas as a list of ints; ValueError unless there is something to do in it."""
    canvas = _token_ids("canvas", r.canvas, config.vocab)
    if config.mask_id not in canvas:
        raise BadInput(f"the canvas has no open place; put the mask id ({config.mask_id}) where one is")
    if r.gen_length not in (Request.gen_length, len(canvas)):
        raise BadInput(f"gen_length is {r.gen_length} and the canvas has {len(canvas)} places; give one")
    if r.stop:
        raise BadInput(f"stop is {r.stop!r}; a canvas ends where it ends: leave one out")
    return canvas


def _check_types(r: Request) -> None:
    """ValueError unless numbers are numbers, texts are texts, and what is on or off is True or False."""
    for name in ("prefix_len", "gen_length", "steps", "block_length", "seed", "top_k"):
        if getattr(r, name) is not None or name in ("gen_length", "seed"):
            whole(name, getattr(r, name))
    for name in (*PACES[1:], "temperature", "eps", "alg_temp", "top_p", "cfg_scale"):
        value = getattr(r, name)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number and not (value is None and getattr(Request, name) is None):
            raise BadInput(f"{name} is {value!r}; it must be a number")
    for name in ("salt", "remasking"):
        if not isinstance(getattr(r, name), str):
            raise BadInput(f"{name} is {getattr(r, name)!r}; it must be a text")
    for name in ("stop_at_eos", "logits_eos_inf", "confidence_eos_eot_inf"):
        if not isinstance(getattr(r, name), bool):
            raise BadInput(f"{name} is {getattr(r, name)!r}; it must be true or false")
    if not isinstance(r.stop, (tuple, list)) or not all(isinstance(text, str) and text for text in r.stop):
        raise BadInput(f"stop is {r.stop!r}; it must be a tuple of texts, none of them empty")


def _check_choice(r: Request, vocab: int) -> None:
    """ValueError unless it is clear which token a row gets."""
    if not 0 <= r.seed < 2**32:
        raise BadInput(f"seed is {r.seed}; it must be from 0 to 2**32 - 1")
    for name in ("temperature", "alg_temp", "cfg_scale"):
        value = getattr(r, name)
        if value and not 1e-4 <= value <= 1e4:      # beyond, float32 has no room for the scores
            raise BadInput(f"{name} is {value}; it must be 0 (off), or from 0.0001 to 10000")
    if not 0 < r.top_p <= 1:
        raise BadInput(f"top_p is {r.top_p}; it must be above 0 and at most 1")
    if r.top_k is not None and not 1 <= r.top_k <= vocab:
        raise BadInput(f"top_k is {r.top_k}; it must be from 1 to the vocabulary's size ({vocab})")


def _check_pace(r: Request, G: int, places: str) -> None:
    """ValueError unless it is clear which rows a step commits, of G in all, which are called `places`."""
    block = G if r.block_length is None else r.block_length
    if not 1 <= block <= G:
        raise BadInput(f"block_length is {block}; it must be from 1 to {places}")
    blocks = -(-G // block)
    paces = [name for name in PACES if getattr(r, name) is not None]
    if len(paces) > 1:
        given = " and ".join(f"{name} ({getattr(r, name)})" for name in paces)
        raise BadInput(f"{given} exclude each other; give one")
    if r.steps is not None and (r.steps % blocks or not blocks <= r.steps <= G):
        raise BadInput(f"steps is {r.steps}; it must be a multiple of the number of blocks ({blocks}), "
                       f"from {blocks} to {places}, so that each step commits a token")
    if r.threshold is not None and not 0 < r.threshold <= 1:
        raise BadInput(f"threshold is {r.threshold}; it must be above 0 and at most 1")
    if r.factor is not None and not 0 < r.factor < math.inf:
        raise BadInput(f"factor is {r.factor}; it must be above 0 (small is careful) and finite")
    if r.entropy_bound is not None and not 0 <= r.entropy_bound < math.inf:
        raise BadInput(f"entropy_bound is {r.entropy_bound}; it must be at least 0 (careful) and finite")
    if r.remasking not in REMASKING:
        raise BadInput(f"remasking is {r.remasking!r}; it must be one of {', '.join(REMASKING)}")
    kind, adaptive = REMASKING[r.remasking][0], paces and paces[0] != "steps"
    if adaptive and r.entropy_bound is None and kind != "probability":
        raise BadInput(f"{paces[0]} compares probabilities and remasking {r.remasking!r} has none; give "
                       "steps instead")
    if r.entropy_bound is not None and r.remasking not in ("low_confidence", "entropy"):
        raise BadInput(f"entropy_bound ranks by entropy, remasking {r.remasking!r} does not; leave one out")
    if r.alg_temp and (adaptive or kind == "random"):
        raise BadInput("alg_temp draws the rows to commit by their scores; it has no effect with "
                       f"threshold, factor, entropy_bound or remasking {r.remasking!r}: leave it at 0")
    if r.eps is not None and not 0 < r.eps < 1:
        raise BadInput(f"eps is {r.eps}; it must be between 0 and 1")
    if r.remasking == "origin" and r.eps is None:
        raise BadInput("remasking 'origin' follows Dream's schedule; give eps (Dream uses 0.001)")
    if r.eps is not None and (adaptive or block < G):
        raise BadInput("eps sets Dream's schedule over the whole answer; it goes with steps alone, not "
                       "with threshold, factor, entropy_bound or block_length")
