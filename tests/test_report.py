"""The report of the accuracy bench: what it says of results that are made up here, so that it is known."""
import xml.etree.ElementTree as ElementTree

import pytest

from bench import report


def made_up(lost: dict, n=500, layers=2, dependence=None) -> dict:
    """Results on kinds "easy" and "hard" at two ratios in which a setup loses every so-manieth answer of a
    kind: {(setup, kind): share}."""
    kind, target = ["easy", "hard"] * n, [0.5, 0.5, 0.9, 0.9] * (n // 2)
    need = ["none, all", "none, block", "naive, all", "intra, R 16, all", report.DEFAULT, report.TABLE,
            *(f"bicache depth {d}, R 16, all" for d in range(layers + 1)), "none, all, slow",
            "bicache auto, R 4, all, slow"]
    header = dict(layers=layers, table={"40": 1, "80": 2}, questions=f"{2 * n} of abc", need=need,
                  kinds=["easy", "hard"], kind=kind, target=target, ratio=target,
                  document=list(range(2 * n)), canvas=[100] * (2 * n))
    rows = {}
    for name in need:
        places = [0, 1] if name.endswith("slow") else None
        right = ["1"] * (2 * n)
        for k, which in enumerate(header["kinds"]):
            for i in range(round(lost.get((name, which), 0) * n)):
                right[2 * i + k] = "0"
        count = 2 if places else 2 * n
        rows[name] = dict(
            setup=name, places=places, right="".join(right[:count]), answers=[int(x) for x in right[:count]],
            depths=[1] * count, forwards=[3] * count, refreshes=[1] * count,
            work=[10 if "none" in name else 4] * count, total={}, seconds=1)
    layer = lambda x: [[1.0, 1 - x]] * 3
    rows["states"] = {"setup": "states"}
    for k in header["kinds"]:
        between = layer((dependence or {}).get(k, 0.01))
        rows["states"][k] = dict(n=4, alone=layer(0.1), between=between, named=layer(0.1)[:1])
    return dict(header=header, rows=rows)


def said(found):
    return "\n".join(report.verdicts(report.Results(found)))


def test_verdict_where_naive_reuse_breaks_a_kind_and_bicache_does_not(capsys):
    broken = {("naive, all", "hard"): 0.4, ("bicache depth 2, R 16, all", "hard"): 0.4}
    found = made_up(broken, n=1000, dependence={"hard": 0.2})
    words = said(found)
    assert "naive reuse, easy: holds, +0.0" in words and "naive reuse, hard: collapses, -40.0" in words
    assert "fixed depths of 2 layers surely lose" in words
    assert "keep its answers: what naive reuse lacks" in words
    assert "with the question (worst decile of tokens, worst layer): hard 0.200, easy 0.010" in words
    assert "easy 0.010; the kinds that collapse change" in words
    assert "within 1.8 points of none on every kind (published): yes\n" in words
    assert "within 0.5 points of none on every kind (ours): yes\n" in words
    report.show(found)
    assert "hard" in capsys.readouterr().out
    found["rows"]["states"]["easy"]["between"] = [[0.5, 0.5]] * 3
    assert "easy 0.500, hard 0.200; not by itself the reason" in said(found)
    found = made_up({(name, "hard"): 0.4 for name in ("naive, all", report.INTRA)})
    assert "lose them as well: keeping K/V is the matter" in said(found)


def test_verdict_where_bicache_loses_and_naive_reuse_holds():
    words = said(made_up({(report.DEFAULT, "hard"): 0.01, ("naive, all", "easy"): 0.002}))
    assert "collapses," not in words and "why: no kind surely collapses" in words
    assert "hard: -1.0" in words and "within 0.5 points of none on every kind (ours): NO" in words
    assert "within 1.8 points of none on every kind (published): yes, the intervals not of all" in words
    words = said(made_up({(report.DEFAULT, "hard"): 0.03}))
    assert "within 1.8 points of none on every kind (published): NO" in words


def test_verdict_without_enough_to_tell():
    words = said(made_up({("naive, all", "hard"): 0.2}, n=20))
    assert "naive reuse, hard: cannot be told" in words
    words = said(made_up({(name, "hard"): 0.95 for name in ("none, all", "naive, all", report.DEFAULT)}))
    assert "hard: holds (none knows only 5%: little to lose)" in words


def test_a_part_is_held_against_none_on_the_same_questions():
    r = report.Results(made_up({("none, all", "easy"): 1.0}))
    assert r.changes("bicache auto, R 4, all, slow", "easy") == (0, 0, 1)
    assert r.changes("naive, all", "easy") == (0, 500, 500)
    assert r.saved("bicache auto, R 4, all, slow") == pytest.approx(0.6)


def test_a_part_is_matched_by_question_not_by_place():
    """Symptom: the third answer of a part is held against the third one of `none`, which was asked something
    else."""
    found = made_up({})
    name = "bicache auto, R 4, all, slow"
    rows = found["rows"]
    rows["none, all, slow"].update(places=[0, 3, 5], right="100", answers=[1, 0, 0], work=[10, 20, 30])
    rows[name].update(places=[3, 0], right="11", answers=[1, 1], work=[4, 6])
    r = report.Results(found)
    assert [r.changes(name, kind) for kind in ("hard", "easy", None)] == [(0, 1, 1), (0, 0, 1), (0, 1, 2)]
    assert r.saved(name) == pytest.approx(1 - 10 / 30)


def test_a_depth_surely_loses_only_if_its_whole_interval_does():
    assert "easy: holds, +0.0" in (words := said(made_up({("bicache depth 1, R 16, all", "easy"): 0.002})))
    assert "surely lose" not in words.split("hard")[0].replace("no fixed depth surely loses", "")
    words = said(made_up({("bicache depth 1, R 16, all", "easy"): 0.1}))
    assert "fixed depths of 1 layers surely lose" in words


def test_picture():
    """A panel for each kind; at each ratio a line, none's level, and a ring where the table stands."""
    root = ElementTree.fromstring(report.draw(made_up({("bicache depth 2, R 16, all", "hard"): 0.4})))
    tag = lambda node, name: node.findall(f"{{http://www.w3.org/2000/svg}}{name}")
    panels = {g.get("id"): g for g in tag(root, "g")}
    assert set(panels) == {"easy", "hard"} and not tag(root, "rect")
    width, height = map(float, root.get("viewBox").split()[2:])
    inner = lambda panel, name: [node for group in tag(panel, "g") for node in tag(group, name)]
    for panel in panels.values():
        lines = [[tuple(map(float, p.split(","))) for p in line.get("points").split()]
                 for line in inner(panel, "polyline")]
        rings = [(float(c.get("cx")), float(c.get("cy"))) for c in inner(panel, "circle")]
        assert [len(line) for line in lines] == [3, 3] and rings == [lines[0][1], lines[1][2]]
        assert all(0 <= x <= width and 0 <= y <= height for line in lines for x, y in line)
    def ends(kind):
        points = inner(panels[kind], "polyline")[0].get("points").split()
        return [point.split(",")[1] for point in points][::2]
    assert len({*ends("easy")}) == 1 and float(ends("hard")[1]) > float(ends("hard")[0]), "down is worse"
