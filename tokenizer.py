"""Text <-> token ids for a model folder, without transformers.

    tok = Tokenizer.from_folder("checkpoints/tiny")      # None: the folder has no tokenizer
    ids, prefix_len = tok.chat([{"role": "user", "content": "Who sits in room 42?"}])      # and back: tok.decode(ids)

Reads tokenizer.json, vocab.json + merges.txt (Dream), or tokenizer.model; special ids come from the folder's files alone. A
prompt is tokenized once, whole; its prefix is a number of ids, found through character offsets. Only a chat template writes
special tokens: text that spells one stays text, so no prompt injects MASK, EOS or a role. Checked (tests/test_tokenizer.py)
id for id against tokenizers.Tokenizer.encode on the LLaDA, Dream and embedded layouts.
"""
import contextlib
import json
import os
import re
from datetime import datetime
from pathlib import Path

import jinja2.sandbox
import tokenizers

ROLES = ("system", "user", "assistant", "tool")   # a free role could spell a token: '<|' + role + '|>'
FLAGS = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=False)
# Qwen2's rule: contractions, words, single digits, punctuation with its line ends, line ends, spaces
QWEN2_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


class Tokenizer:
    @classmethod
    def from_folder(cls, path):
        """The folder's tokenizer; None if it has no tokenizer files; ValueError, one sentence, if they are broken."""
        folder, has = Path(path), {p.name for p in Path(path).glob("*")}
        try:
            if "tokenizer.json" in has:
                return cls(folder, _object(folder / "tokenizer.json"))
            if {"vocab.json", "merges.txt"} <= has:
                return cls(folder, _qwen2(folder))
            if "tokenizer.model" in has:
                return cls(folder, None)
        except Exception as error:                                    # the libraries raise no narrower one
            raise ValueError(f"The tokenizer in {path} cannot be read: "
                             f"{error if isinstance(error, ValueError) else repr(error)}.") from error
        if has & {"vocab.json", "merges.txt", "added_tokens.json", "tokenizer_config.json", "special_tokens_map.json"}:
            raise ValueError(f"{path} has neither tokenizer.json, nor vocab.json with merges.txt, nor tokenizer.model.")

    def __init__(self, folder, data):
        config, *models = (_object(folder / f"{name}.json") for name in ("tokenizer_config", "config", "generation_config"))
        config = {**_object(folder / "special_tokens_map.json"), **{k: v for k, v in config.items() if v is not None}}
        added = {t["content"]: {**FLAGS, **t} for t in (data or {}).get("added_tokens") or []}
        for spelling, i in _object(folder / "added_tokens.json").items():
            added.setdefault(spelling, {**FLAGS, "id": i})
        for i, t in config.get("added_tokens_decoder", {}).items():
            added[t["content"]] = {**FLAGS, **added.get(t["content"], {}), **t, "id": int(i)}
        if data is None:                                              # to sentencepiece all added tokens are special
            from sentencepiece import SentencePieceProcessor
            core = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
            vocab = {core.id_to_piece(i): i for i in range(core.get_piece_size())}
            symbols, unknown = list(vocab), core.unk_id()
            fixed = {s for s, i in vocab.items() if core.is_control(i) or i == unknown} | added.keys()
        else:                                                         # Unigram has a list of pieces, the others a table
            model, vocab = data["model"], data["model"]["vocab"]
            vocab = vocab if isinstance(vocab, dict) else {s: i for i, (s, _) in enumerate(vocab)}
            symbols, unknown = added, vocab.get(model.get("unk_token"), model.get("unk_id"))
            fixed = {s for s, t in added.items() if t["special"]}
        vocab.update((s, t["id"]) for s, t in added.items())          # in the table itself: ids may have gaps
        self._known = {i: s for s, i in vocab.items()}
        if len(self._known) < len(vocab):
            raise ValueError("two tokens have one id")
        self.vocab_size = max(self._known, default=-1) + 1
        named = {k: v["content"] if isinstance(v, dict) else v for k, v in config.items() if k.endswith("_token")}
        named = {"bos_token": "", "eos_token": "", **{k: v for k, v in named.items() if v and isinstance(v, str)}}
        if lost := [k for k in ("bos_token", "eos_token", "mask_token") if named.get(k) and named[k] not in vocab]:
            raise ValueError(f"{lost[0]} is {named[lost[0]]!r}, which has no id in the vocabulary")
        self._named, (self._source, self._template) = named, _template(folder, config.get("chat_template"))
        self.has_chat, sample = bool(self._source), ""                # a chat up to the end of an answer, with all markup
        for roles in (ROLES[1:3], ROLES[:3]):                         # some templates refuse a system message
            with contextlib.suppress(ValueError):
                sample = self._render([{"role": r, "content": "answer"} for r in roles], datetime.now(), answer=False)
        fixed |= {t["content"] if isinstance(t, dict) else t for t in config.get("additional_special_tokens") or []}
        fixed |= {v for v in named.values() if len(v) > 1}            # a pad_token "!" stays text
        ids = {k: [m.get(f"{k}_token_id") for m in models] for k in ("eos", "mask")}         # the model's own
        ids = {k: {i for v in vs for i in (v if isinstance(v, list) else [v]) if i is not None} for k, vs in ids.items()}
        # Markup that masks, ends or is written by the template is special even unflagged; decode shows the last (<tool_call>).
        markup = {s for s in symbols if re.fullmatch(r"[<\[]\S+[>\]]", s) and (
            s in self._source or s in sample or vocab[s] in ids["eos"] | ids["mask"])}
        self.special = {s: vocab[s] for s in sorted(fixed & vocab.keys() | markup, key=len, reverse=True)}   # longest first
        self._hidden = {vocab[s] for s in fixed & vocab.keys()} | ids["eos"] | ids["mask"]
        self._never = set(self.special.values()) - {unknown}
        flags = [(re.escape(s), added.get(s, FLAGS)) for s in self.special]
        self._find = re.compile("|".join(r"\s*" * t["lstrip"] + s + r"\s*" * t["rstrip"] for s, t in flags) or "(?!)")
        self._starts = re.compile(f"(?={'|'.join(s for s, _ in flags) or '(?!)'}).", re.S)
        self._encode, self._decode = _pieces(core, self.special) if data is None else _fast(data, added, self.special)
        self.mask_id = vocab.get(named.get("mask_token"), min(ids["mask"], default=None))
        turn_end = self._find.search(sample.rpartition("answer")[2]) if "answer" in sample else None
        self.eos_ids = ids["eos"] | {vocab[s] for s in (named["eos_token"], turn_end and turn_end.group().strip()) if s}

    def encode(self, text):
        """Ids of `text` as ordinary text: no BOS, and the spelling of a special token never becomes that token."""
        return [i for i, _, _ in self._plain(text)]

    def render(self, request):
        """(ids, prefix_len) of {"messages": [...]}, or of {"prefix", "prompt"} (the first may be absent): as system and user
        message where there is a chat template, else as one running text."""
        if "messages" in request:
            return self.chat(request["messages"])
        if not self.has_chat:
            return self.split(request.get("prefix", ""), request["prompt"])
        system = [{"role": "system", "content": request["prefix"]}] if "prefix" in request else []
        return self.chat([*system, {"role": "user", "content": request["prompt"]}])

    def split(self, prefix, rest):
        """(ids, prefix_len) of prefix + rest as one text; prefix_len counts the leading tokens that end within `prefix`."""
        return _ids(self._plain(prefix + rest), len(prefix))

    def chat(self, messages):
        """(ids, prefix_len) of a chat [{"role", "content"}, ...] for its answer; prefix_len ids precede the last content."""
        if not self.has_chat:
            raise ValueError("This model has no chat template; give it plain text.")
        if not (isinstance(messages, list) and messages and all(isinstance(m, dict) and m.keys() == {"role", "content"} and
                m["role"] in ROLES and isinstance(m["content"], str) for m in messages) and messages[-1]["role"] == "user"):
            raise ValueError(f"A chat is a list of messages, role ({', '.join(ROLES)}) and content string, the last a user's.")
        # Where content spells a special token, its first character gets a stand-in that nobody uses: the special
        # spellings found in the rendering are then the template's own. Stand-ins keep every length.
        used = set(self._source).union(*self.special, *(m["content"] for m in messages))
        free = (c for c in map(chr, range(0xE000, 0x110000)) if c not in used)
        stand, probe = {head: next(free) for head in {s[0] for s in self.special}}, next(free)
        safe = [{**m, "content": self._starts.sub(lambda x: stand[x.group()], m["content"])} for m in messages]
        now = datetime.now()                                          # one clock for both renderings
        text, other = self._render(safe, now), self._render([*safe[:-1], {"role": "user", "content": probe}], now)
        if probe not in other:
            raise ValueError("The chat template leaves out the last message.")
        tokens, at, back = [], 0, {ord(v): k for k, v in stand.items()}
        for found in [*self._find.finditer(text), None]:
            end = found.start() if found else len(text)
            tokens += [(i, at + s, at + e) for i, s, e in self._plain(text[at:end].translate(back))]
            if found:
                word = found.group()
                tokens.append((self.special[word if word in self.special else word.strip()], end, at := found.end()))
        return _ids(tokens, len(os.path.commonprefix([text, other])))

    def decode(self, ids):
        """The text of `ids`; special tokens are skipped, and ids that no token has: output heads are padded with some."""
        return self._decode([i for i in ids if i in self._known and i not in self._hidden])

    def _plain(self, text):
        """[(id, start, end)] of ordinary text, in characters; `end` reaches over what no other token covers."""
        text.encode()                                                 # a lone surrogate: UnicodeEncodeError, a ValueError
        found = self._encode(text)
        if cuts := {s + 1 for i, (s, _) in found if i in self._never} - {len(text) + 1}:
            cuts = sorted({0, len(text)} | cuts)                      # a vocabulary whose merges spell a special token:
            if len(cuts) == 2:                                        # cut the text inside the spelling
                raise ValueError(f"{text!r} can only be encoded as a special token.")
            return [(i, a + s, a + e) for a, b in zip(cuts, cuts[1:]) for i, s, e in self._plain(text[a:b])]
        tokens, after, span, end = [], len(text), None, 0
        for i, (s, e) in reversed(found):
            end = end if (s, e) == span else max(e, after)            # NFC gives "e" + accent the span of "e" alone;
            after, span = s, (s, e)                                   # the bytes of one character share its end
            tokens.append((i, s, end))
        return tokens[::-1]

    def _render(self, messages, now, answer=True):
        try:
            return self._template.render(messages=messages, add_generation_prompt=answer, tools=None, documents=None,
                                         strftime_now=now.strftime, **self._named)
        except Exception as error:                                    # a template is somebody else's program
            raise ValueError(f"The chat template fails: {error or type(error).__name__}.") from error


def _ids(tokens, boundary):
    """(ids, how many leading ones end at or before `boundary`); one of no width there belongs to what follows."""
    outside = (n for n, (_, s, e) in enumerate(tokens) if s >= boundary or e > boundary)
    return [i for i, _, _ in tokens], next(outside, len(tokens))


def _object(path):
    """The JSON object in a file; empty if there is no such file."""
    try:
        return json.loads(path.read_text("utf-8")) if path.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is not valid JSON: {error}") from error


def _qwen2(folder):
    """What a tokenizer.json would hold for vocab.json + merges.txt: byte-level BPE as Qwen2 and Dream have it."""
    merges = [m.split(" ") for m in (folder / "merges.txt").read_text("utf-8").split("\n") if m and m[:8] != "#version"]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": QWEN2_SPLIT}, "behavior": "Isolated", "invert": False}
    return {"version": "1.0", "normalizer": {"type": "NFC"}, "decoder": level,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
            "model": {"type": "BPE", "vocab": _object(folder / "vocab.json"), "merges": merges}}


def _fast(data, added, special):
    """(encode, decode) with the tokenizers library: text -> [(id, (start, end))], and ids -> text."""
    tokens = sorted(({**t, "content": s, "special": s in special} for s, t in added.items()), key=lambda t: t["id"])
    # Cut or fill no text. No post-processor: it trims offsets by the spaces that a token covers, and adds BOS.
    data.update(added_tokens=tokens, truncation=None, padding=None, post_processor=None)
    core = tokenizers.Tokenizer.from_str(json.dumps(data))
    if wrong := [t["content"] for t in tokens if core.token_to_id(t["content"]) != t["id"]]:
        raise ValueError(f"token {wrong[0]!r} cannot have the id that the files give it")
    core.encode_special_tokens = True
    return (lambda text: [*zip((out := core.encode(text, add_special_tokens=False)).ids, out.offsets)],
            lambda ids: core.decode(ids, skip_special_tokens=False))


def _pieces(core, special):
    """The same with sentencepiece; a special piece of type 4, found in any text, gets type 3, never found."""
    blob = core.serialized_model_proto()
    for word in map(str.encode, special):                             # a ModelProto holds piece, score, type in a row
        blob = re.sub(b"(\n" + re.escape(bytes([len(word) & 127]) + word) + rb"\x15.{4}\x18)\x04", b"\\1\3", blob, flags=re.S)
    core.LoadFromSerializedProto(blob)
    return lambda text: [*zip(*map(core.encode(text, return_type="offset_mapping").get, ("ids", "offsets")))], core.decode


def _template(folder, source):
    """(source, compiled) of the chat template: a file, a string, or of a list the one named "default" or the only one."""
    def raise_exception(message):
        raise jinja2.TemplateError(message)
    if (folder / "chat_template.jinja").is_file():
        source = (folder / "chat_template.jinja").read_text("utf-8")
    if isinstance(source, list):
        source = next((t["template"] for t in source if t["name"] == "default" or len(source) == 1), None)
    class Undefined(jinja2.Undefined):                                # `{% if tools %}` is fair, writing it is not
        __str__ = jinja2.Undefined._fail_with_undefined_error
    env = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, undefined=Undefined, extensions=["jinja2.ext.loopcontrols"])
    env.globals["raise_exception"] = raise_exception                  # jinja's own tojson would escape the stand-ins
    env.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    return source or "", env.from_string(source or "")
