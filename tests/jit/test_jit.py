"""xla_fp8.jit and rewrite on straight-line functions: numbers, arguments of every kind, decorators."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import xla_fp8
from tests.jit.programs import assert_close, inputs, layer, tensors, wide_layer


def test_rewritten_function_computes_what_the_original_does() -> None:
    args = inputs()
    fast = xla_fp8.jit(layer)
    assert len(fast.report(*args).rewritten) == 1
    assert_close(fast(*args), jax.jit(layer)(*args))
    assert "xla_fp8_region" in fast.lower(*args).as_text()
