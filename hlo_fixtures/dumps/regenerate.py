"""Writes the corpus of HLO dumps beside this file: `python hlo_fixtures/dumps/regenerate.py [NAME...] [--into FOLDER]`.

Without names, every dump of programs/, and INDEX.md, which says what each file is. The files in the repository come
from jaxlib 0.10.2, the oldest that xla_fp8 supports (its text is read by newer ones; the reverse need not hold), on a
CPU. The same jaxlib gives the same text, but for compiled modules, which depend on the CPU; protos also hold the count
of modules that the process has made so far. Texts over 32 KB are gzipped.
"""

from __future__ import annotations

import argparse
import gzip
import inspect
import os
import re
from pathlib import Path
from typing import Any

# Before jax is imported: eight devices for the collectives, and no GPU, whatever machine this is.
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
from jaxlib import _hlo

from xla_fp8 import _jax_compat

ZIP_ABOVE = 32 * 1024  # bytes


def text_of(dump: Any) -> str | bytes:
    """The file's contents."""
    made = dump.make()
    if isinstance(made, str):
        return made if dump.form == "raw" else normal_form(_jax_compat.full_text(made))
    function, arguments = made
    jitted = function if hasattr(function, "lower") else jax.jit(function)
    lowered = jitted.trace(*arguments).lower(lowering_platforms=(dump.platform,))
    if dump.form == "compiled":
        return normal_form(_jax_compat.compiled_hlo_text(lowered.compile()))
    computation = lowered.compiler_ir("hlo")
    module = computation.get_hlo_module()
    if dump.form == "short":
        return normal_form(_jax_compat.module_short_text(module))
    if dump.form == "as_hlo_text":
        return normal_form(computation.as_hlo_text())
    if dump.form == "proto":
        return wrap(module.as_serialized_hlo_module_proto())
    if dump.form == "typed":
        options = _hlo.HloPrintOptions()
        options.print_large_constants = options.print_operand_shape = True
        return normal_form(module.to_string(options))
    text = normal_form(_jax_compat.module_full_text(module))
    return old_metadata(text) if dump.form == "old_metadata" else text


def normal_form(text: str) -> str:
    return text.strip() + "\n"


def wrap(module: bytes) -> bytes:
    """An HloProto: field 1, length-delimited."""
    length, varint = len(module), b""
    while length > 0x7F:
        varint += bytes([length & 0x7F | 0x80])
        length >>= 7
    return b"\x0a" + varint + bytes([length]) + module


def old_metadata(text: str) -> str:
    """Replaces stack-frame ids by file and line, as XLA printed them before it had tables (until 2025)."""

    def table(name: str) -> dict[str, str]:
        lines = text.partition(f"\n{name}\n")[2].partition("\n\n")[0].splitlines()
        return dict(line.split(" ", 1) for line in lines)

    def field(row: str, name: str) -> str:
        return re.search(rf"\b{name}=(\d+)", row)[1]  # type: ignore[index]

    files, locations, frames = table("FileNames"), table("FileLocations"), table("StackFrames")

    def place(match: re.Match[str]) -> str:
        location = locations[field(frames[match[1]], "file_location_id")]
        line = field(location, "line")
        return f"source_file={files[field(location, 'file_name_id')]} source_line={line}"

    head, tables, rest = re.fullmatch(r"(HloModule[^\n]*\n)(.*?\n)(\n%.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    assert "FileNames" in tables
    return head + re.sub(r"stack_frame_id=(\d+)", place, rest)


def write(folder: Path, name: str, contents: str | bytes) -> Path:
    """Writes NAME.hlo, NAME.hlo.gz or NAME.hlo.pb, and removes what an earlier run wrote under another suffix."""
    for suffix in (".hlo", ".hlo.gz", ".hlo.pb"):
        (folder / f"{name}{suffix}").unlink(missing_ok=True)
    if isinstance(contents, bytes):
        path = folder / f"{name}.hlo.pb"
        path.write_bytes(contents)
    elif len(contents) > ZIP_ABOVE:
        path = folder / f"{name}.hlo.gz"
        path.write_bytes(gzip.compress(contents.encode(), mtime=0))
    else:
        path = folder / f"{name}.hlo"
        path.write_text(contents)
    return path


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("names", metavar="NAME", nargs="*")
    arguments.add_argument("--into", metavar="FOLDER", type=Path, default=Path(__file__).resolve().parent)
    options = arguments.parse_args()
    jax.config.update("jax_enable_x64", False)
    # Metadata names files from this folder on: nothing of the machine gets into a dump.
    jax.config.update("jax_hlo_source_file_canonicalization_regex", ".*/(?=dumps/)|.*/site-packages/")
    from programs import fp8, handwritten, models, ops  # noqa: F401  (each adds to the catalog)
    from programs.catalog import CATALOG, FORMS

    index = ["| file | what it is | form |", "|---|---|---|"]
    for dump in CATALOG:
        if options.names and dump.name not in options.names:
            continue
        with jax.enable_x64("f64" in dump.name):
            path = write(options.into, dump.name, text_of(dump))
        print(f"{path.stat().st_size:9d} {path.name}", flush=True)
        what = inspect.getdoc(dump.make) or dump.name.removesuffix(f"_{dump.form}").replace("_", " ")
        index.append(f"| {path.name} | {what} | {FORMS[dump.form]} |")
    if not options.names:
        head = f"Written by regenerate.py with jaxlib {_jax_compat.jaxlib_version()}.\n\n"
        (options.into / "INDEX.md").write_text("# The corpus of HLO dumps\n\n" + head + "\n".join(index) + "\n")


if __name__ == "__main__":
    main()
