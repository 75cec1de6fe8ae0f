"""Casts to FP8 with the norms, activations and gates in front of them, which one kernel computes.

    x ─┬─ convert ─ sum ─ ... ─ rsqrt ─┐               ┌─ abs ─ reduce_max          the amax
       └─ convert ─ sub ──────────── mul ─ mul, add ─ silu ─ mul ─ clamp ─ convert to FP8
                                                       └─ dot                       the tensor itself

XLA's own kernels for this are bound by their instructions, of which there are 48 for each element of group norm, silu
and cast; and what reduces is a kernel of its own, which reads the tensor once more. What a graph of a convolution or
dot ends with belongs to that; and a bare cast is as fast as XLA makes it (docs/quantization.md, "Fused casts").

A kernel has more results than the cast where others read what is on the way to it. In training they do: the amax is the
next step's scale, a filter gradient is of the tensor in 16 bits, a bias gradient is a sum over its rows, and a norm's
gradient is of the mean and variance of each row.
"""

from __future__ import annotations

import copy
import dataclasses
import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from xla_fp8 import _jax_compat
from xla_fp8.backends.fused_cast import problem as problems
from xla_fp8.backends.fused_cast.problem import Table
from xla_fp8.tracing.data_flow import DataFlow
from xla_fp8.tracing.equations import Equation, is_literal, is_plain, variables
from xla_fp8.tracing.inline import flat
from xla_fp8.tracing.quantizations import is_cast
from xla_fp8.tracing.rows import Groups, Rows, Spread, columns_of, element_count, is_reshape, joins_values, sums_groups

_MOVES = frozenset({"broadcast_in_dim", "concatenate", "dynamic_slice", "pad", "rev", "slice", "transpose"})
"""What XLA fuses with what reads it; for a kernel it would be written to memory first."""

_LEAST_ARITHMETIC = 5
"""Operations on every element, scale and clamp among them; with fewer XLA's kernel is as fast. A norm has 6."""

_MOST_EQUATIONS, _MOST_TENSORS = 256, 6
"""Of a kernel. A residual stream in f32 would be added up from all layers before, in each of them again."""

_LEAST_SIZE = 2**16
_LEAST_SIZE_WITH_NUMBERS_OF_IMAGES = 2**22
"""Elements: of fewer a kernel's launch is most of its time."""
_NARROW = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
_FLOATS = (*_NARROW, jnp.dtype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class Group:
    """What one kernel computes.

    Attributes:
        equations: their indices, in program order. Groups may share some, which each kernel computes again.
        results: what others read, that of which the rows are first. Only this kernel makes it.
    """

    equations: tuple[int, ...]
    results: tuple[Any, ...]


def fused_casts(flow: DataFlow, outvars: Sequence[Any], taken: set[int]) -> list[Group]:
    """What kernels compute: casts, each with what is in front of it; then other tensors and sums of training.

    Args:
        taken: equations that a graph of a convolution or dot computes.
    """
    known = _Known(flow, set(variables(outvars)), taken, _tensors_of(flow, taken), set(), set(), {})
    found = []
    for index, rows in (*_casts(known), *_tensors(known), *_sums(known)):
        if index not in known.gone and known.made.isdisjoint(flow.equations[index].outvars):
            walk = _Walk(known, index, rows)
            group = walk.group()
            if group is not None:
                found.append(group)
                known.made.update(group.results)
                known.gone.update(walk.absorbed - walk.shared)
                for variable in _read_by(flow, group):
                    known.readers.setdefault(variable, set()).add(len(found))
    return found


@dataclasses.dataclass(frozen=True)
class _Known:
    """What is known of a program.

    Attributes:
        results: of the program.
        tensors: of each variable the tensors in memory that it is computed of, element by element; two of more.
        made: results of groups found so far.
        gone: equations that only groups compute.
        readers: of a variable the groups that read it, by number.
    """

    flow: DataFlow
    results: set[Any]
    taken: set[int]
    tensors: dict[Any, frozenset[Any]]
    made: set[Any]
    gone: set[int]
    readers: dict[Any, set[int]]


def _read_by(flow: DataFlow, group: Group) -> set[Any]:
    equations = [flow.equations[index] for index in group.equations]
    made = {variable for equation in equations for variable in equation.outvars}
    return {atom for equation in equations for atom in variables(equation.invars)} - made


Roots = Iterator[tuple[int, Rows]]
"""Equations at whose results walks begin."""


def _casts(known: _Known) -> Roots:
    for index, equation in enumerate(known.flow.equations):
        if is_cast(equation) and known.flow.chain[index] and index not in known.taken:
            rows = Rows.of(equation.outvars[0].aval.shape)
            if rows is not None and rows.size >= _LEAST_SIZE:
                yield index, rows


def _tensors(known: _Known) -> Roots:
    """Tensors of 16 bits that are in memory: something other than elementwise operations reads them."""
    for index, equation in enumerate(known.flow.equations):
        if not known.flow.chain[index] or index in known.taken or not _is_elementwise(equation):
            continue
        result, *others = equation.outvars
        if others or result.aval.dtype not in _NARROW:
            continue
        rows, readers = Rows.of(result.aval.shape), known.flow.consumers.get(result, ())
        is_in_memory = result in known.results or any(not known.flow.chain[reader] for reader in readers)
        if rows is not None and rows.size >= _LEAST_SIZE and is_in_memory:
            yield index, rows


def _sums(known: _Known) -> Roots:
    """Sums over all rows: gradients of biases and of what norms multiply by, and the statistics of batch norms. And
    those over groups of columns of each image, the statistics of group norms.

    Those of several tensors first, which take the others of these along.
    """
    equations = [(index, equation) for index, equation in enumerate(known.flow.equations) if is_plain(equation)]
    found = ((index, Rows.summed_by(equation) or Rows.grouped_by(equation)) for index, equation in equations)
    large = [(index, rows) for index, rows in found if rows is not None and rows.size >= _LEAST_SIZE]

    def tensors(root: tuple[int, Rows]) -> int:
        [operand] = known.flow.equations[root[0]].invars
        return len(known.tensors.get(operand, ()))

    yield from sorted(large, key=tensors, reverse=True)


def _tensors_of(flow: DataFlow, taken: set[int]) -> dict[Any, frozenset[Any]]:
    found: dict[Any, frozenset[Any]] = {}
    for index, equation in enumerate(flow.equations):
        for result in equation.outvars:
            is_in_memory = not flow.chain[index] or (index in taken and result.aval.dtype in _NARROW)
            read = {result}
            if not is_in_memory:
                wide = [a for a in variables(equation.invars) if element_count(a) == element_count(result)]
                read = {tensor for atom in wide for tensor in found.get(atom, (atom,))}
            found[result] = frozenset(itertools.islice(read, 2))
    return found


class _Walk:
    """From a cast up to the tensors that are in memory anyway, and down to what ends there beside it."""

    def __init__(self, known: _Known, root: int, rows: Rows) -> None:
        self.known, self.flow, self.rows = known, known.flow, rows
        self.absorbed: set[int] = set()
        # Those absorbed that are computed outside too, because others read their results.
        self.shared: set[int] = set()
        # Variables that others get from the kernel.
        self.results: dict[Any, None] = {}
        self.pending: list[int] = []
        self.read: set[Any] = set()
        # Results of equations that it is computed of, or reads.
        self.wanted: set[Any] = set()
        # Those whose results are read as tables.
        self.tables: set[int] = set()
        # Those that sums over the pixels of images are of.
        self.summed: set[int] = set()
        self.spread: dict[int, Spread] = {}
        self.is_consistent = True
        # Whether there are parts beside each other, and `rows` are those of one.
        self.is_joined = False
        self.results.update(dict.fromkeys(self.flow.equations[root].outvars))
        # Of groups of columns the kernel makes sums, and nothing else.
        self.groups: Groups | None = None
        if not self._is_sum(root) and self.flow.equations[root].primitive.name == "reduce_sum":
            self.groups = rows.groups_of_sum(self.flow.equations[root])
        self._end(root)

    def group(self) -> Group | None:
        self._go_up()
        if not self._is_worth_it():
            return None
        self._take_sums()
        [root, *others] = self.results
        if not self._is_given(root):
            return None
        in_order = sorted(filter(self._is_given, others), key=lambda v: element_count(v) < self.rows.size)
        return Group(tuple(sorted(self.absorbed)), (root, *in_order))

    def _go_up(self) -> None:
        while self.pending and self._is_small():  # the last in program order: all readers have been decided on
            index = -heapq.heappop(self.pending)
            if index in self.absorbed:
                continue
            if self._joins_values(index):
                self._go_on_with_parts(index)
                continue
            is_computable = self._is_computable(index)
            if (is_computable or self.spread[index] == "all") and self.groups is None:
                for end in self._ends(index):
                    self._end(end)
            if is_computable and self._is_kept(index):
                self._absorb(index)
            else:
                self.read.update(self.wanted.intersection(self.flow.equations[index].outvars))

    def _is_given(self, result: Any) -> bool:
        return result in self.known.results or bool(self._readers_outside(self._at(result)))

    # Beside

    def _take_sums(self) -> None:
        """Takes the other sums over rows of the tensors that are read, if no more tensors have to be."""
        read = set(filter(self.rows.hold, self.read))
        for index in self._sums_of(read):
            if not self._groups_behind(self.flow.equations[index].outvars) <= self._groups_behind(self.results):
                continue  # of which this one may read
            before = {name: copy.copy(value) for name, value in vars(self).items()}
            self._end(index)
            self._go_up()
            is_of_them = self._is_worth_it() and set(filter(self.rows.hold, self.read)) <= read
            if not is_of_them or self._comes_back():
                vars(self).update(before)

    def _groups_behind(self, results: Iterable[Any]) -> set[int]:
        """Earlier groups that read results, or fewer numbers than a tensor has that are made of them."""
        found: set[int] = set()
        pending = list(results)
        seen = set(pending)
        while pending:
            variable = pending.pop()
            found |= self.known.readers.get(variable, set())
            for index in self.flow.consumers.get(variable, ()):
                made = [v for v in self.flow.equations[index].outvars if element_count(v) < self.rows.size]
                pending += set(made) - seen
                seen.update(made)
        return found

    def _comes_back(self) -> bool:
        """Whether the group reads its results, or what others make of them."""
        ends = [v for v in self.results if element_count(v) < self.rows.size and not self._is_sum_of_row(self._at(v))]
        inside = {reader for v in ends for reader in self.flow.consumers.get(v, ())} & self.absorbed
        return bool(inside) or self._reach_group(r for v in self.results for r in self._readers_outside(self._at(v)))

    def _at(self, variable: Any) -> int:
        return self.flow.producer[variable]

    def _sums_of(self, tensors: Iterable[Any]) -> list[int]:
        found, pending, seen = set(), list(tensors), set(tensors)
        while pending and len(seen) < _MOST_EQUATIONS:
            for index in self.flow.consumers.get(pending.pop(), ()):
                equation = self.flow.equations[index]
                result, *others = equation.outvars
                if self._is_sum(index):
                    found.add(index)
                is_of_elements = not others and self.rows.hold(result) and result not in seen
                if is_of_elements and (_is_elementwise(equation) or is_reshape(equation)):
                    seen.add(result)
                    pending.append(result)
        return [i for i in sorted(found - self.absorbed) if self.known.made.isdisjoint(self.flow.equations[i].outvars)]

    # Down

    def _ends(self, index: int) -> Iterator[int]:
        """Equations that read a tensor and end there, as far as the group goes: amax, sums over rows, other casts.

        Whether some come back depends on those before, which are taken in between: a variance reads the mean.
        """
        [result, *others] = self.flow.equations[index].outvars
        if others or not self.rows.hold(result):
            return
        for reader in self.flow.consumers.get(result, ()):
            ends = self._ending(reader) if reader not in self.absorbed else None
            if ends and not self._come_back(ends):
                yield from ends

    def _ending(self, index: int) -> list[int] | None:
        """An equation with all that reads it, where that is elementwise and ends in reductions or casts."""
        found: set[int] = set()
        pending = [index]
        while pending:
            index = pending.pop()
            if index not in found:
                readers = self._readers_up_to_end(index)
                if readers is None or len(found) > _MOST_EQUATIONS:
                    return None
                found.add(index)
                pending += readers
        casts: set[int] = set()  # and what leads to one
        for index in sorted(found, reverse=True):
            equation = self.flow.equations[index]
            if is_cast(equation):
                casts.add(index)
            elif not casts.isdisjoint(self.flow.consumers.get(equation.outvars[0], ())):
                casts.add(index)
                # Behind the tensor there are scalars, scale and bounds. Another tensor would make it another group.
                spreads = [self.rows.spread(atom, equation, "all") for atom in variables(equation.invars)]
                if not set(spreads) <= {"all", "one"} or spreads.count("all") != 1:
                    return None
        return sorted(found)

    def _readers_up_to_end(self, index: int) -> list[int] | None:
        """What reads an equation's result; nothing where the group ends with it, None where it cannot take it."""
        equation = self.flow.equations[index]
        if index in self.known.taken or len(equation.outvars) > 1 or not self.known.made.isdisjoint(equation.outvars):
            return None
        if not is_plain(equation):
            return None
        [result] = equation.outvars
        if self._is_sum(index) or self._is_amax(index):
            return [] if self._groups_behind([result]) <= self._groups_behind(self.results) else None
        if is_cast(equation):
            return [] if self._is_clamped(equation.invars[0]) else None
        if not self.rows.hold(result) or not _is_elementwise(equation) or result in self.known.results:
            return None
        return self.flow.consumers.get(result, []) or None

    def _is_sum(self, index: int) -> bool:
        """Whether an equation adds up all rows, or where this is about groups of columns those."""
        equation = self.flow.equations[index]
        if self.groups is None:
            return self.rows.are_summed_by(equation)
        return equation.primitive.name == "reduce_sum" and self.rows.groups_of_sum(equation) == self.groups

    def _is_clamped(self, atom: Any) -> bool:
        producer = self.flow.producer.get(atom)
        return producer is not None and self.flow.equations[producer].primitive.name in ("clamp", "max", "min")

    def _is_amax(self, index: int) -> bool:
        """Whether an equation finds the largest of absolute values that are made for that alone."""
        if not self._is_maximum(index):
            return False
        [values] = self.flow.equations[index].invars
        producer = self.flow.producer.get(values)
        if producer is None or self.flow.equations[producer].primitive.name != "abs":
            return False
        return values not in self.known.results and all(map(self._is_maximum, self.flow.consumers[values]))

    def _is_maximum(self, index: int) -> bool:
        """Whether an equation finds the largest of all elements."""
        equation = self.flow.equations[index]
        return equation.primitive.name == "reduce_max" and element_count(equation.outvars[0]) == 1

    def _end(self, index: int) -> None:
        """Takes an equation that nothing in the group reads."""
        equation = self.flow.equations[index]
        if self._is_sum(index):
            self.spread[index] = "column" if self.groups is None else "group"
        else:
            self.spread[index] = "one" if self._is_maximum(index) else "all"
        if is_cast(equation) or self.spread[index] != "all":
            self.results.update(dict.fromkeys(equation.outvars))
        self._absorb(index)

    # Up

    def _joins_values(self, index: int) -> bool:
        """Whether the parts of a tensor are beside each other that all so far is computed of, and are computed too."""
        equation = self.flow.equations[index]
        if self.is_joined or not joins_values(equation, self.rows) or self._joins_tensors(index):
            return False
        # Behind it all is computed of that tensor and of scalars.
        others = [
            result for i in {*self.tables, *(-i for i in self.pending)} for result in self.flow.equations[i].outvars
        ]
        others = [other for other in (*others, *self.read) if other not in equation.outvars]
        is_of_elements = {self.spread[i] for i in self.absorbed} <= {"all", "one", "column"}
        if any(element_count(other) > 1 for other in others) or not is_of_elements:
            return False
        outside = set(self._readers_outside(index)).difference(self._ends(index))
        return not outside and self.known.results.isdisjoint(equation.outvars)

    def _go_on_with_parts(self, index: int) -> None:
        """From here up, all is on the rows of one part."""
        for end in self._ends(index):
            self._end(end)
        equation = self.flow.equations[index]
        self.absorbed.add(index)
        self.is_joined = True
        self.rows = Rows(self.rows.count, self.rows.columns // len(equation.invars))
        for atom in equation.invars:
            self._want(atom, "all")

    def _absorb(self, index: int) -> None:
        self.absorbed.add(index)
        equation = self.flow.equations[index]
        is_summed = index in self.summed or sums_groups(equation, self.spread[index])
        for atom, spread in self.rows.spreads(equation, self.spread[index]):
            self._want(atom, spread, is_summed)

    def _want(self, atom: Any, spread: Spread | Table | None, is_summed: bool = False) -> None:
        self.wanted.add(atom)
        producer = self.flow.producer.get(atom)
        if producer is None:
            self.read.add(atom)
        elif spread in ("all", "row", "column", "group") or (
            spread == "one" and _is_known(self.flow.equations[producer])
        ):
            self.is_consistent &= self.spread.setdefault(producer, spread) == spread
            heapq.heappush(self.pending, -producer)
            if is_summed:
                self.summed.add(producer)
        else:
            self.tables.add(producer)

    def _is_computable(self, index: int) -> bool:
        """Whether the kernel can compute an equation; else it reads its result."""
        equation, spread = self.flow.equations[index], self.spread[index]
        name = equation.primitive.name
        if equation.effects or _jax_compat.has_own_context(equation) or not _is_operand(equation.outvars[0]):
            return False
        if len(equation.outvars) > 1 and name != "split":  # a custom_jvp_call
            return False
        if name in ("split", "slice"):
            return equation.invars[0].aval.dtype in _NARROW and bool(columns_of(equation, self.rows))
        if name == "concatenate":
            return self._joins_tensors(index)
        if name == "convert_element_type" and _is_known(equation):  # a bound of jnp.clip, which may be an integer
            return True
        if not all(map(_is_operand, equation.invars)):
            return False
        # Of statistics of statistics XLA makes the inner ones.
        if index in self.summed and spread in ("row", "column", "group"):
            return False
        if name in problems.REDUCTIONS and not is_reshape(equation):
            if spread == "group":
                return self.rows.groups_of_sum(equation) is not None and not self._readers_outside(index)
            return spread == "row" and self.rows.are_reduced_by(equation)
        if not is_reshape(equation) and name != "broadcast_in_dim" and not _is_elementwise(equation):
            return False
        return all(self.rows.spread(a, equation, spread) is not None for a in variables(equation.invars))

    def _joins_tensors(self, index: int) -> bool:
        """Whether a concatenation is of columns, and of tensors in memory."""
        equation = self.flow.equations[index]
        shape = equation.outvars[0].aval.shape
        return (
            equation.params["dimension"] == len(shape) - 1
            and shape[-1] == self.rows.columns
            and self.rows.hold(equation.outvars[0])
            and all(not is_literal(atom) and self._is_tensor(atom, index) for atom in equation.invars)
        )

    def _is_kept(self, index: int) -> bool:
        """Whether the kernel computes what it can compute, and for whom."""
        equation = self.flow.equations[index]
        if not self.known.made.isdisjoint(equation.outvars):
            return False
        outside = self._readers_outside(index)
        is_result = not self.known.results.isdisjoint(equation.outvars)
        if self._may_be_tensor(equation):
            [result] = equation.outvars
            if index in self.known.taken and not self._has_numbers_of_images(equation):
                return False  # a graph writes it
            if not outside and not is_result:
                return True
            is_written = is_result or not all(self.flow.chain[reader] for reader in outside)
            if is_written or len(self.known.tensors[result]) > 1:
                return self._gives(result, outside)
            # Of one tensor it takes no longer to compute it again than to read it.
        elif self._is_sum_of_row(index) and outside:
            [result] = equation.outvars
            if not is_result and self._gives(result, outside):
                return True
        if outside or is_result:
            self.shared.add(index)
        return True

    def _is_sum_of_row(self, index: int) -> bool:
        equation = self.flow.equations[index]
        return (
            equation.primitive.name in problems.REDUCTIONS and self.spread[index] == "row" and not is_reshape(equation)
        )

    def _may_be_tensor_at(self, index: int) -> bool:
        return self._may_be_tensor(self.flow.equations[index])

    def _may_be_tensor(self, equation: Equation) -> bool:
        """Whether a result is of all elements, and of a type that programs have in memory."""
        [result, *others] = equation.outvars
        is_narrow = self.rows.hold(result) and result.aval.dtype in _NARROW
        return not others and is_narrow and not is_reshape(equation) and not _is_view(equation)

    def _gives(self, result: Any, outside: Iterable[int]) -> bool:
        """Lets others have a result from the kernel; not where what they make of it comes back."""
        if self._reach_group(outside):
            return False
        self.results[result] = None
        return True

    # Others

    def _readers_outside(self, index: int) -> list[int]:
        """Equations outside that read a result, or that read what is computed of it outside too."""
        return [
            reader
            for variable in self.flow.equations[index].outvars
            for reader in self.flow.consumers.get(variable, ())
            if (reader not in self.absorbed or reader in self.shared)
            # Of a link only derivatives see the value.
            and self.flow.equations[reader].primitive.name != "xla_fp8_link"
        ]

    def _is_needed_outside(self, index: int, reader: int | None = None) -> bool:
        """Whether a result is needed by others than the group, and than one reader."""
        is_result = not self.known.results.isdisjoint(self.flow.equations[index].outvars)
        return is_result or any(other != reader for other in self._readers_outside(index))

    def _come_back(self, ends: Sequence[int]) -> bool:
        """Whether the group reads what is made of the results of equations, or they what is made of the group's."""
        own = set(ends)
        after = {r for end in ends for v in self.flow.equations[end].outvars for r in self.flow.consumers.get(v, ())}
        if not self.absorbed.isdisjoint(after - own) or self._reach_group(after - own):
            return True
        inside = self.absorbed | own  # a cast may read the scale that is made of an amax beside it
        first, seen = min(inside), set(own)
        pending = [p for end in ends for p in self.flow.predecessors[end] if p not in own]
        while pending:
            index = pending.pop()
            if index in seen or index < first or index in self.absorbed:
                continue
            seen.add(index)
            pending += self.flow.predecessors[index]
        # What the group computes the ends may read; what is computed of its results outside they may not.
        return any(not inside.isdisjoint(self.flow.predecessors[index]) for index in seen - own)

    def _reach_group(self, outside: Iterable[int]) -> bool:
        """Whether the group reads what is computed of the results of equations outside of it."""
        pending, seen, last = list(outside), set(), max(self.absorbed)
        while pending:
            index = pending.pop()
            if index in seen or index > last:
                continue
            seen.add(index)
            for variable in self.flow.equations[index].outvars:
                for reader in self.flow.consumers.get(variable, ()):
                    if reader in self.absorbed and index not in self.absorbed:
                        return True
                    # What is shared is computed outside too, and others read that.
                    if reader not in self.absorbed or reader in self.shared:
                        pending.append(reader)
        return False

    def _has_numbers_of_images(self, equation: Equation) -> bool:
        """Whether an operand is a number for each column of each image, and the tensor large beside another launch.

        No graph adds these: XLA would read and write the tensor for that.
        """
        if self.rows.size < _LEAST_SIZE_WITH_NUMBERS_OF_IMAGES:
            return False
        read = [(atom, equation) for atom in variables(equation.invars)]
        producers = [self.flow.equations[self.flow.producer[a]] for a, _ in read if a in self.flow.producer]
        read += [(e.invars[0], e) for e in producers if e.primitive.name == "broadcast_in_dim"]
        tables = [self.rows.table_of(atom, reader) for atom, reader in read if not self.rows.hold(atom)]
        return any(table is not None and table.period > 1 and bool(table.columns) for table in tables)

    def _is_small(self) -> bool:
        return len(self.absorbed) <= _MOST_EQUATIONS and sum(map(self.rows.hold, self.read)) <= _MOST_TENSORS

    def _is_worth_it(self) -> bool:
        if not self._is_small():
            return False
        if not self.is_consistent or not self.tables.isdisjoint(self.absorbed):  # by row here, by column there
            return False
        equations = [self.flow.equations[index] for index in self.absorbed]
        arithmetic = [
            equation
            for equation in equations
            if equation.primitive.name in problems.ELEMENTWISE and element_count(equation.outvars[0]) >= self.rows.size
        ]
        is_enough = len(arithmetic) >= _LEAST_ARITHMETIC
        if not any(map(is_cast, equations)):
            # XLA's sums over rows load 2 bytes at a time. Else only training has what saves memory: results for the
            # gradient of a norm, and steps of an activation that its gradient makes again in place of reading them.
            is_sum = any(map(self._is_sum, self.absorbed))
            gives_rows = any(map(self._is_sum_of_row, self.absorbed))
            is_enough = is_sum or (is_enough and (gives_rows or any(map(self._may_be_tensor_at, self.shared))))
        return is_enough and all(map(self._is_tensor, filter(self.rows.hold, self.read)))

    def _is_tensor(self, atom: Any, reader: int | None = None) -> bool:
        """Whether what the kernel, or a reader that it computes, reads is in memory in any case, and of 16 bits.

        XLA fuses other things with what reads them: moves, and operations that the kernel cannot do.
        """
        if atom.aval.dtype not in _NARROW:
            return False
        producer = self.flow.producer.get(atom)
        if producer is None or not self.flow.chain[producer] or atom in self.known.made:
            return True
        if self.flow.equations[producer].primitive.name in _MOVES:
            return False
        return producer in self.known.taken or self._is_needed_outside(producer, reader)


def _is_view(equation: Equation) -> bool:
    return equation.primitive.name in ("split", "slice", "concatenate")


def _is_known(equation: Equation) -> bool:
    """Whether a result is a number of the program's."""
    return all(map(is_literal, equation.invars)) and element_count(equation.outvars[0]) == 1


def _is_float(atom: Any) -> bool:
    return getattr(atom.aval, "dtype", None) in _FLOATS


def _is_operand(atom: Any) -> bool:
    return _is_float(atom) or getattr(atom.aval, "dtype", None) == np.dtype(bool)


def _is_elementwise(equation: Equation) -> bool:
    name = equation.primitive.name
    if name == "custom_jvp_call":  # relu, and what refuses to be differentiated
        inner = _jax_compat.open_jaxpr(flat(equation.params["call_jaxpr"])).eqns
        return all(_is_elementwise(e) and _is_operand(e.outvars[0]) for e in inner)
    if name == "convert_element_type":
        return all(map(_is_float, (*equation.invars, *equation.outvars)))
    if name == "select_n":
        return len(equation.invars) == 3
    is_of_floats = name in problems.COMPARISONS or all(map(_is_float, equation.invars))
    return name in problems.ELEMENTWISE and is_of_floats
