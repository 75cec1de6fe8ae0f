"""What is handed over in the wrong place is told so at once, whatever the framework."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import xla_fp8

EVERY = xla_fp8.Recipe("delayed", min_flops=0, keep_first=0, keep_last=0)


def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


@pytest.mark.parametrize(("recipe", "what"), [(jnp.ones(4), "ArrayImpl"), (xla_fp8.Recipe, "class Recipe"), (None, "")])
def test_what_is_no_recipe(recipe: Any, what: str) -> None:
    with pytest.raises(xla_fp8.ModelError, match=f"recipe is .*{what}.*example="):
        xla_fp8.convert(matmul, recipe)


@pytest.mark.parametrize("filter", [3, re.compile("a"), [lambda layer: True]])
def test_what_is_no_filter(filter: Any) -> None:
    with pytest.raises(xla_fp8.ModelError, match="expected a function of a Layer, or patterns"):
        xla_fp8.convert(matmul, filter=filter)


def test_a_class_is_no_model() -> None:
    class Model:
        def __call__(self, x: jax.Array) -> jax.Array:
            return x @ x

    with pytest.raises(xla_fp8.ModelError, match="Model is a class"):
        xla_fp8.convert(Model)


def test_a_function_that_is_called_without_its_state() -> None:
    x = jnp.ones((16, 16))
    fp8 = xla_fp8.convert(matmul, EVERY)
    for first in (x, {"w": x}):
        with pytest.raises(xla_fp8.ModelError, match="takes its state first"):
            fp8(first, x)


def test_a_state_that_was_made_for_other_sizes() -> None:
    small, large = jnp.ones((16, 16)), jnp.ones((32, 32))
    fp8 = xla_fp8.convert(matmul, xla_fp8.Recipe("delayed", min_flops=2 * 32**3, keep_first=0, keep_last=0))
    with pytest.raises(xla_fp8.ModelError, match="init made for arguments of these sizes"):
        fp8(fp8.init(small, small), large, large)
