"""Jupyter and IPython: the example notebook runs, tensors display, completion and `?` help, and progress goes away."""

from __future__ import annotations

import atexit
import importlib.util
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("nbclient", "ipykernel")),
    reason="pip install 'torchtpu[test]': nbclient or ipykernel cannot be imported",
)
EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "first_model.ipynb"


def executed(notebook: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The notebook after all its cells have run in a kernel of their own; an error in a cell is raised."""
    import nbclient

    monkeypatch.setenv("IPYTHONDIR", str(folder / "ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(folder / "runtime"))
    client = nbclient.NotebookClient(notebook, timeout=500, kernel_name="python3", allow_errors=False)
    return client.execute(cwd=str(folder))


def shown(cell: Any) -> str:
    """What a cell prints and displays, without what it shows while it runs only."""
    texts = [output.get("text") or output["data"]["text/plain"] for output in cell.outputs]
    return "".join(texts).rstrip("\n")


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_the_example_runs_and_prints_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last cell, whose report has times and paths, is kept without its output."""
    import nbformat

    committed = nbformat.read(EXAMPLE, as_version=4)
    ran = executed(nbformat.read(EXAMPLE, as_version=4), tmp_path, monkeypatch)
    *cells, (_, report) = zip(code_cells(committed), code_cells(ran), strict=True)
    assert len(cells) > 3
    for before, after in cells:
        assert shown(after) == shown(before), after.source
    assert shown(report).startswith("torchtpu.explain: ")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_what_is_waited_for_is_shown_in_a_notebook_until_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import nbformat

    code = """
from torchtpu.runtime.telemetry.waiting import Waits
waits = Waits()
waits.report("region of 2 ops", 1.0)
waits.report("region of 2 ops", 2.0)
while_it_lasts = {"during": waits.line is not None}
waits.end()
print(while_it_lasts, waits.line)
"""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    (cell,) = executed(notebook, tmp_path, monkeypatch).cells
    displayed = [output for output in cell.outputs if output.output_type == "display_data"]
    assert [output["data"] for output in displayed] == [{"text/plain": ""}]
    assert shown(cell) == "{'during': True} None"


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Any:
    from IPython.core.interactiveshell import InteractiveShell

    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # a shell takes its place, and empties it
    made = InteractiveShell()
    made.user_ns["torch"] = torch
    yield made
    made.atexit_operations()
    atexit.unregister(made.atexit_operations)


def test_a_tensor_displays_as_it_prints(shell: Any) -> None:
    x = torch.arange(3.0, device="tpu") + 1
    data, _ = shell.display_formatter.format(x)
    assert data == {"text/plain": "tensor([1., 2., 3.], device='tpu:0')"}


def test_completion_offers_the_devices_functions_and_nothing_else(shell: Any) -> None:
    from IPython.core.completer import provisionalcompleter

    with provisionalcompleter():
        names = {found.text.removeprefix(".") for found in shell.Completer.completions("torch.tpu.", 10)}
    assert {"synchronize", "memory_allocated", "manual_seed", "Stream", "amp"} <= names
    assert not names & {"os", "Any", "Path", "torch", "startup", "annotations", "dataclass"}


def test_each_name_of_torch_tpu_says_what_it_does(shell: Any) -> None:
    for name in dir(torch.tpu):
        value = getattr(torch.tpu, name)
        if name != "default_generators":
            assert inspect.getdoc(value), name
    help_text = shell.inspector._get_info(torch.tpu.synchronize, "torch.tpu.synchronize")["text/plain"]
    assert "Waits for everything recorded on the device" in help_text
