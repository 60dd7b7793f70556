"""examples/cluster.py on one machine: two replicas of the embedded model on Ray Serve, asked over HTTP.

Skipped where Ray is not installed (examples/requirements.txt).
"""
import asyncio
import json
import os
import random
import signal
import socket
import time
import warnings
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")
from serving import TINY, chat, httpx                   # noqa: E402

os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "120")     # a busy machine needs more than 5
with warnings.catch_warnings():
    warnings.simplefilter("ignore")                     # Ray's, of pydantic
    import cluster
    import ray
    from ray import serve
from engine import Engine, Request                      # noqa: E402

WIDTH = 8       # requests at once; as many may be on their way to a replica before its prefixes spread


@pytest.fixture(scope="module")
def deploy():
    """deploy(path, router): two replicas behind that router, and the URL they are asked at."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    args = cluster.parse(["--model", str(TINY), "--port", str(port), "--queue", "200",
                          "--max-batch", str(WIDTH)])
    os.environ["OMP_NUM_THREADS"] = "1"
    cluster.start(args, num_cpus=4, object_store_memory=100 * 2**20, log_to_driver=False)
    serve.start(http_options=dict(host=args.host, port=port))

    def run(path: str, **router) -> str:
        serve.run(cluster.build(args, **router), name=path, route_prefix=f"/{path}")
        return f"http://127.0.0.1:{port}/{path}"
    yield run
    serve.shutdown()
    ray.shutdown()


@pytest.fixture(scope="module")
def url(deploy):
    return deploy("affine")


def post(url, messages, **options):
    body = dict(messages=messages, max_tokens=16, threshold=0.9) | options
    return httpx.post(url + "/v1/chat/completions", json=body, timeout=120)


def ask(url, asked: list) -> list[tuple[str, int]]:
    """(text, cached tokens) of each (text, question), WIDTH at a time."""
    with ThreadPoolExecutor(WIDTH) as pool:
        replies = [reply.json() for reply in pool.map(lambda pair: post(url, chat(*pair)), asked)]
    return [(r["choices"][0]["message"]["content"], r["usage"]["prompt_tokens_details"]["cached_tokens"])
            for r in replies]


def answers(asked: list, **how) -> list[str]:
    engine = Engine.from_folder(TINY)
    requests = []
    for pair in asked:
        ids, P = engine.tokenizer.render({"messages": chat(*pair)})
        requests.append(Request(ids, prefix_len=P, **dict(gen_length=16, threshold=0.9) | how))
    return [engine.tokenizer.decode(r.tokens) for r in engine.generate(requests)]


def replicas() -> dict:
    """{pid: figures} of the replicas that are found."""
    handle = serve.get_deployment_handle("Replica", "affine")
    found = {}
    for prefix in range(20):
        figures = handle.figures.remote(prefix=str(prefix)).result(timeout_s=60)
        found[figures["pid"]] = figures
    return found


MIXED = [(i % 8, random.Random(i).randrange(40)) for i in range(200)]


def test_requests_go_where_their_prefix_is(url):
    """200 requests over 8 prefixes: each prefix is encoded once, in one of the two replicas, and the
    answers are those of the engine."""
    got = ask(url, MIXED)
    assert [text for text, _ in got] == answers(MIXED)
    assert 8 <= [cached for _, cached in got].count(0) <= 10         # Ray may tell of the second replica late
    assert sorted(f["encoded_prefixes"] for f in replicas().values()) not in ([0, 8], [8])


def test_a_hot_prefix_spreads(url):
    """Sixty at once on one prefix: more than one replica's share, so the other one encodes it as well, and
    no more than that."""
    hot = [(8, i) for i in range(60)]
    with ThreadPoolExecutor(60) as pool:
        replies = [r.json() for r in pool.map(lambda pair: post(url, chat(*pair)), hot)]
    cached = [r["usage"]["prompt_tokens_details"]["cached_tokens"] for r in replies]
    assert [r["choices"][0]["message"]["content"] for r in replies] == answers(hot)
    assert cached.count(0) == 2


def test_the_same_face(url):
    """Streams, errors, refusals and hang-ups pass through: a broken body is a 400, a client that leaves
    frees its replica."""
    body = dict(messages=chat(0, 0), max_tokens=16, stream=True, block_length=4)
    with httpx.stream("POST", url + "/v1/chat/completions", json=body, timeout=60) as reply:
        *chunks, done = [line[6:] for line in reply.iter_lines() if line]
    text = "".join(json.loads(c)["choices"][0]["delta"]["content"] for c in chunks)
    assert [text] == answers([(0, 0)], threshold=None, block_length=4)
    assert done == "[DONE]" and len(chunks) > 1
    reply = post(url, chat(0, 0), top_p=7)
    assert reply.status_code == 400 and reply.json()["error"]["message"].startswith("top_p is 7")
    assert httpx.get(url + "/v1/models").json()["data"][0]["id"] == "tiny"
    assert 'path="/v1/chat/completions",status="400"} 1.0' in httpx.get(url + "/metrics").text
    for i in range(6):
        with httpx.stream("POST", url + "/v1/chat/completions", timeout=60,
                          json=body | dict(max_tokens=600, block_length=1, messages=chat(i, 0))) as reply:
            next(reply.iter_lines())
    for _ in range(300):
        now = replicas().values()
        if all(f["running"] == f["waiting"] == 0 for f in now):
            break
        time.sleep(0.1)
    assert [f["running"] for f in now] == [0, 0]
    assert all(f["cache_bytes"] == f["cache_entry_bytes"] for f in now)


def test_a_killed_replica_loses_no_request(url):
    """Twenty-four answers are on their way, streamed and whole, when one replica is killed: each comes
    whole, as the engine says it, no word twice. Ray starts another replica."""
    asked = [(i % 8, i) for i in range(24)]
    how = dict(threshold=None, steps=48, max_tokens=48)
    before = replicas()

    def work(i):
        if i % 2:
            return post(url, chat(*asked[i]), **how).json()["choices"][0]["message"]["content"]
        body = dict(messages=chat(*asked[i]), stream=True, **how)
        with httpx.stream("POST", url + "/v1/chat/completions", json=body, timeout=120) as reply:
            chunks = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")]
        return "".join(c["choices"][0]["delta"]["content"] for c in chunks)

    with ThreadPoolExecutor(24) as pool:
        futures = [pool.submit(work, i) for i in range(24)]
        while (busiest := max(replicas().values(), key=lambda f: f["running"]))["running"] < 3:
            assert not all(f.done() for f in futures)
        os.kill(busiest["pid"], signal.SIGKILL)
        got = [f.result() for f in futures]
    assert got == answers(asked, threshold=None, steps=48, gen_length=48)
    for _ in range(600):
        if len(after := replicas().keys() - {busiest["pid"]}) == 2:
            break
        time.sleep(0.1)
    assert len(after) == 2 and len(after & before.keys()) == 1


def test_against_rays_own_router(deploy):
    """What affinity saves: behind Ray's default router each of the two replicas encodes nearly every
    prefix."""
    got = ask(deploy("default", router=None), MIXED[:100])
    assert [text for text, _ in got] == answers(MIXED[:100])
    assert [cached for _, cached in got].count(0) >= 14


def test_a_replica_more_or_less_moves_only_its_prefixes():
    """Without a replica only the prefixes it had go elsewhere. One that is overfull comes last for all."""
    router, Id = object.__new__(cluster.PrefixRouter), namedtuple("Id", "unique_id")
    router.initialize_state(bound=1.5, spare=8)
    some = [SimpleNamespace(replica_id=Id(f"r{i}")) for i in range(5)]

    def ranks(prefix, those):
        request = SimpleNamespace(kwargs=dict(prefix=prefix))
        return [r.replica_id for r, in asyncio.run(router.choose_replicas(those, request))]
    before, after = ([ranks(str(p), those) for p in range(200)] for those in (some, some[1:]))
    gone = some[0].replica_id
    assert {b[0] for b in before} == {r.replica_id for r in some}
    assert all([i for i in b if i != gone] == a for a, b in zip(after, before))
    router.load = {gone: 8}
    assert [ranks(str(p), some) for p in range(200)] != before
    assert all(ranks(str(p), some)[-1] == gone for p in range(200))
    router.load = {r.replica_id: 8 for r in some}
    assert [ranks(str(p), some) for p in range(200)] == before


def test_what_requests_are_routed_by():
    """Symptom: all chats of one message go to one replica, and each turn of a conversation to another.
    Turns share their first message; messages that stand alone and differ, tenants, and documents do not
    share a key."""
    def key(*texts, tenant="a"):
        messages = [{"role": "user", "content": text} for text in texts]
        return cluster.prefix_key(json.dumps({"messages": messages}).encode(), True, tenant)
    assert key("document", "q1") == key("document", "q1", "a1", "q2") != key("other", "q1")
    assert key("one") != key("two") and key("document", "q") != key("document", "q", tenant="b")
    swapped = [{"content": "document", "role": "user"}, {"role": "user", "content": "q"}]
    swapped = json.dumps({"messages": swapped})
    assert cluster.prefix_key(swapped.encode(), True, "a") == key("document", "q")
