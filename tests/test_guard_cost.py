"""What measuring online costs, needs and tells: work, room in the cache, a model without a table, the command
line."""
import json
import warnings

import pytest
import torch
from conftest import prompt, tiny
from test_guard import L, P, alike, ask, between, guarded  # noqa: F401

import depth
import generate
from engine import Engine, Request


def test_cost_stays_within_two_percent():
    """At the default rate, for requests like the example of docs/how-it-works.md (P = 900, S = 316, 128
    steps, R = 16, half of the layers shared): the very first request stays below 2%. Rows are counted by
    hooks, not by the guard's own books."""
    model = tiny(layers=6, max_len=1300)
    rows = []
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda m, a: rows.append(a[0].shape[0] * a[0].shape[1]))
    requests = [Request(prompt(900) + prompt(60, seed=i), prefix_len=900, gen_length=256, steps=128,
                        stop_at_eos=False) for i in range(2)]
    work = []
    for measure in (0, None):
        rows.clear()
        engine = Engine(model, table=depth.Table({0: 3}, 0.0), cache_mb=64, max_batch=1, measure=measure)
        results = engine.generate(requests)
        work.append(sum(rows))
    first, T = results[0], 900 + 60 + 256
    assert first.measure_token_layers == 3.5 * T < 0.02 * (first.token_layers + first.encode_token_layers)
    assert engine.counts["measurements"] == 2                               # at refreshes 1 and 16
    assert work[1] - work[0] == 2 * 4 * T < 0.02 * work[0]


def test_one_read_a_measurement(model, monkeypatch):
    """A measurement reads its few numbers from the device once, however many layers it compares."""
    reads, original = [], torch.Tensor.cpu
    def cpu(self):
        reads.append(tuple(self.shape))
        return original(self)

    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    engine = guarded(model, {0: 3}, 0.0)
    engine.generate([ask(i) for i in range(3)])
    assert engine.counts["measurements"] == 1 and reads.count((4,)) == 1
    assert len(reads) == engine.counts["host_reads"] == engine.counts["passes"] + 1


def test_lowering_needs_room(model):
    """Sharing less takes more pages. Where the budget has them not even for one request, it shares nothing
    and is served."""
    need = next(mb / 100 for mb in range(10, 400) if not refused(model, mb / 100))
    threshold = float(alike(model, ask(0, P=130))[2:4].mean())
    roomy = guarded(model, {0: L}, threshold, max_batch=1).generate([ask(i, P=130) for i in range(2)])
    assert [r.depth for r in roomy] == [L, 2]
    engine = guarded(model, {0: L}, threshold, cache_mb=need, max_batch=1)
    results = engine.generate([ask(i, P=130) for i in range(3)])
    assert [r.depth for r in results] == [L, 0, 0]
    stored = sum(len(e.pages) for e in engine.cache.entries.values())
    assert len(engine.cache.free) + stored == len(engine.cache.kv) - 2
    alone = Engine(model, depth=0, cache_mb=8)
    assert results[2].tokens == alone.generate([ask(2, P=130)])[0].tokens


def test_self_profile_asks_for_room_at_once(model):
    """Symptom: in a small cache the first request of a prefix never finds room to be stored beside itself,
    and so nothing is ever measured or shared. The budget is refused at the start; the least that is not
    refused is enough."""
    need = next(mb / 100 for mb in range(10, 400) if not refused(model, mb / 100, self_profile=0.01))
    assert refused(model, need - 0.05, self_profile=0.01)
    engine = Engine(model, self_profile=0.01, cache_mb=need, max_batch=1)
    assert [r.depth for r in engine.generate([ask(i, P=130) for i in range(3)])] == [0, L, L]


def refused(model, mb, **kw) -> bool:
    try:
        Engine(model, cache_mb=mb, max_batch=1, **kw or dict(table={0: L})).check(ask(P=130))
    except ValueError:
        return True


def test_self_profile_measures_first_and_shares_then(model, between):
    """No table, no guess: the first request on a prefix shares nothing and answers as depth 0 does; the next
    ones share what was measured. A larger ratio may rely on a smaller one's depth, a smaller ratio on
    nothing."""
    engine = Engine(model, self_profile=between, cache_mb=8, refresh=3)
    small, large = ask(gen_length=60), ask(gen_length=4)
    results = engine.generate([ask(1), ask(2), small, large])
    assert [(r.depth, r.hit) for r in results] == [(0, False), (2, True), (0, False), (2, True)]
    assert results[0].tokens == Engine(model, depth=0, cache_mb=8, refresh=3).generate([ask(1)])[0].tokens
    assert results[1].tokens == Engine(model, depth=2, cache_mb=8, refresh=3).generate([ask(2)])[0].tokens
    assert results[0].similarity == pytest.approx(alike(model, ask(1)).tolist(), abs=1e-5)
    assert results[0].encode_token_layers == (L - 0.5) * P and results[0].refreshes == 4


def test_no_table_warns_once_and_shares_nothing(model, text_folder, tmp_path):
    """Depth 0 and one warning that names the command, for a model object and for a folder; self_profile needs
    no table."""
    with pytest.warns(UserWarning, match="python tools/profiler.py") as seen:
        engine = Engine(model, cache_mb=8)
    assert len(seen) == 1 and engine.generate([ask()])[0].depth == 0 and engine.guard is None
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((text_folder / name).read_bytes())
    with pytest.warns(UserWarning, match=f"python tools/profiler.py --model {tmp_path}") as seen:
        Engine.from_folder(tmp_path, cache_mb=8)
    assert len(seen) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Engine.from_folder(tmp_path, cache_mb=8, self_profile=0.97)
        Engine(model, cache_mb=8, self_profile=0.97)


def test_the_folder_s_threshold_is_the_guard_s(text_folder, tmp_path):
    """A table made at another threshold than 0.97 is held to that one."""
    for file in text_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    raw = json.loads((tmp_path / "depth.json").read_text())
    (tmp_path / "depth.json").write_text(json.dumps(raw | {"threshold": 0.5}))
    assert Engine.from_folder(tmp_path, cache_mb=8).guard.threshold == 0.5
    assert Engine.from_folder(text_folder, cache_mb=8).guard.threshold == 0.97


def test_results_and_json_tell_what_was_measured(text_folder, capsys):
    """--json has the similarity and both depths; the table in the terminal a line for each lowered
    request."""
    say = ["--model", str(text_folder), "--gen-length", "6", "--max-batch", "1", "--no-eos", "--prefix",
           "The outputs of independent implementations are kept here for the tests.",
           "--prompt", "a", "--prompt", "b"]
    assert generate.main([*say, "--json"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["table_depth"] == first["depth"] == len(first["similarity"]) - 1 == 2
    assert first["measure_token_layers"] > 0
    lowest = min(first["similarity"])
    assert lowest < 0.97 and second["depth"] < second["table_depth"] == 2
    assert generate.main(say) == 0
    out = capsys.readouterr().out
    assert f"depth {second['depth']}, not the table's 2, where the similarity by layer is 1.000 " in out
    assert ": request 2\n" in out
    total = sum(line["token_layers"] + line["encode_token_layers"] + line["measure_token_layers"]
                for line in (first, second))
    assert f"{total:,.0f} token-layers" in out
    assert generate.main([*say, "--json", "--measure", "0"]) == 0
    assert all(json.loads(line)["similarity"] == [] for line in capsys.readouterr().out.splitlines())
    assert generate.main([*say, "--json", "--self-profile", "0.5"]) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert (first["depth"], first["hit"]) == (0, False) and second["depth"] > 0 and second["hit"]
    assert first["table_depth"] is second["table_depth"] is None
    assert generate.main([*say, "--self-profile", "0.5"]) == 0
    assert "not the table's" not in capsys.readouterr().out


@pytest.mark.parametrize("options, says", [
    (["--measure", "4", "--depth", "2"], "--measure has an effect only with --cache bicache"),
    (["--self-profile", "--cache", "intra"], "--self-profile has an effect only with --cache bicache"),
    (["--self-profile", "1.5"], "self_profile is 1.5"),
    (["--self-profile", "--measure", "0"], "measure is 0"),
    (["--measure", "-1"], "measure is -1")])
def test_refused_on_the_command_line(options, says, capsys):
    assert generate.main(options) == 2 and says in capsys.readouterr().err
