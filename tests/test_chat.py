"""A conversation: what its prefix is from turn to turn, what ends an answer, what is typed and piped."""
import io
import json
import os
import re
import signal
import subprocess
import sys

import pytest
from conftest import ROOT, tiny

import generate
from cli.chat import Conversation, Live, fold
from engine import Engine
from files import BadInput
from request import Event, Request, Result
from tokenizer import Tokenizer

DOCUMENT = (ROOT / "tests" / "golden" / "README.md").read_text()[:300]
QUESTIONS = "Which weights?", "How many?", "Who made them?", "Where do they lie?"


@pytest.fixture(params=["llada", "dream"])
def engine(request, text_folder):
    """A random model of either family that always shares half of its layers."""
    tokenizer = Tokenizer.from_folder(text_folder)
    model = tiny(shift=request.param == "dream", vocab=tokenizer.vocab_size, mask_id=0, eos_ids=(1,))
    return Engine(model, table={0: 2}, tokenizer=tokenizer, cache_mb=16, measure=0)


def begin(engine, document=DOCUMENT, **options):
    return Conversation(engine, document, {"gen_length": 8, "stop_at_eos": False, **options}, 8)


def turn(conversation, question, listen=lambda event: None):
    """The answer, and the prefix it was asked with."""
    request, history = conversation.request(question)
    return conversation.ask(question, request, history, listen), request.prefix_len, history


def held(engine):
    """Pages and users of the cache: what must be as before once an answer has ended."""
    cache = engine.cache
    return len(cache.free) + sum(len(e.pages) for e in cache.entries.values()), [
        e.users for e in cache.entries.values() if e.users]


# -- the prefix from turn to turn


def test_the_document_keeps_its_hit_while_the_history_grows(engine):
    """Answers of one step: nothing would be computed twice, so that no longer prefix is stored and each
    question after the first hits the document, alone as in the engine."""
    conversation = begin(engine, threshold=1e-9)
    answers = [turn(conversation, question) for question in QUESTIONS]
    document = answers[0][1]
    assert [a.result.hit for a, *_ in answers] == [False, True, True, True]
    assert {P for _, P, _ in answers} == {document} and len(engine.cache.entries) == 1
    histories = [history for *_, history in answers]
    assert histories == sorted(set(histories)) and histories[0] == document
    assert all(a.result.encode_token_layers == 0 for a, *_ in answers[1:])
    messages = conversation.messages[:-1]
    ids, _ = engine.tokenizer.chat(messages)
    options = dict(prefix_len=document, gen_length=8, stop_at_eos=False, threshold=1e-9)
    alone, = engine.generate([Request(ids, **options)])
    assert engine.tokenizer.decode(alone.tokens).strip() == answers[-1][0].text


def test_a_longer_prefix_is_stored_where_it_pays(engine):
    """One token a step: each of the passes of an answer would compute the history again. The longer prefix is
    stored, and what it spares in its own answer is more than its encoding, by the engine's own count."""
    conversation = begin(engine, gen_length=32)
    turn(conversation, QUESTIONS[0])
    kept = list(conversation.messages)
    ids, history = engine.tokenizer.chat([*kept, {"role": "user", "content": QUESTIONS[1]}])
    document = len(conversation.first)
    short, = engine.generate([Request(ids, prefix_len=document, gen_length=32, stop_at_eos=False)])
    answer, P, _ = turn(conversation, QUESTIONS[1])
    assert P == history > document and answer.result.encode_token_layers == (4 - 0.5) * history
    assert short.hit and short.encode_token_layers == 0
    assert answer.result.token_layers + answer.result.encode_token_layers < short.token_layers
    assert turn(conversation, QUESTIONS[2])[1] > P


@pytest.mark.parametrize("spent, passes, pays", [
    (0, 10, False), (0, 11, True), (9, 10, False), (10, 10, True)])
def test_the_rule(engine, spent, passes, pays):
    """Stored once tokens times passes, spent and to come, reach what is to be encoded: here 110 ids, 100
    stored."""
    conversation, ids = begin(engine), list(range(2, 112))
    first = Request(ids[:101], prefix_len=100, gen_length=2)
    engine.generate([first])
    conversation.spent, conversation.passes = spent, passes
    best = conversation.prefixes([*ids, 5], 110, engine.admission.salt(first))
    assert best == ([110, 100, 0] if pays else [100, 0])


def test_what_is_spent_adds_up_until_it_is_enough(engine):
    """Three steps an answer: too little for a longer prefix at once; the passes of several answers pay for
    one."""
    conversation = begin(engine, gen_length=6, steps=3)
    lengths, spent = [], []
    for i in range(12):
        lengths.append(turn(conversation, QUESTIONS[i % 4])[1])
        spent.append(conversation.spent)
    stored = sorted(set(lengths))
    assert 2 <= len(stored) < 8 and lengths == sorted(lengths)
    assert lengths[1] == lengths[0], "not at once"
    assert all(s == 0 for s, before, P in zip(spent[1:], lengths, lengths[1:]) if P > before)


def test_a_prefix_that_does_not_fit_is_not_stored(engine, monkeypatch):
    """A longer prefix may need more room than the cache has, where the shorter one has it: then that one is
    used."""
    conversation = begin(engine, gen_length=32)
    document, check = turn(conversation, QUESTIONS[0])[1], engine.admission.check

    def small(request):
        if request.prefix_len > document:
            raise BadInput("too small")
        check(request)
    monkeypatch.setattr(engine.admission, "check", small)
    answer, P, history = turn(conversation, QUESTIONS[1])
    assert P == document < history and answer.result.hit


@pytest.mark.parametrize("mode", ["none", "intra", "naive"])
def test_other_modes(text_folder, mode):
    engine = Engine.from_folder(text_folder, cache=mode, cache_mb=16)
    conversation = begin(engine, threshold=1e-9)
    hits = [turn(conversation, question)[0].result.hit for question in QUESTIONS]
    assert hits == [mode == "naive" and i > 0 for i in range(4)]


def test_reset_keeps_the_document_and_its_hit(engine):
    conversation = begin(engine, gen_length=32)
    first, *_ = turn(conversation, QUESTIONS[0])
    turn(conversation, QUESTIONS[1])
    conversation.reset()
    again, P, _ = turn(conversation, QUESTIONS[0])
    assert again.text == first.text and again.result.hit and P == len(conversation.first)
    assert len(conversation.messages) == 3


def test_a_full_conversation_says_so(engine):
    """More tokens than the model takes: a sentence with the remedy, and the conversation is as it was."""
    conversation = begin(engine)
    with pytest.raises(ValueError, match="the model takes 512; shorten one$"):
        turn(conversation, "x " * 300)
    turn(conversation, QUESTIONS[0])
    with pytest.raises(ValueError, match="/reset makes room"):
        turn(conversation, "x " * 300)
    assert len(conversation.messages) == 3


# -- an answer is stopped


def test_ctrl_c_ends_the_answer_and_not_the_conversation(engine):
    """Nothing of a stopped answer stays, in the conversation or in the cache; the next one is as ever."""
    undisturbed = turn(begin(engine), QUESTIONS[1])[0]
    conversation, handler, before, seen = begin(engine), signal.getsignal(signal.SIGINT), held(engine), []

    def stop(event):
        seen.append(event)
        if len(seen) == 2:
            signal.raise_signal(signal.SIGINT)
    answer, *_ = turn(conversation, QUESTIONS[0], stop)
    assert answer is None and seen[-1].result.finish_reason == "cancelled" and len(seen) < 8
    assert conversation.messages == conversation.document
    assert held(engine) == before and signal.getsignal(signal.SIGINT) is handler
    assert turn(conversation, QUESTIONS[1])[0].text == undisturbed.text


def test_the_second_ctrl_c_does_not_wait_for_the_step(engine):
    conversation, handler = begin(engine), signal.getsignal(signal.SIGINT)
    turn(conversation, QUESTIONS[0])
    before = held(engine)
    with pytest.raises(KeyboardInterrupt):
        turn(conversation, QUESTIONS[0], lambda event: [signal.raise_signal(signal.SIGINT) for _ in range(2)])
    assert held(engine) == before and signal.getsignal(signal.SIGINT) is handler
    assert len(conversation.messages) == 3 and turn(conversation, QUESTIONS[1])[0]


# -- the terminal


@pytest.fixture
def pipe(text_folder, monkeypatch, capsys):
    """`generate.py --chat` with lines piped in: exit code, standard output, standard error."""
    def call(*lines, options=()):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        options = ["--gen-length", "8", "--prefix", DOCUMENT, *options]
        return generate.main(["--chat", "--model", str(text_folder), *options]), *capsys.readouterr()
    return call


def test_piped_lines(pipe):
    """A transcript: each question, its answer, what it took. Blank lines are none; any language is one."""
    code, out, err = pipe("Which weights?", "", "¿Quién? 誰ですか 🙂", options=["--threshold", "1e-9"])
    assert code == 0 and err == ""
    assert out.count("\n> ") == 2 and "> ¿Quién? 誰ですか 🙂\n" in out
    found = re.findall(r"\[(\w+), prefix (\d+), depth 2, (\d+) steps?, [\d.]+ s, ([\d,]+) token-layers, "
                       r"(-?[\d,]+) saved \((-?\d+)%\)", out)
    assert [(cache, steps) for cache, _, steps, *_ in found] == [("miss", "1"), ("hit", "1")]
    assert len({P for _, P, *_ in found}) == 1


def test_save_and_reset(pipe, tmp_path):
    """The file holds what was said, whole; what cannot be written is a sentence, and the older file is as it
    was."""
    path = tmp_path / "said.json"
    code, out, _ = pipe("Which weights?", f"/save {path}", "/reset", "How many?", "/quit", "Who?")
    messages = json.loads(path.read_text(encoding="utf-8"))["messages"]
    assert code == 0 and [m["role"] for m in messages] == ["system", "user", "assistant"]
    assert messages[0]["content"] == DOCUMENT and messages[1]["content"] == "Which weights?"
    assert messages[2]["content"] in out and "> Who?" not in out and os.listdir(tmp_path) == ["said.json"]
    before = path.read_bytes()
    for bad in (tmp_path, tmp_path / "absent" / "x.json", ""):
        code, _, err = pipe(f"/save {bad}", "Who?")
        assert code == 2 and err.startswith("generate.py: /save") and err.count("\n") == 1
    assert path.read_bytes() == before


def test_a_byte_order_mark_and_a_neighbour_of_the_saved_file(pipe, tmp_path):
    """Symptom: the mark that some editors put before a piped text was part of the first question; /save wrote
    over the user's own NAME.tmp. Neither: the mark is no text, and that file is as it was."""
    path, other = tmp_path / "said.json", tmp_path / "said.json.tmp"
    other.write_text("mine")
    code, *_ = pipe("\ufeffWhich weights?", f"/save {path}")
    messages = json.loads(path.read_text(encoding="utf-8"))["messages"]
    assert code == 0 and messages[1]["content"] == "Which weights?" and other.read_text() == "mine"


def test_a_stopped_answer_in_a_transcript(pipe, monkeypatch):
    ask = Conversation.ask

    def stopped(self, question, request, history, listen):
        if "weights" in question:
            listen = lambda event: event.step or signal.raise_signal(signal.SIGINT)
        return ask(self, question, request, history, listen)
    monkeypatch.setattr(Conversation, "ask", stopped)
    code, out, _ = pipe("Which weights?", "How many?")
    assert code == 0 and "> Which weights?\nstopped; the question is forgotten\n" in out
    assert out.count("token-layers") == 1


def test_what_is_typed(text_folder, monkeypatch, capsys):
    """In a terminal a mistake is told and one goes on, Ctrl-C takes a line back, Ctrl-D ends it."""
    typed = iter(["Which weights?", KeyboardInterrupt(), "/nonsense", "  ", "\ud800", "How many?",
                  EOFError()])

    def read(prompt):
        line = next(typed)
        if isinstance(line, BaseException):
            raise line
        return line
    monkeypatch.setattr("builtins.input", read)
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    code = generate.main(["--chat", "--model", str(text_folder), "--gen-length", "8", "--prefix", DOCUMENT])
    out, err = capsys.readouterr()
    assert code == 0 and err == "" and out.count("token-layers") == 2
    assert "/nonsense is no command" in out and "half a character" in out and next(typed, None) is None


def test_the_answer_is_drawn_while_it_comes(text_folder):
    """In a terminal: shades, then letters over them, then the answer alone; the questions are typed."""
    pty = pytest.importorskip("pty", reason="no pseudo-terminals on this system")
    ours, theirs = pty.openpty()
    env = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "60", "LINES": "20"}
    process = subprocess.Popen(
        [sys.executable, ROOT / "generate.py", "--chat", "--model", text_folder, "--gen-length", "8",
         "--prefix", DOCUMENT], stdin=theirs, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    shown, wanted = b"", [(b"> ", b"Which weights?\n"), (b"token-layers", b"/quit\n")]
    while wanted or process.poll() is None:
        try:
            shown += os.read(ours, 4096)
        except OSError:                     # how Linux says that the other side is closed
            break
        if wanted and wanted[0][0] in shown:
            os.write(ours, wanted.pop(0)[1])
    assert process.wait() == 0 and not wanted
    shown = shown.decode().replace("\r", "")
    assert shown.count("░") > 8 and re.search(r"\033\[\d+F\033\[J\S.*\n\[miss, prefix", shown)


def test_live_lines(monkeypatch, capsys):
    """A long answer takes as many lines as it needs, but no more than can be drawn over; nothing is left of
    it."""
    assert fold("abcdef", 4) == ["abcd", "ef"] and fold("中文字", 5) == ["中文", "字"] and fold("", 5) == []
    monkeypatch.setattr("cli.terminal.PAUSE", 0)
    monkeypatch.setattr("cli.terminal.shutil.get_terminal_size", lambda: os.terminal_size((10, 4)))
    live = Live([Request([1], gen_length=50)], lambda ids: bytes(ids).decode(), 0)
    live.event(Event(0, 0, False, (0, 1), [(0, ord("a"))], 0, 0))
    assert live.drawn == 3
    done = Result([], "length", 2, 0, 0, 0, False, 0, 0)
    live.event(Event(0, 1, False, (0, 1), [(1, ord("b"))], 0, 0, done))
    live.end()
    assert live.drawn == 0 and capsys.readouterr().out.endswith("\033[3F\033[J\033[J")


@pytest.mark.parametrize("options, says", [
    (["--prompt", "x"], "--chat asks what is typed"), (["--prefix", "-"], "--chat asks what is typed"),
    (["--json"], "/save keeps it"), (["--trace"], "/save keeps it"), (["--seed", "3"], "nothing is drawn"),
    (["--threshold", "7"], "threshold is 7")])
def test_refused(text_folder, monkeypatch, capsys, options, says):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Who?\n"))
    assert generate.main(["--chat", "--model", str(text_folder), *options]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


def test_a_model_without_a_chat_template(text_folder, tmp_path, monkeypatch, capsys):
    for file in text_folder.iterdir():
        if file.name != "tokenizer_config.json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    special = {"eos_token": "<|endoftext|>", "mask_token": "<|mask|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(special))
    monkeypatch.setattr(sys, "stdin", io.StringIO("Who?\n"))
    assert generate.main(["--chat", "--model", str(tmp_path)]) == 2
    assert "no chat template" in capsys.readouterr().err


def test_the_embedded_model_remembers_what_was_said():
    """The real thing: ten turns on its staff list, the answers of a conversation, the document hit nine
    times."""
    engine = Engine.from_folder(ROOT / "checkpoints" / "tiny")
    document = (ROOT / "examples" / "staff.txt").read_text().strip()
    questions = (ROOT / "examples" / "questions.txt").read_text().split("\n")[:5] * 2
    conversation = Conversation(engine, document, {"threshold": 0.9}, 32)
    answers = [turn(conversation, question)[0] for question in questions]
    assert [a.result.hit for a in answers] == [False] + [True] * 9
    assert answers[0].text == "Zoe reports to Jim." and answers[3].text.endswith("Fred is in Tokyo.")
