"""Reading inputs and running passes over them: what `opt`, `explain`, `graph` and `run` do alike."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from xla_fp8.cli import options
from xla_fp8.cli.errors import EXIT_ERROR, EXIT_OK, UsageError, describe
from xla_fp8.cli.inputs import Source
from xla_fp8.errors import XlaFp8Error

if TYPE_CHECKING:
    from xla_fp8.hlo import HloError, HloModule
    from xla_fp8.passes import PipelineOptions
    from xla_fp8.report import Report


def for_each(sources: Iterable[Source], arguments: argparse.Namespace, work: Callable[[Source], int]) -> int:
    """Calls `work` with every source; one that fails is told about and does not stop the others.

    Returns:
        the exit status: that of the worst.
    """
    status = EXIT_OK
    for source in sources:
        try:
            status = max(status, work(source))
        except UsageError:
            raise
        except BrokenPipeError:
            raise
        except (XlaFp8Error, OSError) as error:
            print(describe(error, source.name, options.stderr_color(arguments)), file=sys.stderr)
            status = EXIT_ERROR
        except MemoryError:
            print(f"{source.name}: error: not enough memory for this module", file=sys.stderr)
            status = EXIT_ERROR
    return status


def run_passes(
    module: HloModule,
    arguments: argparse.Namespace,
    names: Iterable[str] | None = None,
    pass_options: PipelineOptions | None = None,
) -> Report:
    """Runs passes over `module`, in place, as --target, --dialect and --supports say; warnings become lines on stderr.

    Args:
        names: of the passes; the default pipeline where None.
    """
    from xla_fp8 import passes

    with options.spoken_warnings(arguments):
        report: Report = passes.run(
            module, names, options.target_of(arguments), dialect=arguments.dialect, options=pass_options
        )
    return report


def why_no_pass_may_run(module: HloModule, passes: Iterable[str] | None) -> HloError | None:
    """What is wrong with a module that XLA's parser took: it takes more than is HLO, and passes cannot trust that.

    Args:
        passes: those to be run; the default pipeline where None, which looks at modules with FP8 only.

    Returns:
        None where the module is sound, or nothing would be run.
    """
    from xla_fp8.hlo import HloError, verify
    from xla_fp8.passes import mentions_fp8

    if not mentions_fp8(module) if passes is None else not tuple(passes):
        return None
    try:
        verify(module)
    except HloError as error:
        return error
    return None
