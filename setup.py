"""Builds the C++ sources in runtime/csrc into the one extension module, `torchtpu.runtime._C`.

With TORCHTPU_SANITIZE=address,undefined or =thread in the environment, the compiler's sanitizers watch it, and it
checks its locks; `tests/sanitize.py` builds it so in a copy and runs tests with it.  That build is one compilation of
all sources: torch's headers cost more than they do.  Everything else about the package is in pyproject.toml.
"""

import os
from glob import glob
from pathlib import Path

from setuptools import setup

# A torchtpu that was built against another torch must not keep this build from importing torch.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

from torch.utils.cpp_extension import BuildExtension, CppExtension

SOURCES = sorted(glob("runtime/csrc/*/*.cpp"))
SANITIZERS = os.environ.get("TORCHTPU_SANITIZE", "")


def parallel_jobs() -> int:
    """One compiler per usable core, as far as memory goes: a file that includes torch's headers takes about 1.6 GB."""
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**30
    return max(1, min(len(os.sched_getaffinity(0)), gigabytes // 3))


os.environ.setdefault("MAX_JOBS", str(parallel_jobs()))


class Build(BuildExtension):
    """Keeps the object files in the checkout, where an editable install would make all of them again each time."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.build_temp = os.path.abspath(BUILD)


def in_one_source() -> list[str]:
    """One source that includes the others; written only where it changes, so that a build that is there stays."""
    path = Path(BUILD, "all.cpp")
    text = "".join(f'#include "{os.path.abspath(source)}"\n' for source in SOURCES)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    return [str(path)]


BUILD = "build/" + (SANITIZERS.replace(",", "-") or "objects")
if SANITIZERS:
    sanitize = [f"-fsanitize={SANITIZERS}", "-fno-sanitize=vptr"]  # torch's type information is hidden from vptr
    compile_args = ["-O0", "-g1", "-fno-omit-frame-pointer", "-DTORCHTPU_CHECKS_LOCKS", *sanitize]
    link_args = sanitize
else:
    # Python's own flags often ask for -g, which would make the library 50 times larger.
    compile_args = ["-O2", "-g0"]
    link_args = ["-Wl,-s"]

setup(
    ext_modules=[
        CppExtension(
            "torchtpu.runtime._C",
            sources=in_one_source() if SANITIZERS else SOURCES,
            depends=SOURCES + sorted(glob("runtime/csrc/*/*.h")),
            include_dirs=[os.path.abspath("runtime/csrc")],
            extra_compile_args=[*compile_args, "-std=c++20", "-fvisibility=hidden"],
            extra_link_args=link_args,
        )
    ],
    cmdclass={"build_ext": Build},
)
