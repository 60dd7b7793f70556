"""Depth: the lookup, where tables come from, and which depth follows from the layers that are alike."""
import json
import shutil
import warnings

import pytest
import torch
import torch.nn.functional as F
from conftest import GOLDEN

import depth
from hub.checkpoint import fingerprint

LLADA = GOLDEN / "llada"


@pytest.mark.parametrize("name", depth.PUBLISHED)
@pytest.mark.parametrize("T", [100, 700, 4000])
def test_lookup_every_key(name, T):
    """At P / T equal to a key its depth holds; one token less falls to the key before it."""
    _, table = depth.PUBLISHED[name]
    before = 0
    for percent, layers in table.items():
        P = percent * T // 100
        assert depth.lookup(table, P, T) == layers
        assert depth.lookup(table, P - 1, T) == before
        before = layers
    assert depth.lookup(table, T, T) == before


def test_published_tables_are_whole():
    """Both tables rise with the ratio and end with all layers, as published."""
    assert {name: layers for name, (layers, _) in depth.PUBLISHED.items()} == {
        "GSAI-ML/LLaDA-8B-Instruct": 32, "Dream-org/Dream-v0-Instruct-7B": 28}
    for layers, table in depth.PUBLISHED.values():
        assert list(table) == sorted(table) and list(table.values()) == sorted(table.values())
        assert max(table.values()) == layers
    assert sum(len(table) for _, table in depth.PUBLISHED.values()) == 34


def test_lookup_is_exact():
    """29 of 100 are 29% (29 / 100 * 100 is 28.999... in floats); one token of a million less is not. Below
    all keys: 0."""
    for percent in range(1, 100):
        for T in (100, 300, 4100, 100_000_000):
            assert depth.lookup({percent: 7}, percent * T // 100, T) == 7
            assert depth.lookup({percent: 7}, percent * T // 100 - 1, T) == 0
    assert depth.lookup({50: 3, 5: 1}, 2, 3) == 3, "keys may come in any order"
    assert depth.lookup(None, 9, 10) == depth.lookup({}, 9, 10) == 0


def in_our_count(name) -> dict:
    """They count leading layers that are alike; a depth rests on one more than it shares, but where all are
    alike."""
    layers, table = depth.PUBLISHED[name]
    return {percent: d if d == layers else d - 1 for percent, d in table.items()}


def test_own_table_goes_first(tmp_path):
    """A folder that bears a published name uses its own depth.json if it has one, else the published
    table."""
    folder = tmp_path / "LLaDA-8B-instruct"
    shutil.copytree(LLADA, folder)
    folder.chmod(0o755)
    with pytest.warns(UserWarning, match="depth 0"):
        assert depth.find_table(folder, 6) is None, "the layer count must match as well"
    assert depth.find_table(folder, 32) == in_our_count("GSAI-ML/LLaDA-8B-Instruct")
    own = dict(fingerprint=fingerprint(folder), layers=6, table={"40": 2, "90": 5})
    (folder / "depth.json").write_text(json.dumps(own))
    assert depth.find_table(folder, 6) == {40: 2, 90: 5}
    (folder / "depth.json").write_text("\ufeff" + json.dumps(own), encoding="utf-8")
    assert depth.find_table(folder, 6) == {40: 2, 90: 5}


def test_published_table_by_origin(tmp_path):
    """A folder of any name finds the table by `_name_or_path` of its config.json; a link by the folder it
    leads to."""
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "config.json").write_text('{"_name_or_path": "someone/dream-V0-Instruct-7B/"}')
    expected = in_our_count("Dream-org/Dream-v0-Instruct-7B")
    assert depth.find_table(tmp_path / "here", 28) == expected and expected[85] == 12 and expected[96] == 28
    (tmp_path / "Dream-v0-Instruct-7B").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "Dream-v0-Instruct-7B")
    assert depth.find_table(tmp_path / "link", 28) == expected


def test_no_table_warns_once(tmp_path):
    """Without a table: None, and one warning that says depth 0 is used and names the command that measures
    one."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert depth.find_table(tmp_path, 6) is None
    assert len(caught) == 1
    assert f"python tools/profiler.py --model {tmp_path} --text FILE" in str(caught[0].message)
    assert "depth 0" in str(caught[0].message)


@pytest.mark.parametrize("change, message", [
    (dict(fingerprint="0" * 16), "another model"), (dict(layers=7), "another model"), ("{", "no depth table"),
    ("[]", "no depth table"), (dict(table={"50": 7}), "no depth table"),
    (dict(table={"50": "2"}), "no depth table"), (dict(table={"150": 2}), "no depth table"),
    (dict(table={"x": 2}), "no depth table"), (dict(standin="text"), "no depth table"),
    (dict(table=None), "no depth table")])
def test_refused_table(tmp_path, change, message):
    """A depth.json of another model, or broken, is refused in one sentence: never ignored, never used."""
    folder = tmp_path / "llada"
    shutil.copytree(LLADA, folder)
    folder.chmod(0o755)
    good = dict(fingerprint=fingerprint(folder), layers=6, table={"50": 2})
    (folder / "depth.json").write_text(change if isinstance(change, str) else json.dumps(good | change))
    with pytest.raises(ValueError, match=message) as caught:
        depth.find_table(folder, 6)
    assert "\n" not in str(caught.value) and "python tools/profiler.py" in str(caught.value)


def test_depth_is_one_less_than_the_layers_alike():
    """The layer at the boundary lives from prefix-only K/V, too, so one layer alike is held back, unless all
    are alike; what comes behind the first layer that differs does not count."""
    rows = {(1, 1, 1, 1): 4, (1, 1, 1, 0): 2, (1, 1, 0, 1): 1,
            (1, 0, 1, 1): 0, (0, 1, 1, 1): 0, (0, 0, 0, 0): 0}
    assert depth.safe_depth(torch.tensor(list(rows), dtype=torch.bool)).tolist() == list(rows.values())


def test_closeness_is_exactly_one_where_nothing_differs():
    """Unit vectors as float32 has them: equal ones are 1.0, not 0.9999998; opposite ones -1; K and V count
    alike."""
    a = F.normalize(torch.randn(2, 50, 64, generator=torch.Generator().manual_seed(0)), dim=-1)
    assert (depth.closeness(a, a) == 1).all()
    assert torch.allclose(depth.closeness(a, -a), -torch.ones(50))
    half = torch.stack([a[0], -a[1]])
    assert torch.allclose(depth.closeness(a, half), torch.zeros(50), atol=1e-6)
