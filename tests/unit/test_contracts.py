"""The import contracts name every module they are about."""

from __future__ import annotations

import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PUBLIC = {"__init__", "__main__", "protocol"}


def test_every_worker_module_but_the_protocol_is_protected() -> None:
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    contracts = settings["tool"]["importlinter"]["contracts"]
    [protected] = [one["protected_modules"] for one in contracts if one["type"] == "protected"]
    modules = {path.stem for path in (REPOSITORY / "model_worker").glob("*.py")} - PUBLIC
    assert {f"model_worker.{name}" for name in modules} == set(protected)
