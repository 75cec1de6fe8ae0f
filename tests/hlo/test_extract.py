"""One computation taken out of a module: names, stack frames, what it calls."""

from __future__ import annotations

from xla_fp8 import _jax_compat, hlo

TEXT = """HloModule whole, entry_computation_layout={(f32[4]{0})->f32[]}

FileNames
1 "other.py"
2 "user.py"

FunctionNames
1 "main"
2 "inner"

FileLocations
1 {file_name_id=1 function_name_id=1 line=7 end_line=7 column=1 end_column=2}
2 {file_name_id=2 function_name_id=1 line=11 end_line=11 column=1 end_column=2}
3 {file_name_id=2 function_name_id=2 line=22 end_line=22 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}
3 {file_location_id=3 parent_frame_id=3}


%max.7 (a.3: f32[], b.4: f32[]) -> f32[] {
  %a.3 = f32[] parameter(0)
  %b.4 = f32[] parameter(1)
  ROOT %maximum.9 = f32[] maximum(%a.3, %b.4)
}

%layer.8 (x.1: f32[4]) -> f32[] {
  %x.1 = f32[4]{0} parameter(0), metadata={op_name="see %max.7"}
  %add.5 = f32[4]{0} add(%x.1, %x.1), metadata={op_name="add" stack_frame_id=3}
  %add.2 = f32[4]{0} add(%add.5, %x.1), metadata={op_name="add" stack_frame_id=2}
  %constant.1 = f32[] constant(-inf)
  ROOT %reduce.3 = f32[] reduce(%add.2, %constant.1), dimensions={0}, to_apply=%max.7
}

%unused.1 (x.2: f32[]) -> f32[] {
  ROOT %x.2 = f32[] parameter(0), metadata={op_name="x" stack_frame_id=1}
}

ENTRY %main.9 (p: f32[4]) -> f32[] {
  %p = f32[4]{0} parameter(0)
  ROOT %call.1 = f32[] call(%p), to_apply=%layer.8
}
"""


def test_extracted_computation_is_the_entry_of_a_module_with_what_it_calls() -> None:
    whole = hlo.parse(TEXT)
    before = hlo.to_text(whole)
    part = hlo.extract(whole.computation("layer.8"), "part")
    hlo.verify(part)
    assert [computation.name for computation in part.computations] == ["max.1", "part"]
    assert part.entry.name == "part"
    assert [i.name for i in part.entry] == ["x.1", "add.1", "add.2", "constant.1", "reduce.1"]
    assert part.entry.instruction("x.1").op_name == "see %max.7", "what a string says is no name"
    assert _jax_compat.full_text(hlo.to_text(part)), "XLA reads it"
    assert hlo.to_text(whole) == before, "the whole stays as it was"


def test_extracted_stack_frames_are_those_it_needs_once_the_others_are_dropped() -> None:
    part = hlo.extract(hlo.parse(TEXT).computation("layer.8"), "part")
    add = part.entry.instruction("add.1")
    assert (add.metadata.stack_frame_id, str(part.source_location(add))) == (3, "user.py:22")
    part.drop_unused_frames()
    assert part.entry.instruction("x.1").op_name == "see %max.7", "other metadata stays"
    assert [str(part.source_location(part.entry.instruction(name))) for name in ("add.1", "add.2")] == [
        "user.py:22",
        "user.py:11",
    ]
    assert [location.line for location in part.tables.stack(2)] == [22, 11]
    assert dict(part.tables.sections)["FileNames"] == '1 "user.py"'
    assert hlo.parse(hlo.to_text(part)).tables.sections == part.tables.sections


def test_without_metadata_there_are_no_tables() -> None:
    part = hlo.extract(hlo.parse(TEXT).computation("max.7"), "part")
    part.drop_unused_frames()
    assert part.tables.sections == ()
    assert "FileNames" not in hlo.to_text(part)


def test_names_stay_in_the_short_form() -> None:
    short = hlo.parse(TEXT.replace("%", ""))
    part = hlo.extract(short.computation("layer.8"), "part")
    assert [computation.name for computation in part.computations] == ["max.7", "part"]
    assert [i.name for i in part.entry] == ["x.1", "add.5", "add.2", "constant.1", "reduce.3"]
    assert part.entry.root.to_apply is part.computation("max.7")
