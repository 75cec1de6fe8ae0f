"""The attributes of an instruction: an ordered map of name → text, and the values that passes read from the text.

Attributes stay text until somebody asks, so unknown ones survive a round trip untouched. Each typed value here has
`parse` and `str`; its text form is XLA's (hlo_instructions.cc, window_util.cc).
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator

from xla_fp8.hlo.errors import HloAttributeError
from xla_fp8.hlo.shape import skip_space

_NAME_RE = re.compile(r"[A-Za-z_][\w.\-]*")
_STRING_RE = re.compile(r'"(?:[^"\\]|\\.)*+"', re.S)
_COMMENT_RE = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)
_PLAIN_RE = re.compile(r"[^\"/{}()\[\]\s,]++")
_CLOSERS = {"{": "}", "(": ")", "[": "]"}


class AttributeMap(dict[str, str]):
    """Attribute name → its text, in the order written. A plain dict that knows how it is printed."""

    def __str__(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.items())

    @staticmethod
    def parse(text: str) -> AttributeMap:
        """Reads `a=x, b={...}` (a leading comma is fine). Raises HloAttributeError."""
        attributes, end = scan_attributes(text, 0, leading_comma=text.lstrip().startswith(","))
        if text[end:].strip():
            raise HloAttributeError(f"not an attribute list: {text!r} (unexpected {text[end:].strip()[:40]!r})")
        return attributes


def scan_attributes(
    text: str, position: int, leading_comma: bool = True, starts: dict[str, int] | None = None
) -> tuple[AttributeMap, int]:
    """Reads `, name=value` repeatedly; returns the map and the offset behind the last value.

    `starts`, where given, receives the offset of each value.
    """
    attributes = AttributeMap()
    end = position
    while True:
        position = skip_space(text, position)
        if attributes or leading_comma:
            if not text.startswith(",", position):
                return attributes, end
            position = skip_space(text, position + 1)
        match = _NAME_RE.match(text, position)
        if not match:
            if not attributes and not leading_comma:
                return attributes, end
            raise AttributeScanError("expected an attribute name after ','", position)
        name = match.group()
        position = skip_space(text, match.end())
        if not text.startswith("=", position):
            raise AttributeScanError(f"expected '=' after attribute name {name!r}", position)
        if name in attributes:
            raise AttributeScanError(f"attribute {name!r} already exists", match.start())
        start = skip_space(text, position + 1)
        position = end = _scan_json(text, start) if name in _JSON_ATTRIBUTES else _scan_value(text, start)
        if end == start:
            raise AttributeScanError(f"attribute {name!r} has no value", start)
        attributes[name] = text[start:end]
        if starts is not None:
            starts[name] = start


class AttributeScanError(HloAttributeError):
    """What scan_attributes raises: `position` is the offset in its text."""

    def __init__(self, message: str, position: int) -> None:
        self.message = message
        self.position = position
        super().__init__(message)


def _scan_value(text: str, position: int) -> int:
    """The end of the attribute value at `position`.

    A value runs to a comma or to white space outside brackets; white space is part of it only before a bracket or `<`
    (`devices=[2] <= [2]`, `mesh['x'=4] {'x'}`), never before a word, which would be the next instruction.
    """
    end = position
    while position < len(text):
        char = text[position]
        if char == '"':
            match = _STRING_RE.match(text, position)
            if not match:
                raise AttributeScanError("a string is not closed with '\"'", position)
            position = match.end()
        elif char in _CLOSERS:
            position = scan_brackets(text, position)
        elif char in ",})]":
            break
        elif char.isspace() or char == "/":
            following = skip_space(text, position)
            if following == position or following >= len(text) or text[following] not in "[({<":
                break
            position = following
            continue
        else:
            match = _PLAIN_RE.match(text, position)
            assert match is not None
            position = match.end()
        end = position
    return end


def _scan_json(text: str, position: int) -> int:
    """The end of text in braces that XLA takes up to the last `}`, whatever other brackets and slashes are in it."""
    if not text.startswith("{", position):
        return _scan_value(text, position)
    depth = 0
    for piece in _JSON_PIECE_RE.finditer(text, position):
        depth += {"{": 1, "}": -1}.get(piece.group(), 0)
        if depth == 0:
            return piece.end()
    raise AttributeScanError("'{' is not closed with '}'", position)


_JSON_ATTRIBUTES = ("backend_config", "frontend_attributes")
_JSON_PIECE_RE = re.compile(r'"(?:[^"\\]|\\.)*+"|[{}]', re.S)
_BRACKET_RE = re.compile(r"[{}()\[\]\"/]")


def scan_brackets(text: str, position: int) -> int:
    """The offset behind the bracket that closes the one at `position`; strings and comments are skipped whole."""
    start = position
    expected: list[str] = []
    while True:
        found = _BRACKET_RE.search(text, position)
        if not found:
            raise AttributeScanError(f"{text[start]!r} is not closed with {_CLOSERS[text[start]]!r}", start)
        position = found.end()
        char = found.group()
        if char == '"':
            match = _STRING_RE.match(text, found.start())
            if not match:
                raise AttributeScanError("a string is not closed with '\"'", found.start())
            position = match.end()
        elif char == "/":
            if match := _COMMENT_RE.match(text, found.start()):
                position = match.end()
        elif char in _CLOSERS:
            expected.append(_CLOSERS[char])
        else:
            if char != expected[-1]:
                raise AttributeScanError(f"expected {expected[-1]!r}, found {char!r}", found.start())
            expected.pop()
            if not expected:
                return position


_ESCAPE_RE = re.compile(rb"\\(x[0-9a-fA-F]{1,2}|[0-7]{1,3}|.)", re.S)
_ESCAPES = {b"n": b"\n", b"t": b"\t", b"r": b"\r", b"a": b"\a", b"b": b"\b", b"f": b"\f", b"v": b"\v"}


def unquote(text: str) -> str:
    """A quoted string's value (absl::CUnescape). Text without quotes is returned as it is."""
    text = text.strip()
    if len(text) < 2 or text[0] != '"' or text[-1] != '"':
        return text
    if "\\" not in text:
        return text[1:-1]
    # Escapes stand for bytes: those above 0x7f are pieces of UTF-8.
    return _ESCAPE_RE.sub(_unescape, text[1:-1].encode(errors="surrogatepass")).decode(errors="replace")


def _unescape(match: re.Match[bytes]) -> bytes:
    code = match[1]
    if code[:1] == b"x" and len(code) > 1:
        return bytes((int(code[1:], 16),))
    if code[:1] in b"01234567":
        return bytes((int(code, 8) & 0xFF,))
    return _ESCAPES.get(code, code)


def quote(value: str) -> str:
    """The text of a string attribute (absl::CEscape, with non-ASCII text kept readable)."""
    table = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return '"' + "".join(table.get(c, c) for c in value) + '"'


def parse_int_list(text: str) -> tuple[int, ...]:
    """`{0,1,2}` → (0, 1, 2)."""
    inner = text.strip()
    if not (inner.startswith("{") and inner.endswith("}")):
        raise HloAttributeError(f"expected a list like {{0,1}}, found {text!r}")
    try:
        return tuple(int(part) for part in inner[1:-1].split(",") if part.strip())
    except ValueError:
        raise HloAttributeError(f"expected a list of integers like {{0,1}}, found {text!r}") from None


def format_int_list(values: tuple[int, ...]) -> str:
    return "{" + ",".join(map(str, values)) + "}"


@dataclasses.dataclass(frozen=True, slots=True)
class WindowDimension:
    """One spatial dimension of a window (xla_data.proto, WindowDimension)."""

    size: int
    stride: int = 1
    padding_low: int = 0
    padding_high: int = 0
    window_dilation: int = 1
    base_dilation: int = 1
    reversal: bool = False

    @property
    def dilated_size(self) -> int:
        """Extent of the dilated window: (size - 1) * window_dilation + 1."""
        return (self.size - 1) * self.window_dilation + 1 if self.size else 0

    def output_size(self, input_size: int) -> int:
        """How many windows fit over `input_size` elements, as XLA's shape inference counts them."""
        base = (input_size - 1) * self.base_dilation + 1 if input_size else 0
        padded = self.padding_low + base + self.padding_high
        return 0 if padded < self.dilated_size or not padded else (padded - self.dilated_size) // self.stride + 1


@dataclasses.dataclass(frozen=True, slots=True)
class Window:
    """`{size=3x3 stride=2x2 pad=1_1x1_1 lhs_dilate=.. rhs_dilate=.. rhs_reversal=..}`: one entry a dimension."""

    dimensions: tuple[WindowDimension, ...] = ()

    @staticmethod
    @functools.lru_cache(maxsize=1024)  # a net has few, and passes ask for them often
    def parse(text: str) -> Window:
        """Raises HloAttributeError where the text is not a window."""
        fields: dict[str, list[str]] = {}
        inner = text.strip().removeprefix("{").removesuffix("}")
        for part in inner.replace(",", " ").split():
            name, equals, value = part.partition("=")
            if not equals or name not in _WINDOW_FIELDS:
                raise HloAttributeError(f"{part!r} is not part of a window, in {text!r}")
            fields[name] = value.split("x")
        rank = len(next(iter(fields.values()), []))
        if any(len(values) != rank for values in fields.values()):
            raise HloAttributeError(f"the parts of window {text!r} have different numbers of dimensions")
        try:
            return Window(tuple(_window_dimension({k: v[i] for k, v in fields.items()}) for i in range(rank)))
        except ValueError:
            raise HloAttributeError(f"window {text!r} has a part that is not a number") from None

    def __str__(self) -> str:
        dims = self.dimensions
        parts = []
        if dims:
            parts.append("size=" + "x".join(str(d.size) for d in dims))
        if any(d.stride != 1 for d in dims):
            parts.append("stride=" + "x".join(str(d.stride) for d in dims))
        if any(d.padding_low or d.padding_high for d in dims):
            parts.append("pad=" + "x".join(f"{d.padding_low}_{d.padding_high}" for d in dims))
        if any(d.base_dilation != 1 for d in dims):
            parts.append("lhs_dilate=" + "x".join(str(d.base_dilation) for d in dims))
        if any(d.window_dilation != 1 for d in dims):
            parts.append("rhs_dilate=" + "x".join(str(d.window_dilation) for d in dims))
        if any(d.reversal for d in dims):
            parts.append("rhs_reversal=" + "x".join(str(int(d.reversal)) for d in dims))
        return "{" + " ".join(parts) + "}"

    def __iter__(self) -> Iterator[WindowDimension]:
        return iter(self.dimensions)

    def __len__(self) -> int:
        return len(self.dimensions)


_WINDOW_FIELDS = ("size", "stride", "pad", "lhs_dilate", "rhs_dilate", "rhs_reversal")


def _window_dimension(fields: dict[str, str]) -> WindowDimension:
    low, _, high = fields.get("pad", "0_0").partition("_")
    return WindowDimension(
        size=int(fields["size"]) if "size" in fields else 1,
        stride=int(fields.get("stride", "1")),
        padding_low=int(low),
        padding_high=int(high),
        window_dilation=int(fields.get("rhs_dilate", "1")),
        base_dilation=int(fields.get("lhs_dilate", "1")),
        reversal=fields.get("rhs_reversal", "0") == "1",
    )


_DIM_LABELS_RE = re.compile(r"([0-9bf?]{2,})_([0-9io?]{2,})->([0-9bf?]{2,})\Z")


@dataclasses.dataclass(frozen=True, slots=True)
class ConvolutionDimensionNumbers:
    """`b01f_01io->b01f`: what each dimension of input, kernel and output is, major to minor as the shapes list them."""

    lhs: str
    rhs: str
    output: str

    @staticmethod
    @functools.lru_cache(maxsize=1024)
    def parse(text: str) -> ConvolutionDimensionNumbers:
        """Raises HloAttributeError where the text is not dim labels."""
        match = _DIM_LABELS_RE.match(text.strip())
        if not match or not (len(match[1]) == len(match[2]) == len(match[3])):
            raise HloAttributeError(f"expected dim_labels like b01f_01io->b01f, found {text!r}")
        labels = ConvolutionDimensionNumbers(match[1], match[2], match[3])
        spatial = [str(i) for i in range(len(labels.lhs) - 2)]
        if (
            sorted(labels.lhs) != sorted(["b", "f", *spatial])
            or sorted(labels.rhs) != sorted(["i", "o", *spatial])
            or sorted(labels.output) != sorted(["b", "f", *spatial])
        ):
            raise HloAttributeError(f"dim_labels {text!r} must name every dimension once")
        return labels

    def __str__(self) -> str:
        return f"{self.lhs}_{self.rhs}->{self.output}"

    @property
    def spatial_rank(self) -> int:
        return len(self.lhs) - 2

    @property
    def input_batch_dimension(self) -> int:
        return self.lhs.index("b")

    @property
    def input_feature_dimension(self) -> int:
        return self.lhs.index("f")

    @property
    def input_spatial_dimensions(self) -> tuple[int, ...]:
        return tuple(self.lhs.index(str(i)) for i in range(self.spatial_rank))

    @property
    def kernel_input_feature_dimension(self) -> int:
        return self.rhs.index("i")

    @property
    def kernel_output_feature_dimension(self) -> int:
        return self.rhs.index("o")

    @property
    def kernel_spatial_dimensions(self) -> tuple[int, ...]:
        return tuple(self.rhs.index(str(i)) for i in range(self.spatial_rank))

    @property
    def output_batch_dimension(self) -> int:
        return self.output.index("b")

    @property
    def output_feature_dimension(self) -> int:
        return self.output.index("f")

    @property
    def output_spatial_dimensions(self) -> tuple[int, ...]:
        return tuple(self.output.index(str(i)) for i in range(self.spatial_rank))


_METADATA_FIELD_RE = re.compile(r'([a-z_]+)=("(?:[^"\\]|\\.)*+"|\{[^}]*\}|[^\s,{}]+)', re.S)


@dataclasses.dataclass(frozen=True, slots=True)
class OpMetadata:
    """`metadata={op_name="jit(f)/add" source_file="f.py" source_line=3}` or, in new dumps, a `stack_frame_id`."""

    op_name: str = ""
    op_type: str = ""
    source_file: str = ""
    source_line: int = 0
    stack_frame_id: int = 0

    @staticmethod
    def parse(text: str) -> OpMetadata:
        fields = {m[1]: unquote(m[2]) for m in _METADATA_FIELD_RE.finditer(text)}
        return OpMetadata(
            fields.get("op_name", ""),
            fields.get("op_type", ""),
            fields.get("source_file", ""),
            _to_int(fields.get("source_line", "0")),
            _to_int(fields.get("stack_frame_id", "0")),
        )


def _to_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise HloAttributeError(f"expected a number in metadata, found {text!r}") from None
