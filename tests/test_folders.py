"""Folders as people download them, end to end through generate.py: text in, text out, a chat's prefix shared.

LLaDA's layout with tokenizer.json, Dream's with vocab.json and merges.txt; weights in two shards, random, so
that the text is nonsense, but always the same.
"""
import itertools
import json

import pytest
from conftest import tiny
from reference import plain
from safetensors.torch import save_file
from layouts import dream, llada

import generate
from hub.checkpoint import checkpoint_names, load
from hub.families import FAMILIES
from tokenizer import Tokenizer

DOCUMENT = "Dana Reed sits in room 42 in Lisbon and reports to Omar Haddad, who sits in room 17 in Oslo."
QUESTIONS = ["Who sits in room 42?", "How many people report to Omar?"]


KINDS = {"llada": {}, "Dream": dict(shift=True), "qwen2": dict(shift=True, tied=True), "a2d-qwen3": dict(
    qk_norm=True, heads=4, kv_heads=2, head_dim=20, tied=True)}


def build(folder, kind, **config):
    """config.json, two shards with an index, tokenizer files; the vocabulary is padded, as in the real ones.
    config: values that config.json has instead; None: it has none."""
    family = FAMILIES[kind]
    tokenizer = Tokenizer.from_folder((llada if kind == "llada" else dream)(folder))
    model = tiny(vocab=tokenizer.vocab_size + 5, scale=3.0, mask_id=tokenizer.mask_id,
                 eos_ids=(tokenizer.special["<|endoftext|>"],), **KINDS[kind])
    model.head.weight[tokenizer.vocab_size:] = 0            # a padded id is never the likeliest
    (folder / "config.json").write_text(json.dumps({"model_type": kind} | {
        theirs: getattr(model.config, ours) for ours, theirs in family.keys.items()} | config))
    weights = {theirs: model.state_dict()[ours] for ours, theirs in checkpoint_names(model, family).items()}
    names, index = list(weights), {}
    for number, part in ((1, names[::2]), (2, names[1::2])):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: weights[name].clone() for name in part}, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


@pytest.fixture(scope="module", params=["llada", "Dream"])
def folder(request, tmp_path_factory):
    return build(tmp_path_factory.mktemp("folder") / request.param, request.param)


def ask(capsys, folder, *options):
    prompts = itertools.chain.from_iterable(("--prompt", q) for q in QUESTIONS)
    code = generate.main(["--model", str(folder), "--prefix", DOCUMENT, *prompts, "--gen-length", "12",
                          "--json", *map(str, options)])
    out, err = capsys.readouterr()
    assert code == 0 and not err
    return sorted(map(json.loads, out.splitlines()), key=lambda line: line["index"])


def test_text_in_text_out(folder, capsys):
    """Without a cache the answers are the plain loop's on the chat template's ids, cut at the end of text or
    turn."""
    tokenizer, model = Tokenizer.from_folder(folder), load(folder)
    lines = ask(capsys, folder, "--cache", "none", "--block-length", 4)
    for line, question in zip(lines, QUESTIONS, strict=True):
        ids, _ = tokenizer.render({"prefix": DOCUMENT, "prompt": question})
        tokens = list(itertools.takewhile(lambda t: t not in tokenizer.eos_ids, plain(model, ids, 12, 4)[0]))
        assert (line["tokens"], line["text"]) == (tokens, tokenizer.decode(tokens))


@pytest.mark.parametrize("window", ["all", "rest", "block"])
def test_the_second_question_is_a_hit(folder, capsys, window):
    """The document, as the chat's system message, is encoded once; the second question finds it, alone or in
    a batch, and gets the answer that it gets as the first."""
    how = ("--depth", 2, "--refresh", 4, "--window", window, "--block-length", 4)
    first, second = ask(capsys, folder, *how)
    assert (first["hit"], second["hit"]) == (False, True) and first["depth"] == second["depth"] == 2
    assert first["prefix_tokens"] == second["prefix_tokens"] > 20 and second["encode_token_layers"] == 0
    alone = ask(capsys, folder, *how, "--max-batch", 1)
    assert [line["tokens"] for line in alone] == [first["tokens"], second["tokens"]] and alone[1]["hit"]


def test_dreams_own_options(folder, capsys):
    """Dream's sampler from the command line, drawn, the same twice."""
    how = ("--remasking", "entropy", "--eps", 1e-3, "--steps", 6, "--temperature", 0.2, "--top-p", 0.95,
           "--alg-temp", 0.1, "--depth", 2, "--seed", 3)
    assert ask(capsys, folder, *how) == ask(capsys, folder, *how)


@pytest.mark.parametrize("kind", ["qwen2", "a2d-qwen3"])
def test_the_mask_that_only_the_tokenizer_names(kind, tmp_path, capsys):
    """Symptom: dllm's and open-dCoder's config.json name no mask, and the folder was refused. Its tokenizer's
    files do, or else the option; in a folder of the hub's cache, files being links into blobs, as well."""
    blobs = build(tmp_path / "blobs", kind, mask_token_id=None)
    folder = tmp_path / "models--some--model" / "snapshots" / "0123abc"
    folder.mkdir(parents=True)
    for file in blobs.iterdir():
        (folder / file.name).symlink_to(file)
    how = ("--depth", 2, "--block-length", 4)
    told = ask(capsys, folder, *how)
    assert told[1]["hit"] and ask(capsys, folder, *how, "--mask-token", "<|mask|>") == told

    config = json.loads((blobs / "tokenizer_config.json").read_text())
    (blobs / "tokenizer_config.json").write_text(json.dumps({**config, "mask_token": None}))
    (blobs / "special_tokens_map.json").unlink()
    (folder / "special_tokens_map.json").unlink()
    assert generate.main(["--model", str(folder), "--prompt", "x"]) == 2
    assert "name it with mask_token (--mask-token" in capsys.readouterr().err
    assert ask(capsys, folder, *how, "--mask-token", "<|mask|>") == told
    assert generate.main(["--model", str(folder), "--prompt", "x", "--mask-token", "<M>"]) == 2
    assert "'<M>'" in capsys.readouterr().err


def test_shift_from_the_command_line(tmp_path, capsys):
    """The option turns the family's default round: other rows are read, and the answer is another."""
    folder = build(tmp_path / "model", "qwen2")
    how = ("--cache", "none", "--block-length", 4)
    with_shift, without = ask(capsys, folder, *how, "--shift"), ask(capsys, folder, *how, "--no-shift")
    assert ask(capsys, folder, *how) == with_shift != without
    ids, _ = Tokenizer.from_folder(folder).render({"prefix": DOCUMENT, "prompt": QUESTIONS[0]})
    expected = plain(load(folder, shift=False), ids, 12, 4)[0]
    assert expected[:len(without[0]["tokens"])] == without[0]["tokens"]


def test_an_end_without_an_embedding_row(text_folder, monkeypatch, capsys):
    """Symptom: tokenizer files of another model load, and no answer ever ends: their EOS is an id that
    these weights do not have. One sentence names it; a filler without a row harms nobody."""
    plain_reading = Tokenizer.from_folder

    def foreign(path, **options):
        tokenizer = plain_reading(path, **options)
        tokenizer.eos_ids = {*tokenizer.eos_ids, 5001}
        tokenizer.ends = {*tokenizer.ends, end}
        return tokenizer
    monkeypatch.setattr(Tokenizer, "from_folder", foreign)
    end = 1
    assert generate.main(["--model", str(text_folder), "--prompt", "x", "--gen-length", "2"]) == 0
    end = 5001
    assert generate.main(["--model", str(text_folder), "--prompt", "x", "--gen-length", "2"]) == 2
    assert "ends an answer with id 5001" in capsys.readouterr().err
