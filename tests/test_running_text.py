"""Text that no template touches: ids of prefix and prompt joined as given, and what is refused as text.

On the folders of tests/layouts.py. Run: python -m pytest tests/test_running_text.py
"""
import json

import pytest
from tokenizers import processors

from layouts import folders, tok  # noqa: F401
from layouts import DOC, ask, bpe, flat, write
from tokenizer import Tokenizer


def test_split_is_one_text(tok):
    """Promise: prefix + rest is tokenized once; prefix_len counts tokens inside the prefix, at every cut of
    the text."""
    text = DOC + "\nnaïve e\u0301 東京 👩‍👩‍👧‍👦 <|mask|>  \n\n end."
    whole = tok.encode(text)
    last = 0
    for cut in range(len(text) + 1):
        ids, n = tok.split(text[:cut], text[cut:])
        assert ids == whole and last <= n <= len(ids)
        seen = tok.decode(ids[:n]).rstrip("\ufffd")         # a token may hold a character's first bytes
        assert flat(text[:cut]).startswith(flat(seen))
        last = n
    assert tok.split("", text)[1] == 0 and tok.split(text, "")[1] == len(whole)


def test_split_shares_a_document(tok):
    """Promise: two questions behind one document that ends in a line get equal prefix ids, and all of the
    document's."""
    chats = [tok.split(DOC + "\n", q) for q in ("Who sits in room 42?", "Is Omar in Oslo?")]
    (a, n), (b, m) = chats
    assert n == m and a[:n] == b[:m] and tok.decode(a[:n]).split() == DOC.split()


def test_offsets_are_not_trimmed(tmp_path):
    """Symptom: the token ".\\n" counted as part of the prefix "room." though it holds the question's line
    end. Cause: the ByteLevel post-processor trims offsets by the spaces a token covers. Fix: no
    post-processor. So with NFC, which gives "e" + accent the offsets of "e" alone: a token reaches up to
    the next one."""
    core = bpe([], qwen=True, post=processors.ByteLevel(trim_offsets=True))
    data = json.loads(core.to_str())
    data["model"]["vocab"][".Ċ"] = len(data["model"]["vocab"])
    data["model"]["merges"].insert(0, [".", "Ċ"])
    tok = Tokenizer.from_folder(write(tmp_path, tokenizer_json=data))
    ids, n = tok.split("room.", "\nWho")
    assert tok.decode(ids[:n]) == "room"
    ids, n = tok.split("cafe", "\u0301 x")
    assert tok.decode(ids[:n]) == "caf" and tok.split("cafe\u0301", " x")[1] == n + len(tok.encode("é"))


def test_prefix_space_belongs_to_the_question(folders):
    """Symptom: the prefix was one id longer when a question began with a line end. Cause: the space that
    add_prefix_space puts before it is a token that ends where the header ends. Fix: a token that starts at
    the boundary is the question's."""
    for name in ("tiny", "pieces"):
        tok = Tokenizer.from_folder(folders[name])
        assert tok.chat(ask("\nWho?"))[1] == tok.chat(ask("Who?"))[1]
        assert tok.split("", "\nWho?")[1] == 0


SPACES = ["\n\n", " ", "", "\t", " \n", "  \r\n", "\u3000", "\u00a0", "\u2028"]


@pytest.mark.parametrize("name", ["tiny", "llada", "dream"])
def test_raw_text_is_taken_as_given(folders, name):
    """Symptom: a base model whose tokenizer brings a chat template got a system and a user message for a
    document and the line that goes on from it. Cause: only a missing template meant running text. Fix: raw,
    in the request. Nothing is stripped on the way in or out: the ids are those of the two texts joined."""
    tok = Tokenizer.from_folder(folders[name])
    for left in SPACES:
        for right in SPACES:
            prefix, prompt = left + DOC + left, right + "Who?" + right
            ids, n = tok.render({"prefix": prefix, "prompt": prompt, "raw": True})
            assert (ids, n) == tok.split(prefix, prompt) and ids == tok.encode(prefix + prompt)
            assert tok.decode(ids) in (prefix + prompt, " " + prefix + prompt)
    assert tok.render({"prompt": "Who?", "raw": True}) == (tok.encode("Who?"), 0)
    chat = tok.chat([{"role": "system", "content": DOC}, {"role": "user", "content": "Who?"}])
    assert tok.render({"prefix": DOC, "prompt": "Who?", "raw": False}) == chat != tok.split(DOC, "Who?")


def test_text_without_a_template_is_raw(tmp_path):
    """Promise: without a chat template raw changes nothing, and white space at every edge is kept."""
    tok = Tokenizer.from_folder(write(tmp_path, tokenizer_json=json.loads(bpe([]).to_str())))
    for edge in SPACES:
        request = {"prefix": edge + DOC + edge, "prompt": edge + "Q: who?" + edge}
        ids, n = tok.render(request)
        assert (ids, n) == tok.render({**request, "raw": True})
        assert tok.decode(ids) == request["prefix"] + request["prompt"]
        assert tok.decode(ids[:n]) == request["prefix"][:len(tok.decode(ids[:n]))] and n > 10


@pytest.mark.parametrize("request_", [
    None, "Who?", {}, {"prefix": "x"}, {"prompt": None}, {"prompt": "x", "prefix": 3},
    {"prompt": "x", "prefx": "y"},
    {"prompt": "x", "raw": "yes"}, {"prompt": "x", "raw": 1}, {"messages": [], "prompt": "x"},
    {"messages": ask("x"), "raw": True}])
def test_bad_requests(folders, request_):
    """Symptom: {"prompt": ..., "prefx": ...} was answered without its prefix, and without a word. Cause:
    keys that render did not know were ignored. Fix: a request is one of two kinds, whole; anything else is
    a ValueError."""
    for name in ("tiny", "pieces"):
        with pytest.raises(ValueError, match="A request is .*messages.*prompt"):
            Tokenizer.from_folder(folders[name]).render(request_)


def test_half_a_character_is_a_sentence(tok):
    """Symptom: "\\ud83d" in a JSON line gave "'utf-8' codec can't encode character", a message about
    nobody's input. Fix: one sentence that names it, from text and chat alike."""
    calls = (lambda: tok.encode("a\ud83d"), lambda: tok.split("a", "\udc00"), lambda: tok.chat(ask("\ud83d")))
    for call in calls:
        with pytest.raises(ValueError, match=r"half a character, '\\ud[8c][30][d0]'.*leave it out") as error:
            call()
        str(error.value).encode()
