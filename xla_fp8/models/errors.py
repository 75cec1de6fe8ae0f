"""What converting a model may raise or warn about."""

from __future__ import annotations

from xla_fp8.errors import XlaFp8Error


class ModelError(XlaFp8Error, TypeError):
    """A model, a layer or a recipe that cannot be converted as asked."""


class MissingPackageError(XlaFp8Error, ImportError):
    """A package that is not installed.

    Args:
        package: its name, and that of our module for it.
        extra: of xla-fp8 that brings it; its own name if "".
        wanted_by: what needs it; our module if "".
    """

    def __init__(self, package: str, extra: str = "", wanted_by: str = "") -> None:
        super().__init__(
            f"{wanted_by or f'xla_fp8.models.{package}'} needs {package}, which is not installed: "
            f"pip install 'xla-fp8[{extra or package}]'"
        )


class NothingConvertedWarning(UserWarning):
    """`convert` left every layer wide."""
