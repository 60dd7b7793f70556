"""Serve a model folder over HTTP, as OpenAI's API: chat completions and completions, streamed or whole.

    python examples/serve.py --model checkpoints/tiny --port 8000
    curl 127.0.0.1:8000/v1/chat/completions -d '{"messages": [{"role": "user", "content": "Who is Kim?"}]}'

One process, one engine, one thread that runs it (runner.py); wire.py knows the API, web.py HTTP.
docs/serving.md says what the server does and what not. Packages: examples/requirements.txt. Checked as a
process: tests/test_serve.py.
"""
import argparse
import hashlib
import json
import signal
import socket
import sys
import warnings
from pathlib import Path

import uvicorn

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]
from engine import Engine                           # noqa: E402
from files import BadInput, read_text               # noqa: E402
from runner import Service                          # noqa: E402
from web import build_app                           # noqa: E402
from wire import Model                              # noqa: E402

ENGINE = ("device", "dtype", "cache", "refresh", "window", "cache_mb", "max_batch", "compile", "measure")


def load(args) -> tuple[Engine, Model]:
    """The engine on the folder, and what bodies are read against."""
    given = {name: value for name, value in vars(args).items() if value is not None}
    engine = Engine.from_folder(args.model, **{name: given[name] for name in ENGINE if name in given})
    if engine.tokenizer is None:
        raise BadInput(f"{args.model} has no tokenizer files, and this speaks text; serve one that has them")
    config = Path(args.model) / "generation_config.json"
    default = json.loads(read_text(config)).get("max_new_tokens") if config.is_file() else None
    most = args.max_tokens or engine.model.config.max_len
    defaults = {name: given[name] for name in ("threshold", "block_length") if name in given}
    return engine, Model(args.name or Path(args.model).resolve().name, engine.tokenizer, engine.check,
                         min(default or 128, most), most, args.queue, defaults)


def load_keys(path: str | None) -> dict | None:
    """{sha256 of the key: tenant} of a file with a line "tenant key" each; BadInput names the line that is
    none."""
    if path is None:
        return None
    keys = {}
    for number, line in enumerate(read_text(path).splitlines(), 1):
        if not (words := line.split()) or line.startswith("#"):
            continue
        digest = hashlib.sha256(words[-1].encode()).digest()
        if len(words) != 2 or digest in keys:
            raise BadInput(f"line {number} of {path} must be a tenant, a space, and a key that no other has")
        keys[digest] = words[0]
    if not keys:
        raise BadInput(f"{path} holds no key; write a line for each: tenant, space, key")
    return keys


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    p.error = lambda message: p.exit(2, f"{p.prog}: {message}\n")
    add = p.add_argument_group("model").add_argument
    add("--model", metavar="DIR", default=str(HERE.parent / "checkpoints" / "tiny"),
        help="model folder (default: the embedded one)")
    add("--name", help="what clients call it (default: the folder's name)")
    add("--device", help="auto, cpu or cuda")
    add("--dtype", help="auto, float32, bfloat16 or float16")
    add("--cache", help="bicache (default), none, intra or naive")
    add("--cache-mb", type=float, help="memory for K/V (default 256)")
    add("--max-batch", type=int, help="requests that step together at most (default 8)")
    add("--refresh", type=int, help="steps between recomputations of the prefix above the depth (default 16)")
    add("--window", help="rows computed after a block's first step: all (default), rest or block")
    add("--measure", type=int, 
        help="at one refresh in so many, see whether the depth table holds (default 16; 0: never)")
    add("--compile", action="store_true", default=None, help="compile the steps: for GPUs")
    add = p.add_argument_group("answers, where a body does not say").add_argument
    add("--threshold", type=float,
        help="commit all tokens above this probability (default: one token a step)")
    add("--block-length", type=int, help="decide answers in blocks of so many tokens (default: one block)")
    add = p.add_argument_group("limits").add_argument
    add("--queue", type=int, default=64, help="requests that may wait (default 64); one more gets 429")
    add("--time-limit", type=float, default=120, help="seconds for a request (default 120)")
    add("--drain", type=float, default=60,
        help="seconds for those that run when the server is told to end (default 60)")
    add("--max-body", type=int, default=2**20, help="bytes of a body (default 1 MiB)")
    add("--max-tokens", type=int, help="tokens of an answer at most (default: what the model takes)")
    add = p.add_argument_group("network").add_argument
    add("--host", default="127.0.0.1", help="address to listen on; another than this one needs --keys")
    add("--port", type=int, default=8000, help="0: any that is free")
    add("--keys", metavar="FILE", help="a line for each tenant: its name, a space, its API key")
    return p


def main(argv=None) -> int:
    """The exit code: 0 after SIGTERM, 2 for bad input, 130 after an interrupt."""
    args = parser().parse_args(argv)
    warnings.showwarning = lambda message, *_: print(f"serve.py: {message}", file=sys.stderr)
    try:
        keys = load_keys(args.keys)
        if keys is None and args.host != "127.0.0.1":
            raise BadInput(f"--host {args.host} is open to others; give --keys FILE, or leave it 127.0.0.1")
        for name in ("queue", "time_limit", "max_body"):
            if getattr(args, name) <= 0:
                raise BadInput(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be above 0")
        try:
            listener = socket.create_server((args.host, args.port), backlog=1024)
        except (OSError, OverflowError) as e:
            where = f"port {args.port} of {args.host}"
            raise BadInput(f"{where} cannot be had ({e}); give another --port") from None
        engine, model = load(args)
    except ValueError as e:
        print(f"serve.py: {e}", file=sys.stderr)
        return 2
    service = Service(engine, model, args.queue)

    async def healthy():
        return service.runner.is_alive() and not service.runner.failed
    app = build_app(service.answer, model.name, keys=keys, limit=args.time_limit, max_body=args.max_body,
                    healthy=healthy, figures=service.runner.figures)
    # uvicorn ends gracefully at either signal, then raises it again for whoever stood there before.
    signal.signal(signal.SIGTERM, lambda *_: None)
    print(f"{model.name} on http://{args.host}:{listener.getsockname()[1]}", flush=True)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=args.drain)
    try:
        uvicorn.Server(config).run(sockets=[listener])
    except KeyboardInterrupt:
        return 130
    finally:
        service.runner.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
