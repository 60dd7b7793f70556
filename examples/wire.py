"""OpenAI's API on the wire: a body in, the engine's requests out; what was decided in, JSON out.

    ask = read(raw, chat=True, tenant="", model=model, seed=0)      # Refused: status, sentence, error body

Field names, error bodies and server-sent events are those of OpenAI's chat completions and completions.
What a diffusion model adds (threshold, steps, block_length, remasking, ..., canvas) stands in the body
beside them. A field that would change the answer and that we do not have is refused by name; one that would
not is ignored. Nothing here runs a model. Checked with OpenAI's own client and a thousand malformed bodies
(tests/test_serve.py).
"""
import json
import time
import uuid
from dataclasses import dataclass, field

from request import PACES, Request, whole

DECODING = (*PACES, "temperature", "top_p", "block_length", "remasking", "top_k", "eps", "alg_temp",
            "cfg_scale")                            # called alike in `Request`, which checks them
SHARED = {"model", "max_tokens", "seed", "n", "stop", "stream", "stream_options", "canvas", *DECODING}
KNOWN = {True: SHARED | {"messages", "max_completion_tokens"}, False: SHARED | {"prompt"}}      # by `chat`
IGNORED = {"user", "store", "metadata", "service_tier", "safety_identifier", "prompt_cache_key",
           "prompt_cache_retention", "prediction", "parallel_tool_calls"}
NEUTRAL = {         # fields that would change the answer, and the values that say: do not
    "frequency_penalty": (0, 0.0), "presence_penalty": (0, 0.0), "logit_bias": ({},), "logprobs": (False,),
    "top_logprobs": (0,), "echo": (False,), "best_of": (1,), "suffix": ("",), "tools": ([],),
    "functions": ([],), "tool_choice": ("none", "auto"), "function_call": ("none", "auto"),
    "modalities": (["text"],), "response_format": ({"type": "text"},)}
FINISH = {"eos": "stop", "stop": "stop", "length": "length"}
MAX_STOPS = 4                                       # as at OpenAI


class Refused(Exception):
    """A request that ends with an error: HTTP status, one sentence, and OpenAI's code for it, if there is
    one."""

    def __init__(self, status: int, message: str, code: str | None = None):
        super().__init__(status, message, code)
        self.status, self.message, self.code = status, message, code

    def body(self) -> dict:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        message = self.message
        if len(message) > 600:                      # it may quote what was sent
            message = message[:300] + " ... " + message[-280:]
        return {"error": {"message": message, "type": kind, "param": None, "code": self.code}}


@dataclass
class Model:
    """What `read` must know of the model that is served. `check` raises ValueError for a request it cannot
    take."""
    name: str
    tokenizer: object
    check: object
    default_tokens: int                             # of an answer where the body does not say
    max_tokens: int                                 # of an answer at most
    max_requests: int                               # of a body at most: prompts times n
    defaults: dict = field(default_factory=dict)    # threshold and block_length where the body does not say


@dataclass
class Ask:
    """A body that was understood. requests: of prompt i those at i * n to i * n + n - 1, which differ in
    their seed."""
    requests: list
    n: int
    stream: bool
    usage: bool                 # a last chunk with the usage
    canvas: bool                # tell the places that each step has committed


def read(raw: bytes, chat: bool, tenant: str, model: Model, seed: int) -> Ask:
    """Understand a body. `seed` is for one that gives none. Raises Refused with status 400 or 404."""
    try:
        body = json.loads(raw, parse_constant=no_json)
    except (ValueError, RecursionError) as e:
        raise Refused(400, f"The body is not valid JSON: {e}.") from None
    if not isinstance(body, dict):
        raise Refused(400, "The body is no JSON object; give one with the fields of OpenAI's API.")
    body = {name: value for name, value in body.items() if value is not None}
    check_fields(body, chat)
    if body.get("model", model.name) != model.name:
        raise Refused(404, f"The model {body['model']!r} does not exist; this server has {model.name!r}.",
                      "model_not_found")
    try:
        return understand(body, chat, tenant, model, seed)
    except ValueError as e:                         # UnicodeEncodeError of a lone surrogate is one, too
        raise Refused(400, f"{str(e).rstrip('.')}.") from None


def no_json(word: str):
    raise ValueError(f"{word} is no number of JSON")


def check_fields(body: dict, chat: bool) -> None:
    for name, value in body.items():
        if name in NEUTRAL:
            if not any(type(value) is type(v) and value == v for v in NEUTRAL[name]):
                raise Refused(400, f"{name} would change the answer and is not supported; leave it out.")
        elif name not in KNOWN[chat] | IGNORED:
            raise Refused(400, f"Unrecognized request argument supplied: {name}; leave it out.")


def understand(body: dict, chat: bool, tenant: str, model: Model, seed: int) -> Ask:
    stream, canvas = flag(body, "stream"), flag(body, "canvas")
    options = body.get("stream_options", {})
    if not isinstance(options, dict) or options.keys() - {"include_usage", "include_obfuscation"}:
        raise ValueError(f"stream_options is {options!r}; it must be an object that may hold include_usage")
    if not stream and (canvas or options):
        which = "canvas" if canvas else "stream_options"
        raise ValueError(f"{which} has an effect only with stream; set stream to true")
    length = body.get("max_completion_tokens", body.get("max_tokens", model.default_tokens))
    length = whole("max_tokens", length)
    if length > model.max_tokens:
        raise ValueError(f"max_tokens is {length}; this server generates at most {model.max_tokens}")
    stops = body.get("stop", [])
    stops = [stops] if isinstance(stops, str) else stops
    texts = isinstance(stops, list) and all(isinstance(s, str) and s for s in stops)
    if not texts or len(stops) > MAX_STOPS:
        raise ValueError(f"stop is {stops!r}; it must be a text, or a list of up to {MAX_STOPS}, none empty")
    n, seed = whole("n", body.get("n", 1)), whole("seed", body.get("seed", seed))
    prompts = read_prompts(body, chat, model.tokenizer)
    if not 1 <= n or len(prompts) * n > model.max_requests:
        raise ValueError(f"n is {n}, of {len(prompts)} prompts; it must be at least 1, and both come to at "
                         f"most {model.max_requests} answers")
    how = {name: body[name] for name in DECODING if name in body}
    other = how.keys() & {*PACES, "eps"} or how.get("alg_temp") or how.get("remasking") not in (
        None, "low_confidence")                     # what a threshold does not go with
    if not other and "threshold" in model.defaults:
        how["threshold"] = model.defaults["threshold"]
    if "eps" not in how and "block_length" in model.defaults:
        how.setdefault("block_length", min(model.defaults["block_length"], length))
    requests = [Request(ids, prefix_len=P, gen_length=length, seed=seed + i, salt=tenant,
                        stop=tuple(stops), **how)
                for ids, P in prompts for i in range(n)]
    for request in requests:
        model.check(request)
    return Ask(requests, n, stream, flag(options, "include_usage"), canvas)


def flag(body: dict, name: str) -> bool:
    if not isinstance(value := body.get(name, False), bool):
        raise ValueError(f"{name} is {value!r}; it must be true or false")
    return value


def read_prompts(body: dict, chat: bool, tokenizer) -> list:
    """[(ids, prefix_len)]. Of a chat of two messages the first is the prefix. In a longer one what stands
    before the last message is another at every turn: it takes what is stored of it, the first turn's prefix
    at least."""
    if chat:
        messages = body.get("messages")
        messages = [joined(m) for m in messages] if isinstance(messages, list) else messages
        ids, length = tokenizer.render({"messages": messages})
        return [(ids, length if len(messages) == 2 else None)]
    prompts = body.get("prompt", "")
    prompts = [prompts] if isinstance(prompts, str) else prompts
    if not isinstance(prompts, list) or not prompts or not all(isinstance(p, str) for p in prompts):
        raise ValueError("prompt must be a text or a list of texts; token ids are not taken here")
    return [(tokenizer.encode(p), None) for p in prompts]


def joined(message):
    """A message whose content is a list of text parts, with one text; any other as it is, for the tokenizer
    to judge."""
    parts = message.get("content") if isinstance(message, dict) else None
    if not isinstance(parts, list):
        return message
    texts = [p.get("text") for p in parts if isinstance(p, dict) and p.get("type") == "text"]
    if len(texts) < len(parts) or not all(isinstance(t, str) for t in texts):
        return message
    return {**message, "content": "".join(texts)}


class Text:
    """What can be said of one answer so far: its tokens up to the first undecided one.

    A diffusion model decides places in any order; what stands here only grows. Held back are the bytes of
    half a character and the beginning of what may become a stop text.
    """

    def __init__(self, decode, length: int, stops: list):
        self.decode, self.stops = decode, stops
        self.tokens, self.known, self.text = [None] * length, 0, ""

    def add(self, event) -> str:
        """The text that an event adds."""
        for place, token in event.committed:
            self.tokens[place] = token
        while self.known < len(self.tokens) and self.tokens[self.known] is not None:
            self.known += 1
        if event.result:
            text = event.result.text                # up to a stop text, if it came to one
        else:
            text = self.decode(self.tokens[:self.known]).rstrip("\ufffd")
            text = text[:len(text) - max((overlap(text, s) for s in self.stops), default=0)]
        if not text.startswith(self.text):
            if event.result:
                raise Refused(500, "The answer is not what was already sent of it; ask again.")
            return ""                               # a decoder that looks ahead: more will come
        new, self.text = text[len(self.text):], text
        return new


def overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` may be the beginning of `stop`."""
    return next((k for k in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:k])), 0)


class Form:
    """The JSON around an answer: a whole one, or the chunks of a stream."""

    def __init__(self, chat: bool, model: str):
        self.chat = chat
        id = ("chatcmpl-" if chat else "cmpl-") + uuid.uuid4().hex
        self.head = dict(id=id, created=int(time.time()), model=model)
        self.begun = set()

    def whole(self, texts: dict, finish: dict, usage: dict) -> dict:
        choices = []
        for i, text in sorted(texts.items()):
            said = dict(message=dict(role="assistant", content=text)) if self.chat else dict(text=text)
            choices.append(dict(index=i, finish_reason=finish[i], logprobs=None, **said))
        kind = "chat.completion" if self.chat else "text_completion"
        return dict(self.head, object=kind, choices=choices, usage=usage)

    def chunk(self, frame: dict) -> dict:
        """A chunk of a stream. canvas: an object {step, committed: [[place, text of the token], ...]}, no
        field of OpenAI's."""
        i, said = frame["index"], dict(text=frame["text"])
        if self.chat:
            role = {} if i in self.begun else dict(role="assistant")
            said = dict(delta=dict(role, content=frame["text"]))
        self.begun.add(i)
        canvas = {"canvas": frame["canvas"]} if frame.get("canvas") else {}
        return self.last([dict(index=i, finish_reason=frame.get("finish"), logprobs=None, **said, **canvas)])

    def last(self, choices=(), **usage) -> dict:
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        return dict(self.head, object=kind, choices=list(choices), **usage)


def add_usage(parts: list) -> dict:
    """The usage of a whole answer from those of its choices."""
    prompt, completion, cached = (sum(p[k] for p in parts) for k in ("prompt", "completion", "cached"))
    return dict(prompt_tokens=prompt, completion_tokens=completion, total_tokens=prompt + completion,
                prompt_tokens_details=dict(cached_tokens=cached))
