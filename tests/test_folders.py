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


@pytest.fixture(scope="module", params=["llada", "Dream"])
def folder(request, tmp_path_factory):
    """config.json, two shards with an index, tokenizer files; the vocabulary is padded, as in the real
    ones."""
    folder, family = tmp_path_factory.mktemp("folder") / request.param, FAMILIES[request.param]
    tokenizer = Tokenizer.from_folder({"llada": llada, "Dream": dream}[request.param](folder))
    model = tiny(shift=request.param == "Dream", vocab=tokenizer.vocab_size + 5, scale=3.0,
                 mask_id=tokenizer.mask_id, eos_ids=(tokenizer.special["<|endoftext|>"],))
    model.head.weight[tokenizer.vocab_size:] = 0            # a padded id is never the likeliest
    (folder / "config.json").write_text(json.dumps({"model_type": request.param} | {
        theirs: getattr(model.config, ours) for ours, theirs in family.keys.items()}))
    weights = {theirs: model.state_dict()[ours] for ours, theirs in checkpoint_names(model, family).items()}
    names, index = list(weights), {}
    for number, part in ((1, names[::2]), (2, names[1::2])):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return folder


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
