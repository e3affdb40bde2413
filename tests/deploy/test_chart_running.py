"""What the chart of deploy/helm renders, started on this machine: the commands, variables and settings of its pods."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from kvtier.bridge.client import status
from kvtier.lab.demo.client import Client
from kvtier.lab.demo.server import Server
from kvtier.testing.servers import free_port
from tests.rigs import container
from tests.rigs.chart import CHART, HELM, Node, helm, of_kind, render, settings, values, workloads
from tests.rigs.forks import VLLM_ENVIRONMENT
from tests.rigs.vllm import models
from tests.rigs.waiting import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not HELM.exists(), reason="helm is not installed: make test"),
]
READY_SECONDS = 300.0
CHUNK = 128
PROMPT = [number * 7 % 250 + 1 for number in range(6 * CHUNK)]
