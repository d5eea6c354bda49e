"""These tests run only when they are asked for: they build images and take minutes."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without `-m compose`, leaves them out, wherever pytest was started."""
    if "compose" in config.option.markexpr:
        return
    left_out = [item for item in items if item.get_closest_marker("compose")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("compose")]
