"""Every private JAX and jaxlib API that xla_fp8 uses, one thin typed function around each.

Nothing is imported before it is needed, so that a process which only asks XLA's parser (`xla_fp8.hlo.xla_process`)
pays for `jaxlib._hlo` alone. Where a new JAX has moved a name, `JaxApiError` says which one; tests/test_jax_compat.py
asks for each. Tried with jax 0.10.2 and 0.12.0.

XLA's parser is C++ and aborts the process on some bad text: text from a user goes to `xla_fp8.hlo.xla_process` first.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from xla_fp8.errors import XlaFp8Error

if TYPE_CHECKING:
    import numpy as np


class JaxApiError(XlaFp8Error):
    """The installed JAX or jaxlib lacks a private name that xla_fp8 needs."""


class HloProtoError(XlaFp8Error):
    """Bytes that are no serialized HloProto or HloModuleProto."""


@functools.cache  # asked for each equation of a program
def _private(module: str, name: str) -> Any:
    """Returns attribute `name` (dotted) of `module`, imported now; JaxApiError when there is none."""
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise JaxApiError(
            f"jaxlib {jaxlib_version()} has no {module}.{name} ({error}). xla_fp8 was tried with jax 0.10.2 to 0.12.0: "
            "install one of these, or teach xla_fp8/_jax_compat.py the new place of that name."
        ) from error
    return found


def jaxlib_version() -> str:
    """The version of the installed jaxlib, e.g. `0.10.2`."""
    from jaxlib import version

    return str(version.__version__)


# HLO text and protos: jaxlib._hlo.


def hlo_text_to_module(text: str) -> Any:
    """Parses HLO text with XLA's own parser (xla/hlo/parser/hlo_parser.cc) and returns a `jaxlib._hlo.HloModule`.

    Raises:
        RuntimeError: the text is no HLO. XLA's message starts `INVALID_ARGUMENT` and holds `was parsing LINE:COLUMN:`.
    """
    return _private("jaxlib._hlo", "hlo_module_from_text")(text)


def module_full_text(module: Any) -> str:
    """Prints everything that a `jaxlib._hlo.HloModule` holds, so that equal strings mean equal modules.

    XLA's defaults (HloPrintOptions in xla/hlo/ir/hlo_print_options.h) elide constants of more than 10 elements; every
    other thing that a default leaves out (operand shapes, the bodies of async computations) stands elsewhere in the
    text. All options that matter are set all the same, because a default may change.
    """
    options = _private("jaxlib._hlo", "HloPrintOptions")()
    for option in (
        "print_metadata",
        "print_backend_config",
        "print_control_dependencies",
        "print_large_constants",
        "print_extra_attributes",
        "print_ids",
        "print_operand_names",
        "print_percent",
        "print_program_shape",
        "print_result_shape",
        "include_layout_in_shapes",
    ):
        if not hasattr(options, option):
            raise JaxApiError(
                f"jaxlib {jaxlib_version()}: HloPrintOptions has no {option}: its print may lose something"
            )
        setattr(options, option, True)
    return str(module.to_string(options))


def module_short_text(module: Any) -> str:
    """Prints a `jaxlib._hlo.HloModule` in XLA's short-parsable form: no `%`, no metadata, no backend_config."""
    return str(module.to_string(_private("jaxlib._hlo", "HloPrintOptions").short_parsable()))


def full_text(text: str) -> str:
    """Parses HLO text and prints all of it: the normal form in which two texts are compared.

    Raises:
        RuntimeError: as `hlo_text_to_module`.
    """
    return module_full_text(hlo_text_to_module(text))


def hlo_text_to_proto(text: str) -> bytes:
    """Parses HLO text and returns the serialized HloModuleProto."""
    return bytes(hlo_text_to_module(text).as_serialized_hlo_module_proto())


def module_proto_to_text(proto: bytes) -> str:
    """The full text of a serialized HloModuleProto (of an HloProto too: it is unwrapped).

    Raises:
        HloProtoError: the bytes are no protocol buffer, or hold no module.
        Exception: XLA cannot build a module of them; nanobind decides the class.
    """
    module_class = _private("jaxlib._hlo", "HloModule")
    return module_full_text(module_class.from_serialized_hlo_module_proto(hlo_proto_unwrap(proto)))


def hlo_proto_unwrap(proto: bytes) -> bytes:
    """Returns the HloModuleProto inside an HloProto, which `--xla_dump_hlo_as_proto` writes; a bare module as it is.

    In xla/service/hlo.proto, an HloProto is `hlo_module = 1; buffer_assignment = 3` (2 is reserved), and an
    HloModuleProto is `name = 1; entry_computation_name = 2; computations = 3; ...`, of which XLA always writes 2. So
    field 2 tells them apart, and reading the top level of the wire format is enough: no protobuf library is needed.

    Raises:
        HloProtoError: the bytes are no protocol buffer, or hold neither field.
    """
    module: bytes | None = None
    for number, value in _proto_fields(proto):
        if number == 2:
            return proto
        if number == 1 and value is not None:
            module = value
    if module is None:
        raise HloProtoError("no HLO module in these bytes: an HloProto has one in field 1, an HloModuleProto is one")
    return module


def _proto_fields(message: bytes) -> Iterator[tuple[int, bytes | None]]:
    """Yields (field number, contents) of each top-level field; contents are None unless length-delimited."""
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            if position >= len(message) or shift > 63:
                raise HloProtoError(f"no protocol buffer: bad varint at byte {position} of {len(message)}")
            byte = message[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while position < len(message):
        start = position
        tag = varint()
        number, wire_type = tag >> 3, tag & 7
        contents: bytes | None = None
        if wire_type == 0:
            varint()
        elif wire_type == 1:
            position += 8
        elif wire_type == 5:
            position += 4
        elif wire_type == 2:
            size = varint()
            contents = message[position : position + size]
            position += size
        else:
            raise HloProtoError(f"no protocol buffer: unknown wire type {wire_type} at byte {start}")
        if number == 0 or position > len(message):
            raise HloProtoError(f"no protocol buffer: the field at byte {start} of {len(message)} ends past the end")
        yield number, contents


# StableHLO: jaxlib._jax.mlir and jaxlib's MLIR bindings.


def hlo_to_stablehlo(text: str) -> bytes:
    """Converts HLO text to a StableHLO module, as MLIR bytecode.

    Raises:
        RuntimeError: as `hlo_text_to_module`.
        Exception: the HLO has no StableHLO form, or its shapes do not agree; nanobind decides the class.
    """
    return bytes(_private("jaxlib._jax", "mlir.hlo_to_stablehlo")(hlo_text_to_proto(text)))


def hlo_functions_to_stablehlo(text: str, names: Sequence[str]) -> dict[str, bytes]:
    """Converts several computations of one HLO module to StableHLO: one call of XLA for all takes the time of two.

    Args:
        text: a module that holds them; nothing needs to call them.
        names: those computations; what they call is named `name.…`.

    Returns:
        Each name → a module of its own as MLIR bytecode, whose `main` that computation is.

    Raises:
        As `hlo_to_stablehlo`. KeyError where XLA has left a computation out.
    """
    ir = "jaxlib.mlir.ir"
    context = _stablehlo_context()
    functions: dict[str, list[Any]] = {name: [] for name in names}
    together = _private(ir, "Module").parse(hlo_to_stablehlo(text), context)
    for function in together.body.operations:
        name = function.name.value
        functions.get(name if name in functions else name.partition(".")[0], []).append(function)
    modules: dict[str, bytes] = {}
    with context, _private(ir, "Location").unknown():
        for name, members in functions.items():
            module = _private(ir, "Module").create()
            for function in members:
                function.operation.clone(_private(ir, "InsertionPoint")(module.body))
            table = _private(ir, "SymbolTable")(module.operation)
            table.set_symbol_name(table[name], "main")
            bytecode = io.BytesIO()
            module.operation.write_bytecode(bytecode)
            modules[name] = bytecode.getvalue()
    return modules


def verify_stablehlo(stablehlo: bytes | str) -> str:
    """Parses a StableHLO module (MLIR bytecode or text), runs the verifiers of its dialects, and returns its text.

    Raises:
        jaxlib.mlir.ir.MLIRError: the module breaks a rule; the message says which.
    """
    context = _stablehlo_context()
    module = _private("jaxlib.mlir.ir", "Module").parse(stablehlo, context)
    module.operation.verify()
    return str(module)


def _stablehlo_context() -> Any:
    """A context with the dialects that `hlo_to_stablehlo` may use: what JAX's own make_ir_context does, without JAX.

    Importing jax takes half a second, which a worker process would pay at each start.
    """
    context = _private("jaxlib.mlir.ir", "Context")()
    registry = _private("jaxlib.mlir.ir", "DialectRegistry")()
    _private("jaxlib.mlir._mlir_libs._jax_mlir_ext", "register_dialects")(registry)  # func, arith, ...
    context.append_dialect_registry(registry)
    context.load_all_available_dialects()
    _private("jaxlib.mlir.dialects.sdy", "register_dialect")(context)
    _private("jaxlib.mlir.dialects.mhlo", "register_mhlo_dialect")(context)
    _private("jaxlib.mlir.dialects.chlo", "register_dialect")(context)
    _private("jaxlib.mlir.dialects.stablehlo", "register_dialect")(context)
    return context


# What JAX lowered and compiled.


def lowered_hlo_text(lowered: Any) -> str:
    """The full HLO text of a `jax.stages.Lowered`: with metadata and every constant.

    `lowered.as_text("hlo")` drops metadata and elides constants of more than 10 elements.
    """
    return module_full_text(lowered.compiler_ir("hlo").get_hlo_module())


def lowered_short_text(lowered: Any) -> str:
    """The HLO text of a `jax.stages.Lowered` in XLA's short-parsable form: without metadata, with every constant."""
    return module_short_text(lowered.compiler_ir("hlo").get_hlo_module())


def compiled_hlo_text(compiled: Any) -> str:
    """The full HLO text of a `jax.stages.Compiled`, optimized by XLA; its first module if there are several."""
    return module_full_text(compiled.runtime_executable().hlo_modules()[0])


# Running HLO.


def compile_hlo_text(
    text: str, platform: str | None = None, flags: Mapping[str, bool | int | str] | None = None
) -> Any:
    """Compiles HLO text for one device and returns a `jaxlib._jax.LoadedExecutable`, for `execute`.

    Layouts, aliasing and shardings of the module's parameters and results are dropped: arrays go in and come out in
    their default layout, and an argument is never donated.

    Args:
        text: a module whose parameters are arrays.
        platform: "cpu", "cuda", ...; JAX's default where None.
        flags: debug options of XLA by name, e.g. `{"xla_allow_excess_precision": False}`.

    Raises:
        RuntimeError: no such platform, or the HLO has no StableHLO form, or XLA cannot compile it.
    """
    ir = "jaxlib.mlir.ir"
    module = _private(ir, "Module").parse(hlo_to_stablehlo(text), _stablehlo_context())
    for name in [attribute.name for attribute in _named_attributes(module.operation)]:
        if name.startswith("mhlo."):
            del module.operation.attributes[name]
    main = _private(ir, "SymbolTable")(module.operation)["main"]
    for name in ("arg_attrs", "res_attrs"):
        if name in main.attributes:
            del main.attributes[name]
    bytecode = io.BytesIO()
    module.operation.write_bytecode(bytecode)
    backend = _private("jax._src.xla_bridge", "get_backend")(platform)
    options = _private("jax._src.compiler", "get_compile_options")(
        num_replicas=1, num_partitions=1, env_options_overrides=dict(flags or {})
    )
    devices = _private("jaxlib._jax", "DeviceList")(tuple(backend.local_devices()[:1]))
    return backend.compile_and_load(bytecode.getvalue(), devices, options)


def _named_attributes(operation: Any) -> list[Any]:
    return [operation.attributes[position] for position in range(len(operation.attributes))]


def execute(executable: Any, arguments: Sequence[np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
    """Runs what `compile_hlo_text` returned and returns its results; those of nested tuples one after the other.

    Args:
        executable: from `compile_hlo_text`.
        arguments: of the parameters' own types and shapes: PJRT checks neither and would read other bytes.
    """
    import jax
    import numpy as np

    device = executable.local_devices()[0]
    with jax.enable_x64(True):  # else device_put makes f32 of f64
        buffers = [jax.device_put(argument, device) for argument in arguments]
    results = executable.execute_sharded(buffers)
    return [np.asarray(shards[0]) for shards in results.disassemble_into_single_device_arrays()]


def gpu_compute_capability() -> tuple[int, ...] | None:
    """Compute capability of the first NVIDIA GPU that JAX sees, e.g. (9, 0); None where it sees none.

    Starts JAX's CUDA client, which takes seconds and device memory.
    """
    import jax

    try:
        devices = jax.devices("cuda")
    except RuntimeError:
        return None
    capability = str(devices[0].compute_capability)
    return tuple(int(part) for part in capability.split("."))


# Jaxprs. Since jax 0.12 a Jaxpr holds its constants and ClosedJaxpr is another name for it; before, a ClosedJaxpr
# wraps a Jaxpr.


def open_jaxpr(jaxpr: Any) -> Any:
    """The object with `constvars`, `invars`, `eqns` and `outvars`, of a Jaxpr or a ClosedJaxpr."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def with_equations(jaxpr: Any, equations: Sequence[Any], outvars: Sequence[Any]) -> Any:
    """`jaxpr`, open or closed as it was, with other equations behind the same inputs."""
    inner = open_jaxpr(jaxpr)
    changed = inner.replace(eqns=list(equations), outvars=list(outvars))
    return changed if inner is jaxpr else jaxpr.replace(jaxpr=changed)


def close_equations(invars: Sequence[Any], outvars: Sequence[Any], equations: Sequence[Any], name: str) -> Any:
    """A ClosedJaxpr without constants and effects, of equations that were taken out of another jaxpr."""
    from jax.extend import core

    debug_info = core.DebugInfo(
        name, name, tuple(f"input{i}" for i in range(len(invars))), tuple(f"result[{i}]" for i in range(len(outvars)))
    )
    jaxpr = core.Jaxpr((), list(invars), list(outvars), list(equations), core.no_effects, debug_info)
    return core.ClosedJaxpr(jaxpr, ())


def trace(function: Callable[..., Sequence[Any]], avals: Sequence[Any], name: str) -> Any:
    """The closed jaxpr of a function of arrays that returns a sequence of arrays.

    `jax.make_jaxpr` looks at signatures, trees and its cache first, which takes half a millisecond.
    """
    from jax.extend import core

    debug_info = core.DebugInfo(name, name, tuple(f"input{i}" for i in range(len(avals))), None)
    wrapped = _private("jax._src.linear_util", "wrap_init")(function, debug_info=debug_info)
    tracing = _private("jax._src.interpreters.partial_eval", "trace_to_jaxpr_dynamic")
    jaxpr, _, constants = tracing(wrapped, list(avals))
    return core.ClosedJaxpr(jaxpr, constants)


def fresh_variable(aval: Any) -> Any:
    """A variable that no jaxpr has yet."""
    from jax.extend import core

    return core.gensym()(aval)  # type: ignore[no-untyped-call]


def equation_source(equation: Any) -> str | None:
    """The user's "file.py:42" for an equation; None where JAX kept no traceback."""
    frame = _private("jax._src.source_info_util", "user_frame")(equation.source_info.traceback)
    return f"{frame.file_name}:{frame.start_line}" if frame is not None else None


def is_user_file(path: str) -> bool:
    """Whether a source file is the user's, and not JAX's, the standard library's or one of `hide_from_sources`."""
    return bool(_private("jax._src.source_info_util", "is_user_filename")(path))


@functools.cache
def hide_from_sources(folder: str) -> None:
    """Makes JAX name the callers of the files in `folder`, and never those files, as sources of operations."""
    _private("jax._src.source_info_util", "register_exclusion")(os.path.join(folder, ""))


def equation_source_info(equation: Any, *, within: Any) -> Any:
    """The source info of an equation that is inlined where the equation `within` was.

    Their name scopes are joined. Where no line of the user's made the equation (jax.nn's functions are traced once, by
    themselves), it has the line of the call.
    """
    info, call = equation.source_info, within.source_info
    traceback = info.traceback if _has_user_frame(info.traceback) else call.traceback
    return info.replace(traceback=traceback, name_stack=call.name_stack + info.name_stack)


@functools.lru_cache(maxsize=4096)
def _has_user_frame(traceback: Any) -> bool:
    return _private("jax._src.source_info_util", "user_frame")(traceback) is not None


def has_own_context(equation: Any) -> bool:
    """Whether an equation stands under a context that means something: `compute_on`, or XLA metadata."""
    return equation.ctx.compute_type is not None or bool(equation.ctx.xla_metadata)


def is_plain_jit(equation: Any) -> bool:
    """Whether a `jit` equation is only a function call: no shardings, layouts, donation or compiler options.

    Under `jax.set_mesh` each has the mesh of the program, which says nothing; shard_map only changes its axes' types.
    """
    params = equation.params
    unspecified = _unspecified()
    mesh = params["ctx_mesh"]
    return (
        all(sharding is unspecified for sharding in (*params["in_shardings"], *params["out_shardings"]))
        and all(layout is None for layout in (*params["in_layouts"], *params["out_layouts"]))
        and not any(params["donated_invars"])
        and not params["compiler_options_kvs"]
        and (mesh.empty or mesh.shape_tuple == equation.ctx.cur_abstract_mesh.shape_tuple)
    )


SHARDING_PARAMETERS = ("sharding", "out_sharding")
"""What primitives call the parameter that says how their result is sharded."""


@functools.cache
def _unspecified() -> Any:
    return _private("jax._src.sharding_impls", "UNSPECIFIED")


def evaluate_staged(
    jaxpr: Any, arguments: Sequence[Any], name: str, of_jit: Mapping[str, Any] | None = None
) -> list[Any]:
    """Evaluates a closed jaxpr. Where JAX is tracing, as the call of a jitted function.

    One equation then holds the jaxpr as it is; to bind each of its equations again takes as long as to trace them did.

    Args:
        of_jit: `parameters_of_jit()`, where there is more than one to evaluate.
    """
    from jax.extend import core

    tracing = isinstance(
        _private("jax._src.core", "trace_ctx").trace,
        _private("jax._src.interpreters.partial_eval", "DynamicJaxprTrace"),
    )
    if not tracing or jaxpr.consts:
        return list(core.jaxpr_as_fun(jaxpr)(*arguments))
    inputs, outputs = len(jaxpr.in_avals), len(jaxpr.out_avals)
    parameters = (parameters_of_jit() if of_jit is None else dict(of_jit)) | {
        "jaxpr": jaxpr,
        "name": name,
        "in_shardings": (_unspecified(),) * inputs,
        "out_shardings": (_unspecified(),) * outputs,
        "in_layouts": (None,) * inputs,
        "out_layouts": (None,) * outputs,
        "donated_invars": (False,) * inputs,
    }
    return list(core.primitives.jit_p.bind(*arguments, **parameters))  # type: ignore[no-untyped-call]


def parameters_of_jit() -> dict[str, Any]:
    """The parameters of a `jit` equation that is traced here: the installed JAX's own defaults, and the mesh."""
    import jax

    (equation,) = open_jaxpr(jax.make_jaxpr(jax.jit(lambda: ()))()).eqns
    return dict(equation.params)


@contextlib.contextmanager
def context_of(equation: Any) -> Iterator[None]:
    """Within it, what is bound has the equation's source, its scopes behind the current ones, and its context."""
    info = equation.source_info
    stack = _private("jax._src.source_info_util", "current_name_stack")() + info.name_stack
    user_context = _private("jax._src.source_info_util", "user_context")
    with user_context(info.traceback, name_stack=stack), equation.ctx.manager:
        yield


def bind_equation(equation: Any, operands: Sequence[Any]) -> list[Any]:
    """The results of an equation, bound anew as JAX's own evaluation of a jaxpr does."""
    with context_of(equation):
        parameters = equation.primitive.get_bind_params(equation.params)
        results = equation.primitive.bind(*operands, **parameters)
    return list(results) if equation.primitive.multiple_results else [results]


def like_jaxpr(closed: Any, original: Any) -> Any:
    """A closed jaxpr, opened if the original is open. An open one has no place for constants."""
    if isinstance(original, type(closed)):
        return closed
    if closed.consts:
        raise JaxApiError("a jaxpr with constants cannot take the place of an open one")
    return open_jaxpr(closed)


def vmapped_examples(x: Any) -> int:
    """How many examples a value stands for inside jax.vmap: the product of the sizes of the vmaps that batch it.

    1 outside, and inside a jit that stands within the vmap: its tracers do not know.
    """
    batched = _private("jax._src.interpreters.batching", "BatchTracer")
    differentiated = (
        _private("jax._src.interpreters.ad", "JVPTracer"),
        _private("jax._src.interpreters.ad", "LinearizeTracer"),
    )
    examples = 1
    while True:
        if isinstance(x, batched):
            examples *= x.val.shape[x.batch_dim]
            x = x.val
        elif isinstance(x, differentiated):
            x = x.primal
        else:
            return examples


def alike_over_mesh(*operands: Any) -> list[Any]:
    """Operands that vary over the same axes of a mesh, as JAX's own operations make them inside shard_map."""
    return list(_private("jax._src.core", "auto_insert_reshard")(*operands))


def evaluate_equations(jaxpr: Any, arguments: Sequence[Any]) -> list[Any]:
    """Evaluates a closed jaxpr of plain equations outside the meshes and contexts in which it was traced.

    `jaxpr_as_fun` enters each equation's own context, a shard_map's manual mesh among them, which makes no sense in a
    module of its own; pvary, which only types arrays for it, does nothing, nor do shardings over that mesh. Source
    locations and scopes are kept.
    """
    import numpy as np
    from jax.extend import core

    user_context = _private("jax._src.source_info_util", "user_context")
    inner = open_jaxpr(jaxpr)
    values: dict[Any, Any] = dict(zip(inner.constvars, jaxpr.consts, strict=True))
    values.update(zip(inner.invars, arguments, strict=True))

    def read(atom: Any) -> Any:
        if isinstance(atom, core.Literal):  # a literal's value has a type of its own, over a mesh as well
            return atom.val if _is_plain_type(atom.aval) else np.asarray(atom.val)
        return values[atom]

    for equation in inner.eqns:
        if equation.primitive.name == "pvary":
            values.update(zip(equation.outvars, map(read, equation.invars), strict=True))
            continue
        info = equation.source_info
        with user_context(info.traceback, name_stack=info.name_stack):
            parameters = equation.primitive.get_bind_params(equation.params)
            parameters |= {name: None for name in SHARDING_PARAMETERS if name in parameters}
            results = equation.primitive.bind(*map(read, equation.invars), **parameters)
        values.update(zip(equation.outvars, results if equation.primitive.multiple_results else [results], strict=True))
    return [read(atom) for atom in inner.outvars]


def without_contexts(jaxpr: Any) -> Any | None:
    """A closed jaxpr of plain equations that does what `evaluate_equations` makes of `jaxpr`.

    None where only tracing tells: where types or equations are over a mesh, or there are constants.
    """
    inner = open_jaxpr(jaxpr)
    if jaxpr.consts or not all(_is_plain_type(atom.aval) for atom in (*inner.invars, *inner.outvars)):
        return None
    equations = []
    for equation in inner.eqns:
        if not equation.ctx.cur_abstract_mesh.empty or equation.primitive.name == "pvary":
            return None
        for atom in (*equation.invars, *equation.outvars):
            if not _is_plain_type(atom.aval):
                return None
        if any(equation.params.get(name) is not None for name in SHARDING_PARAMETERS):
            parameters = {n: None if n in SHARDING_PARAMETERS else value for n, value in equation.params.items()}
            equation = equation.replace(params=parameters)
        equations.append(equation)
    return with_equations(jaxpr, equations, inner.outvars)


@functools.lru_cache(maxsize=4096)
def _is_plain_type(aval: Any) -> bool:
    """Whether a type says nothing but shape and dtype: no mesh, memory or layout."""
    import jax

    return bool(aval == jax.core.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type))


def inputs_in_use(closed: Any) -> list[bool]:
    """For each input of a ClosedJaxpr whether an output or an effect depends on it.

    Loops and branches are looked into where JAX has a rule to drop dead code in them; else all their inputs count.
    """
    inner = open_jaxpr(closed)
    _, used = _private("jax._src.interpreters.partial_eval", "dce_jaxpr")(inner, [True] * len(inner.outvars))
    return list(used)


def jvp_of_jaxpr(jaxpr: Any, nonzeros: Sequence[bool]) -> tuple[Any, list[bool]]:
    """The jaxpr of (primals, tangents of those inputs that `nonzeros` names) → (outputs, their nonzero tangents).

    Also returns which outputs have a nonzero tangent.
    """
    closed, nonzeros_out = _private("jax._src.interpreters.ad", "jvp_jaxpr")(jaxpr, list(nonzeros), instantiate=False)
    return closed, list(nonzeros_out)


def split_jaxpr(jaxpr: Any, unknown: Sequence[bool], instantiate: Sequence[bool]) -> tuple[Any, Any, list[bool]]:
    """Splits a jaxpr into what is known from its known inputs, and the rest.

    Returns:
        known inputs → (known outputs, residuals); (residuals, unknown inputs) → unknown outputs; which outputs are
        unknown.
    """
    split = _private("jax._src.interpreters.partial_eval", "partial_eval_jaxpr_nounits")
    known, rest, unknown_out, _ = split(jaxpr, list(unknown), list(instantiate))
    return known, rest, list(unknown_out)


def save_as(primitive: Any, stands_for: Callable[[Any], Sequence[Any]]) -> None:
    """Makes `jax.checkpoint` save or recompute the results of a primitive as its policy says of other equations.

    Args:
        stands_for: an equation of `primitive` → the equations that the policy is asked about; one to save is enough.
    """
    module = "jax._src.interpreters.partial_eval"
    ensure_enum, saveable_type = _private(module, "ensure_enum"), _private(module, "SaveableType")

    def is_saved(policy: Callable[..., Any], equation: Any) -> bool:
        answers = (policy(e.primitive, *(atom.aval for atom in e.invars), **e.params) for e in stands_for(equation))
        return any(isinstance(ensure_enum(answer), saveable_type) for answer in answers)

    def rule(policy: Any, unknown: Sequence[bool], ready: Sequence[bool], equation: Any) -> tuple[Any, ...]:
        results = len(equation.outvars)
        needed = [atom for atom, is_ready in zip(equation.invars, ready, strict=True) if not is_ready]
        if any(unknown):
            return None, equation, [True] * results, [True] * results, needed
        if is_saved(policy, equation):
            return equation, None, [False] * results, [False] * results, []
        return equation, equation, [False] * results, [True] * results, needed

    _private(module, "partial_eval_jaxpr_custom_rules")[primitive] = rule


def weakref_lru_cache(function: Callable[..., Any]) -> Callable[..., Any]:
    """Caches on the identity of the first argument, which is held weakly, and on the others; as JAX caches jaxprs."""
    cached: Callable[..., Any] = _private("jax._src.util", "weakref_lru_cache")(function)
    return cached


def wrapped_like(function: Callable[..., Any], original: Any) -> Any:
    """`function` in the wrapper in which custom_vjp equations hold `original`."""
    return _private("jax._src.linear_util", "wrap_init")(function, debug_info=original.debug_info)


# Lowering.


def require_devices_during_lowering(primitive: Any) -> None:
    """Makes JAX name the devices to the lowering rule of a primitive, which custom partitioning needs."""
    _private("jax._src.dispatch", "prim_requires_devices_during_lowering").add(primitive)


def is_for_export(context: Any) -> bool:
    """Whether `jax.export` asks for what a `LoweringRuleContext` lowers: another process may run it."""
    return bool(context.module_context.lowering_parameters.for_export)


def is_partitioned(context: Any) -> bool:
    """Whether XLA's partitioner will split what a `LoweringRuleContext` lowers: devices, and axes not all manual."""
    axis_context = context.module_context.axis_context
    if isinstance(axis_context, _private("jax._src.sharding_impls", "ShardingContext")):
        return axis_context.num_devices > 1 and axis_context.device_assignment is not None
    if isinstance(axis_context, _private("jax._src.sharding_impls", "SPMDAxisContext")):
        return bool(axis_context.mesh.size > 1 and axis_context.manual_axes != frozenset(axis_context.mesh.axis_names))
    return False


def spans_devices(context: Any) -> bool:
    """Whether what a `LoweringRuleContext` lowers is for several devices and no shard of theirs.

    As `is_partitioned`, where JAX need not name the devices (`require_devices_during_lowering`).
    """
    axis_context = context.module_context.axis_context
    is_sharding = isinstance(axis_context, _private("jax._src.sharding_impls", "ShardingContext"))
    return axis_context.num_devices > 1 if is_sharding else is_partitioned(context)


def local_devices_of(context: Any) -> tuple[Any, ...]:
    """The devices of this process that run what a `LoweringRuleContext` lowers; all it has where JAX names none."""
    import jax

    axis_context = context.module_context.axis_context
    devices = getattr(axis_context, "device_assignment", None)
    mesh = getattr(axis_context, "mesh", None)
    if devices is None and isinstance(mesh, jax.sharding.Mesh):
        devices = mesh.devices.flat
    if devices is None:
        devices = jax.local_devices()
    return tuple(device for device in devices if device.process_index == jax.process_index())


def sharded_as_typed(context: Any, value: Any, aval: Any) -> Any:
    """`value` with the sharding constraint that JAX's lowering puts on a result of that type; none over automatic axes.

    Args:
        context: the `LoweringRuleContext`.
    """
    return _private("jax._src.interpreters.mlir", "lower_with_sharding_in_types")(context, value, aval)


def lower_jaxpr(context: Any, jaxpr: Any, arguments: Sequence[Any]) -> list[Any]:
    """Lowers a closed jaxpr's equations at the insertion point, and returns its results.

    `lower_fun` would trace it again, which it needs where there are constants or effects.

    Args:
        context: a `LoweringRuleContext` whose `avals_in` are the jaxpr's.
    """
    from jax.extend import core
    from jax.interpreters import mlir

    inner = open_jaxpr(jaxpr)
    if jaxpr.consts or inner.effects:
        results = mlir.lower_fun(core.jaxpr_as_fun(jaxpr), multiple_results=True)(context, *arguments)
    else:
        module_context = context.module_context
        if context.platforms is not None:
            module_context = module_context.replace(platforms=context.platforms)
        results, _ = mlir.jaxpr_subcomp(
            module_context,
            inner,
            context.name_stack,
            mlir.TokenSet(),
            (),
            *arguments,
            dim_var_values=context.dim_var_values,
            const_lowering=context.const_lowering,
            outer_traceback=None,
        )
    values, _ = mlir.ir_tree_registry.flatten(results)
    return list(values)


def merge_stablehlo(context: Any, stablehlo: bytes, name: str) -> tuple[str, list[Any]]:
    """Merges a StableHLO module into the one that is being lowered.

    Args:
        context: the `LoweringRuleContext`.
        stablehlo: MLIR bytecode with a function `main`.
        name: what to call `main`, if it is free.

    Returns:
        The name that `main` got, and the custom calls of the merged module in their order.
    """
    from jax.interpreters import mlir

    module_context = context.module_context
    source = mlir.ir.Module.parse(stablehlo, module_context.context)
    calls = list(_custom_calls(source.operation))
    merged = mlir.merge_mlir_modules(module_context.module, name, source, dst_symtab=module_context.symbol_table)
    return str(merged), calls


def _custom_calls(operation: Any) -> Iterator[Any]:
    for region in operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                if inner.operation.name == "stablehlo.custom_call":
                    yield inner.operation
                yield from _custom_calls(inner.operation)


# Kernels of Pallas Mosaic GPU: a load whose parameters vary, and the dialects of MLIR.


def load_ref(ref: Any, layout: Any, *, optimized: bool = True) -> Any:
    """`plgpu.load` of a whole ref in a layout. JAX 0.10 wants an index, of which 0.11 warns and which 0.12 has not.

    Args:
        optimized: as `plgpu.load` has it: whether a load without an optimized implementation is an error.
    """
    load = _private("jax.experimental.pallas.mosaic_gpu", "load")
    index = inspect.signature(load).parameters.get("idx")
    is_required = index is not None and index.default is inspect.Parameter.empty
    return load(ref, *([()] if is_required else []), layout=layout, optimized=optimized)


def inline_ptx(text: str, shared: Sequence[Any], pointers: Sequence[Any], values: Sequence[Any] = ()) -> None:
    """Puts PTX where `plgpu.inline_mgpu` builds code. It may read and write memory, and leaves nothing in registers.

    Args:
        text: in which $0, $1, ... are addresses: of 32 bits for each of `shared`, then of 64 bits for each of
            `pointers`; then an f32 register for each of `values`.
        shared, pointers: references to shared and to global memory, as `inline_mgpu` hands them over.
        values: f32 scalars in `Layout.WG_SPLAT`, as `inline_mgpu` hands them over.
    """
    ir, llvm = _private("jaxlib.mlir", "ir"), _private("jaxlib.mlir.dialects", "llvm")
    address = _private("jax.experimental.mosaic.gpu.utils", "memref_ptr")
    bits32, bits64 = (ir.IntegerType.get_signless(bits) for bits in (32, 64))
    operands = [llvm.ptrtoint(bits32, address(ref)) for ref in shared]
    operands += [llvm.ptrtoint(bits64, address(ref)) for ref in pointers]
    operands += [value.registers.item() for value in values]
    constraints = ",".join(["r"] * len(shared) + ["l"] * len(pointers) + ["f"] * len(values) + ["~{memory}"])
    llvm.inline_asm(ir.Type.parse("!llvm.void"), operands, text, constraints, has_side_effects=True)


def load_transposed(ref: Any, layout: Any, shape: tuple[int, int]) -> Any:
    """Loads the transpose of a matrix in shared memory where `plgpu.inline_mgpu` builds code, element by element.

    Args:
        ref: the reference that `inline_mgpu` hands over, [columns, rows].
        layout: of the result: a `plgpu.Layout.TILED` whose vectors lie along the last dimension.
        shape: of the result, [rows, columns].
    """
    import numpy as np

    ir = _private("jaxlib.mlir", "ir")
    arith, memref, vector = (_private("jaxlib.mlir.dialects", name) for name in ("arith", "memref", "vector"))
    layout = layout.to_mgpu()
    registers = np.empty(layout.registers_shape(shape), dtype=object)
    type = ir.VectorType.get((layout.vector_length,), ir.MemRefType(ref.type).element_type)
    offsets = [arith.constant(ir.IndexType.get(), i) for i in range(layout.vector_length)]
    for register, (row, column) in zip(np.ndindex(registers.shape), layout.thread_idxs(shape), strict=True):
        values = [memref.load(ref, [arith.addi(column, offset), row]) for offset in offsets]
        registers[register] = vector.from_elements(type, values)
    array = _private("jax.experimental.mosaic.gpu", "FragmentedArray")
    return array(_registers=registers, _layout=layout, _is_signed=None)


# Programs of several processes: the coordination service's key-value store.


def publish(name: str, value: str) -> None:
    """Makes a value known to the other processes of a program that `jax.distributed.initialize` started."""
    _private("jax._src.distributed", "global_state").client.key_value_set(name, value, allow_overwrite=True)


def await_published(name: str, seconds: float) -> str:
    """The value that another process publishes under that name. Raises JaxRuntimeError where none does in time."""
    client = _private("jax._src.distributed", "global_state").client
    return str(client.blocking_key_value_get(name, int(seconds * 1000)))
