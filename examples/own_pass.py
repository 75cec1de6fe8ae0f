"""A pass of your own, on a real program: a relu that keeps a convolution from being FP8 moves to where it does no harm.

    python examples/own_pass.py

The default pipeline refuses a convolution with a relu between its FP8 input and itself. Where the scale is a positive
constant, relu(x * scale) is relu(x) * scale, to the last bit: so the relu can be applied to the FP8 numbers. The pass
below does that, the pipeline then takes the convolution, and both programs are run on the same inputs and compared.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax

from xla_fp8 import hlo, passes
from xla_fp8 import match as m
from xla_fp8.cli.main import main as xla_fp8
from xla_fp8.hlo import HloModule, Shape
from xla_fp8.passes import Context, Pass
from xla_fp8.report import Report
from xla_fp8.target import Target

E4M3 = jnp.float8_e4m3fn


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    wide = jax.nn.relu(x.astype(jnp.float32) * 0.0625), w.astype(jnp.float32) * 0.5
    return lax.conv_general_dilated(*wide, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


SCALE = m.constant_effective_scalar().capture("scale")
DEQUANTIZED = m.multiply_any_order(m.convert(m.any().capture("x")).capture("wide"), SCALE)
RELU = m.maximum_any_order(DEQUANTIZED.capture("scaled"), m.constant_effective_scalar().capture("zero"))


class ReluBeforeDequantization(Pass):
    """Applies a relu to FP8 numbers and no longer to what they stand for, where their scale is a positive constant.

    Before::

        %scaled = f32[8] multiply(f32[8] convert(f8e4m3fn[8] %x), %scales)
        %y = f32[8] maximum(%scaled, %zeros)

    After::

        %positive = f8e4m3fn[8] maximum(%x, %zeros.1)
        %y = f32[8] multiply(f32[8] convert(%positive), %scales)
    """

    name = "relu-before-dequantization"

    def run(self, module: HloModule, target: Target) -> bool:
        changed = False
        for found in m.find_all(module, RELU):
            relu, x = found.instruction, found["x"]
            scale, zero = m.uniform_value(found["scale"]), m.uniform_value(found["zero"])
            if not x.shape.is_fp8 or zero != 0 or scale is None or not scale > 0 or relu.has_control_dependencies:
                continue
            if not self.context.consume_fuel():
                return changed
            computation, new = relu.parent, {"before": relu, "metadata_from": relu}
            scalar = computation.create("constant", Shape(x.shape.element_type), payload="0", before=relu)
            zeros = computation.create("broadcast", x.shape, [scalar], attributes={"dimensions": "{}"}, **new)
            positive = computation.create("maximum", x.shape, [x, zeros], **new)
            wide = computation.create("convert", found["wide"].shape, [positive], **new)
            factor = next(o for o in found["scaled"].operands if o is not found["wide"])
            scaled = computation.create("multiply", relu.shape, [wide, factor], **new)
            name = relu.name
            computation.replace(relu, scaled)
            computation.rename(scaled, name)
            changed = True
        for computation in module.computations:
            computation.remove_dead()
        return changed


def rewritten(text: str, *, with_own_pass: bool) -> tuple[HloModule, Report]:
    """The module that the default pipeline makes of HLO text, and its report."""
    module = hlo.parse(text)
    if with_own_pass:
        passes.run(module, ["call-inliner", "simplify"])  # jax.nn.relu is a call; now it is a maximum
        ReluBeforeDequantization(Context()).run(module, Target.parse("h200"))
        hlo.verify(module)
    return module, passes.run(module, target="h200")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("build/own_pass"), help="folder for the HLO")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)

    x, w = jax.ShapeDtypeStruct((2, 14, 14, 32), E4M3), jax.ShapeDtypeStruct((3, 3, 32, 64), E4M3)
    text = jax.jit(layer).lower(x, w).as_text("hlo", debug_info=True)
    for with_own_pass in (False, True):
        module, report = rewritten(text, with_own_pass=with_own_pass)
        print(f"== the default pipeline{', behind the pass of this file' if with_own_pass else ''}\n\n{report}")
    before, after = arguments.out / "before.hlo", arguments.out / "after.hlo"
    before.write_text(text)
    after.write_text(hlo.to_text(module))
    print("== both on the same inputs\n")
    return xla_fp8(["run", str(before), str(after)])


if __name__ == "__main__":
    raise SystemExit(main())
