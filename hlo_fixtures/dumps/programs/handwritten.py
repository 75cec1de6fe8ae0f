"""HLO that JAX's front end cannot emit: dynamic dimensions, infeed and outfeed, async instructions, TPU layouts, cuDNN.

After XLA's tests of its parser and the dumps of its GPU and TPU compilers. Texts of the form `text` are printed by jaxlib.
"""

# ruff: noqa: E501 - HLO has long lines

from __future__ import annotations

from .catalog import dump


@dump("text")
def dynamic_dimensions() -> str:
    return """
HloModule dynamic, entry_computation_layout={(f32[<=8,4]{1,0}, s32[], f32[<=5]{0})->(f32[<=8,4]{1,0}, s32[], f32[2,<=5]{1,0}, f32[<=8])}

add {
  x = f32[] parameter(0)
  y = f32[] parameter(1)
  ROOT sum = f32[] add(x, y)
}

ENTRY main {
  p0 = f32[<=8,4]{1,0} parameter(0)
  n = s32[] parameter(1)
  p2 = f32[<=5]{0} parameter(2)
  size = s32[] get-dimension-size(p0), dimensions={0}
  smaller = s32[] minimum(size, n)
  cut = f32[<=8,4]{1,0} set-dimension-size(p0, smaller), dimensions={0}
  doubled = f32[<=8,4]{1,0} add(cut, cut)
  zero = f32[] constant(0)
  row = f32[<=8]{0} reduce(doubled, zero), dimensions={1}, to_apply=add
  wide = f32[2,<=5]{1,0} broadcast(p2), dimensions={1}
  two = s32[] constant(2)
  five = s32[] constant(5)
  flat = f32[<=10]{0} dynamic-reshape(wide, five)
  back = f32[2,<=5]{1,0} dynamic-reshape(flat, two, n)
  padded = (f32[<=8,4]{1,0}, s32[]) custom-call(doubled), custom_call_target="PadToStatic"
  ROOT out = (f32[<=8,4]{1,0}, s32[], f32[2,<=5]{1,0}, f32[<=8]{0}) tuple(doubled, smaller, back, row)
}
"""


@dump("text")
def unbounded_dimensions() -> str:
    return """
HloModule unbounded, entry_computation_layout={(f32[?,4]{1,0}, f32[4,8]{1,0})->f32[?,8]{1,0}}

ENTRY main {
  x = f32[?,4]{1,0} parameter(0)
  w = f32[4,8]{1,0} parameter(1)
  y = f32[?,8]{1,0} dot(x, w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT z = f32[?,8]{1,0} tanh(y)
}
"""


@dump("text")
def infeed_outfeed() -> str:
    return """
HloModule feeds

ENTRY main {
  token0 = token[] after-all()
  infeed0 = ((f32[2,3]{1,0}, pred[]), token[]) infeed(token0), infeed_config="queue 7\\n", sharding={{maximal device=0}, {replicated}, {maximal device=0}}
  data = (f32[2,3]{1,0}, pred[]) get-tuple-element(infeed0), index=0
  x = f32[2,3]{1,0} get-tuple-element(data), index=0
  token1 = token[] get-tuple-element(infeed0), index=1
  doubled = f32[2,3]{1,0} add(x, x)
  token2 = token[] outfeed(doubled, token1), outfeed_shape=f32[2,3]{1,0}, outfeed_config="\\"quoted\\""
  token3 = token[] after-all(token2, token1)
  send0 = (f32[2,3]{1,0}, u32[], token[]) send(doubled, token3), channel_id=1, is_host_transfer=true, frontend_attributes={_xla_host_transfer_rendezvous="name"}
  token4 = token[] send-done(send0), channel_id=1, is_host_transfer=true
  recv0 = (f32[2,3]{1,0}, u32[], token[]) recv(token4), channel_id=2, is_host_transfer=true
  recv1 = (f32[2,3]{1,0}, token[]) recv-done(recv0), channel_id=2, is_host_transfer=true
  ROOT result = f32[2,3]{1,0} get-tuple-element(recv1), index=0
}
"""


@dump("text")
def async_instructions() -> str:
    return """
HloModule async, is_scheduled=true

add {
  x = f32[] parameter(0)
  y = f32[] parameter(1)
  ROOT sum = f32[] add(x, y)
}

double {
  p = f32[32]{0} parameter(0)
  t = f32[32]{0} tanh(p)
  ROOT d = f32[32]{0} add(t, p)
}, execution_thread="side"

ENTRY main {
  a = f32[32]{0} parameter(0)
  ar0 = f32[32]{0} all-reduce-start(a), channel_id=1, replica_groups={{0,1},{2,3}}, use_global_device_ids=true, to_apply=add
  copy0 = (f32[32]{0:S(1)}, f32[32]{0}, u32[]) copy-start(a), cross_program_prefetch_index=0
  call0 = ((f32[32]{0}), f32[32]{0}, s32[]) call-start(a), to_apply=double, async_execution_thread="side"
  ag0 = (f32[32]{0}, f32[128]{0}) all-gather-start(a), dimensions={0}, channel_id=2, replica_groups=[1,4]<=[4], use_global_device_ids=true
  cp0 = (f32[32]{0}, f32[32]{0}, u32[], u32[]) collective-permute-start(a), channel_id=3, source_target_pairs={{0,1},{1,2},{2,3}}
  cc0 = ((f32[32]{0}), f32[32]{0}, s32[]) custom-call-start(a), custom_call_target="slow", backend_config="opaque", async_execution_thread="gpu"
  cc1 = ((f32[32]{0}), f32[32]{0}, s32[]) custom-call-update(cc0)
  cc2 = f32[32]{0} custom-call-done(cc1)
  cp1 = f32[32]{0} collective-permute-done(cp0)
  ag1 = f32[128]{0} all-gather-done(ag0)
  call1 = f32[32]{0} call-done(call0)
  copy1 = f32[32]{0:S(1)} copy-done(copy0), control-predecessors={call1}
  ar1 = f32[32]{0} all-reduce-done(ar0), control-predecessors={copy1, ag1}
  ROOT out = (f32[32]{0}, f32[32]{0:S(1)}, f32[128]{0}, f32[32]{0}, f32[32]{0}, /*index=5*/f32[32]{0}) tuple(ar1, copy1, ag1, cp1, call1, cc2)
}
"""


@dump("text")
def async_computations() -> str:
    """async-start with a computation of several instructions, for which XLA has no short spelling."""
    return """
HloModule async_computations

side {
  p0 = f32[8]{0} parameter(0)
  p1 = f32[8]{0} parameter(1)
  m = f32[8]{0} multiply(p0, p1)
  ROOT r = f32[8]{0} tanh(m)
}, execution_thread="side"

ENTRY main {
  a = f32[8]{0} parameter(0)
  s = ((f32[8]{0}, f32[8]{0}), f32[8]{0}, u32[]) async-start(a, a), async_execution_thread="side", calls=side
  u = ((f32[8]{0}, f32[8]{0}), f32[8]{0}, u32[]) async-update(s)
  ROOT d = f32[8]{0} async-done(u)
}
"""


@dump("text")
def tpu_layouts() -> str:
    return """
HloModule tpu, is_scheduled=true, entry_computation_layout={(bf16[256,512]{1,0:T(8,128)(2,1)}, bf16[512,128]{1,0:T(8,128)(2,1)})->f32[256,128]{1,0:T(8,128)}}, num_partitions=2, frontend_attributes={fingerprint="abc"}

fused {
  p0 = bf16[256,512]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  p1 = bf16[512,128]{1,0:T(8,128)(2,1)} parameter(1)
  ROOT c = f32[256,128]{1,0:T(8,128)} convolution(p0, p1), dim_labels=bf_io->bf, operand_precision={highest,default}
}

ENTRY main {
  x = bf16[256,512]{1,0:T(8,128)(2,1)} parameter(0), sharding={devices=[2,1]<=[2]}
  w = bf16[512,128]{1,0:T(8,128)(2,1)} parameter(1), sharding={replicated}
  c0 = (bf16[256,512]{1,0:T(8,128)(2,1)S(1)}, bf16[256,512]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(x)
  c1 = bf16[256,512]{1,0:T(8,128)(2,1)S(1)} copy-done(c0)
  packed = s4[2,3]{1,0:T(32,128)E(4)} constant({{1,-2,3},{-4,5,-6}})
  column = f32[2,2]{0,1:T(8,128)} constant({{1,2},{3,-inf}})
  ROOT y = f32[256,128]{1,0:T(8,128)} fusion(c1, w), kind=kOutput, calls=fused, backend_config={"flag_configs":[],"window_config":{"kernel_window_bounds":["32","1"],"output_window_bounds":["32","1"],"input_window_bounds":[],"estimated_cycles":"1420"},"scoped_memory_configs":[]}
}
"""


@dump("text")
def cudnn_custom_calls() -> str:
    """FP8 convolution and matmul as XLA's GPU compiler leaves them: graph strings, JSON, workspaces."""
    return r"""
HloModule cudnn, entry_computation_layout={(f8e4m3fn[1,6,6,128]{3,2,1,0}, f8e4m3fn[16,3,3,128]{3,2,1,0}, f32[], f8e4m3fn[16,32]{1,0}, f8e4m3fn[16,32]{1,0})->(f8e4m3fn[1,6,6,16]{3,2,1,0}, f32[], bf16[16,16]{1,0})}

ENTRY main {
  x = f8e4m3fn[1,6,6,128]{3,2,1,0} parameter(0)
  w = f8e4m3fn[16,3,3,128]{3,2,1,0} parameter(1)
  scale = f32[] parameter(2)
  conv = (f8e4m3fn[1,6,6,16]{3,2,1,0}, f32[], u8[0]{0}) custom-call(x, w, scale), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$convForwardGraph", metadata={op_name="jit(f)/conv_general_dilated" source_file="model.py" source_line=17}, backend_config={"operation_queue_id":"0","wait_on_operation_queues":[],"cudnn_conv_backend_config":{"conv_result_scale":1,"activation_mode":"kNone","side_input_scale":0,"leakyrelu_alpha":0,"serialized_graph":"21:[f32]conv();24:[f32]scale(21);28:[f32]amax(24);29:[f8e4m3fn]convert(24);"},"force_earliest_schedule":false}
  y = f8e4m3fn[1,6,6,16]{3,2,1,0} get-tuple-element(conv), index=0
  amax = f32[] get-tuple-element(conv), index=1
  a = f8e4m3fn[16,32]{1,0} parameter(3)
  b = f8e4m3fn[16,32]{1,0} parameter(4)
  one = f32[] constant(1)
  gemm = (bf16[16,16]{1,0}, s8[33554432]{0}) custom-call(a, b, scale, one, one, one), custom_call_target="__cublas$lt$matmul$f8", backend_config={"operation_queue_id":"0","gemm_backend_config":{"alpha_real":1,"alpha_imag":0,"beta":0,"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]},"precision_config":{"operand_precision":["DEFAULT","DEFAULT"],"algorithm":"ALG_UNSET"},"epilogue":"DEFAULT","damax_output":false,"selected_algorithm":"0","lhs_stride":"512","rhs_stride":"512","grad_x":false,"grad_y":false}}
  product = bf16[16,16]{1,0} get-tuple-element(gemm), index=0
  old = (f16[1,6,6,16]{3,2,1,0}, u8[16]{0}) custom-call(x, w), window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, feature_group_count=1, custom_call_target="__cudnn$convForward", operand_layout_constraints={f8e4m3fn[1,6,6,128]{3,2,1,0}, f8e4m3fn[16,3,3,128]{3,2,1,0}}, backend_config="{\"algorithm\":\"0\"}"
  ROOT out = (f8e4m3fn[1,6,6,16]{3,2,1,0}, f32[], bf16[16,16]{1,0}) tuple(y, amax, product)
}
"""


@dump("text")
def module_attributes() -> str:
    """Header and instruction attributes that no other dump has."""
    return """
HloModule attributes, is_scheduled=true, input_output_alias={ {0}: (0, {}, must-alias), {1,0}: (1, {1}) }, buffer_donor={ (2, {}) }, replica_count=4, num_partitions=2, alias_passthrough_params=true, entry_computation_layout={(f32[4]{0}, (f32[4]{0}, f32[4]{0}), s8[2,2]{0,1})->(f32[4]{0}, (f32[4]{0}, s8[2,2]{0,1}))}

max {
  x = f32[] parameter(0)
  y = f32[] parameter(1)
  ROOT m = f32[] maximum(x, y)
}

ENTRY main {
  a = f32[4]{0} parameter(0), parameter_replication={true}, sharding={devices=[2]<=[2] metadata={op_name="s"}}
  t = (f32[4]{0}, f32[4]{0}) parameter(1), parameter_replication={true,false}, sharding={{replicated}, {devices=[1,2]<=[2] last_tile_dim_replicate}}
  s = s8[2,2]{0,1} parameter(2), origin={{"original"}}
  t0 = f32[4]{0} get-tuple-element(t), index=0
  r = f32[4]{0} all-reduce(t0), channel_id=1, replica_groups=[4,2]<=[2,4]T(1,0), use_global_device_ids=true, to_apply=max, frontend_attributes={mode="a,b",other="c"}
  p = f32[4]{0} negate(r), statistics={visualizing_index=0,time=12.5}, metadata={op_type="neg" op_name="a/b" source_file="x y.py" source_line=3 deduplicated_name="negate.1" scheduling_name="n" source_end_line=4 source_column=2 source_end_column=9}
  e = f32[4]{0} exponential(p), result_accuracy={mode=highest}
  inner = (f32[4]{0}, s8[2,2]{0,1}) tuple(e, s)
  ROOT out = (f32[4]{0}, (f32[4]{0}, s8[2,2]{0,1})) tuple(a, inner)
}
"""


@dump("text")
def rare_instructions() -> str:
    return """
HloModule rare

twice {
  x = f32[] parameter(0)
  ROOT y = f32[] add(x, x)
}

add {
  x = f32[] parameter(0)
  y = f32[] parameter(1)
  ROOT sum = f32[] add(x, y)
}

ENTRY main {
  a = f32[4,8] parameter(0)
  scale = f32[8] parameter(1)
  id = u32[] replica-id()
  norm = (f32[4,8], f32[8], f32[8]) batch-norm-training(a, scale, scale), epsilon=0.001, feature_index=1
  mean = f32[8] get-tuple-element(norm), index=1
  same = f32[4,8] batch-norm-inference(a, scale, scale, mean, mean), epsilon=0.001, feature_index=1
  grad = (f32[4,8], f32[8], f32[8]) batch-norm-grad(a, scale, mean, mean, same), epsilon=0.001, feature_index=1
  most = (f32[4,2], s32[4,2]) topk(a), k=2, largest=true
  erf = f32[4,8] erf(a)
  mapped = f32[4,8] map(erf), dimensions={0,1}, to_apply=twice
  bits = u32[4,8] bitcast-convert(mapped)
  rounded = bf16[4,8] stochastic-convert(mapped, bits)
  domain = f32[4,8] domain(mapped), domain={kind="sharding", entry={replicated}, exit={maximal device=1}}
  all = f32[4,8] all-reduce(domain), replica_groups={}, to_apply=add
  cast = f32[4,8] collective-broadcast(all), channel_id=3, replica_groups={{0,1}}
  groups = s32[3] constant({1, 2, 1})
  zero = f32[] constant(0)
  w = f32[3,8,5] broadcast(zero), dimensions={}

  ragged = f32[4,5] ragged-dot(cast, w, groups), lhs_contracting_dims={1}, rhs_contracting_dims={1}, lhs_ragged_dims={0}, rhs_group_dims={0}
  exact = f32[4,4] dot(a, a), lhs_contracting_dims={1}, rhs_contracting_dims={1}, algorithm=dot_bf16_bf16_f32_x3, operand_precision={high,highest}
  begin = token[] after-all()
  ordered = f32[4,4] add-dependency(exact, begin)
  ROOT out = (f32[4,5], f32[4,4], bf16[4,8]) tuple(ragged, ordered, rounded)
}
"""


@dump("text")
def literals() -> str:
    """Constants of every type, shape and oddity: empty, nested tuples, NaN with payload, the ends of each range."""
    return """
HloModule literals

ENTRY main {
  a = s2[4] constant({1, -1, 0, -2})
  b = u2[4] constant({1, 3, 0, 2})
  c = s4[3] constant({-8, 0, 7})
  d = u4[2] constant({0, 15})
  e = s8[2] constant({-128, 127})
  f = u8[2] constant({0, 255})
  g = s16[2] constant({-32768, 32767})
  h = u16[1] constant({65535})
  i = s64[2] constant({-9223372036854775808, 9223372036854775807})
  j = u64[1] constant({18446744073709551615})
  k = f16[6] constant({1, -0.0, 6.1e-05, 65504, -inf, nan})
  l = bf16[4] constant({1, 3.39e+38, inf, -nan})
  m = f32[5] constant({nan(0x123), -nan, 1.17549435e-38, 3.40282347e+38, 1e-45})
  n = f64[4] constant({1e-320, 1.7976931348623157e+308, -nan, 0.1})
  o = c64[2] constant({(1, -2), (inf, nan)})
  p = c128[1,1] constant({{(0.1, -0.0)}})
  q = f8e4m3fn[4] constant({448, -0.0, 0.001953, nan})
  r = f8e5m2[4] constant({57344, inf, -inf, -nan})
  s = f8e8m0fnu[2] constant({1, 0.5})
  t = pred[2,2] constant({{true, false}, {false, true}})
  u = f32[0] constant({})
  v = f32[2,0] constant({{}, {}})
  w = (f32[2], (bf16[2,1], pred[]), ()) constant(({1, 2}, ({{1}, {2}}, true), ()))
  x = s32[2,2,2] constant({{{1, 2}, {3, 4}}, {{5, 6}, {7, 8}}})
  ROOT z = f32[2,2]{0,1} constant({{1, 2}, {3, 4}})
}
"""


@dump("raw")
def computations_without_header() -> str:
    """What XLA's parser reads besides modules: computations alone. The last is the entry; layouts and types may miss."""
    return """\
add {
  %x = f32[] parameter(0)
  y = f32[] parameter(1) // a line comment
  ROOT sum = add(f32[] %x, y)
}

main (a: f32[2,3]) -> f32[2] {
  a = f32[2,3] parameter(0) /* a block
    comment */
  zero = f32[] constant(0)
  ROOT r = f32[2] reduce(a, zero), dimensions={1}, to_apply=add
}
"""


@dump("raw")
def single_instruction() -> str:
    """What XLA's own tests write: one instruction, its operands declared by their mention."""
    return "%dot.1 = f32[2,4] dot(f32[2,3] %a, f32[3,4] %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}\n"


@dump("raw")
def nested_instructions() -> str:
    """Instructions in the place of operands and a computation in the place of its name: XLA's parser names them itself."""
    return """\
HloModule nested

ENTRY main {
  a = f32[2] parameter(0)
  b = f32[2] add(f32[2] negate(a), abs(f32[2] constant({1, -2})))
  ROOT r = f32[2] fusion(a, b), kind=kLoop, calls={
    p = f32[2] parameter(0)
    q = f32[2] parameter(1)
    ROOT n = f32[2] multiply(p, q)
  }
}
"""
