"""The selector: which of several backends, XLA's own compiler among them, runs a call."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xla_fp8 import _jax_compat, hlo, passes
from xla_fp8.backends import autotune, cache, reference
from xla_fp8.backends.autotune import config_for
from xla_fp8.backends.example_calls import graph_call, random_call
from xla_fp8.backends.fastest import ChainBackend, FastestBackend
from xla_fp8.backends.inputs import random_inputs
from xla_fp8.backends.protocol import Config, Implementation, No, Yes
from xla_fp8.backends.registry import BackendError, backends_for, choose
from xla_fp8.errors import XlaFp8Error
from xla_fp8.hlo.literal import numpy_dtype
from xla_fp8.target import GraphCall, Target, Verdict, rule_of

pytestmark = pytest.mark.unoptimized

CALL = graph_call("1:[f32]conv();2:[f8e4m3fn]scale(1);3:[f32]amax(1);", batch=1, image=(4, 4), channels=8, features=8)
H200 = Target.parse("h200")


@dataclasses.dataclass(frozen=True)
class Fake:
    """A backend whose configs say how many milliseconds a call takes; it notes who lists them."""

    name: str
    choices: tuple[str, ...]
    listed: list[str] = dataclasses.field(default_factory=list, compare=False, repr=False)
    opaque: bool = True
    needs_python: bool = False

    def supports(self, call: GraphCall, target: Target) -> Verdict:
        return Yes() if self.choices else No("no config", rule="few")

    def configs(self, call: GraphCall, target: Target) -> Sequence[Config]:
        self.listed.append(self.name)
        return self.choices

    def lower(self, call: GraphCall, config: Config) -> Implementation:
        types = [shape.element_type for shape in call.output_shapes]

        def nap(value: jax.Array) -> jax.Array:
            time.sleep(float(str(config)) / 1000)
            return value

        def run(*operands: jax.Array) -> tuple[jax.Array, ...]:
            y, *aux = reference.run(call.graph, call.window, call.dim_labels, 1, operands, types)
            return (y, *(jax.pure_callback(nap, jax.ShapeDtypeStruct((), jnp.float32), a) for a in aux))

        return run


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XLA_FP8_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("XLA_FP8_AUTOTUNE", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("ours", "other", "peer", "winner"),
    [("1", "20", "20", "ours 1"), ("20", "1", "20", "other 1"), ("20", "20", "1", "xla 1")],
)
def test_the_fastest_wins_whose_ever_it_is(ours: str, other: str, peer: str, winner: str) -> None:
    fastest = FastestBackend((Fake("ours", (ours,)), Fake("other", (other,))), (Fake("xla", (peer,)),))
    assert str(config_for(fastest, CALL, H200)) == winner
    assert [choice.config for choice in cache.choices()] == [winner]


class Unbuildable(Fake):
    """Says yes, and has no config when it comes to it."""

    def configs(self, call: GraphCall, target: Target) -> Sequence[Config]:
        raise BackendError("cuDNN cannot build a plan")


@pytest.mark.parametrize("mode", ["0", "1"])
def test_who_says_yes_and_has_no_config_is_passed_over(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setenv("XLA_FP8_AUTOTUNE", mode)
    fastest = FastestBackend((Unbuildable("cudnn", ("1",)), Fake("other", ("1",))))
    assert str(config_for(fastest, CALL, H200)) == "other 1"
    alone = FastestBackend((Unbuildable("cudnn", ("1",)),), (Fake("xla", ("1",)),))
    assert str(config_for(alone, CALL, H200)) == "xla 1"


def test_without_tuning_the_first_that_runs_it_is_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FP8_AUTOTUNE", "0")
    unable, able, peer = Fake("unable", ()), Fake("able", ("9", "5")), Fake("xla", ("1",))
    assert str(config_for(FastestBackend((unable, able), (peer,)), CALL, H200)) == "able 9"
    assert peer.listed == unable.listed == []


@pytest.mark.parametrize("mode", ["0", "1"])
def test_a_warm_start_asks_only_the_winner(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, quick = Fake("slow", ("20", "10")), Fake("quick", ("10", "1"))
    fastest = FastestBackend((slow, quick), (ChainBackend(),))
    config_for(fastest, CALL, H200)
    monkeypatch.setenv("XLA_FP8_AUTOTUNE", mode)
    monkeypatch.setattr(autotune, "tune", lambda *_: pytest.fail("timed again"))
    slow.listed.clear()
    assert str(config_for(fastest, CALL, H200)) in ("quick 1", "xla chain")
    assert slow.listed == []


def test_a_choice_that_no_backend_has_any_more_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    fastest = FastestBackend((Fake("ours", ("9", "5")),))
    for stale in ("ours 7", "gone 1"):
        cache.store(cache.Choice(autotune.key_of(fastest, CALL), stale, 1.0, None, 1, 0.0, "2026-01-01"))
        monkeypatch.setenv("XLA_FP8_AUTOTUNE", "0")
        assert str(config_for(fastest, CALL, H200)) == "ours 9"


def test_xla_alone_is_no_reason_to_rewrite() -> None:
    fastest = FastestBackend((Fake("a", ()), Fake("b", ())), (ChainBackend(),))
    verdict = fastest.supports(CALL, H200)
    assert not verdict.ok
    assert verdict.reason == "a: no config; b: no config"
    assert rule_of(verdict) == "few"
    chosen = choose((fastest, *backends_for("xla", "cuda")), CALL, H200)
    assert isinstance(chosen, No)
    assert chosen.reason.startswith("a: no config; b: no config; xla: the backend is xla")


def test_who_is_not_needed_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN answers from a process of its own, which takes seconds."""
    monkeypatch.setenv("XLA_FP8_AUTOTUNE", "0")

    @dataclasses.dataclass(frozen=True)
    class Slow(Fake):
        def supports(self, call: GraphCall, target: Target) -> Verdict:
            pytest.fail("asked")

    fastest = FastestBackend((Fake("first", ("1", "2")), Slow("slow", ("1",))), (ChainBackend(),))
    assert choose((fastest,), CALL, H200) == fastest
    assert str(config_for(fastest, CALL, H200)) == "first 1"


def test_a_library_that_is_missing_is_part_of_the_version() -> None:
    class Missing(Fake):
        @property
        def version(self) -> str:
            raise XlaFp8Error("not installed")

    assert FastestBackend((Missing("cudnn", ()),), (ChainBackend(),)).version == "cudnn absent; xla"


def test_an_export_takes_what_runs_without_this_process() -> None:
    bound, free, peer = Fake("bound", ("1",), needs_python=True), Fake("free", ("9",)), ChainBackend()
    assert FastestBackend((bound, free), (peer,)).portable() == FastestBackend((free,), (peer,))
    assert FastestBackend((bound,), (peer,)).portable() == FastestBackend((peer,))
    assert FastestBackend((bound,)).needs_python
    assert not FastestBackend((bound,), (peer,)).needs_python


def test_auto_on_a_gpu_is_the_selector_and_then_xla() -> None:
    fastest, xla = backends_for("auto", "cuda")
    assert isinstance(fastest, FastestBackend)
    assert [backend.name for backend in (*fastest.backends, *fastest.peers)] == ["mosaic", "cudnn", "xla"]
    assert fastest.platforms == ("cuda",)
    assert xla.name == "xla"


FUSED = {
    "scale": ("1:[f32]conv();2:[f8e4m3fn]scale(1);", {}),
    "amax": ("1:[f32]conv();2:[f32]scale(1);3:[f8e4m3fn]scale(2);4:[f32]amax(2);", {}),
    "relu": ("1:[f32]conv();2:[f32]scale(1);3:[f32]relu(2);4:[f8e4m3fn]invscale(3);5:[f32]amax(3);", {}),
    "elu": ("1:[f32]conv();2:[f32]scale(1);3:[f32]elu(2);4:[f8e4m3fn]scale(3);", {}),
    "mixed types, stride": (
        "1:[f32]conv();2:[f8e5m2]scale(1);",
        {"types": ("f8e4m3fn", "f8e5m2"), "window": "{size=3x3 stride=2x2 pad=1_1x1_1}"},
    ),
}


@pytest.mark.parametrize("name", FUSED)
def test_the_chain_is_one_that_becomes_a_graph(name: str) -> None:
    """Through the passes here, which fuse what XLA's matcher does; what XLA 0.11.2 made of these was the same."""
    graph, more = FUSED[name]
    call = graph_call(graph, **more)
    chain = ChainBackend().lower(call, "chain")
    shapes = [jax.ShapeDtypeStruct(s.dimensions, numpy_dtype(s.element_type)) for s in call.operand_shapes]
    module = hlo.parse(_jax_compat.lowered_hlo_text(jax.jit(chain).lower(*shapes)))
    report = passes.run(module, target="h200")
    assert [entry.graph for entry in report.rewritten] == [graph]
    assert not any(i.opcode == "maximum" for i in module.entry), "an amax that starts from 0 is a kernel of its own"


def test_a_peer_wins_where_it_is_the_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """And it is then lowered again from the cache, without the others."""
    peer = Fake("xla", ("20", "1"))
    fastest = FastestBackend((Fake("ours", ("20",)),), (peer,))
    assert str(config_for(fastest, CALL, H200)) == "xla 1"
    monkeypatch.setattr(autotune, "tune", lambda *_: pytest.fail("timed again"))
    assert str(config_for(fastest, CALL, H200)) == "xla 1"
    monkeypatch.setenv("XLA_FP8_AUTOTUNE", "0")
    monkeypatch.setattr(cache, "load", lambda *_: None)
    assert str(config_for(fastest, CALL, H200)) == "ours 20"


@pytest.mark.parametrize("seed", range(4))
def test_the_chain_computes_what_the_reference_does(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, once both multiply the factors of gelu in the order that XLA knows."""
    monkeypatch.setattr(reference, "_OPS", reference._OPS | {"gelu_tanh": jax.nn.gelu})
    call = random_call(seed, largest=32)
    operands = random_inputs(call.operand_shapes, seed)
    types = [shape.element_type for shape in call.output_shapes]
    expected = reference.run(call.graph, call.window, call.dim_labels, call.feature_group_count, operands, types)
    outputs = ChainBackend().lower(call, "chain")(*operands)
    for wanted, output in zip(expected, outputs, strict=True):
        np.testing.assert_array_equal(np.asarray(output, np.float32), np.asarray(wanted, np.float32))


def test_the_chain_has_the_reference_s_gelu_in_another_order() -> None:
    """gelu is a/2 * (1 + tanh(z)), in f32 of unit u = 2^-24. z comes of six roundings, which move tanh(z) by at most
    6u * |z| / cosh(z)^2 < 3u; tanh itself and the sum are each right to 4u, the products to 2u of a result of at most
    |a|. So each is within |a|/2 * (3u + 4u + 4u) + 2u * |a| < 8u * |a| of the true one, and the two within
    2^-20 * |a|.
    """
    a = jnp.linspace(-12, 12, 100_001, dtype=jnp.float32)
    difference = jnp.abs(jax.nn.gelu(a) - reference.gelu_tanh(a))
    assert jnp.max(difference) > 0
    assert (difference <= 2.0**-20 * jnp.abs(a)).all()
