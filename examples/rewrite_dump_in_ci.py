"""A check for CI: rewrites the dump of a model, and fails where a convolution is in FP8 no longer.

    python examples/rewrite_dump_in_ci.py --baseline fp8.json --update     once: writes what is in FP8 now
    python examples/rewrite_dump_in_ci.py --baseline fp8.json              in CI

Put your own model in place of `model`, and lower it for the shapes that you mean; nothing is compiled or run, so it
takes seconds on any machine. In the folder `--out` are the rewritten HLO, report.html with a picture of each graph, and
summary.md for the pull request. The baseline counts graphs and refusals by rule, so it changes when a model does and
not when a line moves.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import lax

from xla_fp8 import hlo, passes
from xla_fp8.report import Modules, Report

E4M3 = jnp.float8_e4m3fn


def conv(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def model(x: jax.Array, weights: list[jax.Array], scale: jax.Array, *, clamp: bool = True) -> jax.Array:
    for w in weights:
        y = jax.nn.relu(conv(x.astype(jnp.float32) * scale, w.astype(jnp.float32) * scale)) / scale
        x = (jnp.clip(y, -448, 448) if clamp else y).astype(E4M3)
    return x


def dump(*, clamp: bool = True) -> str:
    """The HLO of the model, with the metadata that source lines come from."""
    x = jax.ShapeDtypeStruct((8, 28, 28, 64), E4M3)
    weights = [jax.ShapeDtypeStruct((3, 3, 64, 64), E4M3)] * 3
    scale = jax.ShapeDtypeStruct((), jnp.float32)
    lowered = jax.jit(model, static_argnames="clamp").lower(x, weights, scale, clamp=clamp)
    return lowered.as_text("hlo", debug_info=True)


def counts(report: Report) -> dict[str, dict[str, int]]:
    """How many graphs there are of each kind, and how many refusals of FP8 convolutions by each rule."""
    return {
        "graphs": dict(sorted(collections.Counter(entry.graph or "" for entry in report.rewritten).items())),
        "refused": dict(sorted(collections.Counter(entry.rule for entry in report.refused_fp8).items())),
    }


def losses(old: dict[str, dict[str, int]], new: dict[str, dict[str, int]]) -> list[str]:
    """What is worse than in the baseline: fewer of a graph, more of a refusal."""
    fewer = [
        f"{new['graphs'].get(graph, 0)} of {count} left: {graph}"
        for graph, count in old["graphs"].items()
        if new["graphs"].get(graph, 0) < count
    ]
    more = [
        f"{count} refused by {rule}, were {old['refused'].get(rule, 0)}"
        for rule, count in new["refused"].items()
        if count > old["refused"].get(rule, 0)
    ]
    return fewer + more


def check(text: str, baseline: Path, out: Path, *, update: bool, target: str = "h200") -> int:
    """Rewrites a dump; returns the exit status."""
    module = hlo.parse(text)
    before = module.clone()
    report = passes.run(module, target=target)
    hlo.verify(module)
    out.mkdir(parents=True, exist_ok=True)
    (out / "rewritten.hlo").write_text(hlo.to_text(module))
    (out / "report.html").write_text(report.to_html(modules=Modules(before, module)))
    (out / "summary.md").write_text(report.to_markdown())
    new = counts(report)
    if update:
        baseline.write_text(json.dumps(new, indent=2) + "\n")
    elif not baseline.exists():
        print(f"{baseline} is not there: run once with --update, and commit it", file=sys.stderr)
        return 1
    found = losses(json.loads(baseline.read_text()), new)
    print(report)
    for loss in found:
        print(f"worse than {baseline}: {loss}", file=sys.stderr)
    if found:
        print("if that is meant, run again with --update and commit the baseline", file=sys.stderr)
    return 1 if found else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--baseline", type=Path, default=Path("fp8.json"), help="what was in FP8 before")
    parser.add_argument("--update", action="store_true", help="write the baseline")
    parser.add_argument("--out", type=Path, default=Path("build/ci"), help="folder for the HLO and the reports")
    parser.add_argument("--break-it", action="store_true", help="leave the clamps out, to see the check fail")
    arguments = parser.parse_args()
    text = dump(clamp=not arguments.break_it)
    return check(text, arguments.baseline, arguments.out, update=arguments.update)


if __name__ == "__main__":
    raise SystemExit(main())
