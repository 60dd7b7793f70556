"""Many clients of examples/serve.py at once, and some that leave, do not read, may not, or break the model.

Whoever stays must be told what `Engine.generate` says, whatever the others do; and what nobody waits for
any more must hold no pages. Skipped where the packages of examples/requirements.txt are missing.
"""
import asyncio
import contextlib
import json
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import SPECIAL, save_folder, tiny
from serving import FAST, TINY, chat, client, expected, figures, httpx, openai, said, serving

import web
import wire
from engine import Engine


@pytest.fixture(scope="module")
def url():
    with serving("--queue", "128") as (url, _):
        yield url


@pytest.fixture(scope="module")
def engine():
    return Engine.from_folder(TINY)


def test_64_clients_at_once(url, engine):
    """Eight documents, eight questions each. Half of the clients hang up, at the first, second, ... chunk
    or before the whole answer; each of the others gets its own answer, whole. Afterwards nothing runs, and
    only stored prefixes hold pages."""
    def work(i):
        messages, leaves = chat(i % 8, i // 8), i % 2
        body = dict(model="tiny", messages=messages, max_tokens=24, stream=i % 4 < 3,
                    **(dict(steps=24) if leaves else FAST))
        with httpx.Client(timeout=120) as http:
            if leaves and not body["stream"]:
                with contextlib.suppress(httpx.ReadTimeout):
                    http.post(url + "/v1/chat/completions", json=body, timeout=0.2 + 0.02 * i)
                return None
            with http.stream("POST", url + "/v1/chat/completions", json=body) as reply:
                assert reply.status_code == 200
                if not body["stream"]:
                    return json.loads(reply.read())["choices"][0]["message"]["content"]
                lines = (line[6:] for line in reply.iter_lines() if line)
                if leaves:
                    for _ in zip(range(1 + i // 8), lines):
                        pass
                    return None
                *chunks, done = lines
                assert done == "[DONE]"
                return "".join(json.loads(c)["choices"][0]["delta"]["content"] for c in chunks)

    before = figures(url)
    with ThreadPoolExecutor(64) as pool:
        got = list(pool.map(work, range(64)))
    for i, text in enumerate(got):
        if i % 2 == 0:
            assert text == expected(engine, chat(i % 8, i // 8), **FAST)[0], i
    after = figures(url)
    assert after["bicache_cache_bytes"] == after["bicache_cache_entry_bytes"] > 0
    assert after["bicache_cache_hits_total"] - before["bicache_cache_hits_total"] >= 24
    assert after["bicache_encoded_prefixes_total"] <= 8 + before["bicache_encoded_prefixes_total"]
    assert after["bicache_token_layers_saved"] > before["bicache_token_layers_saved"]


def test_slow_readers(url, engine):
    """Sixteen clients ask and do not read; one that comes later is answered meanwhile, and they find all
    there when they read."""
    messages = chat(5, 0)
    body = dict(model="tiny", messages=messages, max_tokens=24, stream=True, **FAST)
    with contextlib.ExitStack() as stack:
        ask = lambda: httpx.stream("POST", url + "/v1/chat/completions", json=body, timeout=60)
        replies = [stack.enter_context(ask()) for _ in range(16)]
        want, _ = expected(engine, messages, **FAST)
        answer = client(url).chat.completions.create(model="tiny", messages=messages, max_tokens=24,
                                                     extra_body=FAST)
        assert answer.choices[0].message.content == want
        for reply in replies:
            chunks = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")]
            assert "".join(c["choices"][0]["delta"]["content"] for c in chunks) == want


@pytest.mark.parametrize("blocked", ["the engine", "the client"])
def test_time_limit(blocked):
    """Whether the engine does not come to an end or the client does not read, the time limit ends it, and
    the work with it; one who was sent nothing yet is told 504."""
    ended = []

    async def frames():
        try:
            yield dict(stream=True, usage=False)
            if blocked == "the engine":
                await asyncio.Event().wait()
            while True:
                yield dict(index=0, text="x")
        finally:
            ended.append(True)

    async def never(*_):
        await asyncio.Event().wait()

    async def main():
        reply = web.Reply(frames(), wire.Form(True, "m"), 0.05)
        await asyncio.wait_for(reply({"type": "http"}, never, never), 30)
    if blocked == "the engine":
        with pytest.raises(wire.Refused) as e:
            asyncio.run(main())
        assert e.value.status == 504
    else:
        asyncio.run(main())
    assert ended == [True]


@pytest.fixture(scope="module")
def poisoned(tmp_path_factory):
    """A folder whose word "poison" makes the model give NaN, in the requests that say it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    words = [*SPECIAL, "poison", *(f"w{i}" for i in range(60)), "?"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.WhitespaceSplit(), decoders.WordPiece()
    tokenizer.add_special_tokens(SPECIAL)
    model = tiny(vocab=len(words), mask_id=0, eos_ids=(1,))
    poison = words.index("poison")
    model.head.weight[poison] = 0               # no answer holds it
    model.embed.weight[poison] = float("nan")
    return save_folder(tmp_path_factory.mktemp("poisoned"), model, tokenizer)


@pytest.fixture(scope="module")
def guarded(poisoned, tmp_path_factory):
    """A server for two tenants, with a short queue."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("# who, key\nann key-a\nbob key-b\nmetrics key-m\n")
    flags = "--keys", str(keys), "--queue", "3", "--max-batch", "3", "--measure", "0"
    with serving(*flags, model=poisoned) as (url, _):
        yield url


def words(seed: int, count=80) -> list:
    rng = random.Random(seed)
    return [dict(role="system", content=" ".join(f"w{rng.randrange(60)}" for _ in range(count))),
            dict(role="user", content="w1 w2")]


def test_tenants_do_not_meet(guarded, poisoned):
    """The same document under two keys is encoded twice, and each tenant's first request does the work that
    the other's first did: neither the flag nor the work, and so not the time, tells one of the other.
    Nobody else comes in."""
    def ask(key):
        before = figures(guarded, headers={"authorization": "Bearer key-m"})
        usage = client(guarded, key).chat.completions.create(
            model=poisoned.name, messages=words(1), max_tokens=8).usage
        after = figures(guarded, headers={"authorization": "Bearer key-m"})
        return usage.prompt_tokens_details.cached_tokens, *(after[n] - before[n] for n in (
            "bicache_token_layers_total", "bicache_encoded_prefixes_total", "bicache_cache_hits_total"))
    ann, again, bob, bob_again = [ask(key) for key in ("key-a", "key-a", "key-b", "key-b")]
    assert ann == bob and ann[0] == ann[3] == 0 and ann[2] == 1
    assert again == bob_again and again[0] > 60 and again[1] < ann[1] and again[2:] == (0, 1)
    for key in ("key", "key-c", "key-m", "", "\u00fc"):
        with pytest.raises((openai.AuthenticationError, UnicodeEncodeError)):
            client(guarded, key or "x").models.list()
    assert httpx.get(guarded + "/v1/models").status_code == 401
    assert httpx.get(guarded + "/health").status_code == 200
    assert httpx.get(guarded + "/metrics", headers={"authorization": "Bearer key-a"}).status_code == 401


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_gives_nan_ends_alone(guarded, poisoned, stream):
    """Symptom: one request's NaN ends the engine's stream and with it every request that runs. It is told
    500; two that run beside it, one of them drawing, end as they do alone, with no word twice."""
    engine = Engine.from_folder(poisoned, measure=0)
    ask = client(guarded, "key-a").chat.completions.create
    bad = words(2)
    bad[0]["content"] += " poison"
    want = [expected(engine, words(3 + i), 60, temperature=0.7 * i, seed=9)[0] for i in range(2)]
    begun, got = threading.Barrier(3), {}

    def run(i):
        chunks = iter(ask(model=poisoned.name, messages=words(3 + i), max_tokens=60, temperature=0.7 * i,
                          seed=9, stream=True, extra_body=dict(canvas=True)))
        first = next(chunks)
        begun.wait()
        got[i] = [first, *chunks]
    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    begun.wait()
    with pytest.raises(openai.InternalServerError, match="non-finite"):
        said(ask(model=poisoned.name, messages=bad, max_tokens=8, stream=stream))
    for t in threads:
        t.join()
    for i in range(2):
        assert said(got[i]) == want[i]
        steps = [c.choices[0].canvas["step"] for c in got[i] if getattr(c.choices[0], "canvas", None)]
        assert steps == sorted(set(steps))
    assert httpx.get(guarded + "/health").status_code == 200


def test_a_full_queue_says_so(guarded, poisoned):
    """Three run and three wait; one more is told 429 and when to come back. Who is admitted is answered."""
    def ask(i):
        return httpx.post(guarded + "/v1/chat/completions", timeout=120, headers=bob,
                          json=dict(model=poisoned.name, messages=words(i, 20), max_tokens=100))
    bob = {"authorization": "Bearer key-b"}
    with ThreadPoolExecutor(24) as pool:
        replies = list(pool.map(ask, range(24)))
    codes = [r.status_code for r in replies]
    assert set(codes) == {200, 429} and codes.count(200) >= 3
    full = [r for r in replies if r.status_code == 429]
    assert all(r.headers["retry-after"] == "1" and r.json()["error"]["code"] == "queue_full" for r in full)
    reply = httpx.post(guarded + "/v1/chat/completions", headers=bob,
                       json=dict(model=poisoned.name, messages=words(1), n=4))
    assert reply.status_code == 400 and "at most 3 answers" in reply.text       # it would never find room


def test_sigterm_under_load(engine):
    """At SIGTERM six answers are on their way: they come to their end, nobody new is let in, the exit code
    is 0."""
    with serving() as (url, process):
        streams = [client(url).chat.completions.create(model="tiny", messages=chat(i, 2), max_tokens=24,
                                                       stream=True) for i in range(6)]
        firsts = [next(iter(s)) for s in streams]
        process.send_signal(signal.SIGTERM)
        texts = [first.choices[0].delta.content + said(s) for first, s in zip(firsts, streams)]
        assert texts == [expected(engine, chat(i, 2))[0] for i in range(6)]
        assert process.wait(60) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(url + "/health")
