"""examples/serve.py as it is used: a process of its own, OpenAI's client, and raw HTTP beside it.

What a client is told must be what `Engine.generate` says of the same ids. Skipped where the packages of
examples/requirements.txt are missing.
"""
import itertools
import json
import random
import re
from types import SimpleNamespace

import pytest
from conftest import ROOT
from serving import FAST, TEXTS, TINY, chat, client, expected, httpx, openai, said, serving

import serve
import wire
from engine import Engine, Request


@pytest.fixture(scope="module")
def url():
    with serving() as (url, _):
        yield url


@pytest.fixture(scope="module")
def engine():
    return Engine.from_folder(TINY)


@pytest.mark.parametrize("how", [FAST, dict(steps=8, block_length=12), dict(remasking="entropy", steps=12)])
def test_answers_are_those_of_the_engine(url, engine, how):
    """Greedy answers through OpenAI's client, whole and streamed, equal `Engine.generate`'s, as do the
    counts of tokens; the second request on a document reads it from the cache."""
    ask, messages = client(url).chat.completions.create, chat(0, len(how))
    options = dict(model="tiny", messages=messages, max_tokens=24, extra_body=how)
    want, P = expected(engine, messages, **how)
    whole = [ask(**options) for _ in range(2)]
    assert [w.choices[0].message.content for w in whole] == [want] * 2
    assert whole[1].usage.prompt_tokens_details.cached_tokens == P
    assert whole[1].usage.prompt_tokens == len(engine.tokenizer.render({"messages": messages})[0])
    assert said(ask(stream=True, **options)) == want


def test_a_conversation_keeps_its_hit(url):
    """Symptom: five turns on one document, and each encodes all that was said before, since what stands
    before the last message is another prefix every time. From the second turn on the document is read from
    the cache."""
    messages, cached = chat(3, 0), []
    for turn in range(4):
        got = client(url).chat.completions.create(model="tiny", messages=messages, max_tokens=8,
                                                  extra_body=FAST)
        cached.append(got.usage.prompt_tokens_details.cached_tokens)
        messages = [*messages, {"role": "assistant", "content": "It is Ben."},
                    {"role": "user", "content": "Who?"}]
    assert all(tokens >= cached[1] > 0 for tokens in cached[1:])


def test_completions_draws_and_choices(url, engine):
    """n choices are n requests whose seeds count up; a list of prompts is answered in its order; without a
    chat template's words around it, a prompt is what was sent."""
    prompts = [TEXTS[1][0], TEXTS[2][0] + " Who"]
    got = client(url).completions.create(model="tiny", prompt=prompts, n=2, seed=5, temperature=0.8,
                                         max_tokens=12)
    ids = [engine.tokenizer.encode(p) for p in prompts]
    want = engine.generate([Request(i, prefix_len=None, gen_length=12, seed=seed, temperature=0.8)
                            for i in ids for seed in (5, 6)])
    assert [c.text for c in got.choices] == [engine.tokenizer.decode(r.tokens) for r in want]
    assert got.usage.completion_tokens == sum(len(r.tokens) for r in want)
    assert got.usage.prompt_tokens == sum(map(len, ids))


def test_a_stream_grows_and_the_canvas_tells_all(url, engine):
    """The text of each chunk stands behind all earlier ones; the canvas names every committed place once,
    step by step, and what it says, put in order, is the text; the last chunk has the usage."""
    messages = chat(3, 1)
    stream = client(url).chat.completions.create(
        model="tiny", messages=messages, max_tokens=24, stream=True, stream_options=dict(include_usage=True),
        extra_body=dict(canvas=True, block_length=4))
    *chunks, last = stream
    places, steps = {}, []
    for chunk in chunks:
        canvas = chunk.choices[0].canvas
        steps.append(canvas["step"])
        for place, word in canvas["committed"]:
            assert place not in places
            places[place] = word
    text = said(chunks)
    assert text == expected(engine, messages, block_length=4)[0]
    assert "".join(word for _, word in sorted(places.items())).startswith(text)
    assert steps == list(range(len(steps))) and chunks[-1].choices[0].finish_reason == "stop"
    assert sum(bool(c.choices[0].delta.content) for c in chunks) > 1, "it came in one piece"
    assert last.choices == [] and last.usage.completion_tokens == len(engine.tokenizer.encode(text))


@pytest.mark.parametrize("stream", [False, True])
def test_stop(url, engine, stream):
    """An answer ends before a stop text, wherever its tokens lie, and nothing of that text was sent
    before."""
    messages = chat(4, 0)
    text, _ = expected(engine, messages, threshold=0.9)
    stop = text[len(text) // 2:len(text) // 2 + 3]
    got = client(url).chat.completions.create(model="tiny", messages=messages, max_tokens=24, stream=stream,
                                              stop=["nowhere", stop], extra_body=FAST)
    if stream:
        got = list(got)
        finish, got = got[-1].choices[0].finish_reason, said(got)
    else:
        finish, got = got.choices[0].finish_reason, got.choices[0].message.content
    assert got == text[:text.index(stop)] and finish == "stop"


def test_text_holds_back_what_may_change():
    """Half a character and the beginning of what may become a stop text wait for what follows."""
    words = [b"a", "é".encode()[:1], "é".encode()[1:], b"<", b"<e", b"nd", b"b"]
    event = lambda place, result=None: SimpleNamespace(committed=[(place, place)], result=result)
    decode = lambda ids: b"".join(words[i] for i in ids).decode(errors="replace")
    text = wire.Text(decode, len(words), ["<end"])
    assert [text.add(event(p)) for p in (1, 0, 2, 3, 5)] == ["", "a", "é", "", ""]
    assert text.add(event(4, SimpleNamespace(text="aé<"))) == "<"


def test_the_threshold_of_a_server_gives_way(engine):
    """Symptom: a server with --threshold refused each body with remasking "entropy", since both together say
    nothing. Its threshold is for bodies that name nothing else of the kind."""
    model = wire.Model("tiny", engine.tokenizer, engine.check, 16, 32, 8, {"threshold": 0.9})
    threshold = lambda **how: wire.read(json.dumps(dict(prompt="Who?", **how)).encode(), False, "", model,
                                        0).requests[0].threshold
    for how in (dict(), dict(remasking="low_confidence"), dict(alg_temp=0), dict(top_k=5)):
        assert threshold(**how) == 0.9
    for how in (dict(steps=8), dict(eps=0.001), dict(remasking="entropy"), dict(alg_temp=0.5)):
        assert threshold(**how) is None
    assert threshold(threshold=0.5) == 0.5


def test_what_the_api_does_not_have_is_refused_by_name(url):
    """A field that would change the answer is refused, the same field with the value that changes nothing
    is not, nor one that is for the books only; model, path and method are known or refused."""
    ask = client(url).chat.completions.create
    options = dict(model="tiny", messages=chat(0, 0), max_tokens=4, extra_body=FAST)
    plain = ask(**options).choices[0].message.content
    for name, value in dict(
            frequency_penalty=0.5, logit_bias={"5": 1}, logprobs=True,
            response_format={"type": "json_object"},
            tools=[{"type": "function", "function": {"name": "f"}}]).items():
        with pytest.raises(openai.BadRequestError, match=name):
            ask(**options, **{name: value})
    assert ask(**options, frequency_penalty=0, logprobs=False, user="me", metadata={"a": "b"},
               response_format={"type": "text"}).choices[0].message.content == plain
    with pytest.raises(openai.BadRequestError, match="frobnicate"):
        ask(**options | dict(extra_body=dict(frobnicate=1)))
    with pytest.raises(openai.NotFoundError, match="gpt-4"):
        ask(**options | dict(model="gpt-4"))
    with pytest.raises(openai.BadRequestError, match="max_tokens is 5000"):
        ask(**options | dict(max_tokens=5000))
    assert [m.id for m in client(url).models.list()] == ["tiny"]
    assert httpx.get(url + "/nowhere").json()["error"]["message"] == "GET /nowhere: Not Found."
    assert httpx.get(url + "/v1/completions").status_code == 405
    assert httpx.get(url + "/health").status_code == 200


def test_a_thousand_malformed_bodies(url):
    """Each gets a 400 with one sentence, none a 500, and the server answers as before."""
    good = dict(model="tiny", messages=chat(0, 0), max_tokens=4, temperature=0, top_p=1, seed=1, n=1,
                stop=["x"], stream=False, threshold=0.9, block_length=4, remasking="low_confidence")
    wrong = [{}, {"a": 1}, [[]], [1], "", "\ud800", -1, 1.5, 10**400, "1", True, [None], [{}]]
    right = [("stream", True), ("stop", "\ud800"), ("stop", "1"), ("temperature", 1.5)]
    raw = json.dumps(good).encode()
    bodies = [raw[:n] for n in range(len(raw))]
    for name, value in itertools.product(sorted(good.keys() - {"model"}), wrong):
        if (name, value) not in right:
            bodies.append(json.dumps(good | {name: value}).encode())
    for message in [*wrong, {"role": "user"}, {"role": "nobody", "content": "x"},
                    {"role": "user", "content": 7}, {"role": "user", "content": [{"type": "image_url"}]},
                    {"role": "assistant", "content": "x"}]:
        bodies.append(json.dumps(good | dict(messages=[message])).encode())
    bodies += [b"[" * 100_000, b'{"a":' * 50_000, b"NaN", b"null", b"[]", b'"x"', b"\xff\xfe", b"1" * 5000,
               raw.replace(b'"seed": 1', b'"seed": NaN'), raw.replace(b"4", b"1e999")]
    rng = random.Random(0)
    while len(bodies) < 1000:
        at = rng.randrange(len(raw))
        bodies.append(raw[:at] + bytes([rng.randrange(128, 256)]) + raw[at:])       # no UTF-8
    with httpx.Client(timeout=60) as http:
        for body in bodies:
            reply = http.post(url + "/v1/chat/completions", content=body)
            assert reply.status_code == 400, (body[:300], reply.text[:300])
            error = reply.json()["error"]
            assert error["type"] == "invalid_request_error" and 10 < len(error["message"]) < 700
        assert http.post(url + "/v1/chat/completions", content=b" " * 2**21).status_code == 413
        assert http.post(url + "/v1/chat/completions", content=raw).status_code == 200


@pytest.mark.parametrize("flags, message", [
    (["--host", "0.0.0.0"], "give --keys FILE"),
    (["--keys", "nowhere"], "nowhere cannot be read"),
    (["--keys", str(ROOT / "LICENSE")], "line 3 of"),
    (["--queue", "0"], "--queue is 0"),
    (["--port", "99999"], "give another --port"),
    (["--port", "0", "--model", "nowhere"], "nowhere"),
    (["--port", "0", "--cache", "all"], "cache is 'all'")])
def test_a_bad_command_line_is_one_sentence(flags, message, capsys):
    assert serve.main(flags) == 2
    out = capsys.readouterr()
    assert re.fullmatch(r"serve\.py: [^\n]+\n", out.err) and message in out.err and not out.out
