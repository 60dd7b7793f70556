"""The profiler (tools/profiler.py) against a plain loop that knows one sample at a time; its file, pictures,
command.

The reference here keeps K and V of one pass over one sequence, without padding, and compares with the
library's cosine.
"""
import itertools
import json
import os
import shutil
import subprocess
import sys
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from conftest import GOLDEN, ROOT, prompt, tiny

import depth
from hub.checkpoint import fingerprint, load
from engine import Engine, Request
from model import rotate

sys.path.insert(0, str(ROOT / "tools"))
import profiler                     # noqa: E402
from profiler_map import FEW        # noqa: E402

LLADA = GOLDEN / "llada"
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The golden LLaDA with a tokenizer of 150 words and a chat template."""
    folder = tmp_path_factory.mktemp("models") / "llada"
    shutil.copytree(LLADA, folder)
    folder.chmod(0o755)
    vocab = {"[UNK]": 0, **{f"w{i}": i for i in range(1, 150)}}
    (folder / "tokenizer.json").write_text(json.dumps(dict(
        version="1.0", truncation=None, padding=None, added_tokens=[], normalizer=None,
        pre_tokenizer=dict(type="Whitespace"), post_processor=None, decoder=None,
        model=dict(type="WordLevel", vocab=vocab, unk_token="[UNK]"))))
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(
        chat_template="{% for m in messages %}{{ m.content }} {% endfor %}")))
    return folder


@pytest.fixture
def text(tmp_path):
    """Eight canvases of 32 words."""
    path = tmp_path / "words.txt"
    path.write_text("\n".join(" ".join(f"w{1 + i % 149}" for i in prompt(32, seed)) for seed in range(8)))
    return path


def command(monkeypatch, *args):
    """The exit code of `python tools/profiler.py ARGS`, run in this process."""
    monkeypatch.setattr(sys, "argv", ["profiler.py", *map(str, args)])
    try:
        profiler.main()
    except SystemExit as e:
        return e.code
    return 0


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
    torch.testing.assert_close(profiler.similarity(model, *zip(*samples[::-1])).flip(0), alone, atol=1e-6, rtol=0)


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
    assert profiler.cut((ids, 40), 5, c) is None                           # T = 800 is longer than the model takes
    assert profiler.cut((ids, 40), 50, c, gen_length=30) and profiler.cut((ids, 40), 50, c, gen_length=29) is None
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
    assert found.ratios == [10, 50, 90] and found.samples[2] == 3       # no request reaches 90% with its own prompt


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
    requests = [Request(prompt(40) + prompt(8, seed=i), prefix_len=40, gen_length=12, stop_at_eos=False) for i in range(4)]
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
    monkeypatch.setattr(profiler, "similarity", lambda model, canvases, prefix_lens: torch.tensor(
        [rows[P] for P in prefix_lens], dtype=torch.float64))
    found = profiler.profile(llada, [(prompt(100), None)], rows)
    assert found.table == table
    assert list(found.table.values()) == sorted(found.table.values())


def test_worst_decile(llada, monkeypatch):
    """`worst` is the similarity that a tenth of the samples does not pass, to 0.001; exact layers have
    1.0."""
    values = iter([[1.0, v / 100, 0.5, -0.2] for v in range(99, 79, -1)])               # 0.99, 0.98 ... 0.80
    monkeypatch.setattr(profiler, "similarity", lambda model, canvases, prefix_lens: torch.tensor(
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


def test_write_and_find(folder, tmp_path):
    """What `write` leaves is found again, holds what issue 4 lists, and no temporary file stays behind."""
    folder = shutil.copytree(folder, tmp_path / "copy")
    found = profiler.profile(load(folder), texts(3), RATIOS, fingerprint=fingerprint(folder))
    profiler.write(found, folder / "depth.json")
    assert depth.find_table(folder, 6) == found.table
    raw = json.loads((folder / "depth.json").read_text())
    assert raw["version"] == 1 and raw["date"][:2] == "20" and raw["threshold"] == 0.97
    assert raw["samples"] == {"10": 3, "50": 3, "90": 3}
    assert [len(raw[name]["50"]) for name in ("mean", "worst_decile")] == [6, 6]
    assert not [p for p in folder.iterdir() if "tmp" in p.name]


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


# -- the command


def test_command(folder, text, tmp_path):
    """`python tools/profiler.py` on a text and on requests: writes a table that the folder accepts, an SVG,
    prints the map; no bar where there is no terminal, and no partial sums left."""
    requests = tmp_path / "requests.jsonl"
    words = lambda n: " ".join(f"w{i + 1}" for i in range(n))
    requests.write_text(json.dumps({"prefix": words(30), "prompt": " w40 w41"}) + "\n" + json.dumps(
        {"messages": [{"role": "system", "content": words(20)}, {"role": "user", "content": "w3 w4"}]}) + "\n")
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "profiler.py", "--model", folder, "--text", text, requests, "--samples", "6", "--ratios",
         "25,50,75,99", "--length", "32", "--out", tmp_path / "d.json", "--svg", tmp_path / "d.svg"],
        capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("  layer 5") and "samples  6*  6*  6*" in done.stdout
    raw = json.loads((tmp_path / "d.json").read_text())
    assert raw["fingerprint"] == fingerprint(folder) and raw["samples"] == {"25": 6, "50": 6, "75": 6}     # none meets 99
    ElementTree.parse(tmp_path / "d.svg")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["d.json", "d.svg", "requests.jsonl", "words.txt"]


def test_command_resumes(folder, text, tmp_path, monkeypatch, capsys):
    """Interrupted it exits 130 and says how to go on; with --resume it writes the same table as an
    undisturbed run."""
    args = ["--model", folder, "--text", text, "--ratios", "25,75", "--length", "32", "--batch", "3", "--out"]
    assert command(monkeypatch, *args, tmp_path / "whole.json") == 0
    calls, similarity = [], profiler.similarity

    def twice(*a):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return similarity(*a)

    monkeypatch.setattr(profiler, "similarity", twice)
    assert command(monkeypatch, *args, tmp_path / "parts.json") == 130
    assert "--resume" in capsys.readouterr().err and not (tmp_path / "parts.json").exists()
    assert command(monkeypatch, *args, tmp_path / "parts.json", "--resume") == 0
    assert len(calls) == 4, "three batches, the second one twice"
    whole, parts = (json.loads((tmp_path / name).read_text()) | {"date": ""} for name in ("whole.json", "parts.json"))
    assert whole == parts


@pytest.mark.parametrize("options, message", [
    (["--ratios", "0,50"], "percentages"), (["--ratios", "x"], "percentages"), (["--threshold", "1.5"], "--threshold"),
    (["--samples", "0"], "start at 1"), (["--length", "0"], "start at 1"), (["--samples", "many"], "--samples"),
    (["--gen-length", "8"], "no"), (["--dtype", "int8"], "--dtype"), (["--device", "nowhere"], "nowhere"),
    (["--out", "/no/such/folder/d.json"], "no folder"), (["--nonsense"], "--nonsense"), (["--length", "5000"], "as the model takes")])
def test_bad_options(folder, text, tmp_path, monkeypatch, capsys, options, message):
    """A bad option ends with exit code 2 and one line on standard error, before anything is written."""
    assert command(monkeypatch, "--model", folder, "--text", text, "--out", tmp_path / "d.json", *options) == 2
    out, err = capsys.readouterr()
    assert message in err and err.count("\n") == 1 and out == ""
    assert not (tmp_path / "d.json").exists()


def test_bad_inputs(folder, text, tmp_path, monkeypatch, capsys):
    """Folders and files that cannot be used: exit 2, one line that names what is wrong and where."""
    bad, binary, short = tmp_path / "bad.jsonl", tmp_path / "binary.txt", tmp_path / "short.txt"
    bad.write_text('{"prefix": "w1 w2", "prompt": "w3"}\n{"question": "w1"}\n')
    binary.write_bytes(b"\xff\xfe\x00")
    short.write_text("w1 w2 w3")
    for model, file, options, message in (
            (folder, tmp_path / "absent.txt", [], "absent.txt"), (folder, bad, [], "line 2 of"), (folder, binary, [], "UTF-8"),
            (folder, short, [], "--length"), (folder, bad, ["--length", "16"], "--length"), (tmp_path, text, [], "config.json"),
            (LLADA, text, [], "no tokenizer")):
        code = command(monkeypatch, "--model", model, "--text", file, "--out", tmp_path / "d.json", *options)
        err = capsys.readouterr().err
        assert code == 2 and message in err and err.count("\n") == 1, (file, err)
