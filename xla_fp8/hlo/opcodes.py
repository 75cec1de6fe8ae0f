"""What the IR must know of opcodes: which are elementwise, which have effects, which hold computations.

Names are XLA's (hlo_opcode.h). An opcode that is in none of these sets is carried through unchanged.
"""

from __future__ import annotations

LITERAL_OPCODES = frozenset(("constant", "parameter"))
"""Opcodes whose parentheses hold a literal or a number, not operands."""

ELEMENTWISE_UNARY = frozenset(
    (
        *("abs", "acos", "acosh", "asin", "asinh", "atanh", "cbrt", "ceil", "convert", "copy", "cosine", "cosh", "clz"),
        *("count-leading-zeros", "erf", "exponential", "exponential-minus-one", "floor", "imag", "is-finite", "log"),
        *("log-plus-one", "logistic", "negate", "not", "popcnt", "real", "reduce-precision", "round-nearest-afz"),
        *("round-nearest-even", "rsqrt", "sign", "sine", "sinh", "sqrt", "tan", "tanh", "bitcast-convert"),
    )
)
ELEMENTWISE_BINARY = frozenset(
    (
        *("add", "and", "atan2", "compare", "complex", "divide", "maximum", "minimum", "multiply", "or", "power"),
        *("remainder", "shift-left", "shift-right-arithmetic", "shift-right-logical", "subtract", "xor"),
    )
)

SIDE_EFFECTS = frozenset(
    (
        *("send", "send-done", "recv", "recv-done", "infeed", "outfeed", "rng", "rng-get-and-update-state"),
        *("all-reduce", "all-reduce-start", "all-reduce-done", "all-gather", "all-gather-start", "all-gather-done"),
        *("all-to-all", "collective-broadcast", "collective-permute", "collective-permute-start"),
        *("collective-permute-done", "ragged-all-to-all", "reduce-scatter", "domain", "after-all", "add-dependency"),
    )
)
"""Instructions that stay where nobody uses them.

Wider than HloInstruction::HasSideEffect: collectives without a channel are kept too, since dropping one on a single
participant hangs the others.
"""

COMPUTATION_ATTRIBUTES = (
    *("to_apply", "calls", "body", "condition", "select", "scatter", "branch_computations", "true_computation"),
    *("false_computation", "called_computations", "comparator"),
)
"""Attributes whose text names computations of the same module (a nested one in braces gets a name when it is read)."""
