"""Reading inputs and running passes over them: what `opt`, `explain` and `graph` do alike."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable

from xla_fp8.cli import options
from xla_fp8.cli.errors import EXIT_ERROR, EXIT_OK, UsageError, describe
from xla_fp8.cli.inputs import Source
from xla_fp8.errors import XlaFp8Error


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
