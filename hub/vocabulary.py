"""What the tokenizer files of a model folder say: the vocabulary, which of it is special, the chat template.

    words = read("checkpoints/tiny")      # None: the folder has no tokenizer files
    words.special, words.eos_ids, words.mask_id, words.template, words.library.encode("text")

Three layouts: tokenizer.json; vocab.json + merges.txt (Dream), read as the tokenizer.json that would say the
same; tokenizer.model (sentencepiece). Special ids come from the folder's files alone, whichever names them.
Checked in tests/test_tokenizer.py on folders of each layout.
"""
import json
import re
from pathlib import Path

import tokenizers

from hub.template import Template

PARTS = {"vocab.json", "merges.txt", "added_tokens.json", "tokenizer_config.json", "special_tokens_map.json"}
FLAGS = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=False)
# Qwen2's rule: contractions, words, single digits, punctuation with its line ends, line ends, spaces
QWEN2_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
               r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def read(path):
    """The folder's Vocabulary; None if it has no tokenizer files; ValueError, one sentence, if broken."""
    folder, has = Path(path), {p.name for p in Path(path).glob("*")}
    if not (has & {"tokenizer.json", "tokenizer.model"} or {"vocab.json", "merges.txt"} <= has):
        if has & PARTS:
            raise ValueError(f"{path} has neither tokenizer.json, nor vocab.json with merges.txt, nor "
                             "tokenizer.model.")
        return None
    try:
        return Vocabulary(folder)
    except Exception as error:                                    # the libraries raise no narrower one
        reason = error if isinstance(error, ValueError) else repr(error)
        raise ValueError(f"The tokenizer in {path} cannot be read: {reason}.") from error


class Vocabulary:
    """Spellings and ids, and which of them are special.

    spelling: id -> spelling. special: spelling -> id of what no text becomes, longest first; never: those
    ids. hidden: ids that are no text. eos_ids: ids that end an answer. mask_id: or None. template: of chats.
    """

    def __init__(self, folder: Path):
        config = read_config(folder)
        data = read_data(folder)
        added = read_added_tokens(folder, config, data)
        self.library = library = Pieces(folder, added) if data is None else Fast(data, added)
        ids = library.ids
        self.spelling = {i: word for word, i in ids.items()}
        if len(self.spelling) < len(ids):
            raise ValueError("two tokens have one id")
        named = read_named(config, ids)
        self.template = Template(folder, config.get("chat_template"), named)
        sample = self.template.sample()
        eos, mask = (read_ids(folder, key) for key in ("eos_token_id", "mask_token_id"))

        declared = library.control | (declared_special(config, named) & ids.keys())
        used = {word for word in library.markup
                if word in self.template.source or word in sample or ids[word] in eos | mask}
        self.special = {word: ids[word] for word in sorted(declared | used, key=len, reverse=True)}
        self.never = set(self.special.values()) - {library.unknown}
        self.hidden = {ids[word] for word in declared} | eos | mask     # answers may show markup: <tool_call>
        self._pattern = pattern([(word, added.get(word, FLAGS)) for word in self.special])
        library.load(self.special)
        self.mask_id = ids.get(named.get("mask_token"), min(mask, default=None))
        end = ids.get(named["eos_token"])
        self.eos_ids = (eos | {end, self._end_of_turn(sample)}) - {None}

    def _end_of_turn(self, sample):
        """The id that the template writes behind an answer, if it is special: <|eot_id|>, <|im_end|>."""
        if Template.ANSWER not in sample:
            return None
        behind = sample.rpartition(Template.ANSWER)[2]
        return next((i for i, *_ in self.find_special(behind)), None)

    def find_special(self, text):
        """(id, start, end) of each special token that `text` spells, with the spaces that it takes."""
        for found in self._pattern.finditer(text):
            yield self.special[found[found.lastindex]], found.start(), found.end()


# -- the files ----------------------------------------------------------------------------------------------

def read_json(path):
    """The JSON object in a file; empty if there is no such file."""
    try:
        return json.loads(path.read_text("utf-8")) if path.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name} is not valid JSON: {error}") from error


def read_config(folder):
    """tokenizer_config.json; what it leaves out or gives as null, special_tokens_map.json may say."""
    config = read_json(folder / "tokenizer_config.json")
    given = {key: value for key, value in config.items() if value is not None}
    return {**read_json(folder / "special_tokens_map.json"), **given}


def read_data(folder):
    """What tokenizer.json holds, or would hold; None for a folder with tokenizer.model."""
    if (folder / "tokenizer.json").is_file():
        return read_json(folder / "tokenizer.json")
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return join_vocab_and_merges(folder)
    return None


def join_vocab_and_merges(folder):
    """The tokenizer.json of vocab.json + merges.txt: byte-level BPE as Qwen2 and Dream have it."""
    lines = (folder / "merges.txt").read_text("utf-8").split("\n")
    merges = [line.split(" ") for line in lines if line and not line.startswith("#version")]
    split = {"type": "Split", "pattern": {"Regex": QWEN2_SPLIT}, "behavior": "Isolated", "invert": False}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {"version": "1.0", "normalizer": {"type": "NFC"}, "decoder": level,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
            "model": {"type": "BPE", "vocab": read_json(folder / "vocab.json"), "merges": merges}}


def read_added_tokens(folder, config, data):
    """Added tokens, spelling -> flags and id, merged from the three files that may name them.

    added_tokens.json knows ids alone; added_tokens_decoder of tokenizer_config.json has the last word.
    """
    added = {token["content"]: {**FLAGS, **token} for token in (data or {}).get("added_tokens") or []}
    for word, i in read_json(folder / "added_tokens.json").items():
        added.setdefault(word, {**FLAGS, "id": i})
    for i, token in config.get("added_tokens_decoder", {}).items():
        word = token["content"]
        added[word] = {**FLAGS, **added.get(word, {}), **token, "id": int(i)}
    return added


def spelling_of(token):
    """A token of a config: its spelling, or an object that holds it."""
    return token["content"] if isinstance(token, dict) else token


def read_named(config, ids):
    """The tokens that go by a name, bos_token to mask_token, as a template may write them."""
    named = {"bos_token": "", "eos_token": ""}
    for name, token in config.items():
        word = spelling_of(token) if name.endswith("_token") else None
        if word and isinstance(word, str):
            named[name] = word
    for name in ("bos_token", "eos_token", "mask_token"):
        if named.get(name) and named[name] not in ids:
            raise ValueError(f"{name} is {named[name]!r}, which has no id in the vocabulary")
    return named


def read_ids(folder, key):
    """The ids that config.json and generation_config.json give to `key`, one or a list."""
    ids = set()
    for name in ("config.json", "generation_config.json"):
        value = read_json(folder / name).get(key)
        ids.update(value if isinstance(value, list) else [value])
    return ids - {None}


# -- special tokens -----------------------------------------------------------------------------------------

def declared_special(config, named):
    """Spellings that the config calls special. A name of one character, a pad_token "!", stays text."""
    more = {spelling_of(token) for token in config.get("additional_special_tokens") or []}
    return more | {word for word in named.values() if len(word) > 1}


def is_markup(word):
    """<|user|>, </s> or [CLS]: special where a template writes it, whether or not a file flags it so."""
    return len(word) > 2 and word[0] in "<[" and word[-1] in ">]" and not any(map(str.isspace, word))


def pattern(words):
    """A regular expression of the spellings, each one a group, in the order given.

    A token with lstrip or rstrip (Phi's <|end|>, BERT's [MASK]) takes the spaces beside it.
    """
    spaces = lambda flag: r"\s*" if flag else ""
    return re.compile("|".join(spaces(flags["lstrip"]) + f"({re.escape(word)})" + spaces(flags["rstrip"])
                               for word, flags in words) or "(?!)")


# -- the libraries ------------------------------------------------------------------------------------------
# ids: spelling -> id. control: spellings that are special by their kind. markup: those that are if a template
# uses them. unknown: the id of what has no token. load(special): from then on no text becomes one of these.
# encode(text) -> [(id, (start, end))] in characters, decode(ids) -> text.

class Fast:
    """The tokenizers library on what tokenizer.json holds."""

    def __init__(self, data, added):
        model, vocab = data["model"], data["model"]["vocab"]
        if not isinstance(vocab, dict):                           # Unigram has a list of pieces and scores
            vocab = {word: i for i, (word, _) in enumerate(vocab)}
        self.data, self.added, self.ids = data, added, vocab
        self.unknown = vocab.get(model.get("unk_token"), model.get("unk_id"))
        self.control = {word for word, flags in added.items() if flags["special"]}
        self.markup = set(filter(is_markup, added))
        # In the model's own table: an added token's id may leave a gap, which the library would close.
        vocab.update((word, flags["id"]) for word, flags in added.items())

    def load(self, special):
        """No text is cut or filled. No post-processor: it adds BOS and trims spaces off the offsets."""
        tokens = sorted(({**flags, "content": word, "special": word in special}
                         for word, flags in self.added.items()), key=lambda token: token["id"])
        self.data.update(added_tokens=tokens, truncation=None, padding=None, post_processor=None)
        self.core = tokenizers.Tokenizer.from_str(json.dumps(self.data))
        self.core.encode_special_tokens = True                    # as text, that is
        for token in tokens:
            if self.core.token_to_id(token["content"]) != token["id"]:
                raise ValueError(f"token {token['content']!r} cannot have the id that the files give it")

    def encode(self, text):
        found = self.core.encode(text, add_special_tokens=False)
        return list(zip(found.ids, found.offsets))

    def decode(self, ids):
        return self.core.decode(ids, skip_special_tokens=False)


class Pieces:
    """The sentencepiece library on tokenizer.model. Its control pieces and all added tokens are special."""

    def __init__(self, folder, added):
        from sentencepiece import SentencePieceProcessor
        self.core = core = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
        self.ids, self.unknown = {core.id_to_piece(i): i for i in range(core.get_piece_size())}, core.unk_id()
        control = {word for word, i in self.ids.items() if core.is_control(i) or i == self.unknown}
        self.control = control | added.keys()
        self.markup = set(filter(is_markup, self.ids))
        self.ids.update((word, flags["id"]) for word, flags in added.items())

    def load(self, special):
        """Make special pieces of type 4 (user defined: found in any text) type 3 (control: never found).

        A ModelProto holds piece (field 1), score (2: a float) and type (3) in a row.
        """
        blob = self.core.serialized_model_proto()
        for word in map(str.encode, special):
            piece = b"\n" + re.escape(bytes([len(word) & 127]) + word)
            blob = re.sub(b"(" + piece + rb"\x15.{4}\x18)\x04", b"\\1\3", blob, flags=re.S)
        self.core.LoadFromSerializedProto(blob)

    def encode(self, text):
        found = self.core.encode(text, return_type="offset_mapping")
        return list(zip(found["ids"], found["offsets"]))

    def decode(self, ids):
        return self.core.decode(ids)
