"""Whole networks in FP8: which convolutions and dots of a model, how each is computed, and where its state lives.

    model → layers (names, sizes) → plan (FP8 or wide, and why) → operator per layer → the framework's own model

    recipe.py        Recipe: how FP8 tensors are scaled, and which layers stay wide
    contraction.py   a convolution or a dot, as a layer calls it
    operators.py     how a contraction is computed: wide, FP8 for training, FP8 with fixed scales, watched
    plan.py          layers + recipe + filter → an operator for each
    injection.py     Fp8Conv, Fp8Dot: the same as functions to hand to a layer
    framework.py     what convert asks of a framework; nnx.py, linen.py, equinox.py, functions.py answer it
    convert.py, calibrate.py, scaling.py, report.py   what users call

flax and equinox are imported by the module of that name alone. The public names are those of `xla_fp8`, the
injection objects, and `Layer`, which filters are asked with.
"""

from __future__ import annotations

from xla_fp8.models.injection import Fp8Conv, Fp8Dot
from xla_fp8.models.plan import Layer

__all__ = ["Fp8Conv", "Fp8Dot", "Layer"]
