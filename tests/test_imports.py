"""Imports, files and ops stand in the right place, by the package's source text."""

from __future__ import annotations

import ast
import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYTHON = sorted(p for folder in ("torchtpu", "runtime", "compiler_cache") for p in (ROOT / folder).rglob("*.py"))
SCRIPTS = sorted(p for folder in ("examples", "benchmarks", "tests") for p in (ROOT / folder).rglob("*.py"))
CPP = sorted((ROOT / "runtime" / "csrc").glob("*/*.*"))

OPEN_END = re.compile(r"\b(TOD[O]|FIXM[E]|XX[X])\b")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts if parts[0] == "torchtpu" else ("torchtpu", *parts))


def imports_of(path: Path) -> set[str]:
    """Absolute names of the modules that a file imports anywhere, functions included."""
    found: set[str] = set()
    package = module_of(path).split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            found.update({stem, *(f"{stem}.{alias.name}" for alias in node.names)})
    return found


def is_within(module: str, *packages: str) -> bool:
    return any(module == p or module.startswith(p + ".") for p in packages)


def test_compiler_cache_imports_nothing_of_ours() -> None:
    for path in (p for p in PYTHON if name_of(p).startswith("compiler_cache/")):
        ours = {
            m
            for m in imports_of(path)
            if is_within(m, "torchtpu", "runtime", "torch") and not is_within(m, "torchtpu.compiler_cache")
        }
        assert ours <= {"torchtpu"}, f"{name_of(path)} imports {sorted(ours)}"


def test_runtime_imports_only_itself_and_the_cache() -> None:
    for path in (p for p in PYTHON if name_of(p).startswith("runtime/")):
        above = {
            m
            for m in imports_of(path)
            if is_within(m, "torchtpu") and not is_within(m, "torchtpu.runtime", "torchtpu.compiler_cache")
        }
        assert above <= {"torchtpu"}, f"{name_of(path)} imports {sorted(above)}"


def test_lowerings_import_only_the_registry_and_each_other() -> None:
    for path in (p for p in PYTHON if name_of(p).startswith("torchtpu/ops/")):
        ours = {m for m in imports_of(path) if is_within(m, "torchtpu") and not is_within(m, "torchtpu.ops")}
        allowed = {"torchtpu"}
        if path.stem == "registry":  # which hands out jax
            allowed |= {"torchtpu.runtime.device", "torchtpu.runtime.device.jax_modules"}
        assert ours <= allowed, f"{name_of(path)} imports {sorted(ours)}"


LAYERS = ("device", "ir", "telemetry", "padding", "lowering", "partition", "execute", "compile", "spmd")


def edges() -> dict[str, set[str]]:
    """The modules that each module of the three packages imports, for its annotations too: `from P import m` is an
    import of P.m where that is a module, and else of P."""
    names = {module_of(path).removesuffix(".__init__"): path for path in PYTHON}

    def resolved(imported: str) -> str:
        return imported if imported in names else imported.rpartition(".")[0]

    found: dict[str, set[str]] = {}
    for name, path in names.items():
        packages = {m.rpartition(".")[0] for m in imports_of(path) if m in names}  # named on the way to a module
        found[name] = {resolved(m) for m in imports_of(path) if m not in packages} & names.keys() - {name}
    return found


def test_each_folder_of_the_runtime_imports_itself_and_those_before_it() -> None:
    folders = {path.name for path in (ROOT / "runtime").iterdir() if (path / "__init__.py").exists()}
    assert folders == {*LAYERS}

    def layer_of(module: str) -> int:
        parts = module.split(".")
        is_inside = is_within(module, "torchtpu.runtime") and len(parts) > 2 and parts[2] in folders
        return LAYERS.index(parts[2]) if is_inside else len(LAYERS) * is_within(module, "torchtpu.runtime")

    outside = {"torchtpu", "torchtpu.runtime"}  # packages that import none of these modules
    upward = {
        (module, m)
        for module, imported in edges().items()
        for m in imported - outside
        if is_within(module, "torchtpu.runtime") and layer_of(m) > layer_of(module)
    }
    assert not upward, f"imports of what comes later: {sorted(upward)}"


def test_no_module_imports_what_imports_it() -> None:
    left = edges()
    while leaves := [module for module, imported in left.items() if not imported & left.keys()]:
        for leaf in leaves:
            del left[leaf]
    assert not left, f"each of these imports another: {left}"


def test_no_two_classes_have_one_name() -> None:
    places: dict[str, list[str]] = {}
    for path in PYTHON:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{name_of(path)}:{node.lineno}")
    assert not {name: where for name, where in places.items() if len(where) > 1}


def test_each_file_with_a_long_form_is_in_the_table_of_those() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("### Long forms")[2]
    listed = re.findall(r"^\| `(tests/test_\w+\.py)` \|", table, re.MULTILINE)
    marks = re.compile(r"mark[.]full|in_full[(]|getoption[(]\"--full\"[)]")
    assert listed == [
        name_of(path) for path in SCRIPTS if path.stem.startswith("test_") and marks.search(path.read_text())
    ]


def test_distributed_imports_nothing_that_imports_it() -> None:
    """Of the top package it knows the knobs and the op registry."""
    modules = {module_of(p).removesuffix(".__init__"): p for p in PYTHON if "distributed" in p.parts}
    ours = {m: {n for n in imports_of(p) if is_within(n, "torchtpu")} for m, p in modules.items()}
    for module, imported in ours.items():
        below = ("torchtpu.config", "torchtpu.runtime", "torchtpu.ops.registry", *modules)
        above = {m for m in imported if not is_within(m, *below)}
        tree = ast.parse(modules[module].read_text())
        whole = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
        assert above <= {"torchtpu", "torchtpu.ops"} and "torchtpu" not in whole, f"{module} imports {sorted(above)}"


def test_jax_is_imported_by_the_runtime_and_the_op_registry_only() -> None:
    """Private modules are touched by runtime/device alone, jaxlib by runtime/; op files take jax from the registry,
    which loads it late."""
    for path in PYTHON:
        for private, home in (("jax._src", "torchtpu.runtime.device"), ("jaxlib", "torchtpu.runtime")):
            touched = {m for m in imports_of(path) if is_within(m, private)}
            assert not touched or is_within(module_of(path), home), f"{name_of(path)} imports {sorted(touched)}"


def test_every_package_is_installed() -> None:
    """An editable install has them all; a plain one has those that are listed."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert set(listed) == {module_of(path.parent) for path in PYTHON if path.name == "__init__.py"}


def test_each_op_is_lowered_in_one_place() -> None:
    places: dict[str, list[str]] = {}
    for path in PYTHON:
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Name)
                and node.func.id in ("lowering", "pointwise")
            ):
                platform = next((ast.unparse(k.value) for k in node.keywords if k.arg == "platform"), "")
                for argument in node.args:
                    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                        where = f"{name_of(path)}:{argument.lineno}"
                        places.setdefault(f"{argument.value} {platform}", []).append(where)
    assert places
    assert not {op: where for op, where in places.items() if len(where) > 1}


@pytest.mark.parametrize("path", PYTHON + SCRIPTS, ids=name_of)
def test_a_python_file_says_what_it_is_for(path: Path) -> None:
    text = path.read_text()
    if not text.strip():
        return
    assert ast.get_docstring(ast.parse(text)), "the first line says what the file is for"
    assert not OPEN_END.search(text), "an open end belongs in docs/known_gaps.md"


@pytest.mark.parametrize("path", CPP, ids=name_of)
def test_a_cpp_file_says_what_it_is_for(path: Path) -> None:
    text = path.read_text()
    said_in_header = text.startswith(f'#include "{path.parent.name}/{path.stem}.h"')
    assert text.startswith("//") or said_in_header, "the first line says what the file is for"
    assert not OPEN_END.search(text), "an open end belongs in docs/known_gaps.md"


def test_tests_import_nothing_from_other_tests() -> None:
    for path in SCRIPTS:
        others = {m for m in imports_of(path) if m.startswith("test_") and m != path.stem}
        assert not others, f"{name_of(path)} imports {sorted(others)}"


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_what_a_script_imports_of_the_package_is_there(path: Path) -> None:
    """Also where a function imports it: mypy reads the package alone."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torchtpu":
            module = importlib.import_module(str(node.module))
            for alias in node.names:
                there = hasattr(module, alias.name) or importlib.util.find_spec(f"{node.module}.{alias.name}")
                assert there, f"{node.module} has no {alias.name}"
