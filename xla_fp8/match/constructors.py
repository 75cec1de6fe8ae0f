"""The table of constructors: one for each opcode, named as in XLA with `-` turned into `_`.

`abs_`, `and_`, `or_`, `not_` and `while_` end in an underscore. Opcodes that are not here (XLA grows some every
year) are written `op("new-opcode")`.
"""

from __future__ import annotations

from xla_fp8.match.pattern import Constructor


def _op(opcode: str, arity: int | None = None) -> Constructor:
    return Constructor(_python_name(opcode), opcode, arity)


def _any_order(opcode: str) -> Constructor:
    return Constructor(f"{opcode}_any_order", opcode, 2, any_order=True)


def _python_name(opcode: str) -> str:
    """`get-tuple-element` → `get_tuple_element`."""
    name = opcode.replace("-", "_")
    return f"{name}_" if name in ("abs", "and", "or", "not", "while") else name


any = Constructor("any", "")
"""Any instruction."""

# ---------------------------------------------------------------- no operands
constant = _op("constant", 0)
iota = _op("iota", 0)
partition_id = _op("partition-id", 0)
replica_id = _op("replica-id", 0)

# ---------------------------------------------------------------- one operand
abs_ = _op("abs", 1)
acos = _op("acos", 1)
acosh = _op("acosh", 1)
asin = _op("asin", 1)
asinh = _op("asinh", 1)
async_done = _op("async-done", 1)
async_update = _op("async-update", 1)
atanh = _op("atanh", 1)
bitcast = _op("bitcast", 1)
bitcast_convert = _op("bitcast-convert", 1)
broadcast = _op("broadcast", 1)
cbrt = _op("cbrt", 1)
ceil = _op("ceil", 1)
cholesky = _op("cholesky", 1)
collective_permute_done = _op("collective-permute-done", 1)
convert = _op("convert", 1)
copy = _op("copy", 1)
copy_done = _op("copy-done", 1)
copy_start = _op("copy-start", 1)
cosh = _op("cosh", 1)
cosine = _op("cosine", 1)
count_leading_zeros = _op("count-leading-zeros", 1)
domain = _op("domain", 1)
erf = _op("erf", 1)
exponential = _op("exponential", 1)
exponential_minus_one = _op("exponential-minus-one", 1)
fft = _op("fft", 1)
floor = _op("floor", 1)
get_dimension_size = _op("get-dimension-size", 1)
imag = _op("imag", 1)
infeed = _op("infeed", 1)
is_finite = _op("is-finite", 1)
log = _op("log", 1)
log_plus_one = _op("log-plus-one", 1)
logistic = _op("logistic", 1)
negate = _op("negate", 1)
not_ = _op("not", 1)
opt_barrier = _op("opt-barrier", 1)
popcnt = _op("popcnt", 1)
real = _op("real", 1)
recv = _op("recv", 1)
recv_done = _op("recv-done", 1)
reduce_precision = _op("reduce-precision", 1)
reshape = _op("reshape", 1)
reverse = _op("reverse", 1)
rng_bit_generator = _op("rng-bit-generator", 1)
round_nearest_afz = _op("round-nearest-afz", 1)
round_nearest_even = _op("round-nearest-even", 1)
rsqrt = _op("rsqrt", 1)
send_done = _op("send-done", 1)
sign = _op("sign", 1)
sine = _op("sine", 1)
sinh = _op("sinh", 1)
slice = _op("slice", 1)
sqrt = _op("sqrt", 1)
tan = _op("tan", 1)
tanh = _op("tanh", 1)
topk = _op("topk", 1)
transpose = _op("transpose", 1)
while_ = _op("while", 1)

# ---------------------------------------------------------------- two operands
add = _op("add", 2)
add_dependency = _op("add-dependency", 2)
and_ = _op("and", 2)
atan2 = _op("atan2", 2)
compare = _op("compare", 2)
complex = _op("complex", 2)
convolution = _op("convolution", 2)
divide = _op("divide", 2)
dot = _op("dot", 2)
gather = _op("gather", 2)
maximum = _op("maximum", 2)
minimum = _op("minimum", 2)
multiply = _op("multiply", 2)
or_ = _op("or", 2)
outfeed = _op("outfeed", 2)
pad = _op("pad", 2)
power = _op("power", 2)
remainder = _op("remainder", 2)
rng = _op("rng", 2)
send = _op("send", 2)
set_dimension_size = _op("set-dimension-size", 2)
shift_left = _op("shift-left", 2)
shift_right_arithmetic = _op("shift-right-arithmetic", 2)
shift_right_logical = _op("shift-right-logical", 2)
stochastic_convert = _op("stochastic-convert", 2)
subtract = _op("subtract", 2)
triangular_solve = _op("triangular-solve", 2)
xor = _op("xor", 2)

# ---------------------------------------------------------------- two operands in either order
add_any_order = _any_order("add")
and_any_order = _any_order("and")
maximum_any_order = _any_order("maximum")
minimum_any_order = _any_order("minimum")
multiply_any_order = _any_order("multiply")
or_any_order = _any_order("or")
xor_any_order = _any_order("xor")

# ---------------------------------------------------------------- three operands or more
batch_norm_grad = _op("batch-norm-grad", 5)
batch_norm_inference = _op("batch-norm-inference", 5)
batch_norm_training = _op("batch-norm-training", 3)
clamp = _op("clamp", 3)
ragged_dot = _op("ragged-dot", 3)
select = _op("select", 3)
select_and_scatter = _op("select-and-scatter", 3)

# ---------------------------------------------------------------- any number of operands
after_all = _op("after-all")
all_gather = _op("all-gather")
all_gather_done = _op("all-gather-done")
all_gather_start = _op("all-gather-start")
all_reduce = _op("all-reduce")
all_reduce_done = _op("all-reduce-done")
all_reduce_start = _op("all-reduce-start")
all_to_all = _op("all-to-all")
async_start = _op("async-start")
call = _op("call")
collective_broadcast = _op("collective-broadcast")
collective_permute = _op("collective-permute")
collective_permute_start = _op("collective-permute-start")
concatenate = _op("concatenate")
conditional = _op("conditional")
dynamic_reshape = _op("dynamic-reshape")
dynamic_slice = _op("dynamic-slice")
dynamic_update_slice = _op("dynamic-update-slice")
fusion = _op("fusion")
map = _op("map")
ragged_all_to_all = _op("ragged-all-to-all")
reduce = _op("reduce")
reduce_scatter = _op("reduce-scatter")
reduce_window = _op("reduce-window")
scaled_dot = _op("scaled-dot")
scan = _op("scan")
scatter = _op("scatter")
sort = _op("sort")
tuple = _op("tuple")
