"""What the tokenizer files of a model folder say: the vocabulary, which of it is special, the chat template.

    words = read("checkpoints/tiny")      # None: the folder has no tokenizer files
    words.special, words.eos_ids, words.mask_id, words.template, words.library.encode("text")

Three layouts: tokenizer.json; vocab.json + merges.txt (Dream), read as the tokenizer.json that would say the
same; tokenizer.model (sentencepiece). Special ids come from the folder's files alone, whichever names them.
All files are UTF-8, with or without a byte order mark. Checked in tests/test_vocabulary.py on each layout.
"""
import json
import re
from pathlib import Path

import tokenizers

from files import BadInput
from hub.template import Template

MODEL_FILES = ("config.json", "generation_config.json")
PARTS = {"vocab.json", "merges.txt", "added_tokens.json", "tokenizer_config.json", "special_tokens_map.json"}
FLAGS = dict(single_word=False, lstrip=False, rstrip=False, normalized=False, special=False)
# Qwen2's rule: contractions, words, single digits, punctuation with its line ends, line ends, spaces
QWEN2_SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
               r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def read(path, mask_token=None, template_vars=None):
    """The folder's Vocabulary; None if it has no tokenizer files; ValueError, one sentence, if broken.

    mask_token: the spelling of the mask, where no file names it. template_vars: values for the chat template.
    """
    if not isinstance(template_vars or {}, dict):
        raise BadInput(f"template_vars is {template_vars!r}; it must be a dict of names and values")
    folder, has = Path(path), {p.name for p in Path(path).glob("*")}
    if not (has & {"tokenizer.json", "tokenizer.model"} or {"vocab.json", "merges.txt"} <= has):
        if has & PARTS:
            raise BadInput(f"{path} has neither tokenizer.json, nor vocab.json with merges.txt, nor "
                           "tokenizer.model.")
        return None
    try:
        return Vocabulary(folder, mask_token, template_vars or {})
    except Exception as error:                                    # the libraries raise no narrower one
        reason = error if isinstance(error, ValueError) else f"its files cannot be read ({error!r})"
        raise BadInput(f"The tokenizer in {path}: {reason}.") from error


class Vocabulary:
    """Spellings and ids, and which of them are special.

    spelling: id -> spelling. special: spelling -> id of what no text becomes, longest first; never: those
    ids. hidden: ids that are no text. ends: EOS and end of turn; eos_ids: these and fillers, all that end an
    answer. mask_id: or None. template: of chats.
    """

    def __init__(self, folder: Path, mask_token, template_vars):
        config = read_config(folder)
        data = read_data(folder, config)
        added = read_added_tokens(folder, config, data)
        self.library = Pieces(folder, added) if data is None else Fast(data, added)
        self.ids = ids = self.library.ids
        self.spelling = {i: word for word, i in ids.items()}
        if len(self.spelling) < len(ids):
            raise BadInput("two tokens have one id")
        named = read_named(config, ids)
        self.mask_id, named["mask_token"] = read_mask(folder, ids, named["mask_token"], mask_token)
        values = {**named, **thinking(folder), **template_vars}
        self.template = Template(folder, config.get("chat_template"), values)
        self.template.check(template_vars)
        sample = self.template.sample()
        eos = read_ids(folder, "eos_token_id") | {ids.get(named["eos_token"])}
        pad = read_ids(folder, "pad_token_id") | {ids.get(named["pad_token"])}

        declared = self.library.control | (declared_special(config, named) & ids.keys())
        self.special = self._choose_special(declared, sample, {self.mask_id, *eos, *pad})
        self.never = set(self.special.values()) - {self.library.unknown}
        self._finder = finder({word: added.get(word, FLAGS) for word in self.special})
        self.library.load(self.special)
        fillers = self._fillers(pad)
        self.ends = {*eos, self._end_of_turn(sample)} - {None}
        self.eos_ids = self.ends | fillers
        # An answer may show markup that no file declares: <tool_call>.
        self.hidden = {self.mask_id, *eos, *fillers, *(ids[word] for word in declared)}

    def _choose_special(self, declared, sample, named):
        """Spelling -> id of what files declare special, and of the markup that a template or a name uses."""
        written = self.template.source + "\n" + sample
        used = {word for word in self.library.markup
                if word in written or self.ids[word] in named or is_filler(word)}
        return {word: self.ids[word] for word in sorted(declared | used, key=lambda word: (-len(word), word))}

    def _fillers(self, pad):
        """Ids that fill what is left of a canvas; neither the mask nor an ordinary word named as padding."""
        found = {i for word, i in self.special.items() if i in pad or is_filler(word)}
        return found - {self.mask_id, self.library.unknown}

    def _end_of_turn(self, sample):
        """The id that the template writes behind an answer, if it is special: <|eot_id|>, <|im_end|>."""
        if Template.ANSWER not in sample:
            return None
        behind = sample.rpartition(Template.ANSWER)[2]
        return next((i for i, *_ in self.find_special(behind)), None)

    def find_special(self, text):
        """(id, start, end) of each special token that `text` spells, with the spaces that it takes."""
        found = self._finder.encode(text)
        for number, (start, end) in zip(found.ids, found.offsets):
            if number:                                              # 0 is what stands between them
                yield self.special[self._finder.id_to_token(number)], start, end


# -- the files ----------------------------------------------------------------------------------------------

def read_json(path):
    """The JSON object in a file; empty if there is no such file."""
    try:
        value = json.loads(path.read_text("utf-8-sig")) if path.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadInput(f"{path.name} holds no JSON object")
    return value


def read_config(folder):
    """tokenizer_config.json; what it leaves out or gives as null, special_tokens_map.json may say."""
    config = read_json(folder / "tokenizer_config.json")
    given = {key: value for key, value in config.items() if value is not None}
    return {**read_json(folder / "special_tokens_map.json"), **given}


def read_data(folder, config):
    """What tokenizer.json holds, or would hold; None for a folder with tokenizer.model."""
    if (folder / "tokenizer.json").is_file():
        return read_json(folder / "tokenizer.json")
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        kind = config.get("tokenizer_class") or "Qwen2Tokenizer"
        if not kind.startswith(("Qwen2", "Dream")):         # GPT-2's and others cut words by other rules
            raise BadInput(f"tokenizer_class is {kind}, and vocab.json with merges.txt is read as a "
                           "Qwen2Tokenizer only; save the tokenizer as tokenizer.json")
        return join_vocab_and_merges(folder)
    return None


def join_vocab_and_merges(folder):
    """The tokenizer.json of vocab.json + merges.txt: byte-level BPE as Qwen2 and Dream have it."""
    lines = (folder / "merges.txt").read_text("utf-8-sig").split("\n")
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
    """The tokens that go by a name, bos_token to pad_token, as a template may write them; "" for none."""
    named = dict.fromkeys(("bos_token", "eos_token", "mask_token", "pad_token"), "")
    for name, token in config.items():
        word = spelling_of(token) if name.endswith("_token") else None
        if word and isinstance(word, str):
            named[name] = word
    for name in ("bos_token", "eos_token", "mask_token"):
        if named[name] and named[name] not in ids:
            raise BadInput(f"{name} is {named[name]!r}, which has no id in the vocabulary")
    return named


def read_ids(folder, key):
    """All ids that config.json and generation_config.json give to `key`."""
    return {i for name in MODEL_FILES for i in read_id_list(folder / name, key)}


def read_id_list(path, key):
    """The ids that a file gives to `key`: none, one, or a list."""
    value = read_json(path).get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int for i in ids):
        raise BadInput(f"{key} of {path.name} is {value!r}; it must be an id or a list of ids")
    return ids


def read_mask(folder, ids, word, option):
    """(id, spelling) of the mask token. The model's files, the tokenizer's and the option must agree."""
    said = {}
    for name in MODEL_FILES:
        for i in read_id_list(folder / name, "mask_token_id"):
            said[f"mask_token_id {i} in {name}"] = i
    if word:
        said[f"mask_token {word!r} of its files (id {ids[word]})"] = ids[word]
    if option:
        if option not in ids:
            raise BadInput(f"mask_token is {option!r}, which is no token of the vocabulary; correct it")
        said[f"the option mask_token {option!r} (id {ids[option]})"] = ids[option]
    if len(set(said.values())) > 1:
        raise BadInput(f"{' and '.join(said)} disagree; leave out or correct the wrong one")
    return next(iter(said.values()), None), option or word


def thinking(folder):
    """The default template variable. With false, Qwen3's template writes an empty think block itself.

    The models that dllm made of Qwen3 are trained so, and open their answers with one else. CoDA's authors
    leave the variable out.
    """
    return {} if read_json(folder / "config.json").get("model_type") == "CoDA" else {"enable_thinking": False}


# -- special tokens -----------------------------------------------------------------------------------------

def declared_special(config, named):
    """Spellings that the config calls special. A name of one character, a pad_token "!", stays text."""
    more = []
    for key in ("additional_special_tokens", "extra_special_tokens"):       # the second: since transformers 5
        tokens = config.get(key) or []
        more += tokens.values() if isinstance(tokens, dict) else tokens
    return {spelling_of(token) for token in more} | {word for word in named.values() if len(word) > 1}


def is_markup(word):
    """<|user|>, </s> or [CLS]: special where a template writes it, whether or not a file flags it so."""
    return len(word) > 2 and word[0] in "<[" and word[-1] in ">]" and not any(map(str.isspace, word))


def is_filler(word):
    """<|dlm_pad|>, [PAD]. DiffuCoder fills what is left of its canvas so, whatever its files name."""
    return is_markup(word) and word.strip("<[|]>").lower().split("_")[-1] == "pad"


def finder(flags):
    """A tokenizer that knows these tokens and nothing else, and so finds them as the library does.

    Their flags say what they take with them or ask for: lstrip and rstrip (Phi's <|end|>, BERT's [MASK]) the
    spaces beside them, single_word that no letter stands there.
    """
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel({"": 0}, unk_token=""))
    core.add_special_tokens([
        tokenizers.AddedToken(word, single_word=f["single_word"], lstrip=f["lstrip"], rstrip=f["rstrip"],
                              normalized=f["normalized"]) for word, f in flags.items()])
    return core


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
                raise BadInput(f"token {token['content']!r} cannot have the id that the files give it")

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
