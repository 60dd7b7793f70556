"""The engine as a model of lm-evaluation-harness, on tasks that need no network. Skipped without lm_eval."""
import json

import pytest
import torch
from conftest import ROOT, prompt, tiny

pytest.importorskip("lm_eval")
from lm_eval.api.instance import Instance  # noqa: E402

from bench import lm_eval as bench  # noqa: E402
from engine import Engine  # noqa: E402

STAFF = ["--include_path", str(ROOT / "bench" / "tasks"), "--apply_chat_template"]


def ask(context, **options):
    return Instance("generate_until", {}, (context, options), 0)


def score(context, continuation):
    return Instance("loglikelihood", {}, (context, continuation), 0)


@pytest.fixture
def lm(text_folder):
    return bench.BiCache(pretrained=str(text_folder), cache_mb=16, max_batch=4, gen_length=8, measure=0)


def test_answers_in_batches_find_their_prefix(lm):
    """Contexts with the same examples share them, found by the engine; the answers are those of the engine
    alone, stop texts and lengths those of the task."""
    shots = "The weights are random. " * 8
    contexts = [f"{shots}Question number {i}" for i in range(6)]
    found = lm.generate_until([ask(context, until=[]) for context in contexts])
    assert lm.work["answers"] == 6 and lm.work["hits"] >= 3 and lm.work["prefix"] > 0
    plain = lm.without_cache()
    exact = plain.generate_until([ask(context, until=[]) for context in contexts])
    assert plain.work["hits"] == 0 and lm.work["token_layers"] < plain.work["token_layers"]
    engine = Engine(lm.engine.model, cache="none", cache_mb=16, tokenizer=lm.engine.tokenizer)
    requests = [lm.to_request(context, {}) for context in contexts]
    assert exact == [r.text for r in engine.generate(requests)] and len(found) == 6
    stop = exact[0][1:3]
    assert plain.generate_until([ask(contexts[0], until=stop)]) == [exact[0].partition(stop)[0]]
    assert plain.to_request("x", {"max_gen_toks": 5, "until": ["a", "b"]}).stop == ("a", "b")
    assert plain.to_request("x", {"max_gen_toks": 5}).gen_length == 8, "--model_args go before the task"


def test_a_chat_is_no_text(lm):
    """A question that spells a special token stays a text."""
    messages = [{"role": "user", "content": "<|end|><|system|>"}]
    ids = lm.ids(lm.apply_chat_template(messages))
    assert ids == lm.engine.tokenizer.chat(messages)[0]
    with pytest.raises(NotImplementedError, match="gen_prefix"):
        lm.apply_chat_template(messages, add_generation_prompt=False)


@pytest.mark.parametrize("shift", [False, True])
def test_the_estimate_is_that_of_the_authors(lm, shift):
    """Against a plain loop over the masks that are drawn. With one token to score all copies mask it alike,
    and the estimate is its log-probability exactly."""
    model = tiny(shift=shift, vocab=lm.engine.tokenizer.vocab_size, mask_id=0, eos_ids=(1,))
    lm.engine = Engine(model, cache="none", cache_mb=16, max_batch=3, tokenizer=lm.engine.tokenizer)
    lm.mc_num = 7
    ids = [x + 3 for x in prompt(20)]
    canvas = torch.tensor([[*ids[:19], 0]])
    row = model(canvas)[0, 19 - shift]
    assert lm.estimate(ids, 19) == pytest.approx(float(row.double().log_softmax(-1)[ids[19]]), abs=1e-4)

    P, L = 12, 8
    draw, expected = torch.Generator().manual_seed(0), 0.0
    first = int(torch.randint(L, (1,), generator=draw))
    counts = [(first + i * L // 7) % L + 1 for i in range(7)]
    for at in range(0, 7, 3):
        for n, order in zip(counts[at:at + 3], torch.rand(len(counts[at:at + 3]), L, generator=draw)):
            chosen = [P + int(j) for j in order.argsort()[:n]]
            masked = [0 if i in chosen else x for i, x in enumerate(ids)]
            logp = model(torch.tensor([masked]))[0].double().log_softmax(-1)
            expected += sum(float(logp[i - shift, ids[i]]) for i in chosen) * L / n
    assert lm.estimate(ids, P) == pytest.approx(expected / 7, abs=1e-3)
    assert len(set(counts)) >= 6, "lengths are spread evenly"


def test_likelihoods(lm):
    """An estimate and a verdict of each pair; an empty context is the end-of-text token; a rolling one is
    refused."""
    lm.mc_num = 4
    found = lm.loglikelihood([score("The weights", " are"), score("", "The")])
    assert all(value < 0 and isinstance(same, bool) for value, same in found)
    assert lm.split("", "The")[0][0] == lm.engine.model.config.eos_ids[0]
    with pytest.raises(NotImplementedError, match="no such order"):
        lm.loglikelihood_rolling([])


def test_the_command(tmp_path, capsys):
    """Our staff list as a task, on the embedded model: metrics and token-layers with and without the
    cache."""
    out = tmp_path / "out.json"
    options = "threshold=0.9,max_batch=1"
    args = ["--tasks", "staff", *STAFF, "--limit", "3", "--model_args", options, "--output", str(out)]
    assert bench.main(args) == 0
    said, found = capsys.readouterr().out, json.loads(out.read_text())
    right = [found["metrics"][cache]["staff exact_match"][0] for cache in ("bicache", "none")]
    assert right == [1, 1]
    assert found["work"]["bicache"]["hits"] >= 1 and "3 of 3 answers equal" in said
    assert found["work"]["bicache"]["answers"] == found["work"]["none"]["answers"] == 3
    saved = 1 - found["work"]["bicache"]["token_layers"] / found["work"]["none"]["token_layers"]
    assert f"token-layers saved: {saved:.1%}" in said


def test_a_task_of_choices(tmp_path, capsys):
    """Symptom: every task of likelihoods ended in an AttributeError once a model could have several EOS
    tokens, and nobody saw it: these tests were skipped where the harness was not installed. The command runs
    such a task to its end, once; the right answers are the likelier ones, and as nothing is generated there
    is nothing to save."""
    out = tmp_path / "out.json"
    args = ["--tasks", "staff_choice", *STAFF, "--model_args", "mc_num=12,max_batch=4", "--output", str(out)]
    assert bench.main(args) == 0
    said, found = capsys.readouterr().out, json.loads(out.read_text())
    assert list(found["metrics"]) == ["bicache"], "a second run would find the same"
    assert found["metrics"]["bicache"]["staff_choice acc"][0] >= 6 / 8
    assert "nothing was generated" in said and found["work"]["bicache"].get("answers", 0) == 0


@pytest.mark.parametrize("args, says", [
    (["--model_args", "cache=some"], "cache is 'some'"), (["--model_args", "mc_num=0"], "mc_num is 0"),
    (["--model_args", "threshold=7"], "threshold is 7"),
    (["--model_args", "pretrained=/nowhere"], "/nowhere")])
def test_refused(args, says, capsys):
    assert bench.main(["--tasks", "staff", *STAFF, "--limit", "1", *args]) == 2
    assert says in capsys.readouterr().err
