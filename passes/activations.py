"""How activations look in HLO: as jax.nn writes them, as XLA's own matcher expects them, as people write them by hand.

A spelling is taken only where it is the same function for every input, NaN and infinities included; rounding errors and
the sign of a zero may differ (docs/numbers.md).

Each pattern captures the activation's input as "x"; `find_activation` tries those that end in an instruction's opcode.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType

from xla_fp8 import match as m
from xla_fp8.hlo import HloInstruction, literal
from xla_fp8.passes.values import Scalar, bounded, constant_of, scalar_of

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


def _compared(value: m.Pattern, direction: str, mirrored: str) -> m.Pattern:
    """A comparison of `value` with 0, either way round."""
    zero = number(0)
    return m.any_of(
        m.compare(value, zero).with_comparison_direction(direction),
        m.compare(zero, value).with_comparison_direction(mirrored),
    )


def positive(value: m.Pattern) -> m.Pattern:
    """`value > 0`, or `>= 0`: at 0 both branches of what follows agree. False for NaN."""
    return m.any_of(_compared(value, "GT", "LT"), _compared(value, "GE", "LE"))


def negative(value: m.Pattern) -> m.Pattern:
    """`value < 0`, or `<= 0`. False for NaN."""
    return m.any_of(_compared(value, "LT", "GT"), _compared(value, "LE", "GE"))


def piecewise(above: m.Pattern, below: m.Pattern) -> m.Pattern:
    """jnp.where(x > 0, above, below), or the other way round. Both must be NaN for a NaN: it takes the other branch."""
    return m.any_of(m.select(positive(x), above, below), m.select(negative(x), below, above))


def product(a: m.Pattern, b: m.Pattern, c: m.Pattern) -> m.Pattern:
    """Three factors in any order, whichever two are multiplied first."""
    return m.any_of(
        m.multiply_any_order(m.multiply_any_order(a, b), c),
        m.multiply_any_order(m.multiply_any_order(a, c), b),
        m.multiply_any_order(a, m.multiply_any_order(b, c)),
    )


def sigmoid(value: m.Pattern) -> m.Pattern:
    """`logistic(x)`, or `1 / (1 + exp(-x))` as JAX lowers it."""
    return m.any_of(m.logistic(value), m.divide(number(1), _one_plus_exp_of_minus(value)))


def _one_plus_exp_of_minus(value: m.Pattern) -> m.Pattern:
    return m.add_any_order(m.exponential(m.negate(value)), number(1))


def _exp_minus_one(value: m.Pattern) -> m.Pattern:
    return m.any_of(
        m.exponential_minus_one(value),
        m.subtract(m.exponential(value), number(1)),
        m.add_any_order(m.exponential(value), number(-1)),
    )


_AT_MOST_ZERO = m.minimum_any_order(x, number(0))
_ELU_BELOW = m.any_of(
    _exp_minus_one(x),  # where XLA's own matcher looks
    # jax.nn.elu: the untaken branch is kept finite by a select of its own; alpha is 1.
    _exp_minus_one(m.any_of(m.select(positive(x), number(0), x), _AT_MOST_ZERO)),
)
ELU = piecewise(x, m.any_of(_ELU_BELOW, m.multiply_any_order(_ELU_BELOW, number(1))))
_CELU_BELOW = _exp_minus_one(m.any_of(_AT_MOST_ZERO, m.divide(_AT_MOST_ZERO, number(1))))  # jax.nn.celu, alpha 1
_ELU_SUM = m.add_any_order(
    m.maximum_any_order(x, number(0)), m.any_of(_CELU_BELOW, m.multiply_any_order(_CELU_BELOW, number(1)))
)
LEAKY_RELU = piecewise(x, m.multiply_any_order(x, m.any().capture("slope")))
SILU = m.multiply_any_order(x, sigmoid(x))
_SILU_QUOTIENT = m.divide(x, _one_plus_exp_of_minus(x))
SIGMOID = m.divide(number(1), _one_plus_exp_of_minus(x))

_C = 0.044715
_SQUARE = m.any_of(m.multiply(x, x), m.power(x, number(2)))
_CUBE = m.any_of(m.multiply_any_order(_SQUARE, x), m.power(x, number(3)))
_SCALED_X = m.multiply_any_order(x, number(_C))
_SCALED_SQUARE = m.any_of(m.multiply_any_order(_SQUARE, number(_C)), m.multiply_any_order(_SCALED_X, x))
_SCALED_CUBE = m.any_of(
    m.multiply_any_order(_CUBE, number(_C)),
    m.multiply_any_order(_SCALED_SQUARE, x),
    m.multiply_any_order(_SCALED_X, _SQUARE),
)
_SQRT_2_PI = math.sqrt(2 / math.pi)
_TANH = m.tanh(
    m.any_of(
        m.multiply_any_order(m.add_any_order(x, _SCALED_CUBE), number(_SQRT_2_PI)),
        product(x, number(_SQRT_2_PI), m.add_any_order(_SCALED_SQUARE, number(1))),
        m.add_any_order(
            m.multiply_any_order(x, number(_SQRT_2_PI)), m.multiply_any_order(_CUBE, number(_SQRT_2_PI * _C))
        ),
    )
)


def _gelu(value: m.Pattern) -> m.Pattern:
    """x * (1 + value) / 2, with the half in any of its places."""
    halved = m.add_any_order(m.multiply_any_order(value, number(0.5)), number(0.5))
    return m.any_of(product(x, number(0.5), m.add_any_order(value, number(1))), m.multiply_any_order(x, halved))


GELU_TANH = _gelu(_TANH)


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


_SQRT_HALF, _SQRT_TWO = math.sqrt(0.5), math.sqrt(2)
_X_SQRT_HALF = m.any_of(m.multiply_any_order(x, number(_SQRT_HALF)), m.divide(x, number(_SQRT_TWO)))
# z = -x * sqrt(1/2), in f32 even where x is bf16.
_MINUS_X_SQRT_HALF = m.any_of(
    m.negate(_X_SQRT_HALF),
    m.multiply_any_order(m.negate(x), number(_SQRT_HALF)),
    m.divide(m.negate(x), number(_SQRT_TWO)),
    m.multiply_any_order(x, number(-_SQRT_HALF)),
    m.divide(x, number(-_SQRT_TWO)),
)
_ERFC_ARGUMENT = m.any_of(_MINUS_X_SQRT_HALF, m.convert(_MINUS_X_SQRT_HALF))
_ERFC = _erfc_expanded()
GELU_ERF = _gelu(m.erf(_X_SQRT_HALF))
_SOME_SELECT = m.select(m.any(), m.any(), m.any()).capture("erfc")
_GELU_ERFC = product(x, number(0.5), m.any_of(_SOME_SELECT, m.convert(_SOME_SELECT)))


@dataclasses.dataclass(frozen=True)
class Activation:
    """An activation, applied to `input`: a graph op, or "leaky_relu" with its slope, a constant of at most 1."""

    op: str
    input: HloInstruction
    slope: Scalar | None = None


_SIMPLE: Mapping[str, tuple[tuple[str, m.Pattern, frozenset[str]], ...]] = MappingProxyType(
    {
        "select": (("elu", ELU, frozenset({"exponential-minus-one", "subtract", "add", "multiply"})),),
        "add": (("elu", _ELU_SUM, frozenset({"maximum"})),),
        "multiply": (
            ("silu", SILU, frozenset({"logistic", "divide"})),
            ("gelu_tanh", GELU_TANH, frozenset({"tanh"})),
            ("gelu_erf", GELU_ERF, frozenset({"erf"})),
        ),
        "divide": (
            ("sigmoid", SIGMOID, frozenset({"exponential"})),
            ("silu", _SILU_QUOTIENT, frozenset({"exponential"})),
        ),
        "logistic": (("sigmoid", m.logistic(x), frozenset()),),
        "tanh": (("tanh", m.tanh(x), frozenset()),),
    }
)
"""By an activation's last opcode: graph op, pattern, and opcodes of which one must be near for the pattern to match."""


def find_activation(instruction: HloInstruction) -> Activation | None:
    """The activation whose last instruction this is."""
    patterns = _SIMPLE.get(instruction.opcode)
    if not patterns:
        return None
    near = _opcodes_near(instruction)
    for op, pattern, needed in patterns:
        if (not needed or needed & near) and (found := m.match(instruction, pattern)):
            return Activation(op, found["x"])
    if instruction.opcode != "select":
        return _find_gelu_erfc(instruction) if instruction.opcode == "multiply" and "select" in near else None
    # jnp.where(x < 0, 0, x) keeps NaN, as HLO's max(x, 0) does; jnp.where(x > 0, x, 0) makes 0 of it.
    if (relu := bounded(instruction)) and relu.opcode == "maximum" and relu.bound == 0 and relu.keeps_nan:
        return Activation("relu", relu.value)
    if found := m.match(instruction, LEAKY_RELU):
        slope = scalar_of(found["slope"])
        value = slope.constant() if slope else None
        # max(x, slope * min(x, 0)) is the select only for slopes up to 1; an infinite one makes NaN of 0.
        if value is not None and -math.inf < value <= 1:
            return Activation("leaky_relu", found["x"], slope)
    return None


def _opcodes_near(instruction: HloInstruction) -> set[str]:
    """Opcodes at most three steps up, through sums and products: nearly every multiply is a scale, and soon told so."""
    found: set[str] = set()
    level = [instruction]
    for _ in range(3):
        level = [operand for user in level for operand in user.operands]
        found.update(operand.opcode for operand in level)
        level = [operand for operand in level if operand.opcode in ("multiply", "add", "convert")]
    return found


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
