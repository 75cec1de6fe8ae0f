"""Which convolutions are measured: those of networks, each once, the most telling first."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator


@dataclasses.dataclass(frozen=True)
class Shape:
    """Input [n, h, w, c], filter [k, r, r, c], one stride.

    The padding is the same on both sides, as in the networks' own papers. JAX's SAME is not where the stride is 2: XLA
    then pads in a kernel of its own, which is not what is compared here.
    """

    n: int
    h: int
    w: int
    c: int
    r: int
    k: int
    stride: int = 1

    def __str__(self) -> str:
        stride = f"/{self.stride}" if self.stride != 1 else ""
        return f"{self.n},{self.h},{self.w},{self.c},{self.r}x{self.r},{self.k}{stride}"

    @property
    def out(self) -> tuple[int, int]:
        """Height and width of the output."""
        return -(-self.h // self.stride), -(-self.w // self.stride)

    @property
    def padding(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Low and high, of height and width."""
        return (self.r // 2, self.r // 2), (self.r // 2, self.r // 2)

    @property
    def product(self) -> tuple[int, int, int]:
        """M, N and K of the matrix product that is this convolution."""
        return self.n * math.prod(self.out), self.k, self.c * self.r * self.r

    @property
    def flops(self) -> int:
        return 2 * math.prod(self.product)

    @property
    def elements(self) -> tuple[int, int, int]:
        """Of input, filter and output."""
        return self.n * self.h * self.w * self.c, self.k * self.r * self.r * self.c, math.prod(self.product[:2])


def _square(batch: int, size: int, c: int, k: int, r: int = 3, stride: int = 1) -> Shape:
    return Shape(batch, size, size, c, r, k, stride)


def resnet50(batch: int) -> Iterator[Shape]:
    """Every 3x3 and 1x1 convolution."""
    for width, size in ((64, 56), (128, 28), (256, 14), (512, 7)):
        yield _square(batch, size, width, width)
        yield _square(batch, size, width, 4 * width, 1)
        yield _square(batch, size, 4 * width, width, 1)
        if width > 64:  # the first block of a stage, on the larger image of the stage before
            yield _square(batch, 2 * size, width, width, 3, 2)
            yield _square(batch, 2 * size, 2 * width, width, 1)
            yield _square(batch, 2 * size, 2 * width, 4 * width, 1, 2)
    yield _square(batch, 56, 64, 64, 1)


def vgg16(batch: int) -> Iterator[Shape]:
    """All but the first, which has 3 channels."""
    sizes = ((224, 64, 64), (112, 64, 128), (112, 128, 128), (56, 128, 256), (56, 256, 256), (28, 256, 512))
    for size, c, k in (*sizes, (28, 512, 512), (14, 512, 512)):
        yield _square(batch, size, c, k)


def diffusion(batch: int) -> Iterator[Shape]:
    """The UNets of Stable Diffusion 1.5 (64x64 latents) and SDXL (128x128): blocks, ways down, projections."""
    for size, width in ((64, 320), (32, 640), (16, 1280), (8, 1280)):
        yield _square(batch, size, width, width)
    for size, width in ((128, 320), (64, 640), (32, 1280)):
        yield _square(batch, size, width, width)
    for size, width in ((64, 320), (32, 640), (16, 1280)):
        yield _square(batch, size, width, width, 3, 2)
        yield _square(batch, size, width, width, 1)
    yield _square(batch, 32, 320, 640)
    yield _square(batch, 16, 640, 1280)


def diffusion_up(batch: int) -> Iterator[Shape]:
    """The same on the way up, where the channels of the way down are joined to those of below."""
    for size, c, k in ((64, 640, 320), (64, 960, 320), (32, 960, 640), (32, 1280, 640), (32, 1920, 640)):
        yield _square(batch, size, c, k)
    for size, c, k in ((16, 1920, 1280), (16, 2560, 1280), (8, 2560, 1280)):
        yield _square(batch, size, c, k)


def convnext(batch: int) -> Iterator[Shape]:
    """The pointwise convolutions of ConvNeXt-B."""
    for width, size in ((128, 56), (256, 28), (512, 14), (1024, 7)):
        yield _square(batch, size, width, 4 * width, 1)
        yield _square(batch, size, 4 * width, width, 1)


COMMON = (
    Shape(32, 64, 64, 256, 3, 256),
    Shape(64, 56, 56, 128, 3, 128),
    Shape(64, 28, 28, 512, 3, 512),
    Shape(64, 14, 14, 512, 3, 512),
    Shape(64, 7, 7, 512, 3, 512),
    Shape(16, 32, 32, 1024, 3, 1024),
    Shape(8, 128, 128, 128, 3, 128),
    Shape(1, 64, 64, 1280, 3, 1280),
    Shape(32, 64, 64, 256, 1, 256),
    Shape(64, 56, 56, 256, 1, 256),
    Shape(2, 64, 64, 320, 3, 320),
    Shape(16, 64, 64, 320, 3, 320),
    Shape(64, 56, 56, 128, 3, 128, 2),
)
"""One or two of every kind: these are measured with more epilogues and more contestants than the others."""

TIERS: tuple[dict[str, tuple[Shape, ...]], ...] = (
    {"common": COMMON},
    {
        "resnet50/64": tuple(resnet50(64)),
        "sd/2": tuple(diffusion(2)),
        "vgg16/64": tuple(vgg16(64)),
        "convnext/64": tuple(convnext(64)),
    },
    {"sd/1": tuple(diffusion(1)), "sd/16": tuple(diffusion(16))},
    {"resnet50/256": tuple(resnet50(256))},
    {"sd-up/2": tuple(diffusion_up(2)), "sd-up/16": tuple(diffusion_up(16)), "sd-up/1": tuple(diffusion_up(1))},
)
"""Networks by name and batch; a tier is measured before the next, its networks in turn."""

TINY: tuple[dict[str, tuple[Shape, ...]], ...] = (
    {"common": (Shape(1, 8, 8, 16, 3, 16), Shape(1, 8, 8, 16, 3, 16, 2))},
    {"tiny": (Shape(2, 8, 8, 16, 1, 32),)},
)


def in_order(tiers: tuple[dict[str, tuple[Shape, ...]], ...]) -> dict[Shape, tuple[str, ...]]:
    """Every shape once, in the order of measuring, with the networks that have it."""
    found: dict[Shape, list[str]] = {}
    for tier in tiers:
        named = [[(shape, name) for shape in shapes] for name, shapes in tier.items()]
        for pair in itertools.chain.from_iterable(itertools.zip_longest(*named)):
            if pair is not None:
                found.setdefault(pair[0], []).append(pair[1])
    return {shape: tuple(dict.fromkeys(names)) for shape, names in found.items()}
