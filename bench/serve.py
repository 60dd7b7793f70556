"""Load on examples/serve.py: requests a second, latency against the arrival rate, for bicache, none, intra.

    python bench/serve.py --svg docs/serve.svg          # three servers of the embedded model, four minutes
    python bench/serve.py --seconds 3 --rates 3         # shorter

Closed loop: so many clients, each with its next request when it has its answer; gives requests a second. Open
loop: arrivals at random (Poisson, seeded) whether or not the server keeps up; gives latency, from the moment
a request should have been sent to its last byte. The three servers run at once and are asked in turn at each
rate. All traffic goes to 127.0.0.1, is bounded in number and time, and ends by itself; a server that is
overrun answers 429, which is counted. Needs examples/requirements.txt. Ends with one JSON line.
"""
import argparse
import asyncio
import json
import math
import os
import platform
import random
import subprocess
import sys
import time
from pathlib import Path
from statistics import median, quantiles

import httpx

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools")]
from staff import sample  # noqa: E402

MODES = ("bicache", "intra", "none")
COLORS = {"bicache": "#d1495b", "intra": "#2e933c", "none": "#1b6ca8"}
MOST = 4000                 # requests of one measurement at most


def bodies(args) -> list[dict]:
    """Questions about some staff lists, mixed: what stands before a question is a shared prefix."""
    rng, chats = random.Random(args.seed), []
    for _ in range(args.documents):
        document, questions = sample(rng, people=args.people)
        for _, question, _ in questions:
            chats.append([dict(role="system", content=document), dict(role="user", content=question)])
    rng.shuffle(chats)
    return [dict(messages=m, max_tokens=args.max_tokens, threshold=0.9) for m in chats]


class Server:
    """A server process of one cache mode, what it was asked and how it answered."""

    def __init__(self, mode: str, args):
        self.mode, self.answers, self.refused = mode, {}, 0
        command = [sys.executable, str(ROOT / "examples" / "serve.py"), "--model", args.model, "--port", "0",
                   "--cache", mode, "--queue", "128", "--max-batch", "8"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.url = self.process.stdout.readline().rpartition(" on ")[2].strip()
        if not self.url:
            raise SystemExit("bench/serve.py: the server did not start")

    async def ask(self, http, body: dict, due: float) -> float | None:
        """Seconds from `due` to the last byte; None if it was refused."""
        reply = await http.post(self.url + "/v1/chat/completions", json=body)
        if reply.status_code == 429:
            self.refused += 1
            return None
        reply.raise_for_status()
        question = json.dumps(body["messages"])
        self.answers[question] = reply.json()["choices"][0]["message"]["content"]
        return time.perf_counter() - due

    async def closed(self, todo: list, clients: int, seconds: float) -> dict:
        """`clients` at once for `seconds`, each asking again when it has its answer."""
        todo, times, start = iter(todo), [], time.perf_counter()

        async def client(http):
            while time.perf_counter() - start < seconds and (body := next(todo, None)):
                times.append(await self.ask(http, body, time.perf_counter()))
        async with httpx.AsyncClient(timeout=300) as http:
            await asyncio.gather(*(client(http) for _ in range(clients)))
        return summary(times, time.perf_counter() - start)

    async def open(self, todo: list, rate: float, seconds: float, seed: int) -> dict:
        """Arrivals at `rate` a second on average, for `seconds`; then all come to their end."""
        rng, tasks, start, due = random.Random(seed), [], time.perf_counter(), 0.0
        self.refused = 0
        async with httpx.AsyncClient(timeout=300, limits=httpx.Limits(max_connections=None)) as http:
            for body in todo:
                due += rng.expovariate(rate)
                if due > seconds:
                    break
                await asyncio.sleep(max(0, start + due - time.perf_counter()))
                tasks.append(asyncio.create_task(self.ask(http, body, start + due)))
            times = await asyncio.gather(*tasks)
        return dict(rate=rate, refused=self.refused) | summary(times, time.perf_counter() - start)

    def figures(self) -> dict:
        lines = httpx.get(self.url + "/metrics").text.splitlines()
        return {name: float(value) for name, value in (x.rsplit(" ", 1) for x in lines if x[0] != "#")}


def summary(times: list, seconds: float) -> dict:
    times = sorted(t for t in times if t is not None)
    if len(times) < 2:
        return dict(requests=len(times), rps=len(times) / seconds, p50=math.nan, p95=math.nan)
    p95 = quantiles(times, n=20, method="inclusive")[-1]
    return dict(requests=len(times), rps=len(times) / seconds, p50=median(times), p95=p95)


async def measure(servers: list, args) -> dict:
    """{mode: {closed, open: [...], ...}}; every document has been asked about before the clock starts."""
    asked = bodies(args)
    rng, found = random.Random(args.seed + 1), {}
    todo = lambda: [rng.choice(asked) for _ in range(MOST)]
    for server in servers:
        await server.closed(asked[:8 * args.documents], 8, 120)
        before = server.figures()
        closed = await server.closed(todo(), args.clients, args.seconds)
        after, n = server.figures(), closed["requests"]
        work = after["bicache_token_layers_total"] - before["bicache_token_layers_total"]
        found[server.mode] = dict(closed=closed | dict(token_layers=work / n), open=[])
        print("{:<8} closed, {} clients: {rps:6.2f} requests/s  p50 {p50:6.3f} s  p95 {p95:6.3f} s  {:,.0f} "
              "token-layers a request".format(server.mode, args.clients, work / n, **closed), flush=True)
    least, most = (pick(f["closed"]["rps"] for f in found.values()) for pick in (min, max))
    for i in range(args.rates):                 # from a third of the slowest to beyond the fastest
        rate = least / 3 * (most * 1.2 / (least / 3)) ** (i / max(args.rates - 1, 1))
        for server in servers:
            point = await server.open(todo(), rate, args.seconds, args.seed + i)
            found[server.mode]["open"].append(point)
            print("{:<8} {rate:6.2f} arrivals/s: {rps:6.2f} answered/s  p50 {p50:6.3f} s  p95 {p95:6.3f} s  "
                  "{refused} refused".format(server.mode, **point), flush=True)
    reference = {s.mode: s.answers for s in servers}
    for mode, answers in reference.items():
        both = answers.keys() & reference["none"].keys() if "none" in reference else ()
        found[mode]["compared"] = len(both)
        found[mode]["equal_to_none"] = sum(answers[q] == reference["none"][q] for q in both)
    return found


def draw(found: dict, path: str) -> None:
    """Latency against the arrival rate, both logarithmic: p50 solid, p95 dashed, a tick where the closed loop
    ended. SVG, written by hand."""
    opened = [p for f in found.values() for p in f["open"]]
    points = [(p["rate"], p[q]) for p in opened for q in ("p50", "p95") if p[q] > 0]
    X, Y = [math.log10(x) for x, _ in points], [math.log10(y) for _, y in points]
    y0, y1 = math.floor(min(Y)), math.ceil(max(Y))
    x0, x1 = min(X) - 0.05, max(max(X), *(math.log10(f["closed"]["rps"]) for f in found.values())) + 0.05
    px = lambda x: 70 + (math.log10(x) - x0) / (x1 - x0) * 520
    py = lambda y: 350 - (math.log10(y) - y0) / (y1 - y0) * 320
    text = lambda x, y, words, at="start": f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{at}">{words}</text>'
    out = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 780 400" font-family="sans-serif" '
           'font-size="12">', '<rect width="780" height="400" fill="white"/>',
           text(330, 390, "arrivals a second", "middle"), text(10, 20, "seconds to the last byte")]
    for y in range(y0, y1 + 1):
        at = py(10**y)
        out += [f'<path d="M70 {at:.0f}H590" stroke="#ddd"/>', text(62, at + 4, f"{10**y:g}", "end")]
    for x in sorted({p["rate"] for p in opened}):
        out += [f'<path d="M{px(x):.0f} 30V350" stroke="#ddd"/>', text(px(x), 368, f"{x:.1f}", "middle")]
    for i, (mode, f) in enumerate(found.items()):
        color = COLORS[mode]
        for q, dash in (("p50", ""), ("p95", ' stroke-dasharray="5 4"')):
            line = "L".join(f'{px(p["rate"]):.1f} {py(p[q]):.1f}' for p in f["open"] if p[q] > 0)
            out.append(f'<path d="M{line}" fill="none" stroke="{color}" stroke-width="2"{dash}/>')
        at = px(f["closed"]["rps"])
        out += [f'<path d="M{at:.0f} 350v-14" stroke="{color}" stroke-width="4"/>',
                f'<circle cx="605" cy="{46 + 40 * i}" r="5" fill="{color}"/>', text(616, 50 + 40 * i, mode),
                text(616, 66 + 40 * i, f'{f["closed"]["rps"]:.1f} requests/s')]
    out += [text(600, 186, "solid p50, dashed p95;"), text(600, 202, "below: closed loop"), "</svg>\n"]
    Path(path).write_text("\n".join(out), encoding="utf-8")


def parse(argv=None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = p.add_argument
    add("--model", default=str(ROOT / "checkpoints" / "tiny"), help="model folder (the embedded one)")
    add("--modes", type=lambda s: s.split(","), default=list(MODES), help="bicache,intra,none")
    add("--seconds", type=float, default=10, help="of each measurement (default 10, at most 120)")
    add("--rates", type=int, default=5, help="arrival rates of the open loop (default 5, at most 20)")
    add("--clients", type=int, default=8, help="of the closed loop (default 8, at most 64)")
    add("--documents", type=int, default=8, help="shared prefixes (default 8)")
    add("--people", type=int, default=16, help="in each document: its length (default 16)")
    add("--max-tokens", type=int, default=24, help="of an answer (default 24)")
    add("--seed", type=int, default=0)
    add("--svg", metavar="FILE", help="draw latency against the arrival rate")
    args = p.parse_args(argv)
    for name, most in (("seconds", 120), ("rates", 20), ("clients", 64), ("documents", 64)):
        if not 0 < getattr(args, name) <= most:
            p.exit(2, f"bench/serve.py: --{name} is {getattr(args, name)}; it must be above 0 and at most "
                      f"{most}\n")
    if bad := set(args.modes) - set(MODES):
        p.exit(2, f"bench/serve.py: --modes has {', '.join(sorted(bad))}; it knows {', '.join(MODES)}\n")
    return args


def main(argv=None) -> None:
    args, servers = parse(argv), []
    try:
        for mode in args.modes:
            servers.append(Server(mode, args))
        found = asyncio.run(measure(servers, args))
    finally:
        for server in servers:
            server.process.terminate()
            server.process.wait(90)
    if args.svg:
        draw(found, args.svg)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    where = dict(machine=platform.machine(), cores=os.cpu_count(), load=os.getloadavg()[0],
                 python=platform.python_version(), commit=commit.stdout.strip())
    print(json.dumps(where | dict(options=vars(args), found=found)))


if __name__ == "__main__":
    main()
