"""Builds the C++ sources in runtime/csrc into the extension module `torchtpu.runtime._C`.

A build from source has one, for the torch that is installed.  With TORCHTPU_EXTENSIONS in the environment nothing is
compiled: that folder holds `torch2_13/_C.*.so` and its like, one for each torch, which all go into one wheel, where
`torchtpu.runtime` chooses among them; packaging/build_wheel.py makes it.

With TORCHTPU_SANITIZE=address,undefined or =thread the compiler's sanitizers watch the extension, and it checks its
locks; `tests/sanitize.py` builds it so in a copy and runs tests with it.  The sources of a folder are one compilation,
in that build all are: torch's headers cost more than they do.  Everything else about the package is in pyproject.toml.
"""

import compileall
import os
import shutil
import sys
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

JAX = ">=0.10.2,<0.13"
PREBUILT = os.environ.get("TORCHTPU_EXTENSIONS", "")
SANITIZERS = os.environ.get("TORCHTPU_SANITIZE", "")
SOURCES = sorted(glob("runtime/csrc/*/*.cpp"))


def parallel_jobs() -> int:
    """One compiler per usable core, as far as memory goes: a file that includes torch's headers takes about 1.6 GB."""
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**30
    return max(1, min(len(os.sched_getaffinity(0)), gigabytes // 3))


def joined(folder: str) -> dict[Path, str]:
    """Sources that include those of a folder each, or all, by where they are to be."""
    groups: dict[str, list[str]] = {}
    for source in SOURCES:
        groups.setdefault("all" if SANITIZERS else Path(source).parent.name, []).append(source)
    return {
        Path(folder, f"{name}.cpp"): "".join(f'#include "{os.path.abspath(source)}"\n' for source in sources)
        for name, sources in groups.items()
    }


def write(texts: dict[Path, str]) -> None:
    """Writes what has changed: a build that is there stays."""
    for path, text in texts.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def compiled() -> dict[str, object]:
    """What setup() is told to compile the extension for the torch that is installed."""
    os.environ.setdefault("MAX_JOBS", str(parallel_jobs()))
    # A torchtpu that was built against another torch must not keep this build from importing torch.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension

    objects = f"build/{sys.implementation.cache_tag}-torch{torch.__version__}"
    folder = f"build/{SANITIZERS.replace(',', '-')}" if SANITIZERS else objects
    sources = joined(folder)

    class Build(BuildExtension):
        """Keeps the object files in the checkout, where an editable install would make all of them again each time."""

        def finalize_options(self) -> None:
            super().finalize_options()
            self.build_temp = os.path.abspath(folder)

        def run(self) -> None:
            write(sources)
            super().run()
            if self.editable_mode:  # as pip does with what it copies: a process that may write no bytecode takes longer
                for package in ("torchtpu", "runtime", "compiler_cache"):
                    compileall.compile_dir(package, quiet=2, workers=1)

    if SANITIZERS:
        sanitize = [f"-fsanitize={SANITIZERS}", "-fno-sanitize=vptr"]  # torch's type information is hidden from vptr
        compile_args = ["-O0", "-g1", "-fno-omit-frame-pointer", "-DTORCHTPU_CHECKS_LOCKS", *sanitize]
        link_args = sanitize
    else:
        # Python's own flags often ask for -g, which would make the library 50 times larger.
        compile_args = ["-O2", "-g0"]
        link_args = ["-Wl,-s"]
    extension = CppExtension(
        "torchtpu.runtime._C",
        sources=list(map(str, sources)),
        depends=SOURCES + sorted(glob("runtime/csrc/*/*.h")),
        include_dirs=[os.path.abspath("runtime/csrc")],
        extra_compile_args=[*compile_args, "-std=c++20", "-fvisibility=hidden", "-Wno-subobject-linkage"],
        extra_link_args=link_args,
    )
    version = torch.__version__.partition("+")[0]
    return {"ext_modules": [extension], "cmdclass": {"build_ext": Build}, "install_requires": requires(f"=={version}")}


def collected() -> dict[str, object]:
    """What setup() is told to take the extensions that are there."""

    class Copy(build_ext):
        def build_extension(self, extension: Extension) -> None:
            made = Path(self.get_ext_fullpath(extension.name))
            made.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(PREBUILT, made.parent.name, made.name), made)

    folders = sorted(path.parent.name for path in Path(PREBUILT).glob("torch*/_C.*.so"))
    versions = sorted(tuple(map(int, name.removeprefix("torch").split("_"))) for name in folders)
    (major, first), (_, last) = versions[0], versions[-1]
    extensions = [Extension(f"torchtpu.runtime.{name}._C", []) for name in folders]
    needed = requires(f">={major}.{first},<{major}.{last + 1}")
    return {"ext_modules": extensions, "cmdclass": {"build_ext": Copy}, "install_requires": needed}


def requires(torch: str) -> list[str]:
    """The dependencies; jax 0.11 and later need Python 3.12."""
    # Typer and Rich are the command line's: help, shell completion, tables and progress bars.
    return [f"torch{torch}", f"jax{JAX}", f"jaxlib{JAX}", "numpy", "typer>=0.20", "rich>=14"]


setup(**(collected() if PREBUILT else compiled()))
