"""The HTTP face: paths, keys, limits, and replies that end when the client does.

    app = build_app(service.answer, name, keys=None, limit=120, max_body=2**20, healthy=..., figures=...)

It knows no engine: `answer` may be that of a `Service` in this process (serve.py) or of one far away
(cluster.py). Checked over real connections, broken bodies and slow readers included (tests/test_serve.py).
"""
import asyncio
import contextlib
import hashlib
import hmac
import json
import random

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Route

from wire import Form, Refused, add_usage

METRICS_TENANT = "metrics"      # its key reads /metrics, and nothing else: counts of all tenants together


class Reply:
    """The HTTP reply to frames: one JSON object, or events that a client shows as they come. Ends with the
    client."""

    def __init__(self, frames, form: Form, limit: float):
        self.frames, self.form, self.limit, self.begun = frames, form, limit, False

    async def __call__(self, scope, receive, send) -> None:
        tasks = [asyncio.ensure_future(t) for t in (self.write(send), left(receive))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            write, _ = await asyncio.gather(*tasks, return_exceptions=True)
        if isinstance(write, Exception):
            raise write

    async def write(self, send) -> None:
        try:
            async with asyncio.timeout(self.limit), contextlib.aclosing(self.frames) as frames:
                if (head := await anext(frames))["stream"]:
                    await self.stream(frames, head["usage"], send)
                else:
                    await self.whole(frames, send)
        except (Refused, TimeoutError) as e:
            if isinstance(e, TimeoutError):
                e = Refused(504, f"The answer took longer than {self.limit:g} s; ask for less.")
            if not self.begun:
                raise e from None
            with contextlib.suppress(TimeoutError):         # one who does not read need not know
                async with asyncio.timeout(1):
                    await self.event(send, e.body(), end=True)

    async def stream(self, frames, usage: bool, send) -> None:
        parts = []
        async for frame in frames:                  # an error before the first is still a status
            if not self.begun:
                self.begun = True
                await send(dict(type="http.response.start", status=200, headers=[
                    (b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]))
            parts.append(frame.get("usage"))
            await self.event(send, self.form.chunk(frame) | ({"usage": None} if usage else {}))
        if usage:
            await self.event(send, self.form.last(usage=add_usage([p for p in parts if p])))
        await self.event(send, end=True)

    async def event(self, send, data=None, end=False) -> None:
        text = f"data: {json.dumps(data)}\n\n" if data else ""
        text += "data: [DONE]\n\n" * (end and not data)
        await send(dict(type="http.response.body", body=text.encode(), more_body=not end))

    async def whole(self, frames, send) -> None:
        texts, finish, parts = {}, {}, []
        async for frame in frames:
            i = frame["index"]
            texts[i] = texts.get(i, "") + frame["text"]
            if "finish" in frame:
                finish[i] = frame["finish"]
                parts.append(frame["usage"])
        await as_json(self.form.whole(texts, finish, add_usage(parts)))({"type": "http"}, None, send)


async def left(receive) -> None:
    """Returns when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


def as_json(data: dict, status: int = 200, **headers) -> Response:
    return Response(json.dumps(data), status, headers, "application/json")      # ASCII: lone surrogates pass


def build_app(answer, name: str, *, keys: dict | None, limit: float, max_body: int, healthy, figures):
    """The HTTP face on `answer`, which is `Service.answer` or acts like it. keys: {sha256 of a key:
    tenant}, None: nobody needs one. limit: seconds for a request, from its first byte to its last.
    healthy() and figures(): for those who watch."""
    registry = CollectorRegistry()
    counted = Counter("bicache_requests", "By path and status", ["path", "status"], registry=registry)
    registry.register(Figures(figures))

    def tenant_of(request, watches=False) -> str:
        if keys is None:
            return ""
        given, found = request.headers.get("authorization", "").removeprefix("Bearer ").encode(), None
        given = hashlib.sha256(given).digest()      # of one length, and compared with all: time tells nothing
        for digest, tenant in keys.items():
            found = tenant if hmac.compare_digest(digest, given) else found
        if found is None or (found == METRICS_TENANT) != watches:
            raise Refused(401, "Incorrect API key provided.", "invalid_api_key")
        return found

    async def completions(request, chat: bool):
        tenant, raw = tenant_of(request), bytearray()
        try:
            async with asyncio.timeout(limit):
                async for part in request.stream():
                    raw += part
                    if len(raw) > max_body:
                        raise Refused(413, f"The body has more than {max_body} bytes; shorten it.")
        except TimeoutError:
            raise Refused(408, f"The body took longer than {limit:g} s.") from None
        frames = answer(bytes(raw), chat, tenant, random.getrandbits(31))
        return Reply(frames, Form(chat, name), limit)

    async def chat(request):
        return await completions(request, True)

    async def text(request):
        return await completions(request, False)

    async def models(request):
        tenant_of(request)
        card = dict(id=name, object="model", created=0, owned_by="nano-bicache")
        if (asked := request.path_params.get("name", name)) != name:
            raise Refused(404, f"The model {asked!r} does not exist.", "model_not_found")
        return as_json(card if request.path_params else dict(object="list", data=[card]))

    async def health(request):
        ok = await healthy()
        return as_json(dict(status="ok" if ok else "failed"), 200 if ok else 503)

    async def metrics(request):
        tenant_of(request, watches=True)
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")

    async def on_error(request, e):
        if isinstance(e, HTTPException):            # of the routes: no such path, no such method
            e = Refused(e.status_code, f"{request.method} {request.url.path}: {e.detail}.")
        elif not isinstance(e, Refused):
            e = Refused(500, "The server failed; its log says how.")
        return as_json(e.body(), e.status, **({"retry-after": "1"} if e.status == 429 else {}))

    async def on_leave(request, e):
        return Response(status_code=499)            # nobody reads it

    posts = {"/v1/chat/completions": chat, "/v1/completions": text}
    gets = {"/v1/models": models, "/v1/models/{name:path}": models, "/health": health, "/metrics": metrics}
    routes = [Route(path, f, methods=["POST"]) for path, f in posts.items()]
    routes += [Route(path, f) for path, f in gets.items()]
    app = Starlette(routes=routes, exception_handlers={
        Refused: on_error, HTTPException: on_error, Exception: on_error, ClientDisconnect: on_leave})

    async def counting(scope, receive, send):
        async def count(message):
            if message["type"] == "http.response.start":
                path = scope["path"].removeprefix(scope.get("root_path", ""))
                counted.labels(path if path in posts | gets else "other", message["status"]).inc()
            await send(message)
        await app(scope, receive, count if scope["type"] == "http" else send)
    return counting


class Figures:
    """Figures of a runner as Prometheus wants them, read when it asks."""

    def __init__(self, figures):
        self.figures = figures

    def collect(self):
        for name, kind, what, value in self.figures():
            family = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
            yield family(f"bicache_{name}", what, value=value)
