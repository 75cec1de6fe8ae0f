"""The autotuner and its cache, on the CPU: what it picks, drops, remembers, and shares."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from xla_fp8.backends import autotune, cache, call_text, reference
from xla_fp8.backends.autotune import AutotuneError, config_for
from xla_fp8.backends.example_calls import graph_call, random_call
from xla_fp8.backends.fastest import FastestBackend
from xla_fp8.backends.inputs import random_inputs
from xla_fp8.backends.protocol import Config, Implementation, No, Yes
from xla_fp8.target import GraphCall, Target, Verdict, rule_of

pytestmark = pytest.mark.unoptimized

CALL = graph_call("1:[f32]conv();2:[f8e4m3fn]scale(1);3:[f32]amax(1);", batch=1, image=(4, 4), channels=8, features=8)
H200 = Target.parse("h200")


@dataclasses.dataclass(frozen=True)
class Sleepy:
    """A backend whose configs say how many milliseconds a call takes; "wrong" computes nonsense, "dies" raises."""

    choices: tuple[str, ...] = ("20", "wrong", "2", "dies")
    name: str = "sleepy"
    opaque: bool = True
    rule: str = ""

    def supports(self, call: GraphCall, target: Target) -> Verdict:
        return Yes() if self.choices else No("no config", rule=self.rule)

    def configs(self, call: GraphCall, target: Target) -> Sequence[Config]:
        return self.choices

    def lower(self, call: GraphCall, config: Config) -> Implementation:
        if config == "dies":
            raise RuntimeError("no kernel image for this device")
        types = [shape.element_type for shape in call.output_shapes]

        def nap(value: jax.Array) -> jax.Array:
            time.sleep(0 if config == "wrong" else float(str(config)) / 1000)
            return value

        def run(*operands: jax.Array) -> tuple[jax.Array, ...]:
            y, *aux = reference.run(call.graph, call.window, call.dim_labels, 1, operands, types)
            aux = [jax.pure_callback(nap, jax.ShapeDtypeStruct((), jnp.float32), a) for a in aux]
            return (y, *(2 * a if config == "wrong" else a for a in aux))

        return run


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XLA_FP8_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("XLA_FP8_AUTOTUNE", raising=False)
    return tmp_path / "cache"


def test_the_fastest_that_agrees_wins(capsys: pytest.CaptureFixture[str]) -> None:
    assert config_for(Sleepy(), CALL, H200) == "2"
    assert "timed 4 sleepy configs" in capsys.readouterr().err
    timings = {timing.config: timing for timing in autotune.tune(Sleepy(), CALL, Sleepy().choices)}
    assert "result 1 differs from the reference in 100.0%" in timings["wrong"].problem
    assert "no kernel image" in timings["dies"].problem
    assert 0 < timings["2"].microseconds < timings["20"].microseconds


@dataclasses.dataclass(frozen=True)
class Counting(Sleepy):
    """Counts in i32, as a kernel does: in x64 mode a loop would have an index of 64 bits."""

    def lower(self, call: GraphCall, config: Config) -> Implementation:
        types = [shape.element_type for shape in call.output_shapes]

        def run(*operands: jax.Array) -> tuple[jax.Array, ...]:
            count = jax.lax.fori_loop(0, 3, lambda i, n: jax.lax.max(i, n), jnp.int32(0))
            y, amax = reference.run(call.graph, call.window, call.dim_labels, 1, operands, types)
            return y, jnp.where(count == 2, amax, 0)

        return run


def test_candidates_do_not_see_the_x64_mode_of_the_process() -> None:
    """Nor does the program in which the chosen one runs: the kernel would count in two types, and none be usable."""
    jax.config.update("jax_enable_x64", True)  # type: ignore[no-untyped-call]
    try:
        (timing,) = autotune.tune(Counting(), CALL, ("only",))
    finally:
        jax.config.update("jax_enable_x64", False)  # type: ignore[no-untyped-call]
    assert timing.problem == ""


def test_large_operands_repeat_what_is_random(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 GiB of random FP8 numbers would take 130 GiB on the way, and a quarter of an hour."""
    small = [np.asarray(array) for array in autotune._random_operands(CALL)]
    for mine, plain in zip(small, random_inputs(CALL.operand_shapes), strict=True):
        np.testing.assert_array_equal(mine, plain)
    monkeypatch.setattr(autotune, "_RANDOM", 31)
    for operand, shape in zip(autotune._random_operands(CALL), CALL.operand_shapes, strict=True):
        assert operand.shape == shape.dimensions
        values = operand.reshape(-1).astype(np.float32)
        np.testing.assert_array_equal(values[31:], values[:-31])
        assert len(set(values[:31])) > 10 or shape.is_scalar


def test_something_is_between_the_bounds_of_a_clamp() -> None:
    """Else every candidate would agree with the reference: on one number."""
    call = graph_call("1:[f32]conv();2:[f32]scale(1);3:[f32]clamp(2);4:[f32]clamp(3);5:[f8e4m3fn]scale(4);")
    first, second = (autotune._random_operands(call)[index : index + 2] for index in (3, 5))
    assert first[0] < 0 < first[1]
    assert second[0] < 0 < second[1]


def test_large_results_are_not_kept_eight_times(monkeypatch: pytest.MonkeyPatch) -> None:
    large = graph_call("1:[f32]conv();2:[f8e4m3fn]scale(1);", batch=512, image=(224, 224), channels=64, features=64)
    assert [autotune._calls(call) for call in (CALL, large)] == [8, 2]  # 1.5 GiB each
    monkeypatch.setattr(autotune, "_MOST_RESULTS", 1)
    (timing,) = autotune.tune(Sleepy(), CALL, ("20",))
    assert timing.microseconds > 15_000  # of one call


def test_progress_leaves_nothing_on_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it where stdout goes to the same terminal: the line is cleared, and not in a buffer only."""

    class Terminal(io.StringIO):
        seen = ""

        def isatty(self) -> bool:
            return True

        def flush(self) -> None:
            self.seen = self.getvalue()

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    autotune.tune(Sleepy(), CALL, ("dies",))
    assert terminal.getvalue() == ""
    autotune.tune(Sleepy(), CALL, ("dies", "dies"))
    assert "2/2 compiling for sleepy" in terminal.seen
    assert "2/2 timing sleepy dies" in terminal.seen
    assert terminal.seen.endswith("\r\x1b[K")


def test_what_was_found_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    config_for(Sleepy(), CALL, H200)
    (choice,) = cache.choices()
    assert choice.config == "2"
    assert choice.candidates == 4
    assert choice.first_microseconds is not None
    assert choice.first_microseconds > choice.microseconds
    assert call_text.decode(choice.key["call"]).graph == CALL.graph
    monkeypatch.setattr(autotune, "tune", lambda *_: pytest.fail("it tuned again"))
    assert config_for(Sleepy(), CALL, H200) == "2"


def test_force_tunes_again() -> None:
    config_for(Sleepy(), CALL, H200)
    (before,) = cache.choices()
    cache.store(dataclasses.replace(before, config="20"))
    assert config_for(Sleepy(), CALL, H200) == "20"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XLA_FP8_AUTOTUNE", "force")
        assert config_for(Sleepy(), CALL, H200) == "2"


def test_without_tuning_the_heuristic_decides_unless_the_cache_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FP8_AUTOTUNE", "0")
    assert config_for(Sleepy(), CALL, H200) == "20"
    assert list(cache.choices()) == []
    monkeypatch.setenv("XLA_FP8_AUTOTUNE", "1")
    config_for(Sleepy(), CALL, H200)
    monkeypatch.setenv("XLA_FP8_AUTOTUNE", "0")
    assert config_for(Sleepy(), CALL, H200) == "2"


def test_other_calls_backends_and_versions_are_other_keys() -> None:
    keys = {
        json.dumps(autotune.key_of(backend, call))
        for backend in (Sleepy(), Sleepy(("1",)))
        for call in (CALL, graph_call("1:[f32]conv();"))
    }
    assert len(keys) == 4


def test_a_wrong_mode_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FP8_AUTOTUNE", "yes")
    with pytest.raises(AutotuneError, match="'yes': expected one of 0, 1, force"):
        config_for(Sleepy(), CALL, H200)


@dataclasses.dataclass(frozen=True)
class Confident(Sleepy):
    """Lists only what it takes for the fastest."""

    slower: tuple[str, ...] = ()

    def config_named(self, call: GraphCall, target: Target, name: str | None) -> Config | None:
        return next((config for config in (*self.choices, *self.slower) if name in (None, config)), None)

    def slower_configs(self, call: GraphCall, target: Target) -> Sequence[Config]:
        return self.slower


def test_where_the_fastest_configs_are_wrong_the_others_are_timed() -> None:
    assert config_for(Confident(("wrong", "dies"), slower=("20", "2")), CALL, H200) == "2"
    assert config_for(Confident(("20", "wrong"), slower=("2",)), CALL, H200) == "20"
    with pytest.raises(AutotuneError, match="none of 1 configs"):
        config_for(Confident(("wrong", "dies"), slower=("wrong",)), CALL, H200)


def test_nothing_that_works_is_an_error() -> None:
    with pytest.raises(AutotuneError, match="none of 2 configs of the sleepy backend"):
        config_for(Sleepy(("wrong", "dies")), CALL, H200)


def test_one_config_is_not_timed() -> None:
    assert config_for(Sleepy(("dies",)), CALL, H200) == "dies"


def test_in_a_program_of_several_processes_all_take_the_first_ones_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    board: dict[str, str] = {}
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(autotune._jax_compat, "publish", board.__setitem__)
    monkeypatch.setattr(autotune._jax_compat, "await_published", lambda name, seconds: board[name])
    assert config_for(Sleepy(), CALL, H200) == "2"
    assert list(board.values()) == ["2"]
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(autotune, "tune", lambda *_: pytest.fail("the second process tuned"))
    cache.clear()
    assert config_for(Sleepy(), CALL, H200) == "2"


def test_a_damaged_file_counts_as_none(cache_folder: Path) -> None:
    config_for(Sleepy(), CALL, H200)
    (file,) = cache_folder.glob("*.choice.json")
    for text in ("", "{", "[]", '{"key": 3}', '{"key": {}, "config": 1}'):
        file.write_text(text)
        assert list(cache.choices()) == []
        assert config_for(Sleepy(), CALL, H200) == "2"


def test_a_folder_that_cannot_be_written_to_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XLA_FP8_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert config_for(Sleepy(), CALL, H200) == "2"
    assert list(cache.choices()) == []


def test_clear_deletes_choices_and_nothing_else(cache_folder: Path) -> None:
    config_for(Sleepy(), CALL, H200)
    (cache_folder / "notes.txt").write_text("mine")
    assert cache.clear() == 1
    assert [path.name for path in cache_folder.iterdir()] == ["notes.txt"]
    assert cache.clear() == 0


def test_the_default_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XLA_FP8_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.folder() == tmp_path / "xla_fp8"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache.folder() == tmp_path / ".cache" / "xla_fp8"


_WRITER = """
import sys
from xla_fp8.backends import cache
for round in range(200):
    cache.store(cache.Choice({"call": "c"}, sys.argv[1] * 2000, 1.0, None, 1, 0.0, "2026-01-01"))
    found = cache.load({"call": "c"})
    assert found is not None and len(set(found.config)) == 1 and len(found.config) == 2000, found
"""


def test_processes_write_the_same_choice_at_once() -> None:
    writers = [subprocess.Popen([sys.executable, "-c", _WRITER, letter]) for letter in "abc"]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    assert len(list(cache.choices())) == 1


def test_several_backends_as_one() -> None:
    slow, quick, none = (
        Sleepy(("9",), name="slow"),
        Sleepy(("5", "1"), name="quick"),
        Sleepy((), name="none", rule="few"),
    )
    fastest = FastestBackend((none, slow, quick))
    assert [str(c) for c in fastest.configs(CALL, H200)] == ["slow 9", "quick 5", "quick 1"]
    assert str(config_for(fastest, CALL, H200)) == "quick 1"
    verdict = FastestBackend((none, none)).supports(CALL, H200)
    assert verdict.reason == "none: no config; none: no config"
    assert rule_of(verdict) == "few"


@pytest.mark.parametrize("seed", range(20))
def test_a_call_survives_its_text(seed: int) -> None:
    call = random_call(seed)
    text = call_text.encode(call)
    assert call_text.encode(call_text.decode(text)) == text
    assert str(call_text.decode(text).graph) == str(call.graph)


def test_a_call_that_asks_for_exact_sums_is_tuned_by_itself() -> None:
    exact = dataclasses.replace(CALL, operand_precision=("highest", "highest"))
    assert call_text.encode(exact) != call_text.encode(CALL)
    assert call_text.decode(call_text.encode(exact)).exact_sums
    high = dataclasses.replace(CALL, operand_precision=("high", "high"))
    assert call_text.encode(high) == call_text.encode(CALL)


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"graph":"1:[f32]conv()"}'])
def test_text_that_is_no_call(text: str) -> None:
    with pytest.raises(call_text.CallTextError, match="not a graph call"):
        call_text.decode(text)


_PROCESS = """
import sys, jax
from xla_fp8 import _jax_compat
address, index = sys.argv[1], int(sys.argv[2])
jax.distributed.initialize(address, num_processes=2, process_id=index)
for value in ("first", "second"):  # publishing again under one name is what `force` does
    if index == 0:
        _jax_compat.publish("name " + value, value)
    print(_jax_compat.await_published("name " + value, 30.0))
if index == 1:
    _jax_compat.publish("read", "both")
_jax_compat.await_published("read", 30.0)
if index == 0:
    _jax_compat.publish("name first", "again")
"""


def test_what_one_process_publishes_the_other_reads() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _PROCESS, address, str(index)], env=environment, stdout=subprocess.PIPE, text=True
        )
        for index in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert [output.split() for output in outputs] == [["first", "second"]] * 2
