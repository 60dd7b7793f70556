"""Text <-> token ids for a model folder, without transformers.

    tok = Tokenizer.from_folder("checkpoints/tiny")      # None: the folder has no tokenizer
    ids, prefix_len = tok.chat([{"role": "user", "content": "Who sits in room 42?"}])
    text = tok.decode(ids)

A prompt is tokenized once, whole; its prefix is a number of its ids, found through character offsets. Only
a chat template (hub/template.py) writes special tokens: text that spells one stays text, so that no prompt
injects MASK, EOS or a role. What the folder's files say is read in hub/vocabulary.py. Checked
(tests/test_tokenizer.py) id for id against tokenizers.Tokenizer.encode on the LLaDA, Dream and embedded
layouts.
"""
import os
from datetime import datetime
from typing import NamedTuple

from files import BadInput
from hub import vocabulary
from hub.template import StandIns

ROLES = ("system", "user", "assistant", "tool")   # a free role could spell a token: '<|' + role + '|>'


class Token(NamedTuple):
    """An id and the characters that it stands for, text[start:end]."""
    id: int
    start: int
    end: int


class Tokenizer:
    """Encode, render, decode.

    special: spelling -> id of what no text becomes. eos_ids: ids that end an answer. mask_id: or None.
    vocab_size: one more than the largest id. has_chat: there is a chat template.
    """

    @classmethod
    def from_folder(cls, path, *, mask_token=None, template_vars=None):
        """The folder's tokenizer; None if it has no tokenizer files; ValueError if they are broken.

        mask_token: the spelling of the mask token, for folders that do not name it. template_vars: values for
        the variables of the chat template, as {"enable_thinking": True}.
        """
        words = vocabulary.read(path, mask_token, template_vars)
        if not words and (mask_token or template_vars):
            raise BadInput(f"{path} has no tokenizer files, which mask_token and template_vars are for; "
                           "leave them out")
        return words and cls(words)

    def __init__(self, words: vocabulary.Vocabulary):
        self.words, self.template = words, words.template
        self.special, self.mask_id = words.special, words.mask_id
        self.ends, self.eos_ids = words.ends, words.eos_ids
        self.vocab_size, self.has_chat = max(words.spelling, default=-1) + 1, words.template.exists

    def encode(self, text):
        """Ids of `text` as ordinary text: no BOS, and what spells a special token never becomes it."""
        return [token.id for token in self._ordinary(text)]

    def render(self, request):
        """(ids, prefix_len) of {"messages": [...]} or {"prefix", "prompt", "raw"}, raw and prefix optional.

        Where there is a chat template, prefix and prompt are its system and user message; else, or if raw is
        true, they are one running text, as given.
        """
        _check_request(request)
        if "messages" in request:
            return self.chat(request["messages"])
        if request.get("raw") or not self.has_chat:
            return self.split(request.get("prefix", ""), request["prompt"])
        system = [{"role": "system", "content": request["prefix"]}] if "prefix" in request else []
        return self.chat([*system, {"role": "user", "content": request["prompt"]}])

    def split(self, prefix, rest):
        """(ids, prefix_len) of prefix + rest as one text; prefix_len ids end within `prefix`."""
        return _count_inside(self._ordinary(prefix + rest), len(prefix))

    def chat(self, messages):
        """(ids, prefix_len) of a chat [{"role", "content"}, ...] for its answer.

        prefix_len ids precede the last content: those that the same chat has with any other question.
        """
        if not self.has_chat:
            raise BadInput("This model has no chat template; give it plain text.")
        _check_messages(messages)
        foreign = (self.template.source, str(self.template.values), *(m["content"] for m in messages))
        stand_ins = StandIns(self.special, *foreign)
        safe = [{**m, "content": stand_ins.put(m["content"])} for m in messages]
        now = datetime.now()                                          # one clock for both renderings
        text = self.template.render(safe, now)
        other = self.template.render([*safe[:-1], {"role": "user", "content": stand_ins.unused}], now)
        if stand_ins.unused not in other:
            raise BadInput("The chat template leaves out the last message.")
        tokens = self._rendered(text, stand_ins.take_back)
        return _count_inside(tokens, len(os.path.commonprefix([text, other])))

    def decode(self, ids):
        """The text of `ids` without special tokens, and without ids that no token has: heads are padded."""
        known, hidden = self.words.spelling, self.words.hidden
        return self.words.library.decode([i for i in ids if i in known and i not in hidden])

    def _rendered(self, text, take_back):
        """The tokens of a rendering: special ones where it spells them, and ordinary text between."""
        _check_letters(text)
        tokens, at = [], 0
        for i, start, end in self.words.find_special(text):
            tokens += self._ordinary(take_back(text[at:start]), at)
            tokens.append(Token(i, start, end))
            at = end
        return tokens + self._ordinary(take_back(text[at:]), at)

    def _ordinary(self, text, at=0):
        """The tokens of ordinary text that stands `at` characters behind the start of the whole."""
        _check_letters(text)
        found = self.words.library.encode(text)
        if wrong := [start for i, (start, _) in found if i in self.words.never and start < len(text)]:
            return self._ordinary_in_pieces(text, wrong, at)
        return [Token(i, at + start, at + end) for i, start, end in _close_gaps(found, len(text))]

    def _ordinary_in_pieces(self, text, starts, at):
        """The same where the library finds special tokens at `starts`: cut behind each one's first character.

        A vocabulary may hold a special token's spelling as a word of its own (ignore_merges in Llama 3's).
        """
        cuts = sorted({0, *(start + 1 for start in starts), len(text)})
        if len(cuts) == 2:
            raise BadInput(f"{text!r} can only be encoded as a special token.")
        return [token for a, b in zip(cuts, cuts[1:]) for token in self._ordinary(text[a:b], at + a)]


def _check_request(request):
    """ValueError unless it is one of the two kinds, whole and with nothing else in it."""
    keys = request.keys() if isinstance(request, dict) else set()
    asks = "prompt" in keys and keys <= {"prefix", "prompt", "raw"}
    texts = all(isinstance(request[key], str) for key in keys & {"prefix", "prompt"})
    if not (asks and texts and isinstance(request.get("raw", False), bool)) and keys != {"messages"}:
        raise BadInput('A request is {"messages": [...]} or {"prefix": text, "prompt": text, "raw": true}, '
                       f"prefix and raw optional; not {str(request)[:80]}.")


def _check_letters(text):
    """ValueError for a lone surrogate, as "\\ud83d" in a line of JSON: no library encodes it."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadInput(f"The text has half a character, {text[error.start]!r}, which no UTF-8 holds; "
                       "leave it out.") from None


def _check_messages(messages):
    """ValueError unless the messages are a chat whose last one asks."""
    fits = isinstance(messages, list) and messages and all(
        isinstance(m, dict) and m.keys() == {"role", "content"} and m["role"] in ROLES
        and isinstance(m["content"], str) for m in messages)
    if not fits or messages[-1]["role"] != "user":
        raise BadInput(f"A chat is a list of messages, role ({', '.join(ROLES)}) and content string, "
                       "the last a user's.")


def _close_gaps(found, length):
    """(id, start, end) of [(id, (start, end))] with each end moved up to where the next token starts.

    NFC gives "e" + accent the span of "e" alone. The bytes of one character share its span, and so its end.
    """
    tokens, after, last, reach = [], length, None, length
    for i, (start, end) in reversed(found):
        if (start, end) != last:
            reach = max(end, after)
        tokens.append((i, start, reach))
        after, last = start, (start, end)
    return reversed(tokens)


def _count_inside(tokens, boundary):
    """(ids, how many leading ones end at or before `boundary`); one without width there is not counted."""
    outside = (n for n, token in enumerate(tokens) if token.start >= boundary or token.end > boundary)
    return [token.id for token in tokens], next(outside, len(tokens))
