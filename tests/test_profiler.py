"""The profiler (tools/profiler.py) against a plain loop that knows one sample at a time, and its pictures.

The reference here keeps K and V of one pass over one sequence, without padding, and compares with the
library's cosine.
"""
import itertools
import sys
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, prompt, tiny

from engine import Engine, Request
from model import rotate

sys.path.insert(0, str(ROOT / "tools"))
import profiler                     # noqa: E402
from profiler_map import FEW        # noqa: E402

RATIOS = (10, 50, 90)


def keys_and_values(model, ids):
    """K after RoPE and V of each layer, (T, K * D) float64, of one sequence alone."""
    rope, found = model.rope(torch.arange(len(ids))[None]), []

    def attend(q, k, v):
        q, k = rotate(q, *rope), rotate(k, *rope)
        found.append([x[0].transpose(0, 1).flatten(1).double() for x in (k, v)])
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)

    x = model.embed(torch.tensor([ids]))
    for layer in model.layers:
        x = layer(x, attend)
    return found


def reference(model, canvas, P):
    """Similarity per layer (L,) of one sample."""
    pairs = zip(keys_and_values(model, canvas[:P]), keys_and_values(model, canvas))
    return torch.stack([sum(F.cosine_similarity(a, b[:P], dim=-1).mean() for a, b in zip(alone, within)) / 2
                        for alone, within in pairs])


def texts(n, length=48):
    return [(prompt(length, seed), None) for seed in range(n)]


# -- similarity


def test_similarity_is_the_plain_loop(model):
    """Samples of all lengths in one call give what each gives alone in the plain loop, whatever pads its
    neighbours."""
    canvases = [prompt(n, n) for n in (40, 41, 43, 60, 7, 2, 100, 33)]
    prefix_lens = [10, 40, 42, 59, 3, 1, 50, 33]
    found = profiler.similarity(model, canvases, prefix_lens)
    expected = torch.stack([reference(model, *sample) for sample in zip(canvases, prefix_lens)])
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert found.min() < 0.8, "the case must have something to find"


def test_batch_equals_one_at_a_time(model):
    """A sample's figures do not depend on the batch that it is in."""
    samples = [(prompt(n, n), P) for n, P in ((30, 12), (33, 12), (35, 34), (80, 8), (80, 79))]
    alone = torch.cat([profiler.similarity(model, [canvas], [P]) for canvas, P in samples])
    torch.testing.assert_close(profiler.similarity(model, *zip(*samples)), alone, atol=1e-6, rtol=0)
    backwards = profiler.similarity(model, *zip(*samples[::-1]))
    torch.testing.assert_close(backwards.flip(0), alone, atol=1e-6, rtol=0)


def test_exactly_one(model):
    """Layer 0 depends on token and position only: exactly 1.0. With P == T all layers are."""
    canvases = [prompt(n, n) for n in (40, 50, 50, 64)]
    assert (profiler.similarity(model, canvases, [1, 20, 49, 63])[:, 0] == 1).all()
    assert (profiler.similarity(model, canvases, [40, 50, 50, 64]) == 1).all()


def test_each_sequence_runs_once(llada):
    """One canvas at three ratios costs one pass over the canvas and one over each prefix, no row more."""
    rows, canvas = [], prompt(64)
    handle = llada.layers[0].register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[:2].numel()))
    try:
        profiler.similarity(llada, [canvas] * 4, [16, 32, 48, 32])
    finally:
        handle.remove()
    assert sum(rows) == 64 + 16 + 32 + 48


# -- profile


def test_cut_text(llada):
    """A text of T ids is cut at the nearest token to r * T, with at least one on each side."""
    c = llada.config
    assert profiler.cut((list(range(48)), None), 50, c) == (list(range(48)), 24)
    assert [profiler.cut((list(range(48)), None), r, c)[1] for r in (2, 33, 90, 97)] == [1, 16, 43, 47]
    assert profiler.cut((list(range(48)), None), 1, c) is None             # P = 0
    assert profiler.cut((list(range(20)), None), 99, c) is None            # P = T
    assert profiler.cut(([1] * (c.max_len + 1), None), 50, c) is None


def test_cut_request(llada):
    """A request keeps its prefix and gets the MASKs that bring T nearest to P / r; None where no number of
    them does."""
    c, ids = llada.config, prompt(50)
    canvas, P = profiler.cut((ids, 40), 50, c)
    assert (canvas, P) == (ids + [c.mask_id] * 30, 40)
    for percent in range(10, 79):
        canvas, P = profiler.cut((ids, 40), percent, c)
        assert abs(len(canvas) - 100 * P / percent) <= 0.5 and canvas[:50] == ids
    assert profiler.cut((ids, 40), 80, c) is None                          # T = 50 leaves nothing to generate
    assert profiler.cut((ids, 40), 5, c) is None                      # T = 800 is more than the model takes
    assert profiler.cut((ids, 40), 50, c, gen_length=30)
    assert profiler.cut((ids, 40), 50, c, gen_length=29) is None
    assert profiler.cut((ids, 0), 50, c) is None
    assert profiler.cut((ids, 50), 90, c)[1] == 49                         # one prompt token stays outside


def test_profile_is_the_mean_of_the_plain_loop(model):
    """Texts and requests mixed: mean and count per ratio are those of the plain loop over all cuts."""
    samples = [*texts(3), *((prompt(20 + n, n), 12 + n) for n in range(4))]
    found = profiler.profile(model, samples, RATIOS, batch=3)
    for percent, n, mean in zip(found.ratios, found.samples, found.mean, strict=True):
        values = [reference(model, *c) for s in samples if (c := profiler.cut(s, percent, model.config))]
        assert n == len(values)
        torch.testing.assert_close(torch.tensor(mean), torch.stack(values).mean(0).float(), atol=1e-6, rtol=0)
    assert found.ratios == [10, 50, 90]
    assert found.samples[2] == 3                        # no request reaches 90% with its own prompt


def test_depth_stops_where_the_suffix_enters():
    """Symptom: at the depth of the table the K/V of one layer more are those of the prefix alone, and answers
    break one layer early. Only layers 2 and 4 mix tokens here: the K/V of layers 0, 1, 2 are the same for any
    suffix, those of 3 are not. A refresh at depth 3 would start from a state entering layer 3 that has not
    seen the suffix; from depth 2 on it is exact."""
    model = tiny(layers=5, scale=2)
    for i, layer in enumerate(model.layers):
        if i not in (2, 4):
            layer.o.weight.zero_()
    found = profiler.profile(model, texts(4), (20, 50))
    assert found.table == {20: 2, 50: 2}
    requests = [Request(prompt(40) + prompt(8, seed=i), prefix_len=40, gen_length=12, stop_at_eos=False)
                for i in range(4)]
    tokens = lambda **kw: [r.tokens for r in Engine(model, refresh=1, cache_mb=8, **kw).generate(requests)]
    assert tokens(depth=2) == tokens(cache="none") != tokens(depth=3)
    assert all(s == 1 for row in found.mean for s in row[:3]) and all(row[3] < 0.97 for row in found.mean)
    model.layers[2].o.weight.zero_()
    assert profiler.profile(model, texts(4), (20, 50)).table == {20: 5, 50: 5}


@pytest.mark.parametrize("rows, table", [
    ({10: [1, .99, .98, .9], 50: [1, .98, .96, .99], 90: [1, .99, .98, .97]}, {10: 1, 50: 1, 90: 4}),
    ({10: [1, .99, .9, .99], 50: [1, .98, .98, .9], 90: [1, .9, .99, .97]}, {10: 0, 50: 0, 90: 0}),
    ({10: [1, .99, .99, .99], 50: [1, .9, .99, .99], 90: [.9, 1, 1, 1]}, {10: 0, 50: 0, 90: 0})])
def test_table_is_leading_and_monotone(llada, monkeypatch, rows, table):
    """The depth counts leading layers at or above the threshold, but the last one unless it is the last of
    all; a larger ratio that has less lowers the smaller ones."""
    monkeypatch.setattr(profiler, "similarity", lambda model, canvases, prefix_lens, *_: torch.tensor(
        [rows[P] for P in prefix_lens], dtype=torch.float64))
    found = profiler.profile(llada, [(prompt(100), None)], rows)
    assert found.table == table
    assert list(found.table.values()) == sorted(found.table.values())


def test_worst_decile(llada, monkeypatch):
    """`worst` is the similarity that a tenth of the samples does not pass, to 0.001; exact layers have
    1.0."""
    values = iter([[1.0, v / 100, 0.5, -0.2] for v in range(99, 79, -1)])               # 0.99, 0.98 ... 0.80
    monkeypatch.setattr(profiler, "similarity", lambda model, canvases, prefix_lens, *_: torch.tensor(
        [next(values) for _ in canvases], dtype=torch.float64))
    found = profiler.profile(llada, texts(20), (50,))
    assert found.worst == [[1.0, pytest.approx(0.81, abs=0.0011), 0.5, 0.0]]
    assert found.mean[0][1] == pytest.approx(0.895) and found.samples == [20]


def test_samples_stream(llada):
    """Samples are read as they are needed: an endless source ends with the batch that fills every ratio."""
    source = iter(itertools.cycle(texts(3)))
    taken = []
    found = profiler.profile(llada, (taken.append(1) or s for s in source), RATIOS, per_ratio=5, batch=2)
    assert found.samples == [5, 5, 5] and len(taken) == 6


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_resume_equals_uninterrupted(llada, tmp_path, stop):
    """Interrupted after any batch and resumed, a run comes to the same figures, bit for bit, and reads no
    batch twice."""
    samples, how = [*texts(7), (prompt(30), 20)], dict(batch=2, per_ratio=7, partial=tmp_path / "sums")

    def interrupted():
        yield from samples[:stop]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profiler.profile(llada, interrupted(), RATIOS, **how)
    progress = []
    resumed = profiler.profile(llada, samples, RATIOS, **how, resume=True, progress=progress.append)
    assert resumed == profiler.profile(llada, samples, RATIOS, batch=2, per_ratio=7)
    assert progress[0] == 3 * (stop // 2 * 2) and sum(progress) == sum(resumed.samples)
    with pytest.raises(ValueError, match="other options"):
        profiler.profile(llada, samples, (10, 60), **how, resume=True)


def test_non_finite_is_an_error():
    """K/V that are not finite stop the profile: they are no similarity of zero."""
    model = tiny()
    model.layers[1].v.weight[0, 0] = float("inf")
    with pytest.raises(ValueError, match="not finite"):
        profiler.profile(model, texts(1), RATIOS)


# -- pictures


@pytest.mark.parametrize("samples", [3, 8])
def test_pictures(llada, samples):
    """Both maps show all layers and ratios and the depth; ratios with few samples are marked; the SVG is
    sound XML."""
    found = profiler.profile(llada, texts(samples), (25, 50, 75))
    found.table = {25: 1, 50: 2, 75: 4}
    root = ElementTree.fromstring(profiler.svg(found))
    tags = [e.tag.rpartition("}")[2] for e in root.iter()]
    assert tags.count("rect") == 4 * 3
    line = next(e for e in root.iter() if e.get("id") == "depth")
    heights = [float(point.split(",")[1]) for point in line.get("points").split()]
    bottom, h = max(float(e.get("y")) for e in root.iter() if e.tag.endswith("rect")), heights[0] - heights[2]
    assert heights == pytest.approx([bottom + h - n * h for n in (1, 1, 2, 2, 4, 4)])
    words = ["".join(e.itertext()) for e in root.iter() if e.tag.endswith("text")]
    marks = "*" if samples < FEW else ""
    assert {f"25{marks}", f"50{marks}", f"75{marks}", "layer 0", "layer 3"} <= set(words)
    lines = profiler.text_map(found).split("\n")
    assert [line.split()[:2] for line in lines[:4]] == [["layer", str(i)] for i in (3, 2, 1, 0)]
    assert [line.count("=") for line in lines[:4]] == [1, 1, 2, 3], "one mark for each shared layer and ratio"
    assert lines[5].split() == ["depth", "1", "2", "4"] and lines[6].split()[1:] == [f"{samples}{marks}"] * 3
