"""How lit runs the golden tests: every .hlo file below this folder, but for dumps/ and Inputs/, by its RUN: lines.

`pytest tests/golden` runs them all; `lit hlo_fixtures/simplify -v` works as well.
"""

import os
import shlex
import sys

import lit.formats

config.name = "xla-fp8"
config.test_format = lit.formats.ShTest()
config.suffixes = [".hlo"]
config.excludes = ["dumps", "Inputs"]
config.test_source_root = os.path.dirname(os.path.abspath(__file__))
config.test_exec_root = os.path.join(os.path.dirname(config.test_source_root), "build", "lit")

# In this order: the path of the interpreter goes in last, because it may itself contain "xla-fp8".
config.substitutions += [
    (r"(?<![\w./%-])xla-fp8(?![\w./-])", "%python -m xla_fp8"),
    (r"(?<![\w./%-])(FileCheck|filecheck)(?![\w./-])", "%python -m filecheck"),
    (r"%python", shlex.quote(sys.executable)),
]

# The default target is the GPU at hand, if there is one: the expected output must not depend on it.
config.environment["JAX_PLATFORMS"] = "cpu"
config.environment["NO_COLOR"] = "1"
if "PYTHONPATH" in os.environ:
    config.environment["PYTHONPATH"] = os.environ["PYTHONPATH"]
