"""Sums over the rows of images and the columns of groups, for what is no fused cast."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.backends.fused_cast.programs import BF16, tensor
from tests.backends.quantize.test_lowering import lowered
from xla_fp8.backends.fused_cast import statistics
from xla_fp8.backends.fused_cast.problem import Node, Statistics


def sums(images: int, period: int, columns: int, width: int) -> Statistics:
    """Of a tensor and its squares."""
    return Statistics(images * period, columns, period, width, (tensor(columns),), (Node("mul", (0, 0)),), (0, 1))


@pytest.mark.parametrize(
    ("images", "period", "columns", "width"),
    [(2, 256, 320, 10), (1, 1024, 96, 3), (3, 64, 640, 20), (2, 64, 1280, 40), (2, 64, 128, 1), (2, 64, 320, 320)],
)
def test_totals(images: int, period: int, columns: int, width: int) -> None:
    """Of groups within the columns of a program, across two or more of them, and of all columns."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(images * period, columns)) + 1, BF16)
    total, of_squares = statistics.totals(sums(images, period, columns, width), [x], interpret=True)
    grouped = np.asarray(x, np.float64).reshape(images, period, columns // width, width)
    np.testing.assert_allclose(total, grouped.sum((1, 3)), rtol=1e-5)
    np.testing.assert_allclose(of_squares, (grouped**2).sum((1, 3)), rtol=1e-5)


def test_they_lower_for_a_gpu() -> None:
    problem = sums(16, 4096, 320, 10)
    text = lowered(lambda x: statistics.totals(problem, [x]), jax.ShapeDtypeStruct((16 * 4096, 320), BF16))
    assert text.count(f'name = "{statistics.NAME}"') == 1


def test_images_that_are_no_tiles() -> None:
    with pytest.raises(ValueError, match="49 rows"):
        statistics.totals(sums(2, 49, 320, 10), [jnp.zeros((98, 320), BF16)], interpret=True)
