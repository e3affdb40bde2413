"""Each synchronization of the CUDA layer is necessary: without it, a test on the stand-in fails."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cuda_stand_in.mutated import VARIABLE
from tests.cuda_stand_in.mutations import CPP, IN_FLIGHT, PYTHON, WORKER, Mutation
from tests.rigs.cuda_stand_in.building import ROOT, build

pytestmark = pytest.mark.slow

PROGRAMS = ("test_cuda", "test_cuda_errors")
HANGS_AFTER_SECONDS = 60


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the sources that are mutated, with a build next to it."""
    copy = tmp_path_factory.mktemp("mutations") / "csrc"
    shutil.copytree(ROOT / "csrc", copy)
    return copy


@pytest.fixture
def mutated(sources: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Mutate the sources; return them."""
    mutation: Mutation = request.param
    path = sources / mutation.path
    original = path.read_text()
    assert mutation.old in original, mutation
    path.write_text(original.replace(mutation.old, mutation.new))
    yield sources
    path.write_text(original)


def passes(program: Path) -> bool:
    try:
        return not subprocess.run(
            [program], capture_output=True, timeout=HANGS_AFTER_SECONDS, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return False


def test_unchanged_sources_pass(sources: Path) -> None:
    folder = build(*PROGRAMS, sources=sources, folder=sources.parent / "build")
    assert all(passes(folder / name) for name in PROGRAMS)


@pytest.mark.parametrize("mutated", CPP, indirect=True, ids=[mutation.name for mutation in CPP])
def test_cpp_tests_find_each_mutation(mutated: Path) -> None:
    folder = build(*PROGRAMS, sources=mutated, folder=mutated.parent / "build")
    assert not all(passes(folder / name) for name in PROGRAMS)


@pytest.mark.parametrize("mutation", PYTHON, ids=[mutation.name for mutation in PYTHON])
def test_python_tests_find_each_mutation(mutation: Mutation) -> None:
    change = json.dumps([mutation.path, mutation.old, mutation.new])
    in_worker = mutation.path in (WORKER, IN_FLIGHT) or mutation.in_worker
    tests = ["tests/integrations/test_cuda.py"] if in_worker else ["tests/cuda_stand_in"]
    command = ["-m", "pytest", "-x", "-q", "-p", "tests.cuda_stand_in.mutated", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [sys.executable, *command, "-o", "filterwarnings=", "--timeout=60", "-m", "not slow", *tests],
        env={**os.environ, VARIABLE: change},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == pytest.ExitCode.TESTS_FAILED, result.stdout[-4000:] + result.stderr[-4000:]
    assert "not in kvtier" not in result.stdout
