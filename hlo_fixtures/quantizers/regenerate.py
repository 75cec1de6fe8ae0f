"""Writes the dumps beside this file: models that qwix and flax.linen.fp8_ops quantized, and that xla_fp8 never saw.

    pip install qwix flax
    python hlo_fixtures/quantizers/regenerate.py
    xla-fp8 update-checks hlo_fixtures/quantizers/*.hlo

The files in the repository come from qwix 0.1.8, flax 0.12.8 and jax 0.10.2. The gradients of qwix's convolutions are
e4m3, because jax.lax.conv_general_dilated takes no operands of two types.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import qwix
from flax.linen import fp8_ops

from xla_fp8 import _jax_compat

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
IMAGES, VECTORS = jnp.zeros((2, 8, 8, 16)), jnp.zeros((16, 32))
CONV = "--dialect=extended"
DOT = "--passes=call-inliner,simplify,gemm-rewriter,dce"


class ConvNet(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Conv(16, (3, 3))(nn.relu(nn.Conv(32, (3, 3))(x)))


class Mlp(nn.Module):
    dot_general_cls: Any = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        def dense(features: int) -> nn.Dense:
            return nn.Dense(features, dot_general_cls=self.dot_general_cls)

        return dense(32)(nn.relu(dense(64)(x)))


def dumps() -> Iterator[tuple[str, str, str, Callable[..., Any], Any, jax.Array]]:
    """Name, what it is, options, and function, variables and input of each dump."""
    for kind, model, x, options in (("conv", ConvNet(), IMAGES, CONV), ("dot", Mlp(), VECTORS, DOT)):
        gradient = E4M3 if kind == "conv" else E5M2
        for name, scales, arguments in (
            ("channel", "a scale for each image or row, and for each output channel (its default)", {}),
            ("tensor", "one scale for each tensor (disable_channelwise_axes)", {"disable_channelwise_axes": True}),
        ):
            rule = qwix.QtRule(weight_qtype=E4M3, act_qtype=E4M3, bwd_qtype=gradient, **arguments)
            trained = qwix.quantize_model(model, qwix.QtProvider([rule]))
            what = f"qwix, quantized training: {scales}"
            variables = trained.init(jax.random.key(0), x)
            yield f"qwix_qt_{name}_{kind}", what, options, trained.apply, variables, x
            if name == "tensor":
                backward = jax.grad(lambda v, x, f=trained: jnp.sum(f.apply(v, x) ** 2))
                yield f"qwix_qt_{name}_{kind}_gradient", f"{what}; its gradient", options, backward, variables, x
        rule = qwix.QuantizationRule(weight_qtype=E4M3, act_qtype=E4M3, act_static_scale=True)
        served = qwix.quantize_model(model, qwix.PtqProvider([rule]))
        variables = jax.eval_shape(served.init, jax.random.key(0), x)
        what = "qwix, after training: weights by channel, activations with a fixed scale"
        yield f"qwix_ptq_static_{kind}", what, options, served.apply, variables, x
    for name, operator in (("direct", fp8_ops.Fp8DirectDotGeneralOp), ("qdq", fp8_ops.Fp8DotGeneralOp)):
        model = Mlp(operator)
        variables = model.init(jax.random.key(0), VECTORS)
        what = f"flax.linen.fp8_ops.{operator.__name__}, delayed scaling"
        yield f"flax_{name}_dot", what, DOT, model.apply, variables, VECTORS
        backward = jax.grad(lambda v, x, model=model: jnp.sum(model.apply(v, x) ** 2))
        yield f"flax_{name}_dot_gradient", f"{what}; its gradient", DOT, backward, variables, VECTORS


def main() -> None:
    for name, what, options, function, variables, x in dumps():
        text = _jax_compat.lowered_short_text(jax.jit(function).lower(variables, x))
        run = f"// RUN: xla-fp8 explain %s --target=h200 {options} | filecheck %s"
        path = Path(__file__).with_name(f"{name}.hlo")
        path.write_text(f"// {what}.\n// Written by regenerate.py.\n{run}\n\n{text.strip()}\n")
        print(path.name)


if __name__ == "__main__":
    main()
