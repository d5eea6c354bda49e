"""How a benchmark's result is recorded: with the commit, the versions and the machine."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


def write_result(name: str, document: Mapping[str, object]) -> Path:
    """Writes `benchmarks/results/NAME.json`."""
    path = REPOSITORY / "benchmarks" / "results" / f"{name}.json"
    path.write_text(json.dumps({"commit": commit(), "machine": machine(), **document}, indent=1) + "\n")
    return path


def commit() -> str:
    answer = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False, cwd=REPOSITORY
    )
    return answer.stdout.strip() or "unknown"


def machine() -> dict[str, object]:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return {
        "cpu": next(named, platform.processor()),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
    }
