"""HLO shapes: element type, dimensions, layout. Values, compared and hashed by what they say.

Text form as in XLA's shape_util.cc: `f32[2,<=3]{1,0:T(8,128)S(5)}`, `(f32[2]{0}, token[])`, `b(f32[4]{0})`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable

from xla_fp8.hlo.errors import HloError

UNBOUNDED = -1
"""The size of a dimension written `?`: dynamic, with no bound."""

FP8_TYPES = ("f8e4m3fn", "f8e5m2", "f8e4m3", "f8e3m4", "f8e4m3b11fnuz", "f8e4m3fnuz", "f8e5m2fnuz", "f8e8m0fnu")
FLOAT_TYPES = frozenset(("f16", "bf16", "f32", "f64", "f4e2m1fn", *FP8_TYPES))


@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """`{minor_to_major tail}`: the order of dimensions in memory, fastest first.

    `tail` is what follows the order (tiles, element size, memory space, ...) kept as text, starting with ":".
    """

    minor_to_major: tuple[int, ...]
    tail: str = ""

    def __str__(self) -> str:
        return "{" + ",".join(map(str, self.minor_to_major)) + self.tail + "}"


@dataclasses.dataclass(frozen=True)
class Shape:
    """An array, tuple, token or opaque shape.

    Attributes:
        element_type: XLA's lower-case name (`f32`, `f8e4m3fn`, `pred`, `token`, ...), or "tuple", or "buffer".
        dimensions: sizes; for a dynamic dimension its bound, or UNBOUNDED.
        dynamic: per dimension, whether its size is dynamic.
        layout: None where the text has none.
        tuple_shapes: the elements of a tuple; the one array inside a buffer.
    """

    element_type: str
    dimensions: tuple[int, ...] = ()
    dynamic: tuple[bool, ...] = ()
    layout: Layout | None = None
    tuple_shapes: tuple[Shape, ...] = ()

    def __post_init__(self) -> None:
        if not self.dynamic and self.dimensions:
            object.__setattr__(self, "dynamic", (False,) * len(self.dimensions))

    @property
    def minor_to_major(self) -> tuple[int, ...]:
        """The layout's order; row-major where the text gives none."""
        return self.layout.minor_to_major if self.layout else tuple(reversed(range(self.rank)))

    @staticmethod
    def parse(text: str) -> Shape:
        """Reads a shape. Raises HloError where `text` is not exactly one shape."""
        shape, end = scan_shape(text, 0)
        if text[end:].strip():
            raise HloError(f"not a shape: {text!r} (unexpected {text[end:].strip()!r} after it)")
        return shape

    @staticmethod
    def array(element_type: str, dimensions: Iterable[int] = (), layout: Iterable[int] | None = None) -> Shape:
        """An array shape; row-major unless `layout` gives minor-to-major."""
        dims = tuple(dimensions)
        order = tuple(layout) if layout is not None else tuple(reversed(range(len(dims))))
        return Shape(element_type, dims, layout=Layout(order) if dims else None)

    @staticmethod
    def tuple(shapes: Iterable[Shape]) -> Shape:
        """A tuple shape."""
        return Shape("tuple", tuple_shapes=tuple(shapes))

    @property
    def is_tuple(self) -> bool:
        return self.element_type == "tuple"

    @property
    def is_array(self) -> bool:
        return self.element_type not in ("tuple", "token", "opaque", "buffer")

    @property
    def is_scalar(self) -> bool:
        return self.is_array and not self.dimensions

    @property
    def is_dynamic(self) -> bool:
        return any(self.dynamic) or any(s.is_dynamic for s in self.tuple_shapes)

    @property
    def is_fp8(self) -> bool:
        return self.element_type in FP8_TYPES

    @property
    def rank(self) -> int:
        return len(self.dimensions)

    @property
    def element_count(self) -> int:
        """Number of elements (a dynamic dimension counts its bound)."""
        return math.prod(self.dimensions)

    def with_layout(self, layout: Layout | None) -> Shape:
        return dataclasses.replace(self, layout=layout)

    def with_default_layout(self) -> Shape:
        """Row-major in every array of it."""
        if self.is_tuple:
            return Shape.tuple(shape.with_default_layout() for shape in self.tuple_shapes)
        return self.with_layout(Layout(tuple(reversed(range(self.rank))))) if self.rank and self.is_array else self

    def with_element_type(self, element_type: str) -> Shape:
        return dataclasses.replace(self, element_type=element_type)

    def with_dimensions(self, dimensions: Iterable[int]) -> Shape:
        """The same element type with other, static dimensions in row-major layout."""
        return Shape.array(self.element_type, dimensions)

    def compatible(self, other: Shape) -> bool:
        """Same types and sizes; layouts may differ (ShapeUtil::Compatible)."""
        return self is other or _without_layout(self) == _without_layout(other)

    def same_dimensions(self, other: Shape) -> bool:
        """Both arrays, with the same sizes and the same dynamic dimensions."""
        return (
            self.is_array and other.is_array and self.dimensions == other.dimensions and self.dynamic == other.dynamic
        )

    def __str__(self) -> str:
        return self._text

    @functools.cached_property
    def _text(self) -> str:
        return self._format(with_layout=True)

    @functools.cached_property
    def text_without_layout(self) -> str:
        """As XLA prints it in a computation's signature."""
        return self._format(with_layout=False)

    def _format(self, with_layout: bool) -> str:
        if self.is_tuple:
            parts = [s._text if with_layout else s.text_without_layout for s in self.tuple_shapes]
            marked = [f"/*index={i}*/{part}" if i and i % 5 == 0 else part for i, part in enumerate(parts)]
            return f"({', '.join(marked)})"
        if self.element_type == "buffer":
            inner = self.tuple_shapes[0]
            return f"b({inner._text if with_layout else inner.text_without_layout})"
        layout = str(self.layout) if with_layout and self.layout else ""
        if not any(self.dynamic):
            return f"{self.element_type}[{','.join(map(str, self.dimensions))}]{layout}"
        sizes = [
            "?" if n == UNBOUNDED else f"<={n}" if d else str(n)
            for n, d in zip(self.dimensions, self.dynamic, strict=True)
        ]
        return f"{self.element_type}[{','.join(sizes)}]{layout}"


@functools.lru_cache(maxsize=4096)
def _without_layout(shape: Shape) -> Shape:
    return dataclasses.replace(shape, layout=None, tuple_shapes=tuple(_without_layout(s) for s in shape.tuple_shapes))


SPACE = r"(?:\s|/\*.*?\*/|//[^\n]*)*+"
_SPACE_RE = re.compile(SPACE, re.S)
_ARRAY_RE = re.compile(rf"([a-z][a-z0-9_]*+){SPACE}\[([^\]]*)\]", re.S)
# A `{` after a shape opens a layout only when a number or a colon follows; else it opens a computation's body.
_LAYOUT_RE = re.compile(rf"{SPACE}\{{{SPACE}(?=[0-9:])", re.S)
_SIZE_RE = re.compile(r"\s*(\?|(<=)?\s*([0-9]{1,19}))\s*\Z")
_MAX_NESTING = 100


def skip_space(text: str, position: int) -> int:
    """The offset of the next character that is neither white space nor inside a comment."""
    match = _SPACE_RE.match(text, position)
    return match.end() if match else position


def scan_shape(text: str, position: int, nesting: int = 0) -> tuple[Shape, int]:
    """Reads one shape at `position`; returns it and the offset behind it. Raises HloError."""
    if nesting > _MAX_NESTING:
        raise HloError(f"a shape is nested more than {_MAX_NESTING} tuples deep")
    position = skip_space(text, position)
    if text.startswith("(", position):
        return _scan_tuple(text, position, nesting)
    if text.startswith("b(", position):
        inner, end = scan_shape(text, position + 2, nesting + 1)
        return Shape("buffer", tuple_shapes=(inner,)), _expect(text, end, ")")
    match = _ARRAY_RE.match(text, position)
    if not match:
        raise HloError(f"expected a shape, found {text[position : position + 20]!r}")
    element_type, sizes = match.groups()
    dimensions: list[int] = []
    dynamic: list[bool] = []
    for size in strip_comments(sizes).split(",") if sizes.strip() else ():
        number = _SIZE_RE.match(size)
        if not number:
            raise HloError(f"{size.strip()!r} is not a dimension size, in {match.group()!r}")
        dimensions.append(UNBOUNDED if number[1] == "?" else int(number[3]))
        dynamic.append(number[1] == "?" or number[2] is not None)
    end = match.end()
    layout = None
    if opening := _LAYOUT_RE.match(text, end):
        close = _closing_brace(text, opening.end())
        order, colon, tail = text[opening.end() : close].partition(":")
        try:
            minor_to_major = tuple(int(d) for d in order.split(",")) if order.strip() else ()
        except ValueError:
            raise HloError(f"{order!r} is not a minor-to-major order") from None
        layout, end = Layout(minor_to_major, colon + tail), close + 1
    return Shape(element_type, tuple(dimensions), tuple(dynamic), layout), end


def _scan_tuple(text: str, position: int, nesting: int) -> tuple[Shape, int]:
    position = skip_space(text, position + 1)
    shapes: list[Shape] = []
    while not text.startswith(")", position):
        if shapes:
            position = _expect(text, position, ",")
        shape, position = scan_shape(text, position, nesting + 1)
        shapes.append(shape)
        position = skip_space(text, position)
    return Shape.tuple(shapes), position + 1


def _closing_brace(text: str, position: int) -> int:
    """The offset of the `}` that ends a layout; a physical shape in it (`P(...)`) has braces of its own."""
    depth = 1
    for brace in re.compile(r"[{}]").finditer(text, position):
        depth += 1 if brace.group() == "{" else -1
        if not depth:
            return brace.start()
    raise HloError("a layout is not closed with '}'")


def _expect(text: str, position: int, token: str) -> int:
    position = skip_space(text, position)
    if not text.startswith(token, position):
        raise HloError(f"expected {token!r} in a shape, found {text[position : position + 20]!r}")
    return position + len(token)


def strip_comments(text: str) -> str:
    """`text` without comments; it must not hold strings."""
    return re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.S) if "/" in text else text
