"""What converting a model may raise or warn about."""

from __future__ import annotations

from xla_fp8.errors import XlaFp8Error


class ModelError(XlaFp8Error, TypeError):
    """A model, a layer or a recipe that cannot be converted as asked."""


class MissingPackageError(XlaFp8Error, ImportError):
    """A framework that is not installed."""

    def __init__(self, package: str) -> None:
        super().__init__(
            f"xla_fp8.models.{package} needs {package}, which is not installed: pip install 'xla-fp8[{package}]'"
        )


class NothingConvertedWarning(UserWarning):
    """`convert` left every layer wide."""
