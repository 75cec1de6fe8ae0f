"""`xla-fp8 doctor`: what is installed, what is missing for which backend, and whether all backends compute the same."""

from __future__ import annotations

import argparse
import platform
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xla_fp8.cli import options
from xla_fp8.cli.errors import EXIT_ERROR, EXIT_OK

if TYPE_CHECKING:
    from xla_fp8.cli.color import Color

_PLUGINS = ("jax-cuda13-plugin", "jax-cuda12-plugin")
_DISTRIBUTIONS = (
    *("xla-fp8", "jax", "jaxlib", "numpy", "ml_dtypes"),
    *_PLUGINS,
    *("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
    *("nvidia-cudnn-frontend", "jax-tvm-ffi", "apache-tvm-ffi"),
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="versions, devices, and one tiny convolution on every backend",
        description="Says what is installed and what is missing for which backend, and runs one tiny FP8 convolution "
        "on every backend that can run here. Paste its output into a bug report.",
    )
    parser.set_defaults(run=run)
    parser.add_argument(
        "--save-target",
        type=Path,
        metavar="JSON",
        help="write the properties of the first GPU, for `xla-fp8 check --device-properties` on any machine",
    )
    options.add_common(parser)


def run(arguments: argparse.Namespace) -> int:
    paint = options.stdout_color(arguments)
    if arguments.save_target:
        from xla_fp8.backends.cudnn import device_properties

        arguments.save_target.write_text(device_properties.read(0))
        print(f"wrote {arguments.save_target}")
        return EXIT_OK
    for title, lines in (("Versions", _versions()), ("Devices", _devices()), ("cuDNN without a device", _cudnn())):
        print(paint(title, "heading"))
        for line in lines:
            print(f"  {line}")
    print(paint("Backends, on one tiny convolution", "heading"))
    healthy = True
    for name, ok, what in _backends():
        healthy &= ok is not False
        print(f"  {_mark(ok, paint)} {name}: {what}")
    return EXIT_OK if healthy else EXIT_ERROR


def _mark(ok: bool | None, paint: Color) -> str:
    if ok is None:
        return paint("missing", "note")
    return paint("works  ", "rewritten") if ok else paint("FAILS  ", "refused")


def _versions() -> Iterator[str]:
    yield f"Python {platform.python_version()} on {platform.platform()}"
    for name in _DISTRIBUTIONS:
        version = _version(name)
        yield f"{name} {version}" if version else f"{name} is not installed"


def _version(distribution: str) -> str:
    """Of what is installed; "" where it is not."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


def _devices() -> Iterator[str]:
    import jax

    driver = Path("/proc/driver/nvidia/version")
    yield driver.read_text().splitlines()[0] if driver.exists() else "no NVIDIA driver"
    for device in jax.devices():
        capability = getattr(device, "compute_capability", None)
        yield f"{device.id}: {device.device_kind} ({device.platform})" + (
            f", compute capability {capability}" if capability else ""
        )


def _cudnn() -> Iterator[str]:
    from xla_fp8.backends.cudnn import support
    from xla_fp8.target import Target

    yield f"a small FP8 convolution on an h200: {support(_call(), Target.parse('h200'))}"


def _call() -> Any:
    from xla_fp8.backends.example_calls import graph_call

    graph = "1:[f32]conv();2:[f32]scale(1);3:[f32]relu(2);4:[f8e4m3fn]scale(3);5:[f32]amax(3);"
    return graph_call(graph, batch=1, image=(8, 8), channels=32, features=64)


def _no_gpu() -> str:
    if any(_version(name) for name in _PLUGINS):
        return "JAX has no GPU here"
    return "JAX has no GPU here, nor the plugin for one: pip install 'jax[cuda13]'"


def _backends() -> Iterator[tuple[str, bool | None, str]]:
    """Name, whether it computes what the reference does (None: it cannot run here), and what to say about it."""
    import jax

    from xla_fp8.backends import autotune
    from xla_fp8.backends.registry import BACKENDS
    from xla_fp8.target import Target

    on_gpu = jax.default_backend() == "gpu"
    call, target = _call(), Target.default()
    for name, make in BACKENDS.items():
        if name == "xla":
            continue  # it leaves the chain to XLA: there is nothing of ours to run
        try:
            backend = make()
            verdict = backend.supports(call, target)
            if not verdict.ok:
                yield name, None, verdict.reason
                continue
            if backend.opaque and not on_gpu:
                yield name, None, _no_gpu()
                continue
            (timing,) = autotune.tune(backend, call, list(backend.configs(call, target))[:1])
        except Exception as error:  # the doctor reports whatever a backend dies of
            yield name, False, f"{type(error).__name__}: {error}"
            continue
        if timing.problem:
            yield name, False, timing.problem
        else:
            yield name, True, f"agrees with the reference, {timing.microseconds:.1f} us"
