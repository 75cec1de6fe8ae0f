"""The convolutions that the Mosaic kernel is tested with on a Hopper GPU: one for each feature, and random ones.

`NAMED` has small convolutions with one feature each, and configs that no heuristic would choose for them.
`random_case(seed)` is a random convolution with a random graph and one of its configs.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, Literal, TypeAlias

import numpy as np

from xla_fp8.backends.example_calls import POINTWISE, TYPES, graph_call, random_call
from xla_fp8.backends.inputs import random_operands
from xla_fp8.backends.mosaic.backend import MosaicBackend, Precision
from xla_fp8.backends.mosaic.configs import Config
from xla_fp8.graph import FP8_TYPES
from xla_fp8.hlo import Window
from xla_fp8.target import GraphCall, Target

H200 = Target.parse("h200")

Operands: TypeAlias = Literal["exact", "random", "special", "infinite"]
"""What input and filter hold. `exact`: whole numbers from -1 to 1, whose sums every accumulator holds exactly, so that
a wrong index shows as a wrong number, however small its part. `random`: numbers of all magnitudes. `special`: the same
with NaN, and infinity where the type has it, among them. `infinite`: positive ones with one infinity in each, so that
without padding nothing inside the output is NaN, and what tiles compute beside it is: 0 * infinity."""

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class MosaicCase:
    """A call and how it is run.

    Attributes:
        config: None is the one that the backend prefers.
        seed: of the operands.
    """

    name: str
    call: GraphCall
    precision: Precision = "default"
    config: Config | None = None
    operands: Operands = "exact"
    seed: int = 0

    @property
    def backend(self) -> MosaicBackend:
        return MosaicBackend(self.precision)

    @property
    def chosen_config(self) -> Config:
        return self.config or self.backend.configs(self.call, H200)[0]

    def arrays(self) -> list[Array]:
        """The operands, of which `exact` and `special` say what input and filter hold; scales are powers of two."""
        shapes = self.call.operand_shapes
        arrays = random_operands(self.call, seed=self.seed)
        rng = np.random.default_rng(self.seed)
        if self.operands == "exact":
            for index in (0, 1):
                numbers = rng.integers(-1, 2, shapes[index].dimensions)
                arrays[index] = numbers.astype(np.float32).astype(arrays[index].dtype)
        for index, shape in enumerate(shapes[2:], start=2):
            if shape.is_scalar:
                arrays[index] = _power_of_two(arrays[index])
        if self.operands == "infinite":
            for array in arrays[:2]:
                positive = np.abs(array.astype(np.float32))
                array[...] = np.where(positive > 0, positive, 1).astype(array.dtype)
                array.reshape(-1)[rng.integers(array.size)] = np.inf
        if self.operands == "special":
            for array in arrays[: 1 if _dilates(self.call) else 2]:
                _sprinkle(array, rng)
        return arrays


def _power_of_two(scalar: Array) -> Array:
    """The nearest one, of the scalar's sign."""
    value = scalar.astype(np.float32)
    return np.asarray(np.copysign(np.exp2(np.round(np.log2(np.abs(value)))), value), np.float32)


def _dilates(call: GraphCall) -> bool:
    """Whether zeros stand between the pixels of the input. The kernel skips them, and the reference multiplies them: an
    infinity in the filter gives NaN in one of the two alone."""
    return any(d.base_dilation != 1 for d in call.window)


def _sprinkle(array: Array, rng: np.random.Generator) -> None:
    """Puts NaN and infinities at a few places."""
    flat = array.reshape(-1)
    values = [np.nan]
    if not np.isnan(np.asarray(np.inf).astype(array.dtype).astype(np.float32)):
        values += [np.inf, -np.inf]
    for value in values:
        flat[rng.integers(flat.size)] = np.asarray(value).astype(array.dtype)


# One feature each

SCALE = "1:[f32]conv();2:[f8e4m3fn]scale(1);"
FULL = (
    "1:[f32]conv();2:[f32]scale(1);3:[f32]channel_scale(2);4:[f32]bias(3);5:[f32]silu(4);6:[f32]add_scaled(5);"
    "7:[f32]amax(6);8:[bf16]copy(6);9:[f8e4m3fn]invscale(6);"
)
STRIDE_2 = "{size=3x3 stride=2x2 pad=0_1x0_1}"
GRADIENT_2 = "{size=3x3 pad=1_2x1_2 lhs_dilate=2x2}"

WINDOWS: dict[str, dict[str, Any]] = {
    "plain": {"channels": 128, "features": 128},
    "odd": {"batch": 3, "image": (15, 17), "channels": 48, "features": 80, "filter": (3, 5)},
    "tail": {"image": (13, 11), "channels": 208, "features": 144},
    "smallest": {"batch": 1, "image": (5, 5), "channels": 16, "features": 16},
    "deep": {"image": (8, 8), "channels": 1024, "features": 256},
    "stride-2": {"channels": 64, "features": 64, "window": STRIDE_2},
    "stride-2-odd": {"image": (15, 13), "channels": 96, "window": "{size=3x3 stride=2x2 pad=1_1x1_1}"},
    "stride-2-tail": {
        "image": (14, 14),
        "channels": 48,
        "filter": (7, 7),
        "window": "{size=7x7 stride=2x2 pad=3_3x3_3}",
    },
    "stride-3": {"image": (20, 22), "window": "{size=3x3 stride=3x3 pad=1_0x0_2}"},
    "patches": {"filter": (4, 4), "features": 96, "window": "{size=4x4 stride=4x4}"},
    "dilation": {"image": (20, 20), "channels": 64, "window": "{size=3x3 pad=2_2x2_2 rhs_dilate=2x2}"},
    "asymmetric": {"image": (12, 12), "filter": (4, 4), "window": "{size=4x4 pad=1_2x2_1}"},
    "negative": {"channels": 64, "window": "{size=3x3 pad=-1_-2x-2_-1}"},
    "1x1": {"image": (7, 7), "channels": 256, "features": 512, "filter": (1, 1)},
    "1x1-stride-2": {
        "image": (14, 14),
        "channels": 256,
        "features": 512,
        "filter": (1, 1),
        "window": "{size=1x1 stride=2x2}",
    },
    "one-row": {"image": (1, 52), "channels": 48, "features": 208, "filter": (1, 3)},
    "one-column": {
        "batch": 8,
        "image": (32, 1),
        "channels": 160,
        "features": 48,
        "filter": (7, 4),
        "window": "{size=7x4 pad=0_-1x1_2 rhs_dilate=2x1}",
    },
    "one-pixel": {"batch": 3, "image": (1, 1), "channels": 64, "features": 80},
    "stride-2-two-rows": {"image": (2, 19), "channels": 64, "window": "{size=3x3 stride=2x2 pad=1_1x1_1}"},
    "1-D": {"batch": 4, "image": (100,), "channels": 64, "filter": (5,)},
    "3-D": {"image": (3, 9, 8), "channels": 64, "filter": (1, 3, 3)},
    "NCHW": {"image": (12, 12), "channels": 64, "labels": "bf01_oi01->bf01"},
    "reversal": {
        "image": (12, 12),
        "channels": 64,
        "window": "{size=3x3 pad=1_1x1_1 rhs_reversal=1x1}",
        "labels": "b01f_i01o->b01f",
    },
    "gradient-2": {"channels": 64, "features": 128, "window": GRADIENT_2},
    "gradient-2-odd": {
        "image": (8, 7),
        "channels": 96,
        "features": 80,
        "window": "{size=3x3 pad=1_1x1_1 lhs_dilate=2x2}",
    },
    "gradient-2-1x1": {
        "channels": 64,
        "features": 256,
        "filter": (1, 1),
        "window": "{size=1x1 pad=0_1x0_1 lhs_dilate=2x2}",
    },
    "gradient-2-7x7": {
        "image": (9, 9),
        "filter": (7, 7),
        "features": 48,
        "window": "{size=7x7 pad=3_4x4_3 lhs_dilate=2x2}",
    },
    "gradient-4": {"image": (6, 5), "filter": (4, 4), "window": "{size=4x4 pad=3_3x3_3 lhs_dilate=4x4}"},
    "gradient-3x1": {"image": (6, 15), "window": "{size=3x3 pad=2_1x1_1 lhs_dilate=3x1}"},
    "gradient-dilated": {"image": (6, 7), "window": "{size=3x3 pad=3_3x4_4 lhs_dilate=2x2 rhs_dilate=2x3}"},
    "dilated-by-its-stride": {
        "image": (9, 12),
        "channels": 64,
        "filter": (5, 3),
        "window": "{size=5x3 stride=2x1 pad=2_2x1_1 lhs_dilate=2x1}",
    },
    "dilated-by-a-part": {
        "image": (9, 14),
        "channels": 48,
        "filter": (4, 7),
        "window": "{size=4x7 stride=4x3 pad=1_2x6_6 lhs_dilate=2x3 rhs_dilate=1x2}",
    },
    "dilated-and-unseen": {  # every tap of every output is on a zero between rows
        "image": (6, 8),
        "filter": (3, 3),
        "window": "{size=3x3 stride=2x1 pad=1_1x1_1 lhs_dilate=2x1 rhs_dilate=2x1}",
    },
    "1-D-shifted": {"image": (35,), "channels": 320, "filter": (1,), "window": "{size=1 stride=2 pad=-1_1}"},
    "more-taps-than-pixels": {
        "batch": 33,
        "image": (3, 2),
        "channels": 48,
        "filter": (5, 4),
        "window": "{size=5x4 pad=3_2x2_3}",
    },
    "gradient-many-tiles": {"batch": 16, "image": (28, 28), "channels": 64, "features": 96, "window": GRADIENT_2},
}
ODD: dict[str, Any] = {"batch": 3, "image": (9, 10), "channels": 80, "features": 144}
LONE: dict[str, tuple[Config, dict[str, Any]]] = {
    # Tensors with one row, column or image, and consumers whose box starts beside it: Mosaic leaves such dimensions out
    # of a copy, with where it starts.
    "row": (Config(1, 2, 64, 64, 64, 8), {**WINDOWS["one-row"], "batch": 1}),
    "row-promoted": (
        Config(1, 2, 64, 32, 64, 8, promote=True),
        {"image": (29,), "batch": 3, "channels": 320, "features": 320, "filter": (1,), "labels": "bf0_oi0->bf0"},
    ),
    "column": (Config(1, 64, 2, 32, 64, 8), {**WINDOWS["one-column"], "batch": 1}),
    "column-promoted": (Config(4, 32, 1, 32, 128, 6, promote=True, splits=8), WINDOWS["one-column"]),
    "image": (Config(2, 8, 8, 32, 64, 8), {"batch": 1, "image": (9, 10), "channels": 64, "features": 80}),
    "pixel": (Config(128, 1, 1, 32, 64, 8), WINDOWS["one-pixel"]),
    "row-of-a-phase": (Config(1, 2, 64, 64, 64, 8), {"batch": 1, "image": (1, 30), "window": GRADIENT_2}),
}

EXPLICIT: dict[str, tuple[Config, dict[str, Any]]] = {
    **{
        f"box-{n}x{h}x{w}": (
            Config(n, h, w, 64, 64, 3),
            {"batch": 5, "image": (11, 19), "channels": 64, "features": 96},
        )
        for n, h, w in ((1, 8, 16), (4, 8, 8), (16, 1, 8), (32, 2, 2), (128, 1, 1), (1, 1, 128), (1, 128, 1))
    },
    **{
        f"tile-{features}-{channels}-{stages}-{delay}": (
            Config(1, 8, 16, features, channels, stages, delay, columns=32),
            {"image": (17, 16), "channels": 192, "features": 320},
        )
        for features, channels, stages, delay in ((256, 128, 3, 1), (32, 32, 8, 2), (96, 64, 4, 0), (160, 64, 4, 3))
    },
    **{f"splits-{splits}": (Config(4, 2, 16, 64, 128, 4, splits=splits), ODD) for splits in (3, 9)},
    **{
        f"columns-{columns}-{slots}": (
            Config(1, 8, 16, 128, 64, 3, columns=columns, side_slots=slots),
            {"batch": 4, "image": (33, 40), "channels": 128, "features": 272},
        )
        for slots, columns in ((2, 32), (4, 32), (1, 64))
    },
    **{
        f"{name}-{kind}": (config, window)
        for name, config in {
            "pingpong": Config(1, 8, 16, 128, 64, 4, columns=32, pingpong=True),
            "pingpong-64": Config(1, 8, 8, 160, 64, 4, columns=32, pingpong=True),
        }.items()
        for kind, window in {
            "large": {"batch": 5, "image": (33, 40), "channels": 128, "features": 272},
            "small": {"batch": 1, "image": (7, 9), "channels": 96, "features": 48},
            "gradient": {"batch": 5, "image": (17, 20), "channels": 64, "features": 272, "window": GRADIENT_2},
            "gradient-1x1": {
                "batch": 5,
                "image": (17, 20),
                "channels": 64,
                "features": 272,
                "filter": (1, 1),
                "window": "{size=1x1 pad=0_1x0_1 lhs_dilate=2x2}",
            },
        }.items()
    },
    **{f"lone-{name}": case for name, case in LONE.items()},
    **{
        f"{name}-{kind}": (config, shape)
        for name, config in {
            "taps": Config(1, 16, 8, 64, 64, 3, columns=32, side_slots=2, taps=3),
            "taps-images": Config(2, 8, 8, 64, 64, 3, columns=32, side_slots=2, taps=3),
            "taps-pingpong": Config(4, 8, 8, 32, 32, 3, columns=32, side_slots=2, taps=3, pingpong=True),
            "taps-promote": Config(2, 8, 8, 64, 64, 3, columns=32, side_slots=2, taps=3, promote=True),
            "taps-split": Config(1, 16, 8, 64, 32, 3, taps=3, splits=3),
            "resident": Config(1, 8, 16, 64, 32, 3, columns=32, side_slots=2, resident=27),
            "resident-taps": Config(1, 8, 8, 64, 32, 3, columns=32, side_slots=2, taps=3, resident=27, pingpong=True),
        }.items()
        for kind, shape in {
            "large": {"batch": 5, "image": (33, 40), "channels": 96, "features": 272},
            "small": {"batch": 1, "image": (7, 9), "channels": 80, "features": 48},
        }.items()
    },
    **{
        f"promote-{features}-{pieces}-{splits}": (
            Config(1, 8, 16, features, 128, 3, promote=True, pieces=pieces, splits=splits, columns=32),
            {"image": (17, 16), "channels": 256, "features": 320},
        )
        for features, pieces, splits in ((256, 2, 1), (192, 2, 1), (160, 1, 1), (128, 1, 3))
    },
}

INFINITE: dict[str, dict[str, Any]] = {
    "1x1": {**ODD, "filter": (1, 1)},
    "3x3": {**ODD, "window": "{size=3x3}"},
    "stride-2": {**ODD, "channels": 64, "window": "{size=3x3 stride=2x2}"},
    "splits": {**ODD, "window": "{size=3x3}", "config": Config(4, 2, 16, 64, 128, 4, splits=3)},
    "pingpong": {**ODD, "window": "{size=3x3}", "config": Config(1, 8, 16, 128, 64, 4, columns=32, pingpong=True)},
}
"""No padding, tiles beside the output, and an infinity: amax must not see what lies there."""


def _named() -> dict[str, MosaicCase]:
    cases: list[MosaicCase] = []

    def add(name: str, graph: str, operands: Operands = "exact", precision: Precision = "default", **of: Any) -> None:
        config = of.pop("config", None)
        cases.append(MosaicCase(name, graph_call(graph, **of), precision, config, operands, len(cases)))

    for name, window in WINDOWS.items():
        add(name, SCALE, **window)
        add(f"{name}-full", FULL, "random", **window)
        add(f"{name}-highest", FULL, "random", "highest", **window)
        add(f"{name}-special", SCALE, "special", types=("f8e5m2", "f8e5m2"), **window)
    for name, (config, window) in EXPLICIT.items():
        add(name, FULL, precision="highest" if config.promote else "default", config=config, **window)
    for input in FP8_TYPES:
        for filter in FP8_TYPES:
            add(f"{input}-{filter}", SCALE, "random", image=(12, 12), channels=64, types=(input, filter))
    for type in TYPES:
        add(f"out-{type}", f"1:[f32]conv();2:[{type}]scale(1);", **ODD)
        graph = "1:[f32]conv();2:[f32]scale(1);3:[f32]add(2);4:[f32]amax(3);5:[f8e4m3fn]scale(3);"
        add(f"add-{type}", graph, side=type, **ODD)
    # Blocks of an output lie where those of a side tensor were: of all sizes, over several tiles of a consumer.
    many = {"batch": 16, "image": (33, 40), "channels": 32, "features": 272, "filter": (1, 1)}
    for side, out in itertools.product(("f8e4m3fn", "bf16", "f32"), repeat=2):
        for slots, pingpong in ((1, True), (2, True), (2, False), (4, True)):
            graph = f"1:[f32]conv();2:[f32]scale(1);3:[f32]add(2);4:[f32]relu(3);5:[{out}]scale(4);"
            config = Config(1, 8, 16, 128, 32, 3, columns=32, side_slots=slots, pingpong=pingpong)
            kind = "own" if pingpong else "halves"
            add(f"place-{side}-{out}-{slots}-{kind}", graph, config=config, side=side, **many)
    for op in POINTWISE:
        # sigmoid(0) is not 0: amax must not see what lies outside the output.
        graph = f"1:[f32]conv();2:[f32]invscale(1);3:[f32]{op}(2);4:[f32]amax(3);5:[bf16]scale(3);"
        add(f"op-{op}", graph, "random", **ODD)
        add(f"op-{op}-special", graph, "special", types=("f8e5m2", "f8e5m2"), **ODD)
    seen = "1:[f32]conv();2:[f32]scale(1);3:[f32]amax(2);4:[bf16]relu(2);"
    for name, window in INFINITE.items():
        add(f"infinite-{name}", seen, "infinite", types=("f8e5m2", "f8e5m2"), **window)
    add("no-epilogue", "1:[bf16]conv();", **ODD)
    add(
        "fork", "1:[f32]conv();2:[f32]scale(1);3:[f32]max(2);4:[f32]min(3);5:[f32]scale(4);6:[f8e4m3fn]max(4,5);", **ODD
    )
    several = "1:[f32]conv();2:[f32]bias(1);3:[f32]amax(2);4:[f32]relu(2);5:[f32]amax(4);6:[f8e4m3fn]scale(4);"
    add("several-amaxes", several, **ODD)
    add("many-tiles", FULL, batch=16, image=(64, 64), channels=64, features=128)
    # What fused-dot-rewriter makes: rows that are no multiple of a tile's.
    dot = {"batch": 300, "image": (), "channels": 96, "features": 144, "filter": (), "window": "{}"}
    for name, operands, precision in (("dot", "exact", "default"), ("dot-highest", "random", "highest")):
        add(name, FULL, operands, precision, labels="bf_oi->bf", **dot)
    return {case.name: case for case in cases if case.backend.supports(case.call, H200).ok}


NAMED = _named()


# Random

LARGEST_FLOPS, LARGEST_OUTPUT = 1e9, 1 << 20
"""So that the reference takes a fraction of a second of one core; four times that for one case in ten."""

LABELS: dict[int, list[str]] = {1: ["b0f_o0i->b0f"], 2: ["b01f_o01i->b01f"], 3: ["b012f_o012i->b012f"]}
OTHER_LABELS: dict[int, list[str]] = {
    1: ["bf0_oi0->bf0", "b0f_0io->b0f"],
    2: ["bf01_oi01->bf01", "b01f_01io->b01f", "b01f_o01i->bf01", "01bf_01oi->01bf"],
    3: ["bf012_oi012->bf012", "b012f_012io->b012f"],
}


def random_case(seed: int) -> MosaicCase:
    """A random convolution that the kernel takes: the same for a seed, while `MosaicBackend.configs` stays the same."""
    rng = np.random.default_rng([seed, 2026])
    precision: Precision = "highest" if rng.random() < 0.4 else "default"
    kinds: tuple[Operands, ...] = ("exact", "random", "exact", "special")
    for attempt in range(1000):
        call = _random_call(rng, seed + 1000 * attempt)
        if call is None:
            continue
        configs = MosaicBackend(precision).configs(call, H200)
        if configs:
            config = configs[int(rng.integers(len(configs)))]
            return MosaicCase(f"random-{seed}", call, precision, config, kinds[seed % len(kinds)], seed)
    raise AssertionError(f"no convolution for seed {seed}")


def _random_call(rng: np.random.Generator, seed: int) -> GraphCall | None:
    """A random call with the graph and types of `random_call(seed)`; None where it is empty, or too large to check."""
    like = random_call(seed, groups=(1,), largest=4)
    labels = LABELS if rng.random() < 0.8 else OTHER_LABELS
    rank = int(rng.choice([1, 2, 2, 2, 2, 2, 3]))
    image = [int(n) for n in rng.integers(1, 41, rank)]
    filter = [int(n) for n in rng.choice([1, 1, 2, 3, 3, 3, 4, 5, 7], rank)]
    stride = [int(n) for n in rng.choice([1, 1, 1, 2, 2, 3, 4], rank)]
    dilation = [int(n) for n in rng.choice([1, 1, 1, 1, 2, 3], rank)]
    zeros = [1] * rank
    if rng.random() < 0.25:  # an input gradient: of a stride, seldom with a stride of its own
        zeros = [int(n) for n in rng.choice([1, 2, 2, 3, 4], rank)]
        stride = stride if rng.random() < 0.1 else [1] * rank
        image = [max(1, n // z) for n, z in zip(image, zeros, strict=True)]
    reach = [(size - 1) * apart for size, apart in zip(filter, dilation, strict=True)]
    low = [int(rng.choice([0, r // 2, r // 2, r, -1, int(rng.integers(r + 1))])) for r in reach]
    high = [int(rng.choice([0, r - r // 2, r - r // 2, r, r + 1, -1])) for r in reach]
    reversal = [int(rng.random() < 0.1)] * rank
    if rank == 3:  # the kernel takes the first dimension for more images
        for values, value in ((filter, 1), (stride, 1), (dilation, 1), (zeros, 1), (low, 0), (high, 0)):
            values[0] = value
        image[0] = min(image[0], 4)
    ones = "x".join
    window = (
        f"{{size={ones(map(str, filter))} stride={ones(map(str, stride))} "
        f"pad={ones(f'{a}_{b}' for a, b in zip(low, high, strict=True))} "
        f"lhs_dilate={ones(map(str, zeros))} rhs_dilate={ones(map(str, dilation))} "
        f"rhs_reversal={ones(map(str, reversal))}}}"
    )
    output = [d.output_size(n) for d, n in zip(Window.parse(window), image, strict=True)]
    channels, features = (16 * int(rng.choice([1, 2, 3, 4, 5, 6, 8, 10, 13, 16, 20, 24, 40])) for _ in range(2))
    batch = int(rng.choice([1, 2, 3, 5, 8, 16, 33]))
    pixels = batch * int(np.prod(output)) if min(output) > 0 else 0
    flops = 2 * pixels * features * channels * int(np.prod(filter))
    size = 4 if rng.random() < 0.1 else 1
    if not 0 < flops <= size * LARGEST_FLOPS or pixels * features > size * LARGEST_OUTPUT:
        return None
    return graph_call(
        str(like.graph),
        batch=batch,
        image=tuple(image),
        channels=channels,
        features=features,
        filter=tuple(filter),
        window=window,
        types=(like.operand_shapes[0].element_type, like.operand_shapes[1].element_type),
        side=str(rng.choice(TYPES)),
        residual=str(rng.choice(FP8_TYPES)),
        labels=str(rng.choice(labels[rank])),
    )
