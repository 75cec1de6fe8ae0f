"""Graph calls through cuDNN on a Hopper GPU: every op and type, random graphs, real shapes, plans."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hopper.conftest import Check
from xla_fp8 import hlo, passes
from xla_fp8.backends import autotune, cache, call_text
from xla_fp8.backends.cudnn import plans, support
from xla_fp8.backends.cudnn.backend import CudnnBackend, Plan
from xla_fp8.backends.cudnn.errors import CudnnUnsupportedError
from xla_fp8.backends.example_calls import POINTWISE, TYPES, graph_call, random_call
from xla_fp8.graph import FP8_TYPES
from xla_fp8.target import GraphCall, Target

pytestmark = pytest.mark.hopper

H200 = Target.parse("h200")
FIXTURES = Path(__file__).resolve().parents[2] / "hlo_fixtures"
SCALE = "1:[f32]conv();2:[f8e4m3fn]scale(1);"
FULL = "1:[f32]conv();2:[f32]scale(1);3:[f32]scale(2);4:[f32]relu(3);5:[f8e4m3fn]invscale(4);6:[f32]amax(4);"
first, _, last = os.environ.get("XLA_FP8_SEEDS", "0:60").partition(":")
SEEDS = range(int(first), int(last))


def test_the_smallest(check: Check) -> None:
    check(graph_call(SCALE))


@pytest.mark.parametrize("op", POINTWISE)
def test_every_op(op: str, check: Check) -> None:
    check(graph_call(f"1:[f32]conv();2:[f32]scale(1);3:[f32]{op}(2);4:[f8e4m3fn]scale(3);5:[f32]amax(3);"))


@pytest.mark.parametrize("output", TYPES)
@pytest.mark.parametrize("filter_type", FP8_TYPES)
@pytest.mark.parametrize("input_type", FP8_TYPES)
def test_every_mix_of_types(input_type: str, filter_type: str, output: str, check: Check) -> None:
    check(graph_call(f"1:[f32]conv();2:[{output}]scale(1);3:[f32]amax(2);", types=(input_type, filter_type)))


@pytest.mark.parametrize("side", TYPES)
def test_residuals_of_every_type(side: str, check: Check) -> None:
    check(graph_call("1:[f32]conv();2:[f32]add(1);3:[f8e4m3fn]scale(2);", side=side))


@pytest.mark.parametrize("copied", TYPES)
def test_copies_of_every_type(copied: str, check: Check) -> None:
    check(graph_call(f"1:[f32]conv();2:[f32]scale(1);3:[f8e4m3fn]scale(2);4:[{copied}]copy(2);5:[bf16]amax(2);"))


@pytest.mark.parametrize(
    "graph",
    [
        "1:[f32]conv();2:[f32]min(1);3:[f32]scale(2);4:[f32]max(3,1);5:[f8e4m3fn]scale(4);",
        "1:[f32]conv();2:[f32]scale(1);3:[f32]max(2,1);4:[f8e4m3fn]scale(3);",
        "1:[f32]conv();2:[f32]scale(1);3:[f32]sigmoid(2);4:[f8e4m3fn]add(2,3);",
        "1:[f32]conv();2:[f8e4m3fn]scale(1);3:[f32]amax(1);4:[f32]amax(2);",
    ],
    ids=["leaky_relu", "leaky_relu_of_a_constant", "two_paths", "amax_of_the_output"],
)
def test_graphs_with_several_paths(graph: str, check: Check) -> None:
    check(graph_call(graph))


@pytest.mark.parametrize("image", [(3,), (3, 3), (3, 3, 3)], ids=["1d", "2d", "3d"])
def test_an_output_of_one_element_and_its_amax(image: tuple[int, ...], check: Check) -> None:
    window = f"{{size={'x'.join(map(str, image))}}}"
    graph = "1:[f32]conv();2:[f32]scale(1);3:[f32]relu(2);4:[f8e4m3fn]scale(3);5:[f32]amax(2);6:[bf16]amax(3);"
    check(graph_call(graph, batch=1, features=1, image=image, filter=image, window=window))


@pytest.mark.parametrize("labels", ["b01f_01io->b01f", "bf01_oi01->bf01", "bf01_01io->fb01"])
def test_layouts(labels: str, check: Check) -> None:
    check(graph_call("1:[f32]conv();2:[f32]add(1);3:[f8e4m3fn]bias(2);4:[bf16]copy(2);", labels=labels, batch=3))


WINDOWS = {
    "strided": "{size=3x3 stride=2x2 pad=0_1x0_1}",
    "dilated": "{size=3x3 pad=2_2x2_2 rhs_dilate=2x2}",
    "uneven": "{size=3x3 stride=1x3 pad=2_0x0_2}",
}


@pytest.mark.parametrize("name", WINDOWS)
def test_windows(name: str, check: Check) -> None:
    check(graph_call(FULL, window=WINDOWS[name]))


@pytest.mark.parametrize("image", [(33,), (9, 7), (5, 6, 7)], ids=["1d", "2d", "3d"])
def test_ranks(image: tuple[int, ...], check: Check) -> None:
    check(graph_call(FULL, image=image, filter=(3,) * len(image)))


@pytest.mark.parametrize("per_group", [4, 8, 16, 33])
def test_groups(per_group: int, check: Check) -> None:
    check(graph_call(SCALE, channels=4 * per_group, features=64, groups=4))


@pytest.mark.parametrize("channels", [1, 2, 3, 4, 8, 12, 16, 24, 40, 1000])
def test_channel_counts(channels: int, check: Check) -> None:
    check(graph_call(SCALE, channels=channels, features=64))
    check(graph_call(SCALE, channels=64, features=channels))


@pytest.mark.parametrize("seed", SEEDS)
def test_random_graphs(seed: int, check: Check) -> None:
    call = random_call(seed, largest=64)
    answer = support(call, H200)
    if not answer.ok:
        with pytest.raises(CudnnUnsupportedError):
            CudnnBackend().lower(call, Plan(""))
        return
    check(call)


# N, H, W, C, R, K, stride: each different convolution of the network.
SHAPES = {
    "resnet50": [
        (4, 224, 224, 3, 7, 64, 2),
        (4, 56, 56, 64, 1, 64, 1),
        (4, 56, 56, 64, 3, 64, 1),
        (4, 56, 56, 64, 1, 256, 1),
        (4, 56, 56, 256, 1, 64, 1),
        (4, 56, 56, 128, 3, 128, 2),
        (4, 56, 56, 256, 1, 512, 2),
        (4, 28, 28, 128, 3, 128, 1),
        (4, 28, 28, 512, 1, 128, 1),
        (4, 28, 28, 256, 3, 256, 2),
        (4, 14, 14, 256, 3, 256, 1),
        (4, 14, 14, 1024, 1, 256, 1),
        (4, 14, 14, 512, 3, 512, 2),
        (4, 7, 7, 512, 3, 512, 1),
        (4, 7, 7, 512, 1, 2048, 1),
        (4, 7, 7, 2048, 1, 512, 1),
    ],
    "vgg16": [
        (1, 224, 224, 3, 3, 64, 1),
        (1, 224, 224, 64, 3, 64, 1),
        (1, 112, 112, 64, 3, 128, 1),
        (1, 112, 112, 128, 3, 128, 1),
        (1, 56, 56, 128, 3, 256, 1),
        (1, 56, 56, 256, 3, 256, 1),
        (1, 28, 28, 256, 3, 512, 1),
        (1, 28, 28, 512, 3, 512, 1),
        (1, 14, 14, 512, 3, 512, 1),
    ],
    "unet": [
        (2, 64, 64, 4, 3, 320, 1),
        (2, 64, 64, 320, 3, 320, 1),
        (2, 64, 64, 320, 3, 320, 2),
        (2, 32, 32, 320, 3, 640, 1),
        (2, 32, 32, 640, 3, 640, 1),
        (2, 32, 32, 320, 1, 640, 1),
        (2, 16, 16, 640, 3, 1280, 1),
        (2, 16, 16, 1280, 3, 1280, 1),
        (2, 16, 16, 2560, 3, 1280, 1),
        (2, 8, 8, 1280, 3, 1280, 1),
        (2, 64, 64, 960, 3, 320, 1),
        (2, 64, 64, 320, 3, 4, 1),
    ],
}


def shaped(graph: str, shape: tuple[int, ...]) -> GraphCall:
    n, h, w, c, r, k, stride = shape
    low = (r - 1) // 2 if stride == 1 else max(r - stride, 0) // 2
    high = r - 1 - low if stride == 1 else max(r - stride, 0) - low
    window = f"{{size={r}x{r} stride={stride}x{stride} pad={low}_{high}x{low}_{high}}}"
    return graph_call(graph, batch=n, image=(h, w), channels=c, features=k, filter=(r, r), window=window)


@pytest.mark.parametrize(
    "shape", [s for shapes in SHAPES.values() for s in shapes], ids=lambda s: "x".join(map(str, s))
)
def test_real_shapes(shape: tuple[int, ...], check: Check) -> None:
    check(shaped(FULL, shape))


@pytest.mark.parametrize("graph", [SCALE, FULL], ids=["scale", "full"])
def test_every_plan_computes_the_same(graph: str, check: Check, record_property: Callable[[str, object], None]) -> None:
    call = graph_call(graph, batch=2, image=(28, 28), channels=128, features=128)
    names = list(plans.on_device(0).names(call_text.encode(call)))
    assert len(names) > 1
    unusable = {}
    for name in names:
        try:
            check(call, name)
        except CudnnUnsupportedError as error:  # a plan that does not build is what the autotuner drops
            unusable[name] = str(error)[:300]
    record_property("plans", names)
    record_property("unusable", unusable)
    assert len(unusable) < len(names)


TUNED = [SHAPES["resnet50"][2], SHAPES["resnet50"][13], SHAPES["vgg16"][5], SHAPES["unet"][4]]


@pytest.mark.parametrize("shape", TUNED, ids=lambda s: "x".join(map(str, s)))
def test_the_tuned_plan_is_right_and_remembered(
    shape: tuple[int, ...],
    check: Check,
    record_property: Callable[[str, object], None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("XLA_FP8_AUTOTUNE", "1")
    monkeypatch.setenv("XLA_FP8_CACHE_DIR", str(tmp_path))
    call = shaped(FULL, shape)
    plan = autotune.config_for(CudnnBackend(), call, H200)
    (choice,) = cache.choices()
    assert choice.config == str(plan)
    record_property("tuned", [str(plan), choice.microseconds, choice.first_microseconds, choice.tuning_seconds])
    assert choice.first_microseconds is None or choice.microseconds <= choice.first_microseconds
    check(call, str(plan))
    monkeypatch.setattr(autotune, "tune", lambda *_: pytest.fail("it was tuned again"))
    assert autotune.config_for(CudnnBackend(), call, H200) == plan


def _fixture_calls() -> list[tuple[str, int]]:
    found = []
    for path in sorted(FIXTURES.glob("**/*.hlo")):
        name = path.relative_to(FIXTURES).as_posix()
        if not name.startswith("dumps/"):
            found += [(name, index) for index in range(len(_calls_of(name)))]
    return found


def _calls_of(name: str) -> list[GraphCall]:
    """The graph calls that the pipeline makes of a golden fixture."""
    try:
        module = hlo.parse((FIXTURES / name).read_text(), name)
        passes.run(module, None, "h200", dialect="extended")
    except hlo.HloError:
        return []  # it is there to be rejected
    instructions = (i for computation in module.computations for i in computation)
    return [call for i in instructions if (call := GraphCall.of(i)) is not None]


@pytest.mark.parametrize(("name", "index"), _fixture_calls())
def test_golden_fixtures(name: str, index: int, check: Check) -> None:
    call = _calls_of(name)[index]
    if not support(call, H200).ok:
        pytest.skip(f"falls back to bf16: {support(call, H200).reason}")
    check(call)
