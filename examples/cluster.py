"""The same server on many machines: replicas, each an engine with its own cache, asked where their prefix is.

    python examples/cluster.py --model checkpoints/tiny --replicas 2 --port 8000
    python examples/cluster.py --model DIR --device cuda --num-gpus 1 --replicas 8 --address auto

Ray Serve starts replicas, watches their health, restarts and scales them; ours is one decision, which replica
(`PrefixRouter`). A `Front` speaks HTTP (web.py) and sends each body, as it came, to a `Replica`, which is
serve.py without the network. docs/serving.md says what a replica needs. Checked with two replicas of the
embedded model, one of which is killed: tests/test_cluster.py.
"""
import argparse
import hashlib
import json
import math
import os
import signal
import sys
import threading
from pathlib import Path

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")           # Ray reports to nobody; both to be said first
os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")        # a busy machine needs more than 5
import ray                                                      # noqa: E402
from ray import serve as rayserve                               # noqa: E402
from ray.exceptions import RayActorError                        # noqa: E402
from ray.serve.config import RequestRouterConfig                # noqa: E402
from ray.serve.exceptions import BackPressureError              # noqa: E402
from ray.serve.request_router import RequestRouter              # noqa: E402

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
from runner import Service                                      # noqa: E402
from serve import load, load_keys, parser                       # noqa: E402
from web import build_app                                       # noqa: E402
from wire import Refused                                        # noqa: E402

PREFIX_CHARACTERS = 256         # of a prompt without messages: what stands for its prefix
ATTEMPTS = 3                    # for a request whose replica dies


class PrefixRouter(RequestRouter):
    """Rendezvous hashing with bounded loads: each prefix has an order of all replicas, and a request goes to
    the first one that is not overfull.

    Overfull is one that would have more than `spare` requests from here on their way, and more than `bound`
    times the mean. A replica that comes or goes moves only the prefixes that it gets or had.
    """

    def initialize_state(self, bound: float, spare: int):
        self.bound, self.spare, self.load = bound, spare, {}

    async def choose_replicas(self, candidate_replicas, pending_request=None):
        """Ranks of one replica each. Ray takes the first that has a place (max_ongoing_requests)."""
        prefix = pending_request.kwargs["prefix"] if pending_request else ""
        weight = lambda r: hashlib.blake2b(f"{prefix} {r.replica_id.unique_id}".encode()).digest()
        order = sorted(candidate_replicas, key=weight)
        loads = [self.load.get(r.replica_id, 0) for r in order]
        most = max(self.spare, math.ceil(self.bound * (sum(loads) + 1) / max(len(loads), 1)))
        full = [r for r, load in zip(order, loads) if load + 1 > most]
        return [[r] for r in order if r not in full] + [[r] for r in full]

    def on_send_request(self, replica_id):
        super().on_send_request(replica_id)
        self.load[replica_id] = self.load.get(replica_id, 0) + 1

    def on_request_completed(self, replica_id, internal_request_id):
        self.load[replica_id] = max(0, self.load.get(replica_id, 0) - 1)

    def on_replica_actor_died(self, replica_id):
        super().on_replica_actor_died(replica_id)
        self.load.pop(replica_id, None)


class Replica:
    """One engine and its cache."""

    def __init__(self, args: argparse.Namespace):
        from ray.util.metrics import Gauge
        engine, model = load(args)
        self.service = Service(engine, model, args.queue)
        figures = self.service.runner.figures()
        self.gauges = {name: Gauge(f"bicache_{name}", what) for name, _, what, _ in figures}

    async def answer(self, raw: bytes, chat: bool, tenant: str, seed: int, *, prefix: str):
        """The frames of `Service.answer`; a refusal is one, as exceptions lose their class on the way."""
        try:
            async for frame in self.service.answer(raw, chat, tenant, seed):
                yield frame
        except Refused as e:
            yield dict(refused=e.args)

    def figures(self, prefix: str) -> dict:
        """What goes on in the replica that this prefix belongs to."""
        return dict(pid=os.getpid(), **{name: value for name, _, _, value in self.service.runner.figures()})

    def check_health(self):
        """Ray asks now and then; whoever reads Ray's metrics finds the engine's figures there, by replica."""
        for name, _, _, value in self.service.runner.figures():
            self.gauges[name].set(value)
        if self.service.runner.failed or not self.service.runner.is_alive():
            raise RuntimeError("the engine failed")


@rayserve.ingress()
class Front:
    """The HTTP face of all replicas. A request whose replica dies is asked again elsewhere; its seed is drawn
    here, so that the answer is the same, and what was sent of it is not sent twice."""

    def __init__(self, replicas, keys: dict | None, args: argparse.Namespace):
        self.replicas, self.keys, self.args = replicas.options(stream=True), keys, args

    def __serve_build_asgi_app__(self):
        async def healthy():                    # a replica that is not, Ray replaces
            return True
        return build_app(self.answer, self.args.name, keys=self.keys, limit=self.args.time_limit,
                         max_body=self.args.max_body, healthy=healthy, figures=list)

    async def answer(self, raw: bytes, chat: bool, tenant: str, seed: int):
        """As `Service.answer`."""
        sent, ended, begun = {}, set(), False           # by choice
        for _ in range(ATTEMPTS):
            prefix, told = prefix_key(raw, chat, tenant), {}
            frames = self.replicas.answer.remote(raw, chat, tenant, seed, prefix=prefix)
            try:
                async for frame in frames:
                    if "refused" in frame:
                        raise Refused(*frame["refused"])
                    if "index" not in frame:
                        if not begun:
                            yield frame
                        begun = True
                        continue
                    i = frame["index"]
                    told[i] = told.get(i, "") + frame["text"]
                    before = sent.setdefault(i, "")
                    if not told[i].startswith(before[:len(told[i])]):
                        raise Refused(500, "The answer is not what was already sent of it; ask again.")
                    new = told[i][len(before):]
                    sent[i] += new
                    if i not in ended and (new or frame.keys() & {"finish", "canvas"}):
                        yield frame | dict(text=new)
                    if "finish" in frame:
                        ended.add(i)
                return
            except RayActorError:               # the router knows by now, and Ray starts another
                continue
            except BackPressureError:
                raise Refused(429, "All replicas are full; try again later.", "queue_full") from None
            finally:
                frames.cancel()
        raise Refused(503, f"Its replica died, {ATTEMPTS} times; ask again later.")


def prefix_key(raw: bytes, chat: bool, tenant: str) -> str:
    """What requests that share a prefix have in common: the tenant, and a chat's first message, which all
    its turns begin with (of a prompt, or a message that stands alone, the first characters). A body that
    cannot be read has none; the replica says what is wrong."""
    try:
        body = json.loads(raw)
        prefix = str(body["prompt"])[:PREFIX_CHARACTERS] if not chat else body["messages"][0]
        if chat and len(body["messages"]) == 1:
            prefix = str(prefix["content"])[:PREFIX_CHARACTERS]
        return hashlib.blake2b(json.dumps([tenant, prefix], sort_keys=True).encode()).hexdigest()
    except (ValueError, TypeError, KeyError, IndexError, RecursionError):
        return ""


def parse(argv=None) -> argparse.Namespace:
    p = parser()
    p.description = __doc__.split("\n")[0]
    add = p.add_argument_group("cluster").add_argument
    add("--replicas", type=int, default=2, help="engines, each with its own cache (default 2), at least")
    add("--max-replicas", type=int, help="at most; Ray adds some where the queues grow (default: no more)")
    add("--num-gpus", type=float, default=0, help="of each replica (default 0; 0.5 puts two on one GPU)")
    add("--num-cpus", type=float, default=1, help="of each replica (default 1)")
    add("--fronts", type=int, default=1, help="processes that speak HTTP (default 1)")
    add("--bound", type=float, default=1.5, help="a replica with more than so many times the mean passes "
        "requests on to the next (default 1.5)")
    add("--address", help="of a running Ray cluster, or auto (default: start one here)")
    args = p.parse_args(argv)
    args.model = str(Path(args.model).resolve())
    args.name = args.name or Path(args.model).name
    args.max_batch = args.max_batch or 8
    return args


def build(args: argparse.Namespace, router: str | None = "cluster.PrefixRouter"):
    """The application for `ray.serve.run`. router None: Ray's own, the better of two taken at random."""
    keys = load_keys(args.keys)
    scale = dict(num_replicas=args.replicas)
    if args.max_replicas:
        scale = dict(autoscaling_config=dict(min_replicas=args.replicas, max_replicas=args.max_replicas,
                                             target_ongoing_requests=args.max_batch))
    if router:
        scale["request_router_config"] = RequestRouterConfig(
            request_router_class=router, request_router_kwargs=dict(bound=args.bound, spare=args.max_batch))
    replicas = rayserve.deployment(Replica).options(
        max_ongoing_requests=args.queue + args.max_batch, max_queued_requests=args.queue,
        ray_actor_options=dict(num_gpus=args.num_gpus, num_cpus=args.num_cpus), health_check_period_s=5,
        **scale)
    front = rayserve.deployment(Front).options(
        num_replicas=args.fronts, max_ongoing_requests=10_000, ray_actor_options=dict(num_cpus=0))
    return front.bind(replicas.bind(args), keys, args)


def start(args: argparse.Namespace, **options) -> None:
    """Join or start Ray. Every machine needs the clone at the same path."""
    env = {"PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)])}
    ray.init(address=args.address, runtime_env=dict(env_vars=env), include_dashboard=False, **options)


def main(argv=None) -> int:
    args, ended = parse(argv), threading.Event()
    try:
        app = build(args)
        if not args.keys and args.host != "127.0.0.1":
            raise ValueError(f"--host {args.host} is open to others; give --keys FILE, or leave it 127.0.0.1")
    except ValueError as e:
        print(f"cluster.py: {e}", file=sys.stderr)
        return 2
    try:
        start(args)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: ended.set())       # ray.init has set one that aborts
        rayserve.start(http_options=dict(host=args.host, port=args.port))
        rayserve.run(app)
        print(f"{args.name} on http://{args.host}:{args.port}", flush=True)
        ended.wait()
        return 0
    finally:
        rayserve.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main())
