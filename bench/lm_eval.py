"""Our engine as a model of lm-evaluation-harness: accuracy and work of a task, with a shared prefix' K/V and
without.

    pip install -r bench/requirements-lm-eval.txt
    python bench/lm_eval.py --tasks staff --include_path bench/tasks --apply_chat_template  # offline
    python bench/lm_eval.py --tasks gsm8k --num_fewshot 5 \
        --model_args pretrained=LLaDA-8B-Base,cache_mb=8192,gen_length=256,block_length=32

--model_args are arguments of `Engine.from_folder` and fields of `Request`. Each task runs twice, as they say
and with cache=none, and the metrics stand side by side with the token-layers. The shared prefix is found by
the engine itself; so that there is one, every question gets the first examples (the harness draws others for
each; --draw_examples). generate_until runs in the engine; loglikelihood is LLaDA's Monte Carlo estimate
(arXiv 2502.09992, algorithm 3), which masks at random and reuses nothing. Checked: tests/test_lm_eval.py.
"""
import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import fields
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Without bench/, where this file would be found in the harness' place.
sys.path[:] = [str(ROOT)] + [path for path in sys.path if Path(path or ".").resolve() != ROOT / "bench"]

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from lm_eval import evaluator  # noqa: E402
from lm_eval.api.model import LM  # noqa: E402
from lm_eval.api.samplers import ContextSampler, FirstNSampler  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402
from lm_eval.utils import simple_parse_args_string  # noqa: E402

from engine import Engine, Request  # noqa: E402

CHAT = "\0chat "        # a context that is a chat, not a text: no task's text begins so


class BiCache(LM):
    """An engine behind the harness' interface.

    pretrained: the model folder. mc_num: masked copies of each continuation whose log-likelihood is estimated
    (LLaDA: 128), max_batch of them a pass. All else is an argument of `Engine.from_folder`, or a field of
    `Request` and then said of every request. work: what all answers took.
    """

    def __init__(self, pretrained=str(ROOT / "checkpoints" / "tiny"), mc_num=128, seed=0, **options):
        super().__init__()
        known = {f.name for f in fields(Request)} - {"prompt", "prefix_len", "seed"}
        self.options = {name: options.pop(name) for name in known & options.keys()}
        self.engine = Engine.from_folder(pretrained, **options)
        if self.engine.tokenizer is None:
            raise ValueError(f"{pretrained} has no tokenizer files, and tasks are text")
        if sum(p.numel() for p in self.engine.model.parameters()) < 2e7:
            torch.set_num_threads(1)        # so small a model waits for a second thread more than it gains
        if mc_num < 1:
            raise ValueError(f"mc_num is {mc_num}; it must be at least 1")
        self.mc_num, self.seed, self.work, self.answers = mc_num, seed, Counter(), []

    def without_cache(self) -> "BiCache":
        """The same model and requests, every step computed whole."""
        plain, engine = object.__new__(BiCache), self.engine
        vars(plain).update(vars(self))
        plain.work, plain.answers = Counter(), []
        plain.engine = Engine(engine.model, cache="none", max_batch=engine.max_batch,
                              tokenizer=engine.tokenizer, cache_mb=engine.cache.budget / 2**20)
        return plain

    # -- texts -----------------------------------------------------------------------------------------------

    tokenizer_name = "bicache"          # the harness keeps rendered contexts under it

    def apply_chat_template(self, chat_history, add_generation_prompt=True) -> str:
        """The messages themselves: they become ids in one go, so that no text in them is taken for a special
        token."""
        if not add_generation_prompt:
            raise NotImplementedError("gen_prefix begins the answer inside a chat, which our templates do "
                                      "not; leave out --apply_chat_template")
        return CHAT + json.dumps(chat_history)

    def chat_template(self, chat_template=False) -> str:
        return ""

    def ids(self, context: str) -> list[int]:
        if context.startswith(CHAT):
            return self.engine.tokenizer.chat(json.loads(context[len(CHAT):]))[0]
        return self.engine.tokenizer.encode(context)

    # -- answers ---------------------------------------------------------------------------------------------

    def generate_until(self, requests, disable_tqdm=False) -> list[str]:
        """All at once: the engine batches them, and finds what their contexts have in common."""
        ours = [self.to_request(*instance.args) for instance in requests]
        start, results = time.perf_counter(), self.engine.generate(ours)
        self.work.update(seconds=time.perf_counter() - start)
        for instance, request, result in zip(requests, ours, results):
            layers = result.token_layers + result.encode_token_layers + result.measure_token_layers
            self.work.update(answers=1, steps=result.forwards, hits=int(result.hit), token_layers=layers,
                             prompt=len(request.prompt), prefix=result.prefix_tokens)
            self.answers.append(result.text)
            self.cache_hook.add_partial("generate_until", instance.args, result.text)
        return [result.text for result in results]

    def to_request(self, context: str, gen_kwargs: dict) -> Request:
        """What the task says of length, stops and temperature goes behind what --model_args say."""
        until = gen_kwargs.get("until") or []
        said = {"stop": tuple([until] if isinstance(until, str) else until)}
        length = gen_kwargs.get("max_gen_toks", gen_kwargs.get("max_new_tokens"))
        if length:
            said["gen_length"] = int(length)
        if gen_kwargs.get("do_sample") and gen_kwargs.get("temperature"):
            said["temperature"] = float(gen_kwargs["temperature"])
        return Request(self.ids(context), **{**said, **self.options})

    # -- likelihoods -----------------------------------------------------------------------------------------

    def loglikelihood(self, requests, disable_tqdm=False) -> list[tuple[float, bool]]:
        """(estimate, whether the model, a token a step, would answer this) of each (context,
        continuation)."""
        found = []
        for instance in requests:
            ids, P = self.split(*instance.args)
            one_a_step = Request(ids[:P], prefix_len=0, gen_length=len(ids) - P, stop_at_eos=False)
            answer, = self.engine.generate([one_a_step])
            found.append((self.estimate(ids, P), answer.tokens == ids[P:]))
            self.cache_hook.add_partial("loglikelihood", instance.args, found[-1])
        return found

    def split(self, context: str, continuation: str) -> tuple[list[int], int]:
        """Ids of both, and how many of them are the context's: at least one."""
        if context.startswith(CHAT):
            ids = self.ids(context)
            return ids + self.engine.tokenizer.encode(continuation), len(ids)
        ids, P = self.engine.tokenizer.split(context, continuation)
        return (ids, P) if P else ([self.engine.model.config.eos_ids[0], *ids], 1)

    @torch.inference_mode()
    def estimate(self, ids: list[int], P: int) -> float:
        """log p(ids[P:] | ids[:P]), estimated: the mean, over copies with n of L tokens masked, of the masked
        tokens' log-probabilities times L / n. n runs evenly through 1 to L, from a random one on."""
        model, c = self.engine.model, self.engine.model.config
        L, device = len(ids) - P, self.engine.device
        draw = torch.Generator().manual_seed(self.seed)
        first = int(torch.randint(L, (1,), generator=draw))
        counts = [(first + int(i * L / self.mc_num)) % L + 1 for i in range(self.mc_num)]
        true, total = torch.tensor(ids, device=device), 0.0
        for at in range(0, self.mc_num, self.engine.max_batch):
            n = torch.tensor(counts[at:at + self.engine.max_batch])                                 # (B,)
            ranks = torch.rand(len(n), L, generator=draw).argsort(1).argsort(1)                     # (B, L)
            masked = (ranks < n[:, None]).to(device)
            canvas = true.repeat(len(n), 1)                                                         # (B, T)
            canvas[:, P:][masked] = c.mask_id
            rows = model(canvas)[:, P - c.shift:len(ids) - c.shift]                             # (B, L, V)
            wanted = true[P:].expand(len(n), -1)[..., None]
            logp = F.log_softmax(rows.float(), -1).gather(2, wanted)[..., 0]                    # (B, L)
            total += float(((logp * masked).sum(1).double().cpu() * L / n).sum())
        return total / self.mc_num

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        raise NotImplementedError("loglikelihood_rolling scores each token by those before it, and a "
                                  "masked diffusion model has no such order; take tasks of the kinds "
                                  "generate_until, multiple_choice or loglikelihood")


class FirstExamples(TaskManager):
    """Every question gets the same examples, where the task does not choose them itself."""

    def load(self, *args, **kw):
        loaded = super().load(*args, **kw)
        for task in loaded["tasks"].values():
            if type(getattr(task, "sampler", None)) is ContextSampler:
                task.sampler = FirstNSampler(task.sampler.df)
        return loaded


def evaluate(lm: BiCache, args) -> dict:
    """{(task, metric): (value, standard error)} of the tasks, and lm.work."""
    manager = TaskManager if args.draw_examples else FirstExamples
    found = evaluator.simple_evaluate(
        model=lm, tasks=args.tasks.split(","), num_fewshot=args.num_fewshot, limit=args.limit,
        apply_chat_template=args.apply_chat_template, fewshot_as_multiturn=args.apply_chat_template,
        gen_kwargs=args.gen_kwargs, task_manager=manager(include_path=args.include_path), log_samples=False)
    metrics = {}
    for task, row in found["results"].items():
        for name, value in row.items():
            metric, _, which = name.partition(",")
            if isinstance(value, (int, float)) and which and not metric.endswith("_stderr"):
                metrics[task, name.removesuffix(",none")] = value, row.get(f"{metric}_stderr,{which}")
    return metrics


def show(runs: dict, work: dict, same: int) -> None:
    """Metrics, then what they took: `given` beside `none`."""
    names = list(runs)
    two = len(names) > 1
    print(f"\n{'':32}" + "".join(f"{name:>22}" for name in names) + f"{'points':>9}" * two)
    for key in runs[names[0]]:
        values = [runs[name][key] for name in names]
        cells = [f"{100 * v:.1f}" + (f" +- {100 * e:.1f}" if isinstance(e, float) else "") for v, e in values]
        points = f"{100 * (values[0][0] - values[-1][0]):+9.1f}" * two
        print(f"{' '.join(key):32}" + "".join(f"{cell:>22}" for cell in cells) + points)
    for what in ("token_layers", "steps", "hits", "answers", "seconds"):
        digits = 1 if what == "seconds" else 0
        print(f"{what.replace('_', '-'):32}" + "".join(f"{work[name][what]:22,.{digits}f}" for name in names))
    first, last = work[names[0]], work[names[-1]]
    if first["answers"]:
        print(f"prefix shared: {first['prefix'] / first['prompt']:.0%} of the prompts' tokens")
        if two:
            print(f"token-layers saved: {1 - first['token_layers'] / last['token_layers']:.1%}; "
                  f"{same} of {first['answers']} answers equal")
    else:
        print("nothing was generated: likelihoods are estimated without a cache")


def parse(argv=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--tasks", required=True, metavar="A,B", help="of the harness, or of --include_path")
    add("--model_args", default="", metavar="A=1,B=2",
        help="pretrained=DIR, cache, depth, threshold, mc_num, ...")
    add("--num_fewshot", type=int, metavar="N", help="examples before each question (as the task says)")
    add("--limit", type=float, metavar="N", help="questions of a task (all)")
    add("--include_path", metavar="DIR", help="tasks of your own")
    add("--gen_kwargs", metavar="A=1", help="over what the task says: max_gen_toks=256")
    add("--apply_chat_template", action="store_true", help="examples as turns of a chat")
    add("--draw_examples", action="store_true",
        help="other examples for each question, as the harness does it")
    add("--no_compare", action="store_true", help="not once more with cache=none")
    add("--output", metavar="FILE", help="the numbers as JSON")
    return parser.parse_args(argv)


def main(argv=None) -> int:
    """Exit code 2 for what cannot be run, with a sentence."""
    args = parse(argv)
    try:
        lm = BiCache(**simple_parse_args_string(args.model_args))
        names = [lm.engine.mode] if args.no_compare or lm.engine.mode == "none" else [lm.engine.mode, "none"]
        runs, work, answers = {}, {}, []
        for name in names:
            lm = lm if name == lm.engine.mode else lm.without_cache()
            runs[name], work[name] = evaluate(lm, args), lm.work
            answers.append(lm.answers)
            if not lm.answers:          # likelihoods alone, which no cache changes
                break
    except (ValueError, NotImplementedError, OSError) as e:
        print(f"lm_eval.py: {e}", file=sys.stderr)
        return 2
    show(runs, work, sum(a == b for a, b in zip(answers[0], answers[-1])))
    if args.output:
        metrics = {name: {" ".join(key): value for key, value in run.items()} for name, run in runs.items()}
        found = json.dumps(dict(metrics=metrics, work=work), indent=1)
        Path(args.output).write_text(found + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
