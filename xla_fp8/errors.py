"""The base class of every error that xla_fp8 raises on purpose."""

from __future__ import annotations


class XlaFp8Error(Exception):
    """Something that xla_fp8 refuses or cannot do. The message says what is wrong, where, and what to change.

    Every layer has its own subclasses (`HloParseError`, `GraphStringError`, ...); catching this class catches them all.
    The command line prints the message without a traceback and exits with status 1.
    """
