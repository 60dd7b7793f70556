"""Stop texts: an answer ends where one stands and nothing before its end is undecided."""
from types import SimpleNamespace

import pytest
import torch
from conftest import prompt, tiny

from engine import Engine, Request

WORDS = ["ab", "", "xy z", "é", "c", " ", "ba", "bc", "\n"]            # of a token: its id modulo 9


def spell(ids) -> str:
    return "".join(WORDS[i % 9] for i in ids)


TOKENIZER = SimpleNamespace(eos_ids=set(), decode=spell)


@pytest.fixture(params=[False, True], ids=["llada", "dream"], scope="module")
def model(request):
    return tiny(shift=request.param)


MODES = [dict(cache="none"), dict(cache="none", window="block"), dict(cache="intra"), dict(cache="naive"),
         dict(depth=2, refresh=4), dict(depth=3, refresh=2, window="rest")]


@pytest.mark.parametrize("kw", MODES)
def test_stop_ends_at_the_step_that_completes_it(model, kw):
    """Of an answer without stop texts some stretches are made stop texts. The request ends at the first step
    after which all tokens up to the end of its stretch are decided, with the fewest tokens that spell it and
    the text in front of it, beside neighbours that stop elsewhere; one that does not stop gets what it gets
    alone."""
    engine = Engine(model, cache_mb=8, max_batch=5, tokenizer=TOKENIZER, **kw)
    shared, how = prompt(20), dict(prefix_len=20, stop_at_eos=False)
    ask = lambda *stop: Request(shared + [3, 4], gen_length=12, block_length=6, stop=stop, **how)
    other = Request(shared + prompt(5, seed=2), gen_length=9, **how)
    calm, = engine.generate([other])
    decided, leading = set(), []                # after each step: how many leading tokens are decided
    for event in engine.stream([ask()]):
        decided.update(place for place, _ in event.committed)
        leading.append(min(set(range(13)) - decided))
    full = event.result
    assert full.text == spell(full.tokens) and full.finish_reason == "length"
    stops = sorted({full.text[i:i + 1 + i % 4] for i in range(len(full.text))})
    neighbour, *results = engine.generate([other] + [ask("never", stop) for stop in stops])
    for stop, result in zip(stops, results, strict=True):
        last = min(n for n in range(13) if stop in spell(full.tokens[:n]))
        assert result.finish_reason == "stop" and result.tokens == full.tokens[:last]
        assert result.forwards == 1 + min(step for step, n in enumerate(leading) if n >= last)
        assert result.text == full.text[:full.text.find(stop)]
    assert (neighbour.tokens, neighbour.text) == (calm.tokens, calm.text)
    assert sum(result.forwards < full.forwards for result in results) > 3
    assert all(entry.users == 0 for entry in engine.cache.entries.values())


def test_stop_and_eos_the_first_one_counts(monkeypatch, model):
    """Symptom: an answer ends at a stop text behind its EOS, or before a gap is closed. Tokens spell a b c d
    e EOS g h i and come in an order of their own; whichever stands first ends the answer, once nothing before
    its end is open. Of two stop texts the earlier one cuts the text, whichever is named first."""
    eos, order, commit = model.config.eos_ids[0], [5, 7, 0, 2, 1, 4, 3, 6, 8], Engine._commit

    def planned(self, group, layout, depth, token, stats):
        """The engine's own commit, with the model's choice replaced by the plan."""
        at = layout.places[0].tolist()
        token = torch.tensor([eos if p == 5 else p for p in at])
        score = torch.tensor([-1.0 - order.index(p) for p in at]).double()
        return commit(self, group, layout, depth, token, [score])

    monkeypatch.setattr(Engine, "_commit", planned)
    spelled = lambda ids: "".join("abcdefghi"[i] for i in ids if i != eos)
    engine = Engine(model, cache="none", tokenizer=SimpleNamespace(eos_ids=set(), decode=spelled))
    for stop, stop_at_eos, text, tokens, reason, forwards in (
            (("gh",), True, "abcde", [0, 1, 2, 3, 4], "eos", 7),
            (("gh",), False, "abcde", [0, 1, 2, 3, 4, eos, 6, 7], "stop", 8),
            (("eg",), False, "abcd", [0, 1, 2, 3, 4, eos, 6], "stop", 8),
            (("de", "cd"), True, "ab", [0, 1, 2, 3], "stop", 7),
            (("c",), True, "ab", [0, 1, 2], "stop", 5),
            (("hi", "a"), True, "", [0], "stop", 3),
            (("z",), False, "abcdeghi", [0, 1, 2, 3, 4, eos, 6, 7, 8], "length", 9)):
        result, = engine.generate([Request([1], gen_length=9, stop=stop, stop_at_eos=stop_at_eos)])
        found = result.text, result.tokens, result.finish_reason, result.forwards
        assert found == (text, tokens, reason, forwards), stop


def test_text_is_empty_without_a_tokenizer(model):
    assert Engine(model, cache="none").generate([Request([1], gen_length=3)])[0].text == ""
