"""Templates: ordinary ops need no jax, and what is filled in is what tracing gives."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
import torch
from script import run_script

from torchtpu import metrics, ops, startup
from torchtpu.ops.registry import LOWERINGS
from torchtpu.runtime.ir.calls import describe_results, parameters
from torchtpu.runtime.ir.program import Base, Lifted, Op, Operand, Result
from torchtpu.runtime.lowering import templates
from torchtpu.runtime.lowering.templates import FragmentTemplate, Templates
from torchtpu.runtime.lowering.tracing import Tracer, without_copies
from torchtpu.runtime.lowering.written import written_fragment

FOLDER = Path(ops.__path__[0], "templates")
MAKER = Path(__file__).parent.parent / "packaging" / "fragment_templates.py"
PARTS = 200

ORDINARY = """
    import sys, torch
    from torch.nn import functional as F

    def compute(device):
        x = torch.ones(3, 7, device=device) + 1
        y = torch.arange(21.0).view(3, 7).to(device)
        weight = torch.full((5, 7), 0.1, device=device, requires_grad=True)
        made = F.linear((x * y - 2).relu(), weight)
        loss = made.softmax(-1).square().sum() + (made > 1).float().mean()
        loss.backward()
        with torch.no_grad():
            weight -= 0.1 * weight.grad
        return [t.detach().cpu() for t in (x, made, loss, weight, y.max(), y.argmax(1), y.bool().any(), x.long() // 2)]

    found = compute("tpu")
    print("jax" in sys.modules)
    for one, other in zip(found, compute("cpu")):
        torch.testing.assert_close(one, other)
"""


def test_ordinary_ops_import_no_jax() -> None:
    ended = run_script(ORDINARY, TORCHTPU_CACHE="off")
    assert (ended.status, ended.out) == (0, "False\n"), ended.err


GROWING = """
    import sys, torch
    from torch import nn
    from torch.nn import functional as F

    def compute(device):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 1)).to(device)
        optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
        found = []
        for rows in (20, 31, 32, 7, 33, 64, 100):
            x = torch.linspace(-1, 1, 32 * rows).view(rows, 32).to(device)
            loss = F.mse_loss(net(x), x.mean(1, keepdim=True))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        return torch.stack([torch.tensor(value, device=device) for value in found]).cpu()

    found = compute("tpu")
    print("jax" in sys.modules)
    torch.testing.assert_close(found, compute("cpu"), rtol=1e-4, atol=1e-5)
"""


def test_batches_of_ever_other_sizes_import_no_jax() -> None:
    ended = run_script(GROWING, TORCHTPU_CACHE="off")
    assert (ended.status, ended.out) == (0, "False\n"), ended.err


ACTIVATIONS = """
    import sys, torch
    from torch.nn import functional as F

    def compute(device):
        x = torch.linspace(-4, 4, 4 * 6 * 8 * 8).view(4, 6, 8, 8).to(device).requires_grad_()
        made = [f(x) for f in (F.hardswish, F.hardsigmoid, F.relu6, F.elu, F.mish, F.softplus, F.logsigmoid)]
        made += [f(x * 2, inplace=True) for f in (F.hardswish, F.leaky_relu, F.elu, F.silu, F.hardsigmoid)]
        made += [x.abs().sqrt().atan(), x.log1p(), x.clamp(-1, 1), x / 3, x.detach() // 2, x.pow(3), x * (x > 0)]
        loss = torch.stack([torch.where(each > 0, each, 0).sum() for each in made]).sum()
        loss.backward()
        return [t.detach().cpu() for t in (*made, x.grad)]

    found = compute("tpu")
    print("jax" in sys.modules)
    for one, other in zip(found, compute("cpu")):
        torch.testing.assert_close(one, other, equal_nan=True)
"""


def test_activations_of_any_shape_import_no_jax() -> None:
    ended = run_script(ACTIVATIONS, TORCHTPU_CACHE="off")
    assert (ended.status, ended.out) == (0, "False\n"), ended.err


def test_what_tracing_gives_is_in_the_file(rotation: int, held: Any) -> None:
    """Of a part of the ops; a lowering that was changed has no templates until the file is made anew."""
    (version,) = {head["jax"] for head, _ in held.values()}
    if jax.__version__ != version:
        pytest.skip(f"the files were made with jax {version}, whose text may be another one")
    part = f"{rotation % PARTS}/{PARTS}"
    command = [sys.executable, str(MAKER), "--check", "--part", part]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def held() -> Any:
    """What the files hold, by op: the first line, and the others."""
    lines = {file.stem: map(json.loads, file.read_text().splitlines()) for file in FOLDER.iterdir()}
    return {op: (next(of_op), list(of_op)) for op, of_op in lines.items()}


def test_the_files_are_of_these_sources(held: Any) -> None:
    for op, (head, _) in held.items():
        digests = {home: templates.digest_of_sources(home) for home in head["sources"]}
        assert digests == head["sources"], f"{op}: python {MAKER.name} makes it anew"


def has_sizes_that_follow(text: str, sizes: list[str]) -> bool:
    """Whether some follow from others, so that not every number does: of results, or of parts of padded arrays."""
    given, _, _ = text.partition(")->(")
    count = given.count("#")
    return (
        not set(sizes[count:]) <= set(sizes[:count]) or "ranges=((" in text or (text.startswith("cat(") and count > 0)
    )


def sizes_for(text: str, template: FragmentTemplate) -> dict[str, str]:
    """Sizes with which a template is what such an op makes; with padding, some are products of others."""
    is_padded = " padding " in text
    letters = {letter: "1" if is_padded else str(size) for size, letter in enumerate(templates.LETTERS, 2)}
    letters |= {whole: "55440" for _, whole, _, _ in template.parts}  # of which many numbers are divisors
    letters |= {part: str(55440 // divisor + behind) for part, _, divisor, behind in template.parts}
    return {"S": "3x1x2", "N": "6", **letters}


def test_every_template_is_a_program(held: Any) -> None:
    """To the installed jaxlib, which need not be the one that the file was made with."""
    rows = [row for _, rows in held.values() for row in rows if not has_sizes_that_follow(*row[:2])]
    all_templates = [(text, FragmentTemplate(*fields)) for text, _, _, *fields in rows]
    made = [template.filled(sizes_for(text, template)) for text, template in all_templates]
    bodies = "\n".join({fragment.symbol: fragment.text for fragment in made if fragment is not None}.values())
    assert None not in made
    main = "func.func public @main(%x: tensor<2xf32>) -> tensor<2xf32> { return %x : tensor<2xf32> }"
    startup.engine().client.compile(f"module {{\n{main}\n{bodies}\n}}", 0)  # reads and verifies all of them


def test_an_op_made_of_a_description_has_that_description(held: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(MAKER.parent)
    described_ops = importlib.import_module("described_ops")
    found = [(text, sizes) for _, rows in held.values() for text, sizes, *_ in rows[::10]]
    numbers = dict.fromkeys(templates.LETTERS, 256)
    for text in (described_ops.filled(text, sizes, numbers).replace("<Sx", "<5x3x") for text, sizes in found):
        op = described_ops.op_of(text)
        described = f"{op.name}({parameters(op)[0]})->({describe_results(op)}) {op.settings}"
        assert templates.with_room(described) == text


def test_a_template_may_be_for_all_shapes_but_empty_ones(tmp_path: Path) -> None:
    """Of empty arrays jax selects nothing."""
    pattern = "f(tensor<Sxf32>)->(tensor<Sxf32>) None"
    body = "func.func private @0(%arg0: tensor<$Sxf32>) -> tensor<$Sxf32> { return %arg0 : tensor<$Sxf32> }"
    template = FragmentTemplate("f", body, [0], [0], "(tensor<$Sxf32>) -> tensor<$Sxf32>", [], [], [["0", "N"]], [])
    (tmp_path / "f.jsonl").write_text("{}\n" + templates.line_of(["cpu"], pattern, template) + "\n")
    held = Templates(tmp_path, "cpu").of("f")
    assert [sizes["S"] for _, sizes in held.matching(pattern.replace("S", "3x5"))] == ["3x5"]
    assert not list(held.matching(pattern.replace("S", "3x0")))


def test_sizes_become_letters() -> None:
    neg = "neg(tensor<3x1x5xf32>)->(tensor<3x1x5xf32>) None"
    assert templates.of_shape(neg) == ("neg(tensor<Sxf32>)->(tensor<Sxf32>) None", {"S": "3x1x5", "N": "15"})
    assert templates.of_sizes(neg) == ("neg(tensor<Ax1xBxf32>)->(tensor<Ax1xBxf32>) None", {"A": "3", "B": "5"})
    assert templates.of_sizes("mm(tensor<3x5xf32>,tensor<5x3xf32>)->(tensor<3x3xf32>) highest") == (
        "mm(tensor<AxBxf32>,tensor<BxAxf32>)->(tensor<AxAxf32>) highest",
        {"A": "3", "B": "5"},
    )
    assert templates.of_sizes("f(tensor<9x3x3xf32>,int:9,int:7)->(tensor<9xf32>) None", {"3"}, {"7"}) == (
        "f(tensor<Ax3x3xf32>,int:A,int:B)->(tensor<Axf32>) None",
        {"A": "9", "B": "7"},
    )


def test_bounds_are_left_out_where_they_are_wide_enough() -> None:
    def neg(bounds: str, rows: int) -> str:
        rows_of = f"tensor<{rows}x7xf32>"
        return f"neg({rows_of}, padding ({bounds},) (PaddedExtent(sizes=('a', 7)),))->({rows_of}) None"

    pattern = "neg(tensor<Bx7xf32>, padding (0 of B) (PaddedExtent(sizes=('a', 7)),))->(tensor<Bx7xf32>) None"
    assert templates.with_room(neg("(33, 64, 64)", 64)) == pattern.replace("B", "64")
    assert templates.with_room(neg("(1, 64, 64)", 64)) is None
    assert templates.with_room(neg("(64, 64, 64)", 64)) is None
    fields = "neg", "@0 $A $B-1", [0], [None], "", [], ["a - $A"], [], []
    line = templates.line_of(["cpu"], pattern.replace("7", "A"), FragmentTemplate(*fields))
    held = templates.OfAnOp({}, [line], "cpu")
    ((template, sizes),) = held.matching(neg("(17, 32, 32)", 32))
    assert sizes == {"A": "7", "B": "32"}
    filled = template.filled(sizes)
    assert filled is not None
    assert filled.text.endswith(" 7 31")
    assert filled.unequal == ("a - 7",)
    assert not list(held.matching(neg("(33, 64, 64)", 2**20)))  # whose places are not counted in i32


def test_sizes_that_are_equal_and_those_that_are_apart() -> None:
    fields = "mm", "@0 $A $B $C", [0, 1], [None], "", [], []
    pattern = "mm(tensor<AxBxf32>,tensor<BxCxf32>)->(tensor<AxCxf32>) highest"
    described = "mm(tensor<{0}x{1}xf32>,tensor<{1}x{2}xf32>)->(tensor<{0}x{2}xf32>) highest"

    def found(apart: list[list[str]], *sizes: int) -> list[Any]:
        held = templates.OfAnOp({}, [templates.line_of(["cpu"], pattern, FragmentTemplate(*fields, apart, []))], "cpu")
        return [list(sizes.values()) for _, sizes in held.matching(described.format(*sizes))]

    assert found([], 3, 3, 5) == [["3", "3", "5"]]
    assert found([["A", "B"]], 3, 3, 5) == []
    assert found([["A", "B"]], 3, 4, 3) == [["3", "4", "3"]]
    assert found([["C", "4"]], 3, 3, 4) == []
    assert found([], 1, 3, 4) == []


def test_a_size_that_is_a_part_of_another_is_no_other_size() -> None:
    """What is between them in the text is no letter: as where a stride of 2 leaves half of what is padded by one."""
    fields = "pool", "@0 $A $A+1 $B", [0], [None], "", [], [], [], [("B", "A", 2, 1)]
    line = templates.line_of(["cpu"], "pool(tensor<Axf32>)->(tensor<Bxf32>) None", FragmentTemplate(*fields))
    held = templates.OfAnOp({}, [line], "cpu")
    ((template, sizes),) = held.matching("pool(tensor<32xf32>)->(tensor<17xf32>) None")
    filled = template.filled(sizes)
    assert filled is not None
    assert filled.text.endswith(" 32 33 17")
    for whole, part in ((32, 16), (33, 17), (31, 17)):
        assert not list(held.matching(f"pool(tensor<{whole}xf32>)->(tensor<{part}xf32>) None"))


def test_functions_that_are_alike_are_one() -> None:
    inner = "  func.func private @0_{}(%arg0: i1) -> i1 {{\n    return %arg0 : i1\n  }}"
    root = "  func.func private @0() -> i1 {\n    call @0_1, @0_2, @0_3, @0_10\n  }"
    other = "  func.func private @0_3() -> i1 {\n    call @0_2\n  }"
    text = "\n".join([root, inner.format(1), inner.format(2), other, inner.format(10)])
    kept = [
        root.replace("@0_2, @0_3, @0_10", "@0_1, @0_2, @0_1"),
        inner.format(1),
        other.replace("_2", "_1").replace("_3", "_2"),
    ]
    assert without_copies(text) == "\n".join(kept)
    assert without_copies(kept[0]) == kept[0]


def description(sizes: str) -> str:
    return f"relu(tensor<{sizes}f32>)->(tensor<{sizes}f32>) None"


def test_a_template_of_other_sources_does_not_count(tmp_path: Path, held: Any) -> None:
    assert Templates(FOLDER, "cpu").find(description("3x5x"), LOWERINGS["relu"]) is not None
    assert Templates(FOLDER, "vulkan").find(description("3x5x"), LOWERINGS["relu"]) is None
    head, rows = held["relu"]
    changed = {**head, "sources": dict.fromkeys(head["sources"], "of other sources")}
    (tmp_path / "relu.jsonl").write_text("\n".join(map(json.dumps, [changed, *rows])))
    assert Templates(tmp_path, "cpu").find(description("3x5x"), LOWERINGS["relu"]) is None
    assert Templates(tmp_path / "none", "cpu").find(description("3x5x"), LOWERINGS["relu"]) is None


@pytest.mark.bailouts("template")
def test_a_damaged_file_costs_nothing_but_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mul.Tensor.jsonl").write_text("{")
    monkeypatch.setattr(startup.engine().fragments, "_templates", Templates(tmp_path, "cpu"))
    before = metrics.snapshot()["fragment_traces"]
    assert torch.ones(613, 2, 3, device="tpu").mul(4).sum().item() == 613 * 24
    assert metrics.snapshot()["fragment_traces"] > before


JOINS = [
    ("stack", [shape] * count, dim)
    for shape in ((), (3,), (2, 1, 3))
    for count in (2, 5, 16, 17, 33)
    for dim in range(-len(shape) - 1, len(shape) + 1)
] + [
    ("cat", [(*shape[:dim], k % 3 + 1, *shape[dim:]) for k in range(count)], dim - is_counted_back * (len(shape) + 1))
    for shape in ((), (3,), (2, 1))
    for count in (2, 16, 40)
    for dim in range(len(shape) + 1)
    for is_counted_back in (False, True)
]


def joining(name: str, shapes: list[tuple[int, ...]], dim: int, dtypes: list[torch.dtype]) -> Op:
    given = [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in zip(shapes, dtypes, strict=True)]
    made = getattr(torch, name)(given, dim)
    operands = tuple(
        Operand(~k, tuple(t.shape), t.stride(), 0, t.dtype, Base(tuple(t.shape), t.dtype)) for k, t in enumerate(given)
    )
    shape = tuple(made.shape)
    return Op(
        name, (operands, dim), (Result(0, shape, made.stride(), made.dtype, Base(shape, made.dtype)),), (), "here"
    )


def test_what_a_join_writes_is_what_tracing_gives() -> None:
    ops_found = [joining(name, shapes, dim, [torch.float32] * len(shapes)) for name, shapes, dim in JOINS]
    ops_found += [joining("cat", [(2,), (3,)], 0, [dtype] * 2) for dtype in (torch.bool, torch.int64, torch.complex64)]
    asked = [(op, LOWERINGS[op.name]) for op in ops_found]
    traced = Tracer(startup.engine().client, "cpu", ops.Context).trace(asked)
    assert [written_fragment(op, entry) for op, entry in asked] == traced


def test_a_join_that_converts_or_leaves_out_is_traced() -> None:
    left = [
        joining("cat", [(2,), (3,)], 0, [torch.int64, torch.float32]),
        joining("cat", [(0, 2), (3, 2)], 0, [torch.float32] * 2),
        joining("cat", [(0,), (3, 2)], 0, [torch.float32] * 2),
        joining("stack", [(2,)], 0, [torch.float32]),
    ]
    assert [written_fragment(op, LOWERINGS[op.name]) for op in left] == [None] * len(left)


def padding(name: str, shape: tuple[int, ...], *others: Any, dtype: torch.dtype = torch.float32) -> Op:
    given = torch.empty(shape, dtype=dtype)
    made = getattr(torch.ops.aten, name)(given, *(list(o) if isinstance(o, tuple) else o for o in others))
    operand = Operand(~0, shape, given.stride(), 0, dtype, Base(shape, dtype))
    result = Result(0, tuple(made.shape), made.stride(), dtype, Base(tuple(made.shape), dtype))
    return Op(name, (operand, *others), (result,), (), "here")


PADDINGS = [
    padding("slice_backward", (2, 3), (4, 3), 0, 1, 3, 1),
    padding("slice_backward", (2, 3), (9, 3), 0, 1, 7, 3),
    padding("slice_backward", (4, 2), (4, 5), 1, -2, 2**63 - 1, 1),
    padding("slice_backward", (4, 5), (4, 5), 1, -9, 5, 1),
    padding("slice_backward", (4, 3), (4, 5), -1, 0, 5, 2),
    padding("constant_pad_nd", (2, 3), (0, 1, 2, 0), 0.0),
    padding("constant_pad_nd", (2, 3), (-1, 1), 0),
    padding("constant_pad_nd", (2, 3, 4), (1, 1, -1, -1, 0, 5), 0.0),
    padding("constant_pad_nd", (2, 3), (0, 0, 0, 0)),
    *(
        padding("slice_backward", (2, 3), (4, 3), 0, 1, 3, 1, dtype=dtype)
        for dtype in (torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64, torch.complex64)
    ),
    *(padding("constant_pad_nd", (2, 3), (1, 1), 0, dtype=dtype) for dtype in (torch.bool, torch.uint8, torch.int64)),
    *(padding("constant_pad_nd", (2, 3), (1, 1), 0.0, dtype=dtype) for dtype in (torch.float16, torch.float64)),
]


def placing(name: str, *given: Any, dtype: torch.dtype = torch.float32) -> Op:
    """With a place that is known when it runs."""
    op = padding(name, *given, dtype=dtype)
    lifted = Lifted("i", 0), Lifted("i", 1)
    return replace(op, args=(*op.args[:3], *lifted, 1) if name == "slice_backward" else (*op.args[:3], lifted[0]))


PADDINGS += [
    placing("slice_backward", (2, 3), (4, 3), 0, 1, 3, 1),
    placing("slice_backward", (4, 3), (4, 7), -1, 1, 4, 1),
    placing("slice_backward", (3,), (7,), 0, 1, 4, 1),
    placing("slice_backward", (2, 1, 5), (2, 6, 5), 1, 1, 2, 1),
    placing("select_backward", (3,), (4, 3), 0, 1),
    placing("select_backward", (4,), (4, 3), -1, 1),
    placing("select_backward", (), (5,), 0, 2),
    placing("select_backward", (2, 3), (2, 5, 3), 1, 2),
    *(
        placing("slice_backward", (2, 3), (4, 3), 0, 1, 3, 1, dtype=dtype)
        for dtype in (torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float64, torch.complex64)
    ),
]


@pytest.mark.parametrize("op", PADDINGS, ids=str)
def test_what_a_padding_writes_is_what_tracing_gives(op: Op) -> None:
    entry = LOWERINGS[op.name]
    (traced,) = Tracer(startup.engine().client, "cpu", ops.Context).trace([(op, entry)])
    written = written_fragment(op, entry)
    assert written == traced


def test_a_padding_of_no_zeros_or_between_elements_at_a_place_that_changes_is_traced() -> None:
    left = [
        padding("constant_pad_nd", (2, 3), (0, 1), 2.5),
        padding("constant_pad_nd", (2, 3), (0, 1), -0.0),
        padding("constant_pad_nd", (0, 3), (0, 1, 0, 2), 0.0),
        padding("constant_pad_nd", (), (), 0.0),
        padding("slice_backward", (0, 3), (4, 3), 0, 1, 1, 1),
        replace(
            padding("slice_backward", (2, 3), (4, 3), 0, 1, 4, 2), args=(*PADDINGS[0].args[:3], Lifted("i", 0), 4, 2)
        ),
    ]
    assert [written_fragment(op, LOWERINGS[op.name]) for op in left] == [None] * len(left)
