"""Templates: ordinary ops need no jax, and what is filled in is what tracing gives."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
import torch
from script import run_script

from torchtpu import metrics, ops, startup
from torchtpu.ops.registry import LOWERINGS
from torchtpu.runtime.lowering import templates
from torchtpu.runtime.lowering.templates import FragmentTemplate, Templates

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


def test_what_tracing_gives_is_in_the_file(rotation: int, held: Any) -> None:
    """Of a part of the ops; a lowering that was changed has no templates until the file is made anew."""
    (version,) = {of_op["jax"] for of_op in held.values()}
    if jax.__version__ != version:
        pytest.skip(f"the files were made with jax {version}, whose text may be another one")
    part = f"{rotation % PARTS}/{PARTS}"
    command = [sys.executable, str(MAKER), "--check", "--part", part]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture(scope="module")
def held() -> Any:
    """What the files hold, by op."""
    return {file.stem: json.loads(file.read_text()) for file in FOLDER.iterdir()}


def test_the_files_are_of_these_sources(held: Any) -> None:
    for op, of_op in held.items():
        digests = {home: templates.digest_of_sources(home) for home in of_op["sources"]}
        assert digests == of_op["sources"], f"{op}: python {MAKER.name} makes it anew"


def sizes_for(pattern: str) -> dict[str, str]:
    """Sizes with which a template is what an op with this pattern makes."""
    some = {"S": "3x1x2"} | {letter: str(size) for size, letter in enumerate(templates.LETTERS, 2)}
    filled = re.sub(r"\b[A-S](?=x)|(?<=x)[A-S](?=x)|(?<=\bint:)[A-M]\b", lambda letter: some[letter[0]], pattern)
    return dict(templates.patterns(filled))[pattern]


def has_other_sizes_in_results(pattern: str) -> bool:
    """As those of `cat`, which follow from the others, so that not every number does."""
    given, _, made = pattern.partition(")->(")
    letters = re.compile(r"\b[A-M](?=x)|(?<=x)[A-M](?=x)|(?<=\bint:)[A-M]\b")
    return not set(letters.findall(made)) <= set(letters.findall(given))


def test_every_template_is_a_program(held: Any) -> None:
    """To the installed jaxlib, which need not be the one that the file was made with."""
    rows = [row for of_op in held.values() for row in of_op["templates"] if not has_other_sizes_in_results(row[1])]
    made = [FragmentTemplate(*fields).filled(sizes_for(pattern)) for _, pattern, *fields in rows]
    bodies = "\n".join({fragment.symbol: fragment.text for fragment in made if fragment is not None}.values())
    assert None not in made
    main = "func.func public @main(%x: tensor<2xf32>) -> tensor<2xf32> { return %x : tensor<2xf32> }"
    startup.engine().client.compile(f"module {{\n{main}\n{bodies}\n}}", 0)  # reads and verifies all of them


def test_sizes_become_letters() -> None:
    assert list(templates.patterns("neg(tensor<3x1x5xf32>)->(tensor<3x1x5xf32>) None")) == [
        ("neg(tensor<Sxf32>)->(tensor<Sxf32>) None", {"S": "3x1x5", "N": "15"}),
        ("neg(tensor<Ax1xBxf32>)->(tensor<Ax1xBxf32>) None", {"N": "15", "A": "3", "B": "5"}),
    ]
    assert list(templates.patterns("mm(tensor<3x5xf32>,tensor<5x3xf32>)->(tensor<3x3xf32>) highest")) == [
        ("mm(tensor<AxBxf32>,tensor<BxAxf32>)->(tensor<AxAxf32>) highest", {"A": "3", "B": "5"})
    ]
    assert list(templates.patterns("neg(tensor<f32>)->(tensor<f32>) None")) == [
        ("neg(tensor<f32>)->(tensor<f32>) None", {})
    ]


def description(sizes: str) -> str:
    return f"relu(tensor<{sizes}f32>)->(tensor<{sizes}f32>) None"


def test_a_template_of_other_sources_does_not_count(tmp_path: Path, held: Any) -> None:
    assert Templates(FOLDER, "cpu").find(description("3x5x"), LOWERINGS["relu"]) is not None
    assert Templates(FOLDER, "vulkan").find(description("3x5x"), LOWERINGS["relu"]) is None
    of_op = held["relu"]
    changed = {**of_op, "sources": dict.fromkeys(of_op["sources"], "of other sources")}
    (tmp_path / "relu.json").write_text(json.dumps(changed))
    assert Templates(tmp_path, "cpu").find(description("3x5x"), LOWERINGS["relu"]) is None
    assert Templates(tmp_path / "none", "cpu").find(description("3x5x"), LOWERINGS["relu"]) is None


@pytest.mark.bailouts("template")
def test_a_damaged_file_costs_nothing_but_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mul.Tensor.json").write_text("{")
    monkeypatch.setattr(startup.engine().fragments, "_templates", Templates(tmp_path, "cpu"))
    before = metrics.snapshot()["fragment_traces"]
    assert torch.ones(613, 2, 3, device="tpu").mul(4).sum().item() == 613 * 24
    assert metrics.snapshot()["fragment_traces"] > before
