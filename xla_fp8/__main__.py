"""`python -m xla_fp8`: the same program as the console script `xla-fp8`."""

from __future__ import annotations

import sys

from xla_fp8.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
