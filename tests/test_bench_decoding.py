"""bench/decoding.py: it measures once, counts what it says it counts, and draws what it measured."""
import json
import xml.etree.ElementTree as ElementTree

import pytest

from bench import decoding as bench

SMALL = {"threshold": (0.9,), "factor": (0.5, 4.0), "entropy_bound": (0.1,)}
NAMES = [bench.ONE, "threshold 0.9", "factor 0.5", "factor 4", "entropy_bound 0.1"]


def test_it_measures_once(tmp_path, monkeypatch, capsys):
    """A second run of the same command asks nothing and says the same; a file of other questions is refused.
    The slowest setting is one token a step, which takes a pass for each place up to EOS at least."""
    monkeypatch.setattr(bench, "SETTINGS", SMALL)
    out, svg = tmp_path / "out.jsonl", tmp_path / "out.svg"
    args = ["--questions", "1", "--out", str(out), "--svg", str(svg)]
    assert bench.main(args) == 0
    first = json.loads(capsys.readouterr().out.splitlines()[-1])
    header, *rows = map(json.loads, out.read_text().splitlines())
    assert [row["setup"] for row in rows] == NAMES == list(first["settings"])
    assert all(len(row["right"]) == len(header["header"]["kind"]) == 6 for row in rows)
    assert all(row["tokens"] >= 6 and row["forwards"] >= 6 for row in rows)
    one, *fast = (first["settings"][name]["tokens_a_pass"] for name in NAMES)
    assert one <= 1 < min(fast)
    picture = ElementTree.fromstring(svg.read_text())
    assert sum(element.tag.endswith("circle") for element in picture.iter()) == 4
    monkeypatch.setattr(bench, "run", None)
    assert bench.main(args) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == first
    assert bench.main([*args, "--seed", "1"]) == 2
    assert "measured with another seed" in capsys.readouterr().err


def test_advice_is_the_fastest_that_loses_little():
    """Of settings within half a point of one token a step the one with the most tokens a pass; none, if all
    lose."""
    kind = ["a"] * 200
    row = lambda right, tokens: dict(right="1" * right + "0" * (200 - right), tokens=tokens, forwards=100)
    rows = {bench.ONE: row(180, 90), "threshold 0.5": row(170, 300), "threshold 0.8": row(179, 200),
            "threshold 0.9": row(185, 150), "factor 1": row(178, 400), "entropy_bound 1": row(180, 90)}
    found = dict(header=dict(kind=kind, kinds=["a"]), rows=rows)
    assert bench.advice(found) == {"threshold": "threshold 0.8", "factor": None,
                                   "entropy_bound": "entropy_bound 1"}
    assert bench.rate(found, "threshold 0.8") == 89.5 and bench.speed(rows["factor 1"]) == 4


@pytest.mark.parametrize("args, says", [(["--questions", "0"], "start at 1"),
                                        (["--svg", "/no/x.svg"], "no folder /no")])
def test_bad_options(args, says, capsys):
    with pytest.raises(SystemExit) as e:
        bench.main(args)
    assert e.value.code == 2 and says in capsys.readouterr().err
