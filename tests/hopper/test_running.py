"""How calls run inside programs on a GPU: CUDA graphs, threads, donation, memory, JAX's own cache."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xla_fp8
from xla_fp8.backends import call_text
from xla_fp8.backends.cudnn import device_context, device_properties, plans, support
from xla_fp8.backends.cudnn.backend import CudnnBackend, Plan
from xla_fp8.backends.example_calls import graph_call
from xla_fp8.backends.inputs import random_inputs
from xla_fp8.target import Target

if TYPE_CHECKING:  # other processes run this file too, and know no tests
    from tests.hopper.conftest import Check

pytestmark = pytest.mark.hopper

SCALE = "1:[f32]conv();2:[f8e4m3fn]scale(1);"
CALL = graph_call(SCALE, batch=4, image=(28, 28), channels=128, features=128)


def one(*operands: jax.Array) -> jax.Array:
    return CudnnBackend().lower(CALL, Plan(""))(*operands)[0]


def chain(x: jax.Array, w: jax.Array, s: jax.Array) -> jax.Array:
    for _ in range(8):
        x = one(x, w, s)
    return x


def operands(seed: int = 3) -> list[jax.Array]:
    x, w, _ = random_inputs(CALL.operand_shapes, seed)
    return [jnp.asarray(x), jnp.asarray(w), jnp.float32(0.01)]


def test_eight_in_a_row_are_eight_one_by_one() -> None:
    x, w, s = operands()
    whole = jax.jit(chain)(x, w, s)
    single = jax.jit(one)
    for _ in range(8):
        x = single(x, w, s)
    np.testing.assert_array_equal(np.asarray(whole, np.float32), np.asarray(x, np.float32))


def test_a_cuda_graph_calls_python_only_while_it_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    device = plans.on_device(0)
    count = 0
    original = device.run

    def counted(*arguments: Any) -> None:
        nonlocal count
        count += 1
        original(*arguments)

    monkeypatch.setattr(device, "run", counted)
    function = jax.jit(chain).lower(*operands()).compile()
    arguments = operands()
    expected = np.asarray(function(*arguments), np.float32)
    for _ in range(100):
        result = function(*arguments)
    np.testing.assert_array_equal(np.asarray(result, np.float32), expected)
    assert count < 100, f"{count} calls of Python for 808 convolutions"


@pytest.mark.parametrize("flag", ["", "--xla_gpu_enable_command_buffer="], ids=["graphs", "no_graphs"])
def test_cuda_graphs_on_and_off_give_the_same(flag: str, tmp_path: Path) -> None:
    x, w, s = operands()
    expected = np.asarray(jax.jit(chain)(x, w, s), np.float32)
    script = tmp_path / "run.py"
    script.write_text(f"import runpy, sys\nm = runpy.run_path({__file__!r})\n" + _SCRIPT)
    environment = {
        **os.environ,
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip(),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "y.npy")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    np.testing.assert_array_equal(np.load(tmp_path / "y.npy"), expected)


_SCRIPT = """
import jax, numpy as np
y = jax.jit(m["chain"])(*m["operands"]())
np.save(sys.argv[1], np.asarray(y, np.float32))
"""


def test_two_threads_and_two_programs() -> None:
    """Each thread has operands of its own; of 1,000 runs, interleaved, every result is looked at."""
    programs = [jax.jit(one), jax.jit(chain)]
    arguments = [operands(seed) for seed in (3, 4)]
    wanted = [program(*mine) for program, mine in zip(programs, arguments, strict=True)]
    assert not same_bits(*wanted), "the two are told apart"

    def work(which: int) -> int:
        results = [same_bits(programs[which](*arguments[which]), wanted[which]) for _ in range(250)]
        return sum(map(bool, results))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(work, [0, 1, 0, 1])) == [250] * 4


@jax.jit
def same_bits(a: jax.Array, b: jax.Array) -> jax.Array:
    return (jax.lax.bitcast_convert_type(a, jnp.uint8) == jax.lax.bitcast_convert_type(b, jnp.uint8)).all()


@pytest.mark.parametrize("threads", [1, 2])
def test_two_streams(threads: int) -> None:
    """One plan on two CUDA streams with different operands, 1,000 launches, from one thread in turn and from two."""
    device, text = plans.on_device(0), call_text.encode(CALL)
    built = device.plan(text)
    everything = [jax.block_until_ready((operands(seed), jax.jit(one)(*operands(seed)))) for seed in (3, 4)]
    # As copies, so that they are no buffers of anything else; the plan writes into them behind JAX's back.
    outputs = [jax.block_until_ready(jax.device_put(np.zeros(y.shape, y.dtype), y.device)) for _, y in everything]
    workspaces = [jax.block_until_ready(jnp.zeros(max(built.workspace, 1), jnp.uint8)) for _ in everything]
    pointers = [
        [array.unsafe_buffer_pointer() for array in (*mine, output)]
        for (mine, _), output in zip(everything, outputs, strict=True)
    ]
    driver = ctypes.CDLL("libcuda.so.1")
    with device_context.current(0):
        streams = [ctypes.c_void_p() for _ in everything]
        for stream in streams:
            assert driver.cuStreamCreate(ctypes.byref(stream), _NON_BLOCKING) == 0

    def launch(which: int) -> None:
        workspace, stream = workspaces[which].unsafe_buffer_pointer(), streams[which].value
        assert stream is not None
        device.run(text, built.name, pointers[which], workspace, stream)

    def work(turns: list[int]) -> None:
        with device_context.current(0):
            for which in turns:
                launch(which)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, [[0, 1] * 500] if threads == 1 else [[0] * 500, [1] * 500]))
    with device_context.current(0):
        for stream in streams:
            assert driver.cuStreamSynchronize(stream) == 0
            assert driver.cuStreamDestroy_v2(stream) == 0
    for output, (_, wanted) in zip(outputs, everything, strict=True):
        assert same_bits(output, wanted)


_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: it does not wait for the default stream


def test_donation() -> None:
    x, w, s = operands()
    expected = np.asarray(jax.jit(one)(x, w, s), np.float32)
    donating = jax.jit(one, donate_argnums=0)
    np.testing.assert_array_equal(np.asarray(donating(x, w, s), np.float32), expected)


def test_a_thousand_runs_take_no_memory() -> None:
    function = jax.jit(chain)
    arguments = operands()
    for _ in range(20):
        jax.block_until_ready(function(*arguments))
    before = free_memory()
    for _ in range(1000):
        result = function(*arguments)
    jax.block_until_ready(result)
    assert before - free_memory() < 8 << 20


def free_memory() -> int:
    """Bytes that are free on the device, XLA's pool apart."""
    driver = ctypes.CDLL("libcuda.so.1")
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    with device_context.current(0):
        assert driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)) == 0
    return free.value


def test_a_program_from_jaxs_cache_runs_its_own_graph(tmp_path: Path) -> None:
    """Two processes with one compilation cache: the second compiles nothing and computes the same."""
    script = tmp_path / "run.py"
    script.write_text(f"import runpy, sys\nm = runpy.run_path({__file__!r})\n" + _SCRIPT)
    environment = {
        **os.environ,
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    for name in ("a", "b"):
        command = [sys.executable, str(script), str(tmp_path / f"{name}.npy")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
    assert any((tmp_path / "cache").iterdir())
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), np.load(tmp_path / "b.npy"))


def test_the_devices_own_properties_answer_as_the_shipped_ones() -> None:
    target = Target.parse("h200")
    own = device_properties.read(0)
    assert json.loads(own)["deviceVer"] == 900
    assert support(CALL, target, own).plans == support(CALL, target).plans


# Through the public function.


def quantized_chain(x: jax.Array, w: jax.Array, scales: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = jax.lax.conv_general_dilated(
        x.astype(jnp.float32) * scales[0],
        w.astype(jnp.float32) * scales[1],
        (1, 1),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    y = jax.nn.silu(y + bias)
    return jnp.clip(y * scales[2], -448, 448).astype(jnp.float8_e4m3fn), jnp.max(jnp.abs(y))


def chain_arguments(batch: int = 4) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [
        jnp.asarray(rng.normal(size=(batch, 28, 28, 128)), jnp.float8_e4m3fn),
        jnp.asarray(rng.normal(size=(3, 3, 128, 128)), jnp.float8_e4m3fn),
        jnp.asarray([0.05, 0.5, 2.0], jnp.float32),
        jnp.asarray(rng.normal(size=128), jnp.float32),
    ]


def test_jit_runs_the_backend(check: Check) -> None:
    arguments = chain_arguments()
    function = xla_fp8.jit(quantized_chain, backend="cudnn")
    text = function.lower(*arguments).as_text()
    assert "xla_fp8.cudnn_graph" in text
    with jax.default_device(jax.devices("cpu")[0]):
        expected = jax.jit(quantized_chain)(*map(np.asarray, arguments))
    outputs = function(*arguments)
    check.same(list(map(np.asarray, expected)), list(map(np.asarray, outputs)), "jit")


@pytest.mark.parametrize("spatial", [2, 3])
def test_what_cudnn_cannot_run_runs_in_bf16(spatial: int, check: Check) -> None:
    """Depthwise, in two and three dimensions: never an error."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, *[8] * spatial, 32)).astype(jnp.float8_e4m3fn)
    w = rng.normal(size=(*[3] * spatial, 1, 32)).astype(jnp.float8_e4m3fn)
    labels = ("NHWC", "HWIO", "NHWC") if spatial == 2 else ("NDHWC", "DHWIO", "NDHWC")

    def depthwise(x: jax.Array, w: jax.Array, s: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jax.lax.conv_general_dilated(
            x.astype(jnp.float32) * s,
            w.astype(jnp.float32),
            (1,) * spatial,
            "SAME",
            dimension_numbers=labels,
            feature_group_count=32,
        )
        return jnp.clip(y, -448, 448).astype(jnp.float8_e4m3fn), jnp.max(jnp.abs(y))

    with jax.default_device(jax.devices("cpu")[0]):
        expected = jax.jit(depthwise)(x, w, np.float32(0.5))
    outputs = xla_fp8.jit(depthwise, backend="cudnn")(x, w, jnp.float32(0.5))
    check.same(list(map(np.asarray, expected)), list(map(np.asarray, outputs)), "depthwise")
