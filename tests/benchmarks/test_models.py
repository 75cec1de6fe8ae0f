"""The benchmark of networks: its rows, its tables, what its profile tells, and some rows on a CPU from end to end."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.scripts import load_benchmark
from tests.xla_options import environment
from xla_fp8 import hlo

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bench() -> Any:
    """The modules of the package, which is not installed."""
    names = ("rows", "table", "plot", "profile", "programs", "scheduler", "tune")
    return SimpleNamespace(**{name: load_benchmark(f"models.{name}") for name in names})


def test_rows_have_names_of_their_own_and_baselines(bench: Any) -> None:
    for tiny in (False, True):
        every = bench.rows.rows(tiny)
        assert len({row.name for row in every}) == len(every)
        assert {row.case for row in every} == {row.case for row in every if row.variant == "bf16"}
    assert [row.variant for row in bench.rows.selected(bench.rows.rows(), "unet inference 2 ", "bf16,xla")] == [
        "bf16",
        "static/xla",
    ]


@pytest.mark.parametrize(
    ("model", "parameters"), [("resnet", 25_610_152), ("unet", 859_496_004), ("convnext", 28_589_128)]
)
def test_networks_have_their_published_sizes(bench: Any, model: str, parameters: int) -> None:
    """And a ResNet the statistics of its batch norms."""
    network = importlib.import_module(f"examples.networks.{model}")
    params = network.init(lambda shape, std: jax.ShapeDtypeStruct(shape, jnp.float32))
    assert sum(int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(params)) == parameters


def test_kinds_of_kernels(bench: Any) -> None:
    module = hlo.parse(
        """HloModule m

%cast {
  %p = f32[8] parameter(0)
  ROOT %q = f8e4m3fn[8] convert(%p)
}

%sum {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%reduced {
  %p = f32[8] parameter(0)
  %zero = f32[] constant(0)
  ROOT %r = f32[] reduce(%p, %zero), dimensions={0}, to_apply=%sum
}

%twice {
  %p = f32[8] parameter(0)
  ROOT %t = f32[8] add(%p, %p)
}

ENTRY %main {
  %x = f32[8] parameter(0)
  %quantize = f8e4m3fn[8] fusion(%x), kind=kLoop, calls=%cast
  %norm = f32[] fusion(%x), kind=kInput, calls=%reduced
  %pointwise = f32[8] fusion(%x), kind=kLoop, calls=%twice
  %conv = f32[8] custom-call(%x), custom_call_target="__cudnn$convForwardGraph"
  %gemm = f32[8] custom-call(%x), custom_call_target="__cublas$lt$matmul$f8"
  %image = f32[1,4,4,8] parameter(1)
  %window = f32[3,3,1,8] parameter(2)
  %y = f32[1,2,2,8] convolution(%image, %window), window={size=3x3}, dim_labels=b01f_01io->b01f, feature_group_count=8
  %kernel = f32[8] custom-call(%x), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="f/xla_fp8_depthwise"}
  %scaled = f32[8] custom-call(%x), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(f)/quantize"}
  %moved = f32[8] copy(%x)
  %some = (f8e4m3fn[8], f32[], f32[1,2,2,8]) tuple(%quantize, %norm, %y)
  %rest = (f32[8], f32[8], f32[8], f32[8], f32[8]) tuple(%conv, %gemm, %moved, %kernel, %scaled)
  ROOT %all = (f32[8], (f8e4m3fn[8], f32[], f32[1,2,2,8]), (f32[8], f32[8], f32[8], f32[8], f32[8]))
    tuple(%pointwise, %some, %rest)
}
"""
    )
    kinds = bench.profile.kinds_of(module)
    named = {name: kinds[name] for name in ("quantize", "norm", "pointwise", "conv", "gemm", "moved", "kernel")}
    assert (kinds["y"], kinds["scaled"]) == ("depthwise", "quantization")
    assert named == {
        "quantize": "quantization",
        "norm": "norms and sums",
        "pointwise": "pointwise",
        "conv": "convolution",
        "gemm": "matmul",
        "moved": "copies",
        "kernel": "depthwise",
    }
    assert bench.profile.launches(module) == dict.fromkeys(named.values(), 1) | {"depthwise": 2, "quantization": 2}
    assert set(named.values()) <= set(bench.profile.KINDS)


def test_table(bench: Any, tmp_path: Path) -> None:
    measured = {
        "ms": 2.0,
        "spread": 0.1,
        "host_ms": 0.25,
        "host_bound": False,
        "compile_s": 3.0,
        "xla_autotune": 0,
        "memory": {"arguments": 10**9},
    }
    profile = {"profile": {"ms": {"convolution": 1.5, "quantization": 0.5}, "kernels": 4.0}}
    content = {
        "about": {},
        "rows": {
            "resnet50 inference 64 bf16": measured | profile,
            "resnet50 inference 64 static/xla": measured | profile | {"ms": 1.6},
            "resnet50 inference 64 static/auto": measured | profile | {"ms": 0.8},
            "unet inference 2 bf16": {"problem": "not compiled in time"},
        },
    }
    lines = bench.table.render(content).splitlines()
    assert "| resnet50 inference 64 | static/auto | 0.80 | 2.50x | 2.00x | 1.00 | 4 | 3.0 | level 0 |  |" in lines
    assert any(line.startswith("| unet inference 2 | bf16 | - |") and "not compiled in time" in line for line in lines)
    assert "| resnet50 inference 64 bf16 | 1.50 | 0.50 | 2.00 | 2.00 | 0.25 |" in lines
    page = tmp_path / "benchmarks.md"
    page.write_text(f"before\n{bench.table.BEGIN}old\n{bench.table.END}\nafter\n")
    bench.table.put_into(page, bench.table.for_docs(content))
    lines = page.read_text().splitlines()
    numbers = "2.00 (0.10) | 1.60 (0.10) | 0.80 (0.10) | 2.50x | 2.00x | 1.00 → 1.00 | 4 → 4"
    assert f"| resnet50 inference 64 | static | {numbers} |" in lines
    assert (lines[0], lines[-1]) == ("before", "after")
    assert not {"old"} & {*lines}
    assert not [line for line in lines if "unet" in line], "nothing to compare with"


def test_plot(bench: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    facts = {"ms": 2.0, "profile": {"ms": {"convolution": 1.5, "quantization": 0.5}}}
    found = {"resnet50 inference 64 bf16": facts, "resnet50 inference 64 static/auto": facts | {"ms": 1.0}}
    path = tmp_path / "models.svg"
    rows = [row for row in bench.rows.rows() if row.model == "resnet50"]
    assert bench.plot.plot(rows, found, path)
    drawn = path.read_text()
    assert "1.00 ms, 2.00x" in drawn
    assert "resnet50 inference 64 static/auto" in drawn
    assert "training" not in drawn, "what was not measured"
    assert not bench.plot.plot(rows, {}, path)


@pytest.mark.parametrize("variant", ["static/auto", "static/xla"])
def test_static_fp8_is_near_bf16(bench: Any, variant: str) -> None:
    """One error of FP8 for each layer: what is wrong beyond that is a wrong scale or layer."""
    rows = {row.variant: row for row in bench.rows.rows(True) if row.model == "resnet50" and row.mode == "inference"}
    found = []
    for name in ("bf16", variant):
        program = bench.programs.program_of(rows[name], True)
        # The same weights: those of FP8 are the others, rounded.
        state, batch = bench.programs.arrays(program.state), bench.programs.arrays(program.batch)
        found.append(np.asarray(jax.jit(program.function)(state, batch), jnp.float32))
    assert np.linalg.norm(found[1] - found[0]) < 0.2 * np.linalg.norm(found[0])


def test_processes_share_the_chains_that_xla_tunes(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    row = next(row for row in bench.rows.rows(True) if row.name == "resnet50 inference 2 static/xla")
    assert bench.scheduler.is_xla_fp8(row)
    every = list(bench.tune.chains(row, True))
    convolutions = [
        sum(equation.primitive.name == "conv_general_dilated" for equation in chain.jaxpr.eqns) for chain in every
    ]
    assert sum(convolutions) == len(every), "one in each"
    assert len(every) <= 8, "equal layers are one chain"
    for part in range(2):
        bench.tune.compile_chains([row, row], part, 2, True)
    assert capsys.readouterr().out.count("chain ") == len(every)


class _Child:
    """Stands for the process of a row. Compiles until the test says otherwise; is measured as soon as it is told to."""

    every: list[_Child]

    def __init__(self, row: Any, settings: Any, gpu: str | None) -> None:
        self.row, self.gpu, self.state, self.is_told = row, gpu, "compiling", False
        self.facts: dict[str, Any] = {"gpu": gpu}
        self.process = SimpleNamespace(wait=self.wait)
        self.is_over = False
        self.beside: list[str] = []
        self.every.append(self)

    def go(self) -> None:
        self.beside = [
            other.state for other in self.every if other is not self and other.gpu == self.gpu and not other.is_over
        ]
        self.facts |= {"ms": 1.0, "host_ms": 0.1, "host_bound": False, "compile_s": 1.0}
        self.facts["profile"] = {"ms": {"convolution": 1.0}, "kernels": 1}
        self.state = "measured"

    def fail(self, problem: str) -> None:
        self.facts["problem"], self.state = problem, "failed"

    def wait(self) -> None:
        self.is_over = True


@pytest.fixture
def children(bench: Any, monkeypatch: pytest.MonkeyPatch) -> list[_Child]:
    """Those that the scheduler has begun, so far."""
    monkeypatch.setattr(_Child, "every", [], raising=False)
    monkeypatch.setattr(bench.scheduler, "Child", _Child)
    return _Child.every


def _scheduler(bench: Any, out: Path, rows: list[Any], batch_seconds: float) -> Any:
    settings = bench.scheduler.Settings(
        out=out,
        seconds=500,
        batch_seconds=batch_seconds,
        workers=2,
        gpus=("0",),
        tune=False,
        autotune=4,
        fp8_autotune=4,
        chain_seconds=0,
        xla_flags="",
        tiny=True,
    )
    return bench.scheduler.Scheduler(settings, rows)


def test_nothing_compiles_on_the_gpu_of_a_row_that_is_measured(
    bench: Any, children: list[_Child], tmp_path: Path
) -> None:
    rows = bench.rows.selected(bench.rows.rows(True), "resnet50", "bf16,auto")[:3]
    scheduler = _scheduler(bench, tmp_path, rows, batch_seconds=90)
    (lane,) = scheduler.lanes
    scheduler.advance(lane)
    first, second = children
    first.state = "compiled"
    scheduler.advance(lane)
    assert (first.state, second.state) == ("compiled", "compiling"), "the batch is not over"
    lane.since -= 100  # now it is
    scheduler.advance(lane)
    assert (first.state, first.beside) == ("measured", [])
    assert (second.state, second.is_over) == ("failed", True)
    assert "time of its batch" in scheduler.content["rows"][second.row.name]["problem"]
    assert scheduler.waiting == [rows[2], second.row], "it begins again behind the others"
    scheduler.advance(lane)
    for child in children[2:]:
        child.state = "compiled"
    scheduler.advance(lane)
    scheduler.advance(lane)
    assert [child.row for child in children[2:]] == [rows[2], second.row]
    assert [child.beside for child in children[2:]] == [["compiled"], []], "who is compiled only waits"
    assert all(scheduler.content["rows"][row.name]["ms"] for row in rows)


def test_nothing_begins_on_the_only_gpu_while_chains_are_tuned_there(
    bench: Any, children: list[_Child], tmp_path: Path
) -> None:
    scheduler = _scheduler(bench, tmp_path, bench.rows.rows(True)[:2], batch_seconds=90)
    (tmp_path / "tune.log").write_text("3 files\n")
    code: list[int | None] = [None]
    scheduler.tuner = SimpleNamespace(poll=lambda: code[0])
    scheduler.advance(scheduler.lanes[0])
    assert not children
    code[0] = 0
    scheduler.advance(scheduler.lanes[0])
    assert len(children) == 2


@pytest.mark.parametrize(
    ("length", "trains", "expected"), [(77, False, "cudnn"), (77, True, "xla"), (78, True, "cudnn")]
)
def test_attention_that_cudnn_cannot_differentiate_is_xlas(
    monkeypatch: pytest.MonkeyPatch, length: int, trains: bool, expected: str
) -> None:
    """jax's call of cuDNN refuses an odd length when it is differentiated: the UNet's texts have 77 tokens."""
    layers = importlib.import_module("examples.networks.layers")
    chosen = []

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, implementation: str) -> jax.Array:
        chosen.append(implementation)
        return q

    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    q, k = jnp.zeros((1, 64, 32), jnp.bfloat16), jnp.zeros((1, length, 32), jnp.bfloat16)
    layers.attention(q, k, k, 2, trains)
    assert chosen == [expected]


def test_a_unet_that_trains_tells_its_attention(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    unet = importlib.import_module("examples.networks.unet")
    told = []

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, heads: int, trains: bool) -> jax.Array:
        told.append(trains)
        return q

    monkeypatch.setattr(unet, "attention", attend)
    for mode, trains in (("training", True), ("inference", False)):
        row = next(row for row in bench.rows.rows(True) if (row.model, row.mode) == ("unet", mode))
        program = bench.programs.program_of(row, True)
        jax.eval_shape(program.function, bench.programs.structs(program.state), bench.programs.structs(program.batch))
        assert told
        assert set(told) == {trains}
        told.clear()


@pytest.mark.slow
def test_rows_from_end_to_end(tmp_path: Path) -> None:
    """Two variants on a CPU, and one that is not to be compiled in time."""
    command = [sys.executable, "-m", "benchmarks.models", "run", "--tiny", "--out", str(tmp_path), "--seconds", "400"]
    command += ["--only", "resnet50 inference", "--variants", "bf16,auto", "--workers", "2", "--gpus", "0"]
    subprocess.run(command, check=True, cwd=ROOT, env=environment(1), timeout=500)
    content = json.loads((tmp_path / "results.json").read_text())
    assert set(content["rows"]) == {"resnet50 inference 2 bf16", "resnet50 inference 2 static/auto"}
    for facts in content["rows"].values():
        assert facts["ms"] > 0
        assert facts["profile"]["ms"]["convolution"] > 0
        assert sum(facts["memory"].values()) > 0
    assert content["rows"]["resnet50 inference 2 static/auto"]["rewritten"] == [
        "8 rewritten, 0 refused, 2 without FP8 operands"
    ]
    assert "resnet50 inference 2 | static/auto" in (tmp_path / "table.md").read_text()
