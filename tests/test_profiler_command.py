"""The profiler as it is run, `python tools/profiler.py`: its file, its exit codes, going on after an
interrupt."""
import json
import os
import shutil
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from conftest import GOLDEN, ROOT, prompt

import depth
from hub.checkpoint import fingerprint, load

sys.path.insert(0, str(ROOT / "tools"))
import profiler                     # noqa: E402

LLADA = GOLDEN / "llada"


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


def test_write_and_find(folder, tmp_path):
    """What `write` leaves is found again, holds what a reader of the table may ask, and no temporary file
    stays behind."""
    folder = shutil.copytree(folder, tmp_path / "copy")
    texts = [(prompt(48, seed), None) for seed in range(3)]
    found = profiler.profile(load(folder), texts, (10, 50, 90), fingerprint=fingerprint(folder))
    profiler.write(found, folder / "depth.json")
    assert depth.find_table(folder, 6) == found.table
    raw = json.loads((folder / "depth.json").read_text())
    assert raw["version"] == 1 and raw["date"][:2] == "20" and raw["threshold"] == 0.97
    assert raw["samples"] == {"10": 3, "50": 3, "90": 3}
    assert [len(raw[name]["50"]) for name in ("mean", "worst_decile")] == [6, 6]
    assert not [p for p in folder.iterdir() if "tmp" in p.name]


def test_no_deeper_than_said(folder, text, tmp_path, monkeypatch, capsys):
    """--max-depth bounds the table where accuracy is known to fall above it; nothing else changes."""
    args = ["--model", folder, "--text", text, "--ratios", "25,75", "--length", "32", "--threshold", "0.01"]
    assert command(monkeypatch, *args, "--out", tmp_path / "all.json") == 0
    assert command(monkeypatch, *args, "--out", tmp_path / "two.json", "--max-depth", "2") == 0
    deep, bound = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("all", "two"))
    assert min(deep["table"].values()) > 2 and bound["table"] == {"25": 2, "75": 2}
    assert bound["mean"] == deep["mean"] and bound["threshold"] == 0.01
    assert command(monkeypatch, *args, "--max-depth", "0") == 2 and "start at 1" in capsys.readouterr().err


def test_command(folder, text, tmp_path):
    """`python tools/profiler.py` on a text and on requests: writes a table that the folder accepts, an SVG,
    prints the map; no bar where there is no terminal, and no partial sums left."""
    requests = tmp_path / "requests.jsonl"
    words = lambda n: " ".join(f"w{i + 1}" for i in range(n))
    chats = [{"prefix": words(30), "prompt": " w40 w41"},
             {"messages": [{"role": "system", "content": words(20)}, {"role": "user", "content": "w3 w4"}]}]
    requests.write_text("\n".join(map(json.dumps, chats)) + "\n")
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "profiler.py", "--model", folder, "--text", text, requests,
         "--samples", "6", "--ratios", "25,50,75,99", "--length", "32",
         "--out", tmp_path / "d.json", "--svg", tmp_path / "d.svg"],
        capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("  layer 5") and "samples  6*  6*  6*" in done.stdout
    raw = json.loads((tmp_path / "d.json").read_text())
    assert raw["fingerprint"] == fingerprint(folder)
    assert raw["samples"] == {"25": 6, "50": 6, "75": 6}                    # none meets 99
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
    whole, parts = (json.loads((tmp_path / name).read_text()) | {"date": ""}
                    for name in ("whole.json", "parts.json"))
    assert whole == parts


@pytest.mark.parametrize("options, message", [
    (["--ratios", "0,50"], "percentages"), (["--ratios", "x"], "percentages"),
    (["--threshold", "1.5"], "--threshold"), (["--samples", "0"], "start at 1"),
    (["--length", "0"], "start at 1"), (["--samples", "many"], "--samples"), (["--gen-length", "8"], "no"),
    (["--dtype", "int8"], "--dtype"), (["--device", "nowhere"], "nowhere"), (["--nonsense"], "--nonsense"),
    (["--out", "/no/such/folder/d.json"], "no folder"), (["--length", "5000"], "as the model takes")])
def test_bad_options(folder, text, tmp_path, monkeypatch, capsys, options, message):
    """A bad option ends with exit code 2 and one line on standard error, before anything is written."""
    out = tmp_path / "d.json"
    assert command(monkeypatch, "--model", folder, "--text", text, "--out", out, *options) == 2
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
            (folder, tmp_path / "absent.txt", [], "absent.txt"), (folder, bad, [], "line 2 of"),
            (folder, binary, [], "UTF-8"), (folder, short, [], "--length"),
            (folder, bad, ["--length", "16"], "--length"),
            (tmp_path, text, [], "config.json"), (LLADA, text, [], "no tokenizer")):
        code = command(monkeypatch, "--model", model, "--text", file, "--out", tmp_path / "d.json", *options)
        err = capsys.readouterr().err
        assert code == 2 and message in err and err.count("\n") == 1, (file, err)


def test_texts_and_requests_as_everywhere(folder, tmp_path):
    """Symptom: a byte order mark became part of the first sample; a blank line ended the run, as a request
    with a seed would have. Cause: the profiler read its files in its own way. Fixed: it reads them as
    generate.py does, and with --raw without the chat template."""
    from tokenizer import Tokenizer
    tokenizer = Tokenizer.from_folder(folder)
    (tmp_path / "a.txt").write_bytes("\ufeffw1 w2 w3".encode())
    assert list(profiler.read(tmp_path / "a.txt", tokenizer, 3, False)) == [([1, 2, 3], None)]
    path = tmp_path / "a.jsonl"
    text = '\ufeff{"prefix": "w1 w2 ", "prompt": "w3", "seed": 1, "id": 7}\n\n{"prompt": "w4"}\n'
    path.write_bytes(text.encode())
    assert list(profiler.read(path, tokenizer, 3, True)) == [([1, 2, 3], 2), ([4], 0)]
    path.write_text('\n{"prompt": "w1", "Seed": 1}')
    with pytest.raises(ValueError, match="line 2 of .* has 'Seed'"):
        list(profiler.read(path, tokenizer, 3, False))


def test_nothing_is_written_over_what_is_read(folder, text, monkeypatch, capsys):
    """Symptom: --out or --svg equal to --text overwrites the text, after hours of measuring."""
    before = text.read_bytes()
    for args in (["--out", text], ["--svg", text], ["--out", "x.json", "--svg", "x.json"]):
        assert command(monkeypatch, "--model", folder, "--text", text, *args) == 2
        assert "name one file twice" in capsys.readouterr().err
    assert text.read_bytes() == before
