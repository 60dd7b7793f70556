"""The command line: what it refuses before a model is loaded, and what it says is to be answered."""
import io
import re
from dataclasses import fields

import pytest

from engine import Engine
from files import BadInput
from generate import main
from cli.options import draws, files_read, parse, read_chats, text
from request import Request

ASK = ["--prefix", "A text.", "--prompt", "Who?"]


@pytest.mark.parametrize("args, says", [
    (["--depth", "x"], "--depth: 'x' is neither"),
    (["--depth", "²"], "--depth: '²' is neither"),
    (["--cache", "none", "--depth", "2"], "--depth has an effect only with"),
    (["--cache", "naive", "--refresh", "2"], "--refresh has no effect"),
    (["--cache", "none", "--salt", "x"], "--salt has no effect"),
    (["--cache", "none", "--no-auto-prefix"], "--auto-prefix has"),
    (["--cache", "none", "--compare"], "--compare compares"),
    (["--depth", "2", "--measure", "3"], "--measure has an effect only"),
    (["--depth", "2", "--self-profile"], "--self-profile has an effect only"),
    (["--requests", "x.jsonl"], "brings its own prompts"),
    (["--watch"], "in a terminal"),
    (["--trace", "--json"], "wants standard output for itself"),
    (["--prefix", "another"], "--prefix is given twice"),
    (["--steps", "two"], "--steps: invalid int value: 'two'"),
    (["--prompt", "-", "--prompt", "-"], "(-) is asked for 2 times"),
    (["--gen", "3"], "unrecognized arguments"),
    (["--template-var", "enable_thinking"], "--template-var is 'enable_thinking'; give it as NAME=VALUE"),
    (["--template-var", "=1"], "--template-var is '=1'; give it as NAME=VALUE"),
    (["--template-var", "a=1", "--template-var", "a=2"], "--template-var a is given twice"),
    (["--template-var", "a=1", "--raw"], "--template-var has an effect on chats"),
])
def test_refused_options(args, says):
    """What has no effect in the chosen mode, excludes another, or would silently replace another is an
    error."""
    with pytest.raises(BadInput, match=re.escape(says)):
        parse([*ASK, *args])


def test_a_template_variable_has_no_effect_on_holes():
    """Symptom: --infill is running text, and --template-var beside it did nothing, without a word."""
    with pytest.raises(BadInput, match="--template-var has an effect on chats"):
        parse(["--infill", "Ann is in ___.", "--template-var", "a=1"])


def test_variables_of_the_template(capsys):
    """--template-var may be repeated; a value is JSON where it can be, else text; a name that the template
    does not read is refused before any weights load."""
    values = ["enable_thinking=true", "date=3 May", "n=3", 'quoted="3"', "equal=a=b", "none="]
    values.append("deep=" + "[" * 99999)
    args = parse([*ASK, *(word for value in values for word in ("--template-var", value))])
    assert list(args.template_vars.values())[:6] == [True, "3 May", 3, "3", "a=b", ""]
    assert parse(ASK).template_vars is None
    assert main([*ASK, "--template-var", "enable_thinking=true"]) == 2
    said = capsys.readouterr().err
    assert "template_vars has 'enable_thinking', which the chat template does not take" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize("option",
                         ["prefix", "prompt", "requests", "model", "output", "salt", "device", "remasking"])
def test_an_empty_option(option):
    """Symptom: `--requests "$FILE"` with FILE unset answers the embedded demo, with exit code 0. Cause: an
    empty text is false, as one not given. Fixed: an empty option is an error, whichever."""
    with pytest.raises(BadInput, match=f"--{option} is empty; give it a value or leave it out"):
        parse([f"--{option}", ""])


@pytest.mark.parametrize("args, says", [
    (["--seed", "3"], "there is a --seed, and nothing is drawn"),
    (["--seed", "0"], "there is a --seed, and nothing is drawn"),
])
def test_a_seed_without_a_draw(args, says):
    """Symptom: --seed 0 without a temperature passed, --seed 3 did not. Cause: 0 is false."""
    with pytest.raises(BadInput, match=says):
        read_chats(parse([*ASK, *args]))
    assert read_chats(parse([*ASK, *args, "--remasking", "random"]))


def test_seeds_follow_the_place(tmp_path):
    """Seed of number i, from 0: --seed + i, modulo 2**32; blank lines do not count, a line's own seed stays,
    and where no line draws, seeds are refused."""
    path = tmp_path / "in.jsonl"
    path.write_text('\n{"prompt": "a"}\n\n{"prompt": "b", "seed": 3}\n{"prompt": "c"}\n')
    chats = read_chats(parse(["--requests", str(path), "--seed", str(2**32 - 2), "--temperature", "1"]))
    assert [chat.options["seed"] for chat in chats] == [2**32 - 2, 3, 0]
    with pytest.raises(BadInput, match="line 4 of .* has a seed, and nothing is drawn"):
        read_chats(parse(["--requests", str(path)]))


def test_n_answers_take_consecutive_places(tmp_path):
    """--n N: each prompt N times, one after another; so the seeds are consecutive, also behind a line's own.
    What would be N times the same answer is refused, by its line."""
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b", "seed": 7, "id": "x"}\n'
                    '{"prompt": "c", "remasking": "random"}\n')
    chats = read_chats(parse(["--requests", str(path), "--n", "3", "--seed", "5", "--temperature", "1"]))
    assert [chat.text["prompt"] for chat in chats] == list("aaabbbccc")
    assert [chat.options["seed"] for chat in chats] == [5, 6, 7, 7, 8, 9, 11, 12, 13]
    assert [chat.passed.get("id") for chat in chats] == [None] * 3 + ["x"] * 3 + [None] * 3
    with pytest.raises(BadInput, match="line 1 of .* would get the same answer 3 times: nothing is drawn"):
        read_chats(parse(["--requests", str(path), "--n", "3"]))
    with pytest.raises(BadInput, match="--n is 0; it must be at least 1"):
        parse([*ASK, "--n", "0"])


def test_a_line_goes_before_the_command_line(tmp_path):
    """A JSONL line takes the fields of Request by their names; null is as if nobody had said anything."""
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a", "gen_length": 9, "threshold": null, "remasking": "random"}\n'
                    '{"prompt": "b"}\n')
    own, common = read_chats(parse(["--requests", str(path), "--gen-length", "4", "--threshold", "0.5"]))
    assert own.options == dict(gen_length=9, remasking="random", seed=0) and draws(own.options)
    assert common.options == dict(gen_length=4, threshold=0.5, seed=1) and not draws(common.options)


def test_raw_and_chats(tmp_path):
    """--raw is for prefix and prompt; a chat under it is refused by its line, not rendered after all."""
    path = tmp_path / "in.jsonl"
    path.write_text('{"prompt": "a"}\n{"messages": [{"role": "user", "content": "b"}]}\n')
    with pytest.raises(BadInput, match="line 2 of .* is a chat, and --raw takes running text"):
        read_chats(parse(["--requests", str(path), "--raw"]))
    with pytest.raises(BadInput, match="--raw has an effect only with"):
        parse(["--raw"])


def test_a_file_without_requests(tmp_path):
    """Symptom: an empty file was bad JSON. It is a file without requests, and that is said."""
    (tmp_path / "in.jsonl").write_text("\n \n")
    with pytest.raises(BadInput, match="holds no request"):
        read_chats(parse(["--requests", str(tmp_path / "in.jsonl")]))


def test_where_a_text_comes_from(tmp_path, monkeypatch):
    """Symptom: a prompt that begins with @ cannot be given; @~/file is not found. @@channel is the text
    @channel, ~ is the user's home, - is standard input, as it is, without a byte order mark."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf one\r\ntwo \n")
    assert text("@~/a.txt") == text(f"@{tmp_path}/a.txt") == " one\r\ntwo \n"
    assert text("@@channel") == "@channel" and text("@@@") == "@@" and text(" a-b ") == " a-b "
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("\ufeff one\n".encode())))
    assert text("-") == " one\n"
    args = parse(["--prefix", "@a", "--prompt", "@@b", "--prompt", "@c", "--prompt", "d"])
    assert files_read(args) == ["a", "c"]


def test_help_tells_the_defaults(capsys):
    """The defaults are written once, in Request and Engine; what the help says of them is the same."""
    with pytest.raises(SystemExit):
        parse(["--help"])
    told = re.findall(r"(?s)\n  --([a-z-]+)((?:(?!\n  --|\n\n).)*)", capsys.readouterr().out)
    known = {f.name: f.default for f in fields(Request)}
    known |= Engine.from_folder.__kwdefaults__ | Engine.__init__.__kwdefaults__
    checked = 0
    for option, words in told:
        default = re.search(r"\(default:? ([a-z0-9]+)[;:,)]", " ".join(words.split()))
        name = option.replace("-", "_")
        if default and name in known and not isinstance(known[name], bool) and known[name] is not None:
            checked += 1
            said = float(default[1]) if default[1].isdigit() else default[1]
            assert said == known[name], option
    assert checked >= 5
