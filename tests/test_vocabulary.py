"""What a folder's files say, on the folders of tests/layouts.py: special, mask, EOS ids; broken ones."""
import json
import os
import subprocess
import sys

import pytest
from tokenizers import AddedToken

from layouts import TINY, TINY_CHAT, bpe, dream, folders, pieces, tiny, tok, write  # noqa: F401
from conftest import ROOT
from tokenizer import Tokenizer


def test_role_tokens_without_a_flag(folders, tmp_path):
    """Symptom: role tokens that no file flags as special could be typed. Cause: only flags were looked at.
    Promise: markup that the template writes is guarded too, and decode still shows it (Dream's
    <tool_call>)."""
    core = bpe([])
    core.add_tokens([AddedToken(w, special=False) for w in TINY])
    tok = Tokenizer.from_folder(write(
        tmp_path, tokenizer_json=json.loads(core.to_str()),
        tokenizer_config_json=dict(chat_template=TINY_CHAT),
        config_json=dict(mask_token_id=core.token_to_id("<|mask|>"), eos_token_id=None),
        generation_config_json=dict(eos_token_id=[core.token_to_id("<|endoftext|>")])))
    assert set(tok.special) == set(TINY) and not set(tok.special.values()) & set(tok.encode("".join(TINY)))
    assert tok.eos_ids == {tok.special["<|endoftext|>"], tok.special["<|end|>"]}
    assert tok.mask_id == tok.special["<|mask|>"]
    tok = Tokenizer.from_folder(folders["dream"])
    call = tok.special["<tool_call>"]
    assert tok.decode([call, *tok.encode("{}"), tok.special["<|im_end|>"]]) == "<tool_call>{}"
    assert call not in tok.encode("<tool_call>")


def test_ordinary_token_named_as_padding(tmp_path):
    """Symptom: every text with a "!" was refused. Cause: a config named "!" (id 0) as its pad token, so it
    was guarded like EOS. Promise: what is one character and in the ordinary vocabulary stays text."""
    core = bpe([])
    stop = core.token_to_id(".")
    tok = Tokenizer.from_folder(write(
        tmp_path, tokenizer_json=json.loads(core.to_str()), tokenizer_config_json=dict(pad_token="!"),
        config_json=dict(pad_token_id=0, eos_token_id=stop)))
    assert tok.decode(tok.encode("Who? Dana!")) == "Who? Dana!"
    assert tok.special == {} and tok.eos_ids == {stop}


def test_special_ids_come_from_the_files(folders):
    """Promise: mask, EOS and end-of-turn are what the folder says, in whichever file it says it; nothing is
    a constant."""
    for name, mask, eos in [("tiny", "<|mask|>", {"<|endoftext|>", "<|end|>"}),
                            ("llada", "<|mdm_mask|>", {"<|endoftext|>", "<|eot_id|>"}),
                            ("dream", "<|mask|>", {"<|endoftext|>", "<|im_end|>"}),
                            ("pieces", "<|mask|>", {"</s>", "<|end|>"})]:
        tok = Tokenizer.from_folder(folders[name])
        assert tok.mask_id == tok.special[mask] and tok.eos_ids == {tok.special[w] for w in eos}, name
        assert tok.has_chat and tok.vocab_size > max(tok.special.values())


@pytest.mark.parametrize("named", [
    dict(pad_token="<|dlm_pad|>"), dict(pad_token=dict(content="<|dlm_pad|>")), 
    dict(pad_token="<|endoftext|>"), {}])
@pytest.mark.parametrize("special", [True, False])
def test_filler_tokens_end_an_answer(tmp_path, named, special):
    """Symptom: DiffuCoder's answers ended in a hundred <|dlm_pad|>, counted and shown. Cause: only EOS and
    the end of a turn ended an answer; the pad token that fills the rest of a canvas was text like any
    other. Promise: it ends the answer and is no text, whether the files name it, give its id, or only have
    it, flagged special or not."""
    words = ["<|endoftext|>", "<|dlm_pad|>", "<|mask|>"]
    core = bpe([])
    core.add_tokens([AddedToken(w, special=special or w != "<|dlm_pad|>") for w in words])
    eos, pad, mask = map(core.token_to_id, words)
    tok = Tokenizer.from_folder(write(
        tmp_path, tokenizer_json=json.loads(core.to_str()),
        config_json=dict(pad_token_id=eos, mask_token_id=mask),
        tokenizer_config_json=dict(eos_token="<|endoftext|>", **named)))
    assert tok.eos_ids == {eos, pad} and tok.decode([*tok.encode("Yes."), pad, pad]) == "Yes."
    assert pad not in tok.encode("<|dlm_pad|>")


def test_padding_that_is_no_filler(tmp_path, folders):
    """Symptom (of a first draft): every answer was empty, or ended at a "!". Cause: folders name as padding
    what they happen to have: id 0, the unknown token, even the mask. Promise: a filler is special, and
    neither of those."""
    core = bpe(["<|mask|>", "<pad_id>"])
    mask, pad = map(core.token_to_id, ("<|mask|>", "<pad_id>"))
    data = json.loads(core.to_str())
    named = dict(mask_token="<|mask|>", pad_token="<|mask|>")
    for value, ends in ((0, set()), ([0, -1], set()), (mask, set()), (pad, {pad}), ([pad, 0], {pad})):
        tok = Tokenizer.from_folder(write(tmp_path, tokenizer_json=data, tokenizer_config_json=named,
                                          config_json=dict(pad_token_id=value)))
        assert tok.eos_ids == ends and tok.mask_id == mask
    folder = pieces(tmp_path / "pieces")
    write(folder, tokenizer_config_json=dict(pad_token="<unk>", eos_token="</s>"))
    tok = Tokenizer.from_folder(folder)
    assert tok.eos_ids == {tok.special["</s>"]}


def test_lists_of_eos_ids(tmp_path):
    """Promise: eos_token_id may be a list, in both files; each of its ids ends an answer and is no text."""
    core = bpe(TINY)
    ids = [core.token_to_id(w) for w in TINY]
    tok = Tokenizer.from_folder(write(
        tmp_path, tokenizer_json=json.loads(core.to_str()), config_json=dict(eos_token_id=[ids[1], ids[5]]),
        generation_config_json=dict(eos_token_id=[ids[1], ids[4]])))
    assert tok.eos_ids == {ids[1], ids[4], ids[5]} and tok.decode([*tok.encode("x"), *tok.eos_ids]) == "x"


# -- the mask ------------------------------------------------------------------------------------------------

def coder(folder, **more):
    """As open-dcoder has it: <M> is in added_tokens.json alone, and nothing says that it is the mask."""
    data = json.loads(bpe([]).to_str())
    n = len(data["model"]["vocab"])
    return write(folder, tokenizer_json=data, added_tokens_json={"<M>": n, "<N>": n + 1}, **more), n


def test_mask_token_by_option(tmp_path):
    """Symptom: open-dcoder could not be used: its mask token is an added one that no file names as the
    mask. Fix: an option. The token is then special: no text becomes it, no answer shows it."""
    folder, n = coder(tmp_path)
    assert Tokenizer.from_folder(folder).mask_id is None
    tok = Tokenizer.from_folder(folder, mask_token="<M>")
    assert tok.mask_id == n and n not in tok.encode("a <M> b") and tok.decode([*tok.encode("a"), n]) == "a"


@pytest.mark.parametrize("config, named, option, words", [
    (0, None, "<N>", ["mask_token_id 0 in config.json", "'<N>'"]),
    (0, "<N>", None, ["mask_token_id 0 in config.json", "'<N>'"]),
    (None, "<M>", "<N>", ["'<M>'", "'<N>'"]), (None, None, "<none>", ["'<none>'", "no token"])])
def test_mask_tokens_that_disagree(tmp_path, config, named, option, words):
    """Symptom: a folder whose files name two masks ran with one of them, and answered noise if it was the
    wrong one. Fix: config.json, the tokenizer's files and the option must agree; else an error names
    both."""
    folder, n = coder(tmp_path, config_json=dict(mask_token_id=config),
                      tokenizer_config_json=dict(mask_token=named))
    with pytest.raises(ValueError) as error:
        Tokenizer.from_folder(folder, mask_token=option)
    assert all(word in str(error.value) for word in words)
    folder, n = coder(tmp_path, config_json=dict(mask_token_id=n),
                      tokenizer_config_json=dict(mask_token="<M>"))
    assert Tokenizer.from_folder(folder, mask_token="<M>").mask_id == n


@pytest.mark.parametrize("form", ["added_tokens", "decoder", "map", "gaps"])
def test_added_tokens_from_config_files_only(tmp_path, form):
    """Promise: a tokenizer.json without its special tokens gets them from the configs, with their ids, gaps
    included."""
    core = bpe([])
    n = core.get_vocab_size()
    ids = {w: n + i * (10 if form == "gaps" else 1) for i, w in enumerate(TINY)}
    table = {str(i): dict(content=w, special=True) for w, i in ids.items()}
    named = dict(eos_token="<|endoftext|>", mask_token=dict(content="<|mask|>"),
                 additional_special_tokens=[*TINY[2:5], dict(content=TINY[5])])
    templates = [dict(name="rag", template="{{ x }}"), dict(name="default", template=TINY_CHAT)]
    config = dict(chat_template=templates)
    files = {"added_tokens": dict(added_tokens_json=ids, special_tokens_map_json=named),
             "map": dict(added_tokens_json=ids, special_tokens_map_json=named)}.get(form, {})
    if form in ("decoder", "gaps"):
        config.update(added_tokens_decoder=table, **named)
    write(tmp_path, tokenizer_json=json.loads(core.to_str()), tokenizer_config_json=config, **files)
    tok = Tokenizer.from_folder(tmp_path)
    assert tok.special == ids and tok.vocab_size == max(ids.values()) + 1
    assert tok.eos_ids == {ids["<|endoftext|>"], ids["<|end|>"]} and tok.mask_id == ids["<|mask|>"]
    whole = [ids["<|user|>"], *tok.encode("a"), ids["<|end|>"], ids["<|assistant|>"]]
    assert tok.chat([{"role": "user", "content": "a"}]) == (whole, 1)
    if form == "gaps":
        assert tok.decode([n + 1]) == ""


# -- folders -------------------------------------------------------------------------------------------------

def test_sentencepiece_round_trip(tmp_path):
    """Promise: pieces with byte fallback give ordinary text back, spaces folded as the model folds them, on
    a folder with nothing but tokenizer.model; its control pieces are special."""
    folder = pieces(tmp_path)
    (folder / "tokenizer_config.json").unlink()
    tok = Tokenizer.from_folder(folder)
    for text in ("Dana is in room 42.", "naïve café — 東京", "😀 smile", "Omar  Haddad"):
        assert tok.decode(tok.encode(text)) == " ".join(text.split())
    assert {"<s>", "</s>", "<unk>", "<|end|>"} <= set(tok.special)
    assert not tok.has_chat and tok.mask_id is None and tok.eos_ids == set()
    with pytest.raises(ValueError):
        tok.encode("\ud800")


def test_unknown_characters(tmp_path):
    """Promise: without byte fallback a character the model never saw is its unknown piece, not an error;
    decode skips it."""
    tok = Tokenizer.from_folder(pieces(tmp_path, fallback=False))
    ids = tok.encode("room ☃ 42")
    assert tok.special["<unk>"] in ids and tok.decode(ids).split() == ["room", "42"]


def test_folders_without_a_tokenizer(tmp_path):
    """Promise: an engine runs on ids alone, so a folder without tokenizer files is None; half a tokenizer
    is an error."""
    assert Tokenizer.from_folder(tmp_path / "absent") is None
    assert Tokenizer.from_folder(write(tmp_path, config_json=dict(mask_token_id=3))) is None
    with pytest.raises(ValueError, match="merges.txt"):
        Tokenizer.from_folder(write(tmp_path / "half", vocab_json={"a": 0}))
    with pytest.raises(ValueError, match="tokenizer.model"):
        Tokenizer.from_folder(write(tmp_path / "config", tokenizer_config_json=dict(eos_token="x")))


@pytest.mark.parametrize("files", [
    dict(tokenizer_json="{broken"), dict(tokenizer_json="[]"), dict(tokenizer_json="{}"),
    dict(tokenizer_json=dict(model=dict(type="BPE"))),
    dict(tokenizer_json="version https://git-lfs.github.com/spec/v1\noid"),
    dict(tokenizer_config_json="nope"), dict(tokenizer_config_json=[]), dict(config_json="{"),
    dict(tokenizer_config_json=dict(added_tokens_decoder={"x": dict(content="<x>")})),
    dict(tokenizer_config_json=dict(added_tokens_decoder={"9": "<x>"})),
    dict(tokenizer_config_json=dict(eos_token="<none>")), dict(config_json=dict(eos_token_id="</s>")),
    dict(config_json=dict(eos_token_id=[True])), dict(generation_config_json=dict(mask_token_id=[[1]])),
    dict(added_tokens_json="{"), dict(special_tokens_map_json="\x00"),
    dict(tokenizer_config_json=dict(added_tokens_decoder={"5": dict(content="<|mask|>", special=True)}))])
def test_broken_files(tmp_path, files):
    """Promise: broken files are one ValueError with one line, never a traceback from a library or a silent
    default."""
    with pytest.raises(ValueError) as error:
        Tokenizer.from_folder(write(tiny(tmp_path), **files))
    assert "\n" not in str(error.value).replace("\\n", "")


@pytest.mark.parametrize("name, content", [
    ("tokenizer.model", b"garbage"), ("tokenizer.model", b""), ("tokenizer.json", b"\xff\xfe")])
def test_broken_bytes(tmp_path, name, content):
    """Promise: so for files that are not even text, or no sentencepiece model."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError):
        Tokenizer.from_folder(tmp_path)


def test_files_from_other_systems(tmp_path):
    """Symptom: a folder edited on Windows was "not valid JSON: Unexpected UTF-8 BOM", and where the locale
    is not UTF-8 texts were misread. Promise: files are UTF-8 whatever the locale, with a byte order mark or
    without, and with either line end. Here no file at all is opened without an encoding."""
    for make in (dream, tiny):
        plain = make(tmp_path / make.__name__)
        marked = make(tmp_path / f"{make.__name__} marked")
        write(marked, chat_template_jinja="{# é #}" + TINY_CHAT + "\n")
        write(plain, chat_template_jinja="{# é #}" + TINY_CHAT + "\n")
        for file in marked.iterdir():
            file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes().replace(b"\n", b"\r\n"))
        run = ("import sys; from tokenizer import Tokenizer; tok = Tokenizer.from_folder(sys.argv[1]); "
               "print(tok.chat([dict(role='user', content='na\\xefve')]), tok.special)")
        python = [sys.executable, "-X", "warn_default_encoding", "-W", "error::EncodingWarning", "-c", run]
        locale = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
        answers = [subprocess.run([*python, str(folder)], cwd=ROOT, env=locale, capture_output=True,
                                  text=True, encoding="utf-8") for folder in (plain, marked)]
        assert not any(answer.stderr for answer in answers), answers
        assert answers[0].stdout == answers[1].stdout != ""


def test_vocabularies_that_are_cut_otherwise(tmp_path):
    """Symptom: a GPT-2 folder's vocab.json and merges.txt were read by Qwen2's rule, and gave other ids
    than the model knows. Cause: tokenizer_class was ignored. Fix: another class is refused, with what to
    do."""
    folder = dream(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text("utf-8"))
    for kind in ("Qwen2Tokenizer", "Qwen2TokenizerFast", "DreamTokenizer", None):
        assert Tokenizer.from_folder(write(folder, tokenizer_config_json={**config, "tokenizer_class": kind}))
    with pytest.raises(ValueError, match="GPT2Tokenizer.*save the tokenizer as tokenizer.json"):
        config["tokenizer_class"] = "GPT2Tokenizer"
        Tokenizer.from_folder(write(folder, tokenizer_config_json=config))


@pytest.mark.parametrize("tokens", [["<|user|>"], [dict(content="<|user|>")], dict(user_token="<|user|>")])
def test_special_tokens_as_transformers_5_writes_them(tmp_path, tokens):
    """Symptom: a text could spell a role token. Cause: only additional_special_tokens was read;
    transformers 5 writes extra_special_tokens, a list or names with tokens."""
    core = bpe([])
    core.add_tokens([AddedToken("<|user|>", special=False)])
    tok = Tokenizer.from_folder(write(tmp_path, tokenizer_json=json.loads(core.to_str()),
                                      tokenizer_config_json=dict(extra_special_tokens=tokens)))
    assert tok.special == {"<|user|>": core.token_to_id("<|user|>")}


def test_broken_dream_folder(tmp_path):
    """Promise: merges that name no piece of the vocabulary are found when the folder is read."""
    folder = dream(tmp_path)
    (folder / "merges.txt").write_text("#version: 0.2\nzz yy\n")
    with pytest.raises(ValueError, match="cannot be read"):
        Tokenizer.from_folder(folder)
