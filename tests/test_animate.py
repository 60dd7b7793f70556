"""The picture of the README (tools/animate.py): well-formed, no script, every number that of a real run."""
import re
import sys
import xml.etree.ElementTree as ET

import pytest
from conftest import ROOT, prompt

from engine import Engine, Request

sys.path.insert(0, str(ROOT / "tools"))
import animate                          # noqa: E402

SVG = "{http://www.w3.org/2000/svg}"
QUESTION = 'Which of "two" & <three>?'


@pytest.fixture(scope="module")
def run(text_folder):
    document = "The weights are random but decisive. " * 8
    return animate.record(text_folder, document, QUESTION, gen_length=10, refresh=3)


@pytest.fixture(scope="module")
def svg(run):
    return ET.fromstring(animate.draw(run))


def words(svg) -> list:
    return [e.text for e in svg.iter(SVG + "text")]


def test_counts_are_those_of_the_run(run, text_folder):
    """A hit, one token a step; the sums in the end are the results', with the cache and without."""
    engine = Engine.from_folder(text_folder, refresh=3, measure=0)
    ids, P = engine.tokenizer.render({"prefix": run.document, "prompt": QUESTION})
    request = Request(ids, prefix_len=P, gen_length=10)
    engine.generate([request])
    hit, = engine.generate([request])
    plain, = Engine(engine.model, cache="none", tokenizer=engine.tokenizer).generate([request])
    assert (run.work[-1], run.none[-1]) == (hit.token_layers, plain.token_layers)
    assert hit.depth == run.depth > 0
    assert len(run.refreshes) == hit.forwards and sum(run.refreshes) == hit.refreshes >= 2
    assert (run.prefix, run.suffix) == (P, len(ids) + 10 - P)


@pytest.mark.parametrize("window", ["all", "block"])
@pytest.mark.parametrize("cache", ["none", "bicache"])
def test_count_in_a_batch(model, cache, window):
    """Token-layers summed from events are the result's, for both families, two at a time, in blocks."""
    engine = Engine(model, cache=cache, window=window, cache_mb=8, refresh=3,
                    **({"depth": 2} if cache == "bicache" else {}))
    requests = [Request(prompt(40) + prompt(n, seed=n), prefix_len=40, gen_length=n, block_length=4,
                        stop_at_eos=False) for n in (8, 12)]
    events = list(engine.stream(requests))
    for index in range(2):
        own = [e for e in events if e.index == index]
        assert animate.count(own, model.config.layers)[-1] == own[-1].result.token_layers


def test_no_script_and_nothing_from_outside(svg):
    """A README shows it as an <img>: there a script does not run and nothing else is fetched."""
    assert {e.tag for e in svg.iter()} == {SVG + name for name in ("svg", "title", "style", "rect", "text")}
    assert not [name for e in svg.iter() for name in e.attrib if name.startswith("on") or "href" in name]
    assert "url(" not in svg.find(SVG + "style").text and "@import" not in svg.find(SVG + "style").text


def test_every_number_stands_in_it(run, svg):
    """Each step's sums and kind, and each token; text with <, & and quotes as it is."""
    shown = words(svg)
    assert QUESTION in shown
    for sums in (run.work, run.none):
        assert all(f"{n:,.0f}" in shown for n in sums)
    for step, refresh in enumerate(run.refreshes):
        assert shown.count(f"step {step}: {'refresh' if refresh else 'reuse'}") == 1
    tokens = [word or "end" for committed in run.committed for _, word in committed]
    assert len(tokens) == 10 and all(shown.count(word) >= tokens.count(word) for word in tokens)


def test_still_it_is_the_last_step(run, svg):
    """Without animation the masks are gone and the last sums stand alone."""
    masks = [e for e in svg.iter(SVG + "rect") if e.get("class") == "mask" and "until" in e.get("style", "")]
    assert len(masks) == 10 and all("opacity: 0" in e.get("style") for e in masks)
    plain = [e.text for e in svg.iter(SVG + "text") if e.get("class") == "ink number end"
             and "opacity: 0" not in e.get("style")]
    assert plain == [f"{run.work[-1]:,.0f}", f"{run.none[-1]:,.0f}"]


def test_every_animation_is_defined(svg):
    """A rule that the style lacks is silence: the bar of `none` once did not grow, since a rule that is
    called none is no rule."""
    defined = set(re.findall(r"@keyframes (\S+)", svg.find(SVG + "style").text))
    used = {re.match(r"animation: (\S+)", e.get("style", "")) for e in svg.iter()} - {None}
    assert {m.group(1) for m in used} == defined and "none" not in defined


def test_command_line(text_folder, tmp_path, capsys):
    """It writes the file whole, and says bad input in a sentence."""
    out, document = tmp_path / "x.svg", tmp_path / "doc.txt"
    document.write_text("The weights are random but decisive. " * 4)
    asked = ["--model", str(text_folder), "--prefix", str(document), "--gen-length", "6", "--out", str(out)]
    assert animate.main(asked) == 0 and ET.parse(out) and list(tmp_path.glob("*.tmp")) == []
    assert "6 steps, 2 refreshes" in capsys.readouterr().out
    before = out.read_bytes()
    assert animate.main([*asked, "--refresh", "0"]) == 2 and out.read_bytes() == before
    assert capsys.readouterr().err.startswith("animate.py: refresh is 0")


def test_the_picture_in_docs_is_of_the_embedded_model():
    """docs/denoise.svg tells the counts of today's weights; if they have changed: python tools/animate.py."""
    document = (ROOT / "examples" / "staff.txt").read_text().strip()
    run = animate.record(ROOT / "checkpoints" / "tiny", document, "Which room is Tom's manager in?", 16, 4)
    title = lambda text: ET.fromstring(text).find(SVG + "title").text
    assert title((ROOT / "docs" / "denoise.svg").read_text()) == title(animate.draw(run))
