"""How activations look in HLO: as jax.nn writes them, as XLA's own matcher expects them, as people write them by hand.

Each pattern captures the activation's input as "x"; `find_activation` tries those that end in an instruction's opcode.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType

from xla_fp8 import match as m
from xla_fp8.hlo import HloInstruction, literal
from xla_fp8.passes.values import constant_of

x = m.any().capture("x")


def number(value: float) -> m.Pattern:
    """A tensor whose every element is `value`, as nearly as its element type can say it."""

    def is_number(instruction: HloInstruction) -> bool:
        found = constant_of(instruction)
        if found is None:
            return False
        rounded = float(literal.numpy_dtype(instruction.shape.element_type).type(value))
        # Dumps print bf16 constants with four digits; reading them back can be off by the last one.
        return found in (rounded, value) or math.isclose(found, rounded, rel_tol=_TOLERANCE[_width(instruction)])

    return m.any().where(is_number, f"the number {value:g}")


_TOLERANCE = {"f32": 1e-6, "f16": 1e-3, "bf16": 1e-2}


def _width(instruction: HloInstruction) -> str:
    element_type = instruction.shape.element_type
    return element_type if element_type in _TOLERANCE else "f32"


def positive(value: m.Pattern) -> m.Pattern:
    """`value > 0`, or `>= 0`: at 0 both branches of what follows agree."""
    zero = number(0)
    return m.any_of(
        m.compare(value, zero).with_comparison_direction("GT"),
        m.compare(value, zero).with_comparison_direction("GE"),
    )


def sigmoid(value: m.Pattern) -> m.Pattern:
    """`logistic(x)`, or `1 / (1 + exp(-x))` as JAX lowers it."""
    spelled = m.divide(number(1), m.add_any_order(m.exponential(m.negate(value)), number(1)))
    return m.any_of(m.logistic(value), spelled)


ELU = m.any_of(
    # Where XLA's own matcher looks.
    m.select(positive(x), x, m.exponential_minus_one(x)),
    # jax.nn.elu: the untaken branch is kept finite by a select of its own; alpha is 1.
    m.select(positive(x), x, m.exponential_minus_one(m.select(positive(x), number(0), x))),
    m.select(
        positive(x), x, m.multiply_any_order(m.exponential_minus_one(m.select(positive(x), number(0), x)), number(1))
    ),
)
LEAKY_RELU = m.select(positive(x), x, m.multiply_any_order(x, m.any().capture("slope")))
SILU = m.multiply_any_order(x, sigmoid(x))
SIGMOID = m.divide(number(1), m.add_any_order(m.exponential(m.negate(x)), number(1)))

_CUBE = m.any_of(m.multiply_any_order(m.multiply(x, x), x), m.power(x, number(3)))
_TANH = m.tanh(
    m.multiply_any_order(
        m.add_any_order(x, m.multiply_any_order(_CUBE, number(0.044715))), number(math.sqrt(2 / math.pi))
    )
)
_ONE_PLUS_TANH = m.add_any_order(_TANH, number(1))
GELU_TANH = m.any_of(
    m.multiply_any_order(x, m.multiply_any_order(_ONE_PLUS_TANH, number(0.5))),
    m.multiply_any_order(m.multiply_any_order(x, number(0.5)), _ONE_PLUS_TANH),
    m.multiply_any_order(m.multiply_any_order(x, _ONE_PLUS_TANH), number(0.5)),
)


def _polynomial(variable: m.Pattern, coefficients: tuple[float, ...]) -> m.Pattern:
    """Horner's scheme, highest power first."""
    value = m.multiply_any_order(variable, number(coefficients[0]))
    for coefficient in coefficients[1:-1]:
        value = m.multiply_any_order(m.add_any_order(value, number(coefficient)), variable)
    return m.add_any_order(value, number(coefficients[-1]))


# The coefficients of MathUtil's erfc as StableHLO's chlo.erfc expands it (f32).
_ERFC_SMALL = (7.85386146e-05, -0.000801019371, 0.00518832775, -0.0268538129, 0.112835854, -0.37612626, 1.12837911)
_ERFC_MIDDLE = (
    *(0.0232682, -0.138703942, 0.368742466, -0.582473278, 0.621000469, -0.494451523, 0.340488),
    *(-0.274112701, 0.563825965),
)
_ERFC_LARGE = (-10.477664, 12.9772, -7.49551868, 2.92101908, -1.01526523, 0.42184633, -0.282076746, 0.564189494)


def _erfc_expanded() -> m.Pattern:
    """erfc(z) as JAX writes it out in HLO, "z" captured: a polynomial near 0, exp(-z^2)/|z| times another elsewhere."""
    z = m.any().capture("z")
    square = m.multiply(z, z)
    minus_square = m.negate(square)
    less = "LT"
    near = m.subtract(number(1), m.multiply_any_order(z, _polynomial(square, _ERFC_SMALL)))
    reciprocal = m.divide(number(1), square)
    far_polynomial = m.select(
        m.compare(m.abs_(z), number(2)).with_comparison_direction(less),
        _polynomial(reciprocal, _ERFC_MIDDLE),
        _polynomial(reciprocal, _ERFC_LARGE),
    )
    tail = m.multiply_any_order(
        m.multiply_any_order(m.exponential(minus_square), m.divide(number(1), m.abs_(z))), far_polynomial
    )
    guarded = m.select(
        m.compare(minus_square, number(-88.7228394)).with_comparison_direction(less), number(0), tail
    ).capture("far")
    far = m.select(m.compare(z, number(0)).with_comparison_direction(less), m.subtract(number(2), guarded), guarded)
    return m.select(m.compare(m.abs_(z), number(1)).with_comparison_direction(less), near, far)


_SQRT_HALF = math.sqrt(0.5)
# z = -x * sqrt(1/2), in f32 even where x is bf16.
_MINUS_X_SQRT_HALF = m.any_of(
    m.multiply_any_order(m.negate(x), number(_SQRT_HALF)),
    m.negate(m.multiply_any_order(x, number(_SQRT_HALF))),
    m.multiply_any_order(x, number(-_SQRT_HALF)),
)
_ERFC_ARGUMENT = m.any_of(_MINUS_X_SQRT_HALF, m.convert(_MINUS_X_SQRT_HALF))
_ERFC = _erfc_expanded()
_ERF_ARGUMENT = m.any_of(m.multiply_any_order(x, number(_SQRT_HALF)), m.divide(x, number(math.sqrt(2))))
_ONE_PLUS_ERF = m.add_any_order(m.erf(_ERF_ARGUMENT), number(1))
GELU_ERF = m.any_of(
    m.multiply_any_order(m.multiply_any_order(x, number(0.5)), _ONE_PLUS_ERF),
    m.multiply_any_order(x, m.multiply_any_order(_ONE_PLUS_ERF, number(0.5))),
    m.multiply_any_order(m.multiply_any_order(x, _ONE_PLUS_ERF), number(0.5)),
)
_GELU_ERFC = m.multiply_any_order(
    m.multiply_any_order(x, number(0.5)),
    m.any_of(
        m.select(m.any(), m.any(), m.any()).capture("erfc"),
        m.convert(m.select(m.any(), m.any(), m.any()).capture("erfc")),
    ),
)


@dataclasses.dataclass(frozen=True)
class Activation:
    """An activation found at `instruction`, applied to `input`."""

    op: str
    input: HloInstruction
    slope: float | None = None


_SIMPLE: Mapping[str, tuple[tuple[str, m.Pattern], ...]] = MappingProxyType(
    {
        "select": (("elu", ELU),),
        "multiply": (("silu", SILU), ("gelu_tanh", GELU_TANH), ("gelu_erf", GELU_ERF)),
        "divide": (("sigmoid", SIGMOID),),
        "logistic": (("sigmoid", m.logistic(x)),),
        "tanh": (("tanh", m.tanh(x)),),
    }
)


def find_activation(instruction: HloInstruction) -> Activation | None:
    """The activation whose last instruction this is."""
    for op, pattern in _SIMPLE.get(instruction.opcode, ()):
        if found := m.match(instruction, pattern):
            return Activation(op, found["x"])
    if instruction.opcode == "select" and (found := m.match(instruction, LEAKY_RELU)):
        slope = constant_of(found["slope"])
        # max(x, slope * min(x, 0)) is the select only for slopes up to 1.
        if slope is not None and slope <= 1:
            return Activation("leaky_relu", found["x"], slope)
    if instruction.opcode == "multiply":
        return _find_gelu_erfc(instruction)
    return None


def _find_gelu_erfc(instruction: HloInstruction) -> Activation | None:
    """jax.nn.gelu(approximate=False): 0.5 * x * erfc(-x * sqrt(1/2)), erfc written out in some 60 instructions."""
    outer = m.match(instruction, _GELU_ERFC)
    if not outer:
        return None
    erfc = m.match(outer["erfc"], _ERFC)
    if not erfc:
        return None
    argument = m.match(erfc["z"], _ERFC_ARGUMENT)
    return Activation("gelu_erf", outer["x"]) if argument and argument["x"] is outer["x"] else None
