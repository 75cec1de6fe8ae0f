"""Options that several commands share, and the readers of their values."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from xla_fp8.cli import color
from xla_fp8.errors import XlaFp8Error

if TYPE_CHECKING:
    from xla_fp8.target import GraphCall, Target, Verdict


def add_common(parser: argparse.ArgumentParser) -> None:
    """`--color`, which every command has."""
    parser.add_argument(
        "--color",
        choices=color.CHOICES,
        default="auto",
        help="colour the text for people: on a terminal (auto, the default), always, never",
    )


def add_xla_verify(parser: argparse.ArgumentParser) -> None:
    """`--xla-verify`, of every command that reads HLO."""
    parser.add_argument(
        "--xla-verify",
        type=boolean,
        default=True,
        metavar="true|false",
        help="ask XLA's own parser too (default true; false reads dumps newer than the installed jaxlib)",
    )


def add_inputs(parser: argparse.ArgumentParser) -> None:
    """`IN ...`, of every command that reads several modules."""
    parser.add_argument(
        "inputs",
        nargs="+",
        metavar="IN",
        help="HLO text (.hlo, .txt) or proto (.pb, .hlo.pb), gzip of either, - for stdin, or a directory of dumps",
    )


def add_output(parser: argparse.ArgumentParser, what: str = "a file") -> None:
    """`-o`, of every command that writes a result."""
    parser.add_argument("-o", "--output", default="-", metavar="OUT", help=f"{what}, or - for stdout (the default)")


def add_pipeline(parser: argparse.ArgumentParser) -> None:
    """What every command that reads HLO and runs passes over it has."""
    add_target(parser)
    parser.add_argument(
        "--supports",
        choices=("rules", "cudnn", "any"),
        default="rules",
        help="what has no cuDNN plan on the target becomes bf16: by the rules of docs/backends.md (rules, the default: "
        "the same on every machine), by asking the cuDNN that is installed (cudnn), or not at all (any)",
    )
    add_xla_verify(parser)


def add_target(parser: argparse.ArgumentParser) -> None:
    """`--target` and `--dialect`."""
    parser.add_argument(
        "--target",
        type=_lazily(_target),
        metavar="TARGET",
        help="what to compile for: h100, h200, b200, l40s, a100, or cc=9.0,cuda=12.4,cudnn=9.1 "
        "(default: the GPU at hand, else h200)",
    )
    parser.add_argument(
        "--dialect",
        choices=("xla", "extended"),
        default="xla",
        help="graph ops: those that XLA itself reads (xla, the default), or those that xla_fp8.jit runs (extended)",
    )


def target_of(arguments: argparse.Namespace) -> Target:
    """The target that --target names or the machine has, which asks what --supports says."""
    from xla_fp8.target import Target

    target = arguments.target if arguments.target is not None else Target.default()
    if arguments.supports == "any":
        return target
    from xla_fp8.backends import cudnn

    ask = cudnn.support if arguments.supports == "cudnn" else cudnn.support_by_rules
    if arguments.dialect == "xla":
        return dataclasses.replace(target, supports=lambda call: cudnn.in_xla(ask(call, target), call))
    return dataclasses.replace(target, supports=lambda call: (_mosaic if call.is_dot else ask)(call, target))


def _mosaic(call: GraphCall, target: Target) -> Verdict:
    """What `xla_fp8.jit` asks about a dot: of the backends only mosaic runs one."""
    from xla_fp8.backends.registry import BACKENDS

    return BACKENDS["mosaic"]().supports(call, target)


@contextlib.contextmanager
def spoken_warnings(arguments: argparse.Namespace) -> Iterator[None]:
    """Prints Python's warnings as the command line prints things: one line each, without the line of our source."""
    paint = stderr_color(arguments)

    def show(message: Warning | str, *_: object, **__: object) -> None:
        print(f"xla-fp8: {paint('warning:', 'error')} {message}", file=sys.stderr)

    with warnings.catch_warnings():
        warnings.simplefilter("always", UserWarning)
        warnings.showwarning = show
        yield


def boolean(text: str) -> bool:
    """Reads true or false, as XLA's flags do."""
    value = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(text.lower())
    if value is None:
        raise argparse.ArgumentTypeError(f"expected true or false, not {text!r}")
    return value


def natural(text: str) -> int:
    """Reads a whole number of at least 0."""
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 0, not {text!r}")
    return value


def pass_list(text: str) -> tuple[str, ...]:
    """Reads `a,b,c`; "" is no pass. A name that is none is a usage error."""
    from xla_fp8 import passes

    names: tuple[str, ...] = passes.parse_pipeline(text) if text.strip() else ()
    return names


def _target(text: str) -> Target:
    from xla_fp8.target import Target

    return Target.parse(text)


def _lazily(read: Callable[[str], object]) -> Callable[[str], object]:
    """An argparse type of a reader that raises XlaFp8Error: its message is the usage error's."""

    def typed(text: str) -> object:
        try:
            return read(text)
        except XlaFp8Error as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return typed


pass_list_type = _lazily(pass_list)
"""`pass_list` as an argparse type."""


def stdout_color(arguments: argparse.Namespace) -> color.Color:
    return color.choose(arguments.color, sys.stdout)


def stderr_color(arguments: argparse.Namespace) -> color.Color:
    return color.choose(arguments.color, sys.stderr)
