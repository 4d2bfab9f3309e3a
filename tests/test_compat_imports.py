"""Other libraries are changed as they are imported, without an error of ours."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from torchtpu.compat import imports


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A package `somelib` with a module `device`, and no trace of them afterwards."""
    package = tmp_path / "somelib"
    package.mkdir()
    (package / "__init__.py").write_text("from somelib.device import name\n")
    (package / "device.py").write_text("def name():\n    return 'cpu'\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield package
    for module in ("somelib", "somelib.device", "somelib.other"):
        sys.modules.pop(module, None)
        imports._finder.changes.pop(module, None)


def use_tpu(module):
    module.name = lambda: "tpu"


def test_who_imports_from_a_changed_module_gets_the_change(library):
    imports.after("somelib.device", use_tpu)
    assert importlib.import_module("somelib").name() == "tpu"


def test_a_module_that_is_there_already_is_changed_at_once(library):
    importlib.import_module("somelib.device")
    imports.after("somelib.device", use_tpu)
    assert sys.modules["somelib.device"].name() == "tpu"


def test_a_module_that_is_just_being_imported_is_changed_when_it_is_done(library):
    source = (
        "from torchtpu.compat import imports\nimports.after(__name__, lambda m: setattr(m, 'name', lambda: 'tpu'))\n"
    )
    path = library / "device.py"
    path.write_text(source + path.read_text())
    assert importlib.import_module("somelib").device.name() == "tpu"
    assert importlib.reload(sys.modules["somelib.device"]).name() == "tpu"


def test_a_module_whose_import_fails_is_not_changed(library):
    source = "from torchtpu.compat import imports\nimports.after(__name__, lambda m: 1 / 0)\nraise OSError\n"
    (library / "device.py").write_text(source)
    with pytest.raises(OSError):
        importlib.import_module("somelib")


def test_a_version_that_cannot_be_changed_works_as_before_and_is_warned_of(library):
    def change(module):
        module.find_best_device

    imports.after("somelib.device", change)
    with pytest.warns(RuntimeWarning, match=r"does not know this version of somelib\.device.*find_best_device"):
        module = importlib.import_module("somelib.device")
    assert module.name() == "cpu"


def test_the_source_of_a_changed_module_can_still_be_found(library):
    imports.after("somelib.device", use_tpu)
    spec = importlib.util.find_spec("somelib.device")
    assert spec is not None and spec.origin == str(library / "device.py")
    assert "return 'cpu'" in spec.loader.get_source("somelib.device")


def test_modules_of_an_archive_are_changed_once_each(library, monkeypatch):
    (library / "other.py").write_text("name = print\n")
    archive = shutil.make_archive(str(library.parent / "packed"), "zip", library.parent, "somelib")
    shutil.rmtree(library)
    monkeypatch.syspath_prepend(archive)
    changed = []
    for name in ("somelib.device", "somelib.other"):
        imports.after(name, lambda module: changed.append(module.__name__))
    importlib.import_module("somelib")
    assert importlib.import_module("somelib.other").__file__.startswith(archive)
    assert changed == ["somelib.device", "somelib.other"]


def test_importing_torch_imports_no_library_that_can_be_changed():
    libraries = {name.partition(".")[0] for name in imports._CHANGES} - {"torch"}
    names = sorted(libraries | set(imports._CHANGES))
    code = f"import sys, torch; assert torch.tpu; print([name for name in {names} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
    code += "; print([name for name in sys.modules if name.startswith('torchtpu.compat.')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = [f"torchtpu.compat.{name}" for name in ("imports", "compiler_imports", "data_parallel")]
    assert done.stdout.splitlines()[1] == str(modules)
