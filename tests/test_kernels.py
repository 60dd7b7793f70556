"""The kernels, held to kernel_checks.py on whatever hardware there is.

Without a GPU the Triton kernels run in Triton's interpreter (it must be switched on before Triton is
imported, so one test starts a second pytest on the class `TestInterpreted`) and are compiled for sm_80 and
sm_90, where the compiler's own account of registers and shared memory is read. With a GPU the same checks run
on it, and whole generations are compared.
"""
import importlib.util
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from conftest import ROOT, prompt, tiny
from kernel_checks import (ATTEND, BF16, CONFIDENCE, FP16, FP32, INTERPRETED, MASK, PAGE, ROPE, TOLERANCE,
                           attend_case, check_attend, check_confidence, check_confidence_extremes,
                           check_rope_store, error)

import kernels
from engine import Engine, Request

gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_triton = pytest.mark.skipif(kernels.triton is None, reason="triton is not installed")


class TestTwins:
    __test__ = not INTERPRETED

    @pytest.mark.parametrize("case", ATTEND)
    def test_attend(self, case):
        check_attend(case, "torch")

    @pytest.mark.parametrize("shape", ROPE, ids=str)
    def test_rope_store(self, shape):
        check_rope_store(*shape, impl="torch")

    @pytest.mark.parametrize("case", CONFIDENCE, ids=str)
    def test_confidence(self, case):
        check_confidence(*case, impl="torch")

    def test_confidence_extremes(self):
        check_confidence_extremes("torch")

    def test_noise_is_finite(self, monkeypatch):
        """The largest draw once rounded to 1, whose Gumbel noise is infinite: 1 row in 130 committed a token
        by that alone."""
        monkeypatch.setattr(kernels, "_mix", lambda x: torch.full_like(x, 0xFFFFFFFF))
        assert float(kernels.uniform(*[torch.zeros(1, dtype=torch.long)] * 4)) < 1

    def test_choose(self):
        assert kernels.choose("cpu") == kernels.choose("cpu", "torch") == "torch"
        assert kernels.choose("cuda", "torch") == "torch"
        with pytest.raises(ValueError, match="needs a GPU, and the model is on cpu"):
            kernels.choose("cpu", "triton")
        with pytest.raises(ValueError, match="one of auto, triton, torch"):
            kernels.choose("cpu", "cuda")

    def test_without_triton(self, monkeypatch):
        """The file loads, the CPU says nothing, a GPU is told once. Its operation is not registered a
        second time: that would replace the first one's for good, by one that ends with this test."""
        monkeypatch.setitem(sys.modules, "triton", None)
        monkeypatch.setattr(torch.library, "custom_op", lambda *_, **__: lambda function: function)
        spec = importlib.util.spec_from_file_location("kernels_without_triton", ROOT / "kernels.py")
        bare = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(bare)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert bare.choose("cpu") == "torch"
        for wanted in ("auto", "triton"):
            with pytest.warns(UserWarning, match="triton is not installed"):
                assert bare.choose("cuda", wanted) == "torch"
        q, kv, _, *rest = attend_case(*ATTEND["two lengths"])
        assert torch.equal(bare.attend(q, kv, *rest), kernels.attend(q, kv, *rest))

    def test_bench_without_gpu(self, capsys):
        if torch.cuda.is_available():
            pytest.skip("there is a GPU")
        spec = importlib.util.spec_from_file_location("bench_kernels", ROOT / "bench" / "kernels.py")
        bench = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(bench)
        assert bench.main([]) == 2
        assert "needs a GPU" in capsys.readouterr().err


def generations(model, attention, device="cpu", compile=False):
    """Two prefix lengths in a row through one engine, the second in a batch of two, with a refresh between
    the steps."""
    engine = Engine(model, depth=1, refresh=2, cache_mb=8, attention=attention, compile=compile)
    first, second = prompt(66, 1), prompt(21, 2)
    batches = [[Request(first + prompt(3, 3), prefix_len=66, gen_length=3)],
               [Request(second + prompt(4, 4), prefix_len=21, gen_length=3),
                Request(first + prompt(2, 5), prefix_len=66, gen_length=3, temperature=0.8, seed=3)]]
    return [result.tokens for batch in batches for result in engine.generate(batch)]


@needs_triton
class TestInterpreted:
    """Collected in the second pytest only; `test_in_the_interpreter` starts it."""
    __test__ = INTERPRETED

    @pytest.mark.parametrize("case", ATTEND)
    def test_attend(self, case):
        check_attend(case, "triton")

    @pytest.mark.parametrize("shape", ROPE, ids=str)
    def test_rope_store(self, shape):
        check_rope_store(*shape, impl="triton")

    @pytest.mark.parametrize("case", CONFIDENCE, ids=str)
    def test_confidence(self, case):
        check_confidence(*case, impl="triton")

    def test_confidence_extremes(self):
        check_confidence_extremes("triton")

    def test_dream_vocabulary(self):
        l = torch.randn(1, 152064, generator=torch.Generator().manual_seed(0))
        out, want = (kernels.confidence(l, 151666, stats=True, impl=impl) for impl in ("triton", "torch"))
        for a, b in zip(out, want):
            assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)

    def test_head_dim(self):
        q, kv, _, *rest = attend_case(1, 2, 2, 3, 24, (5,), (3,), 2, FP32)
        with pytest.raises(ValueError, match="head_dim is 24"):
            kernels.attend(q, kv, *rest, impl="triton")

    def test_generation(self):
        model = tiny(shift=True, layers=2, hidden=64)
        assert generations(model, "triton") == generations(model, "torch")


if not INTERPRETED:
    @needs_triton
    def test_in_the_interpreter():
        env = os.environ | {"TRITON_INTERPRET": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", __file__]
        run = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        if "only 0-dimensional arrays can be converted" in run.stdout:
            pytest.skip("the interpreter of this triton (3.6 or before) does not run with numpy 2.4 or later")
        assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]


# -- compiled ahead of time ----------------------------------------------------------------------------------

SHARED = {80: 166912, 90: 232448}       # bytes a block may have: 163 kB on an A100, 227 kB on an H100
TYPES = {BF16: "*bf16", FP16: "*fp16", FP32: "*fp32"}
COUNTS = {"B", "N", "M", "n", "splits", "rows", "chunks", "mask_id", "pages_b", "columns_b"}  # any integer
I64 = dict.fromkeys(("Pages", "PrefixLen", "SuffixLen", "Columns", "Seed", "Step", "Row", "OutToken"), "*i64")


def shipped() -> dict:
    """Every configuration the launchers choose: name -> kernel, argument types, compile-time constants."""
    table = {}
    shapes = [(dtype, D, 1) for dtype in (BF16, FP32) for D in (32, 64, 128)]
    for dtype, D, G in shapes + [(FP16, 128, 1), (BF16, 128, 7)]:
        types = I64 | dict(Q=TYPES[dtype], KV=TYPES[dtype], Out=TYPES[dtype], Lse="*fp32", scale="fp32")
        # One of each kind that attend_config tells apart; float16 has one other instruction than bfloat16.
        for rows, programs in ((32, 32), (64, 1), (512, 64))[dtype == FP16:2 if dtype == FP16 else 3]:
            config = kernels.attend_config(dtype, rows, programs)
            table[f"attend {TYPES[dtype][1:]} D{D} G{G} {config['ROWS']} rows"] = (
                kernels._attend_kernel, types, dict(G=G, K=32 // G, D=D, PAGE=PAGE) | config)
    types = dict(Part="*fp32", Lse="*fp32", Out="*bf16")
    table["combine"] = kernels._combine_kernel, types, dict(D=128, ROWS=16, num_warps=4)
    for H, K in ((32, 32), (28, 4)):
        types = I64 | dict.fromkeys(("Q", "Key", "Value", "KV", "Out"), "*bf16")
        types |= dict(Cos="*fp32", Sin="*fp32")
        table[f"rope_store H{H} K{K}"] = kernels._rope_store_kernel, types, dict(
            H=H, K=K, D=128, PAGE=PAGE, H_UP=32, K_UP=K, num_warps=4)
    for dtype, noise, stats in ((BF16, False, False), (BF16, True, True), (FP32, True, True)):
        types = I64 | dict(Logits=TYPES[dtype], Temperature="*fp32", Part="*fp32", Token="*i32")
        table[f"judge {TYPES[dtype][1:]} noise {noise} stats {stats}"] = kernels._judge_kernel, types, dict(
            CHUNK=4096, NOISE=noise, STATS=stats, num_warps=4)
    types = I64 | dict(Part="*fp32", Token="*i32", Out="*fp32")
    table["verdict"] = kernels._verdict_kernel, types, dict(CHUNKS=64, STATS=True, num_warps=1)
    return table


def build(kernel, types: dict, constants: dict, capability: int):
    """The kernel as a launch would compile it: pointers and the model's own strides are multiples of 16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    options = {k: v for k, v in constants.items() if k.startswith("num_")}
    constants = {k: v for k, v in constants.items() if k not in options}
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    even = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names)
            if signature[name].startswith("*") or signature[name] == "i32" and name not in COUNTS}
    return kernels.triton.compile(ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=even),
                                  target=GPUTarget("cuda", capability, 32), options=options)


def usage(binary: bytes, tool: Path, folder: Path) -> dict:
    """REG, STACK and LOCAL of compiled code, as its header says. Registers are spilled to a stack: none, no
    spill.

    Read off the code itself and not from `ptxas -v`, whose run here would lack the options that Triton gave.
    """
    (folder / "kernel.cubin").write_bytes(binary)
    report = subprocess.run([tool, "-res-usage", folder / "kernel.cubin"], capture_output=True, text=True,
                            check=True)
    return {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", report.stdout)}


@needs_triton
class TestCompiled:
    __test__ = not INTERPRETED

    @pytest.mark.parametrize("capability", SHARED)
    @pytest.mark.parametrize("name", shipped() if kernels.triton and not INTERPRETED else [])
    def test_compiles_without_spills(self, name, capability, tmp_path):
        import triton.backends.nvidia
        tools = Path(triton.backends.nvidia.__file__).parent / "bin"
        if absent := [tool for tool in ("ptxas", "cuobjdump") if not (tools / tool).is_file()]:
            pytest.skip(f"this triton brings no {' and no '.join(absent)}")
        built = build(*shipped()[name], capability)
        used = usage(built.asm["cubin"], tools / "cuobjdump", tmp_path)
        print(f"sm_{capability} {name}: {used['REG']} registers, {built.metadata.shared} bytes shared, "
              f"{used['STACK']} stack")
        assert built.metadata.shared <= SHARED[capability]
        assert used["STACK"] == used["LOCAL"] == 0, f"spills: {used}"


@gpu
@needs_triton
class TestGPU:
    __test__ = not INTERPRETED

    @pytest.mark.parametrize("impl", ["torch", "triton"])
    @pytest.mark.parametrize("case", ATTEND)
    def test_attend(self, case, impl):
        check_attend(case, impl, "cuda")

    @pytest.mark.parametrize("impl", ["torch", "triton"])
    @pytest.mark.parametrize("shape", ROPE, ids=str)
    def test_rope_store(self, shape, impl):
        check_rope_store(*shape, impl=impl, device="cuda")

    @pytest.mark.parametrize("impl", ["torch", "triton"])
    @pytest.mark.parametrize("case", CONFIDENCE, ids=str)
    def test_confidence(self, case, impl):
        check_confidence(*case, impl=impl, device="cuda")

    def test_confidence_extremes(self):
        check_confidence_extremes("triton", "cuda")

    @pytest.mark.parametrize("rows", [32, 100, 512])
    def test_attend_at_model_size(self, rows):
        """LLaDA's heads at a real length, all launch configurations of bfloat16, against the twin in
        float32."""
        lengths = (2000, 777), (rows, rows - 5)
        q, kv, poisoned, *rest = attend_case(2, 32, 32, rows, 128, *lengths, 40, BF16, "cuda")
        want = kernels.attend(q.float(), kv.float(), *rest)
        assert error(kernels.attend(q, poisoned, *rest, impl="triton"), want) < TOLERANCE[BF16]

    def test_cuda_graph(self):
        """One graph of all three, replayed after the lengths, pages and logits in its buffers have
        changed."""
        torch.manual_seed(0)
        B, H, K, N, D, n = 2, 4, 2, 6, 64, 6
        dev = dict(device="cuda")
        q, k, v = (torch.randn(B, h, N, D, **dev) for h in (H, K, K))
        angle, logits = torch.randn(B, 1, N, D // 2, **dev), torch.randn(3, 5000, **dev)
        kv = torch.randn(B * n + 1, 2, K, PAGE, D, **dev)
        pages = (torch.randperm(B * n, **dev) + 1).view(B, n)
        columns, P, S = (torch.zeros(shape, dtype=torch.long, **dev) for shape in ((B, N), (B,), (B,)))

        def inputs(first, second):
            P.copy_(torch.tensor([first, second]))
            S.fill_(N)
            columns.copy_(((P + PAGE - 1) // PAGE * PAGE)[:, None] + torch.arange(N, **dev))

        def step(impl, kv):
            x = kernels.rope_store(q, k, v, angle.cos(), angle.sin(), kv, pages, columns, impl=impl)
            return kernels.attend(x, kv, pages, P, S, impl=impl), *kernels.confidence(logits, MASK, impl=impl)

        inputs(100, 64)
        step("triton", kv)                                              # compiles, outside the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = step("triton", kv)
        for lengths in ((3, 200), (128, 0)):
            inputs(*lengths)
            logits.normal_()
            want = step("torch", kv.clone())
            graph.replay()
            assert error(out[0], want[0]) < TOLERANCE[FP32]
            assert torch.equal(out[1], want[1]) and torch.allclose(out[2], want[2], rtol=1e-5)

    @pytest.mark.parametrize("compile", [False, True])
    @pytest.mark.parametrize("shift", [False, True])
    def test_generation(self, shift, compile):
        model = tiny(shift=shift, layers=3, hidden=128).cuda()
        want = generations(model, "torch", "cuda")
        assert generations(model, "triton", "cuda", compile) == want
