"""Programs that tests need from Debian's packages: found, or installed where that is possible."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from typing import TypeVar

Found = TypeVar("Found")


def find_or_install(find: Callable[[], Found | None], package: str) -> Found | None:
    """What `find` finds, if need be after installing `package`. None where it cannot be installed."""
    found = find()
    if found is None and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(
            ["apt-get", "install", "-y", "--no-install-recommends", package],
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
            stdout=subprocess.DEVNULL,
            check=False,
        )
        found = find()
    return found
