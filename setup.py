"""The list of packages: xla_fp8 as it stands, and the folder passes/ installed as xla_fp8.passes.

Everything else is in pyproject.toml. `passes/` is never a top-level module of an installation, so a user's own
`passes` module neither shadows it nor is shadowed by it.
"""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["xla_fp8", "xla_fp8.*"]),
        "xla_fp8.passes",
        *(f"xla_fp8.passes.{name}" for name in find_packages("passes")),
    ],
    package_dir={"xla_fp8.passes": "passes"},
)
