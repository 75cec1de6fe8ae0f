"""What the shapes of each opcode must satisfy (XLA's shape_inference.cc and hlo_verifier.cc), one small function each.

A rule gets an instruction whose own shape and whose operands' shapes are known; it returns what is wrong, or None.
Opcodes without a rule pass. Dimensions of unknown size (`?`) agree with any size, and whether a dimension is dynamic
is not compared: XLA's own passes disagree about that.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from xla_fp8.hlo import literal
from xla_fp8.hlo.attributes import Window
from xla_fp8.hlo.errors import HloError
from xla_fp8.hlo.instruction import HloInstruction
from xla_fp8.hlo.opcodes import ELEMENTWISE_BINARY, ELEMENTWISE_UNARY
from xla_fp8.hlo.shape import FLOAT_TYPES, UNBOUNDED, Shape

Rule = Callable[[HloInstruction], "str | None"]

_REAL_OF = {"c64": "f32", "c128": "f64"}
_BITS_RE = re.compile(r"(?:bf|[subcf])(\d+)")
_SLICE_RE = re.compile(r"\[\s*(\d+)\s*:\s*(\d+)\s*(?::\s*(\d+)\s*)?\]")
_LARGEST_CHECKED_LITERAL = 4096


def broken_rule(instruction: HloInstruction) -> str | None:
    """What is wrong with the shapes of `instruction`, or None."""
    rule = SHAPE_RULES.get(instruction.opcode)
    if rule is None:
        return None
    try:
        return rule(instruction)
    except HloError as error:
        return str(error)
    except IndexError:
        return f"{instruction.opcode} has {len(instruction.operands)} operands, too few"
    except ValueError as error:
        return f"an attribute is not what {instruction.opcode} needs: {error}"


# ---------------------------------------------------------------- comparing


def sizes_agree(left: tuple[int, ...], right: tuple[int, ...]) -> bool:
    """Equal sizes, an unbounded one agreeing with any."""
    return left == right or (
        len(left) == len(right) and all(a == b or UNBOUNDED in (a, b) for a, b in zip(left, right, strict=True))
    )


def types_agree(left: str, right: str) -> bool:
    """Equal element types, or both of a floating type: XLA lets the precision differ in calls and reductions."""
    return left == right or (left in FLOAT_TYPES and right in FLOAT_TYPES)


def shapes_agree(left: Shape, right: Shape) -> bool:
    """Same structure, element types and sizes; layouts are not compared."""
    if left is right:
        return True
    if left.element_type != right.element_type or len(left.tuple_shapes) != len(right.tuple_shapes):
        return False
    return sizes_agree(left.dimensions, right.dimensions) and all(
        shapes_agree(a, b) for a, b in zip(left.tuple_shapes, right.tuple_shapes, strict=True)
    )


def _expect(actual: Shape, element_type: str | None, dimensions: tuple[int, ...]) -> str | None:
    """Complains where the result is not of this type and these sizes (None: any type)."""
    if not actual.is_array:
        return f"the result is {actual}, not an array"
    if (element_type is None or actual.element_type == element_type) and sizes_agree(actual.dimensions, dimensions):
        return None
    sizes = ",".join("?" if n == UNBOUNDED else str(n) for n in dimensions)
    return f"the result is {actual}, expected {element_type or actual.element_type}[{sizes}]"


def _expect_like(instruction: HloInstruction, other: Shape, what: str) -> str | None:
    if shapes_agree(instruction.shape, other):
        return None
    return f"the result is {instruction.shape}, but {what} is {other}"


def _count(instruction: HloInstruction, *allowed: int) -> str | None:
    found = len(instruction.operands)
    if found in allowed:
        return None
    return f"{instruction.opcode} takes {' or '.join(map(str, allowed))} operands, found {found}"


def _is_static(*shapes: Shape) -> bool:
    return not any(shape.is_dynamic for shape in shapes)


def _dimensions_of(instruction: HloInstruction, rank: int) -> str | None:
    """Complains where `dimensions={...}` are not distinct dimensions below `rank`."""
    dimensions = instruction.dimensions
    if len(set(dimensions)) == len(dimensions) and all(0 <= d < rank for d in dimensions):
        return None
    return f"dimensions={instruction.attr('dimensions')} are not distinct dimensions of rank {rank}"


# ---------------------------------------------------------------- elementwise


def _unary(instruction: HloInstruction) -> str | None:
    if wrong := _count(instruction, 1):
        return wrong
    operand, opcode = instruction.operand(0).shape, instruction.opcode
    if operand is instruction.shape and opcode not in ("real", "imag", "is-finite"):
        return None
    if not operand.is_array:
        return _expect_like(instruction, operand, "the operand")
    element_type: str | None = operand.element_type
    if opcode == "convert":
        element_type = None
    elif opcode == "is-finite":
        element_type = "pred"
    elif opcode in ("abs", "real", "imag"):
        element_type = _REAL_OF.get(operand.element_type, operand.element_type)
    return _expect(instruction.shape, element_type, operand.dimensions)


def _binary(instruction: HloInstruction) -> str | None:
    if wrong := _count(instruction, 2):
        return wrong
    left, right, opcode = instruction.operand(0).shape, instruction.operand(1).shape, instruction.opcode
    if left is not right:
        if left.element_type != right.element_type or not sizes_agree(left.dimensions, right.dimensions):
            return f"the operands are {left} and {right}: they must have the same type and sizes"
        if not left.is_array:
            return f"the operands are {left}, not arrays"
    if left is instruction.shape and opcode not in ("compare", "complex"):
        return None
    element_type = left.element_type
    if opcode == "compare":
        element_type = "pred"
    elif opcode == "complex":
        element_type = {"f32": "c64", "f64": "c128"}.get(element_type, "c64")
    sizes = tuple(b if a == UNBOUNDED else a for a, b in zip(left.dimensions, right.dimensions, strict=True))
    return _expect(instruction.shape, element_type, sizes)


def _bitcast_convert(instruction: HloInstruction) -> str | None:
    if wrong := _count(instruction, 1):
        return wrong
    operand, result = instruction.operand(0).shape, instruction.shape
    old, new = _bits(operand.element_type), _bits(result.element_type)
    if old is None or new is None:
        return None
    if old == new:
        return _expect(result, None, operand.dimensions)
    if old > new:
        return _expect(result, None, (*operand.dimensions, old // new))
    if not operand.dimensions or not sizes_agree(operand.dimensions[-1:], (new // old,)):
        return f"bitcast-convert of {operand} to {result.element_type} needs a last dimension of size {new // old}"
    return _expect(result, None, operand.dimensions[:-1])


def _bits(element_type: str) -> int | None:
    match = _BITS_RE.match(element_type)
    return int(match[1]) if match else None


def _select(instruction: HloInstruction) -> str | None:
    if wrong := _count(instruction, 3):
        return wrong
    predicate, on_true, on_false = (o.shape for o in instruction.operands)
    if predicate.element_type != "pred":
        return f"the first operand is {predicate}, expected pred"
    if not shapes_agree(on_true, on_false):
        return f"the values are {on_true} and {on_false}: they must have the same shape"
    if predicate.dimensions and not sizes_agree(predicate.dimensions, on_true.dimensions):
        return f"the predicate is {predicate}: it must be a scalar or have the sizes of {on_true}"
    return _expect_like(instruction, on_true, "the second operand")


def _clamp(instruction: HloInstruction) -> str | None:
    if wrong := _count(instruction, 3):
        return wrong
    low, value, high = (o.shape for o in instruction.operands)
    for bound in (low, high):
        if bound.element_type != value.element_type:
            return f"a bound is {bound}, but the operand is {value}: they must have the same type"
        if bound.dimensions and not sizes_agree(bound.dimensions, value.dimensions):
            return f"a bound is {bound}: it must be a scalar or have the sizes of {value}"
    return _expect_like(instruction, value, "the second operand")


# ---------------------------------------------------------------- moving data


def _broadcast(instruction: HloInstruction) -> str | None:
    if wrong := _count(instruction, 1) or _dimensions_of(instruction, instruction.shape.rank):
        return wrong
    operand, result, dimensions = instruction.operand(0).shape, instruction.shape, instruction.dimensions
    if len(dimensions) != operand.rank:
        return f"dimensions={instruction.attr('dimensions')} must have one entry for each dimension of {operand}"
    if operand.element_type != result.element_type:
        return f"the result is {result}, but the operand is {operand}: they must have the same type"
    if not sizes_agree(operand.dimensions, tuple(result.dimensions[d] for d in dimensions)):
        return f"the operand is {operand}, which does not fit dimensions {dimensions} of {result}"
    return None


def _reshape(instruction: HloInstruction) -> str | None:
    if wrong := _count(instruction, 1):
        return wrong
    operand, result = instruction.operand(0).shape, instruction.shape
    if operand.element_type != result.element_type:
        return f"the result is {result}, but the operand is {operand}: they must have the same type"
    if _is_static(operand, result) and operand.element_count != result.element_count:
        return f"the operand {operand} has {operand.element_count} elements, the result {result.element_count}"
    return None


def _transpose(instruction: HloInstruction) -> str | None:
    if wrong := _count(instruction, 1):
        return wrong
    operand, permutation = instruction.operand(0).shape, instruction.dimensions
    if sorted(permutation) != list(range(operand.rank)):
        return f"dimensions={instruction.attr('dimensions')} is not a permutation of the dimensions of {operand}"
    return _expect(instruction.shape, operand.element_type, tuple(operand.dimensions[d] for d in permutation))


def _reverse(instruction: HloInstruction) -> str | None:
    operand = instruction.operand(0).shape
    return _dimensions_of(instruction, operand.rank) or _expect_like(instruction, operand, "the operand")


def _concatenate(instruction: HloInstruction) -> str | None:
    if not instruction.operands:
        return "concatenate takes at least one operand"
    first = instruction.operand(0).shape
    if wrong := _dimensions_of(instruction, first.rank):
        return wrong
    if len(instruction.dimensions) != 1:
        return f"concatenate is along one dimension, found dimensions={instruction.attr('dimensions')}"
    along = instruction.dimensions[0]
    total = 0
    for operand in instruction.operands:
        shape = operand.shape
        if shape.element_type != first.element_type or shape.rank != first.rank:
            return f"operand {operand.name} is {shape}, but the first is {first}"
        others = shape.dimensions[:along], shape.dimensions[along + 1 :]
        if not (
            sizes_agree(others[0], first.dimensions[:along]) and sizes_agree(others[1], first.dimensions[along + 1 :])
        ):
            return f"operand {operand.name} is {shape}, but the first is {first}: only dimension {along} may differ"
        total = UNBOUNDED if UNBOUNDED in (total, shape.dimensions[along]) else total + shape.dimensions[along]
    sizes = (*first.dimensions[:along], total, *first.dimensions[along + 1 :])
    return _expect(instruction.shape, first.element_type, sizes)


def _slice(instruction: HloInstruction) -> str | None:
    if wrong := _count(instruction, 1):
        return wrong
    operand = instruction.operand(0).shape
    ranges = [(int(a), int(b), int(c or 1)) for a, b, c in _SLICE_RE.findall(instruction.attr("slice") or "")]
    if len(ranges) != operand.rank:
        return f"slice={instruction.attr('slice')} must have one range for each dimension of {operand}"
    for (start, limit, stride), size in zip(ranges, operand.dimensions, strict=True):
        if stride < 1 or start > limit or (size != UNBOUNDED and limit > size):
            return f"slice={instruction.attr('slice')} is not inside {operand}"
    sizes = tuple((limit - start + stride - 1) // stride for start, limit, stride in ranges)
    return _expect(instruction.shape, operand.element_type, sizes)


def _dynamic_slice(instruction: HloInstruction) -> str | None:
    operand, result = instruction.operand(0).shape, instruction.shape
    if wrong := _start_indices(instruction, 1, operand):
        return wrong
    if operand.rank != result.rank or any(
        UNBOUNDED not in (part, size) and part > size
        for part, size in zip(result.dimensions, operand.dimensions, strict=False)
    ):
        return f"the result {result} does not fit inside the operand {operand}"
    sizes = instruction.attr("dynamic_slice_sizes")
    wanted = result.dimensions if sizes is None else tuple(map(int, re.findall(r"\d+", sizes)))
    return _expect(result, operand.element_type, wanted)


def _dynamic_update_slice(instruction: HloInstruction) -> str | None:
    operand, update = instruction.operand(0).shape, instruction.operand(1).shape
    if wrong := _start_indices(instruction, 2, operand):
        return wrong
    if operand.element_type != update.element_type or operand.rank != update.rank:
        return f"the update is {update}, but the operand is {operand}: they must have the same type and rank"
    if any(
        UNBOUNDED not in (part, size) and part > size
        for part, size in zip(update.dimensions, operand.dimensions, strict=True)
    ):
        return f"the update {update} does not fit inside the operand {operand}"
    return _expect_like(instruction, operand, "the operand")


def _start_indices(instruction: HloInstruction, first: int, operand: Shape) -> str | None:
    indices = [o.shape for o in instruction.operands[first:]]
    if len(indices) == 1 and indices[0].rank == 1:
        return None  # the old form: all indices in one vector
    if len(indices) != operand.rank:
        return f"{len(indices)} start indices for {operand}, expected one for each dimension"
    for index in indices:
        if not index.is_scalar or index.element_type in FLOAT_TYPES:
            return f"a start index is {index}, expected an integer scalar"
    return None


def _pad(instruction: HloInstruction) -> str | None:
    if wrong := _count(instruction, 2):
        return wrong
    operand, value = instruction.operand(0).shape, instruction.operand(1).shape
    if not value.is_scalar or value.element_type != operand.element_type:
        return f"the padding value is {value}, expected {operand.element_type}[]"
    text = instruction.attr("padding") or ""
    parts = [part.split("_") for part in text.split("x")] if text else []
    if len(parts) != operand.rank or any(len(part) not in (2, 3) for part in parts):
        return f"padding={text} must have one low_high or low_high_interior for each dimension of {operand}"
    sizes = []
    for part, size in zip(parts, operand.dimensions, strict=True):
        low, high, interior = (*map(int, part), 0)[:3]
        padded = low + high + size + max(size - 1, 0) * interior
        sizes.append(UNBOUNDED if size == UNBOUNDED else padded)
    return _expect(instruction.shape, operand.element_type, tuple(sizes))


def _iota(instruction: HloInstruction) -> str | None:
    dimension = int(instruction.attr("iota_dimension") or 0)
    if 0 <= dimension < max(instruction.shape.rank, 1):
        return None
    return f"iota_dimension={dimension} is not a dimension of {instruction.shape}"


def _constant(instruction: HloInstruction) -> str | None:
    shape = instruction.shape
    if not shape.is_array or len(instruction.payload) > _LARGEST_CHECKED_LITERAL or instruction.is_elided_constant:
        return None
    try:
        literal.numpy_dtype(shape.element_type)
    except HloError:
        return None  # a type that numpy has not
    instruction.constant_value()
    return None


# ---------------------------------------------------------------- contractions and windows


def _dot(instruction: HloInstruction) -> str | None:
    if len(instruction.operands) != 2:
        return None  # sparse dots carry metadata operands
    left, right = instruction.operand(0).shape, instruction.operand(1).shape
    groups = [
        _dimension_list(instruction, name)
        for name in ("lhs_contracting_dims", "rhs_contracting_dims", "lhs_batch_dims", "rhs_batch_dims")
    ]
    left_contracting, right_contracting, left_batch, right_batch = groups
    for shape, dims in ((left, left_contracting + left_batch), (right, right_contracting + right_batch)):
        if len(set(dims)) != len(dims) or any(not 0 <= d < shape.rank for d in dims):
            return f"contracting and batch dimensions {dims} are not distinct dimensions of {shape}"
    for name, mine, other in (("contracting", left_contracting, right_contracting), ("batch", left_batch, right_batch)):
        if not sizes_agree(_pick(left, mine), _pick(right, other)):
            return f"the {name} dimensions of {left} and {right} have sizes {_pick(left, mine)}, {_pick(right, other)}"
    free_left = [d for d in range(left.rank) if d not in left_contracting + left_batch]
    free_right = [d for d in range(right.rank) if d not in right_contracting + right_batch]
    sizes = _pick(left, left_batch) + _pick(left, free_left) + _pick(right, free_right)
    return _expect(instruction.shape, None, sizes)


def _dimension_list(instruction: HloInstruction, name: str) -> list[int]:
    return [int(d) for d in re.findall(r"\d+", instruction.attr(name) or "")]


def _pick(shape: Shape, dimensions: list[int]) -> tuple[int, ...]:
    return tuple(shape.dimensions[d] for d in dimensions)


def _convolution(instruction: HloInstruction) -> str | None:
    if wrong := _count(instruction, 2):
        return wrong
    lhs, rhs, result = instruction.operand(0).shape, instruction.operand(1).shape, instruction.shape
    labels, window = instruction.dim_labels, instruction.window
    groups, batch_groups = instruction.feature_group_count, instruction.batch_group_count
    for name, shape in (("input", lhs), ("kernel", rhs), ("result", result)):
        if shape.rank != labels.spatial_rank + 2:
            return f"dim_labels={labels} have {labels.spatial_rank + 2} dimensions, but the {name} is {shape}"
    if len(window) != labels.spatial_rank:
        return (
            f"the window has {len(window)} dimensions, but dim_labels={labels} have {labels.spatial_rank} spatial ones"
        )
    if not _is_static(lhs, rhs, result):
        return None
    if any(groups_ < 1 for groups_ in (groups, batch_groups)) or (groups > 1 and batch_groups > 1):
        return (
            f"feature_group_count={groups} and batch_group_count={batch_groups}: both must be positive, one of them 1"
        )
    features, batch = lhs.dimensions[labels.input_feature_dimension], lhs.dimensions[labels.input_batch_dimension]
    kernel_features = rhs.dimensions[labels.kernel_input_feature_dimension]
    outputs = rhs.dimensions[labels.kernel_output_feature_dimension]
    if features != kernel_features * groups:
        return f"{features} input features, but the kernel has {kernel_features} and feature_group_count={groups}"
    if outputs % groups or outputs % batch_groups or batch % batch_groups:
        return f"{outputs} output features and batch {batch} are not divisible by the group count"
    for dimension, entry in zip(labels.kernel_spatial_dimensions, window, strict=True):
        if rhs.dimensions[dimension] != entry.size:
            return f"the window is {window}, but the kernel is {rhs} with dim_labels={labels}"
    sizes = [0] * result.rank
    sizes[labels.output_batch_dimension] = batch // batch_groups
    sizes[labels.output_feature_dimension] = outputs
    for source, target, entry in zip(
        labels.input_spatial_dimensions, labels.output_spatial_dimensions, window, strict=True
    ):
        sizes[target] = entry.output_size(lhs.dimensions[source])
    return _expect(result, None, tuple(sizes))


def _windowed(shape: Shape, window: Window) -> tuple[int, ...]:
    return tuple(entry.output_size(size) for entry, size in zip(window, shape.dimensions, strict=True))


def _results(instruction: HloInstruction, count: int) -> tuple[Shape, ...]:
    """The result arrays of a variadic operation: a tuple where there is more than one."""
    return instruction.shape.tuple_shapes if count > 1 or instruction.shape.is_tuple else (instruction.shape,)


def _reduction(instruction: HloInstruction, sizes: tuple[int, ...]) -> str | None:
    """N arrays and N initial scalars; every result has `sizes`."""
    arrays, initial = _halves(instruction)
    results = _results(instruction, len(arrays))
    if len(results) != len(arrays):
        return f"{len(arrays)} arrays, but the result is {instruction.shape}"
    for array, init, result in zip(arrays, initial, results, strict=True):
        if not sizes_agree(array.dimensions, arrays[0].dimensions):
            return f"the arrays are {arrays[0]} and {array}: they must have the same sizes"
        if not init.is_scalar or not types_agree(init.element_type, array.element_type):
            return f"the initial value is {init}, expected {array.element_type}[]"
        if not types_agree(result.element_type, array.element_type):
            return f"the result is {result}, but the array is {array}"
        if wrong := _expect(result, None, sizes):
            return wrong
    return None


def _halves(instruction: HloInstruction) -> tuple[list[Shape], list[Shape]]:
    shapes = [o.shape for o in instruction.operands]
    if not shapes or len(shapes) % 2:
        raise HloError(f"{instruction.opcode} takes as many initial values as arrays, found {len(shapes)} operands")
    return shapes[: len(shapes) // 2], shapes[len(shapes) // 2 :]


def _reduce(instruction: HloInstruction) -> str | None:
    first = instruction.operand(0).shape
    if wrong := _dimensions_of(instruction, first.rank):
        return wrong
    reduced = instruction.dimensions
    return _reduction(instruction, tuple(n for d, n in enumerate(first.dimensions) if d not in reduced))


def _reduce_window(instruction: HloInstruction) -> str | None:
    first, window = instruction.operand(0).shape, instruction.window
    if len(window) != first.rank and (window or not first.rank):
        return f"the window has {len(window)} dimensions, but the operand is {first}"
    if first.is_dynamic or not window:
        return None
    return _reduction(instruction, _windowed(first, window))


def _select_and_scatter(instruction: HloInstruction) -> str | None:
    if wrong := _count(instruction, 3):
        return wrong
    operand, source, initial = (o.shape for o in instruction.operands)
    window = instruction.window
    if window and len(window) != operand.rank:
        return f"the window has {len(window)} dimensions, but the operand is {operand}"
    if not initial.is_scalar:
        return f"the initial value is {initial}, expected a scalar"
    if window and _is_static(operand, source) and source.dimensions != _windowed(operand, window):
        return f"the source is {source}, but {operand} under window {window} gives {_windowed(operand, window)}"
    return _expect(instruction.shape, None, operand.dimensions)


# ---------------------------------------------------------------- tuples and the rest


def _tuple(instruction: HloInstruction) -> str | None:
    elements = instruction.shape.tuple_shapes
    if not instruction.shape.is_tuple or len(elements) != len(instruction.operands):
        return f"the result is {instruction.shape}, but there are {len(instruction.operands)} operands"
    for index, (operand, element) in enumerate(zip(instruction.operands, elements, strict=True)):
        if not shapes_agree(operand.shape, element):
            return f"element {index} of the result is {element}, but operand {operand.name} is {operand.shape}"
    return None


def _get_tuple_element(instruction: HloInstruction) -> str | None:
    if wrong := _count(instruction, 1):
        return wrong
    elements, index = instruction.operand(0).shape.tuple_shapes, instruction.tuple_index
    if not instruction.operand(0).shape.is_tuple:
        return f"the operand is {instruction.operand(0).shape}, not a tuple"
    if not 0 <= index < len(elements):
        return f"index={index}, but the operand has {len(elements)} elements"
    return _expect_like(instruction, elements[index], f"element {index} of the operand")


def _like_operands(instruction: HloInstruction) -> str | None:
    """sort, all-reduce: the result is the operand, or the tuple of all of them."""
    shapes = [o.shape for o in instruction.operands]
    if not shapes:
        return f"{instruction.opcode} takes at least one operand"
    if len(shapes) == 1 and shapes_agree(instruction.shape, shapes[0]):
        return None
    return _expect_like(instruction, Shape.tuple(shapes), "what the operands make")


def _like_first(instruction: HloInstruction) -> str | None:
    return _expect_like(instruction, instruction.operand(0).shape, "the operand")


def _triangular_solve(instruction: HloInstruction) -> str | None:
    return _count(instruction, 2) or _expect_like(instruction, instruction.operand(1).shape, "the second operand")


def _token(instruction: HloInstruction) -> str | None:
    return _expect_like(instruction, Shape("token"), "the result of an after-all")


def _index_scalar(instruction: HloInstruction) -> str | None:
    element_type = "s32" if instruction.opcode == "get-dimension-size" else "u32"
    return _expect(instruction.shape, element_type, ())


SHAPE_RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE_UNARY, _unary),
    **dict.fromkeys(ELEMENTWISE_BINARY, _binary),
    "add-dependency": _like_first,
    "after-all": _token,
    "all-reduce": _like_operands,
    "bitcast-convert": _bitcast_convert,
    "broadcast": _broadcast,
    "cholesky": _like_first,
    "clamp": _clamp,
    "concatenate": _concatenate,
    "constant": _constant,
    "convolution": _convolution,
    "dot": _dot,
    "dynamic-slice": _dynamic_slice,
    "dynamic-update-slice": _dynamic_update_slice,
    "get-dimension-size": _index_scalar,
    "get-tuple-element": _get_tuple_element,
    "iota": _iota,
    "opt-barrier": _like_first,
    "pad": _pad,
    "partition-id": _index_scalar,
    "reduce": _reduce,
    "reduce-window": _reduce_window,
    "replica-id": _index_scalar,
    "reshape": _reshape,
    "reverse": _reverse,
    "select": _select,
    "select-and-scatter": _select_and_scatter,
    "slice": _slice,
    "sort": _like_operands,
    "transpose": _transpose,
    "triangular-solve": _triangular_solve,
    "tuple": _tuple,
}
"""Opcode → its rule."""
