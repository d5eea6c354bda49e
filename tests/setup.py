"""`python -m tests.setup`: what tests need and pip does not bring. Run before pytest by `make test`.

Finds or installs PostgreSQL, Prometheus and Chromium, and converts the default model once,
so that tests are not slowed down by, or fail of, any of it in the middle.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

from model_worker.models import ModelUnavailable, resolve_model_folder
from model_worker.settings import WorkerSettings
from tests.browsers import BrowserMissingError, chromium_path, find_chromium
from tests.servers import (
    ServerMissingError,
    find_postgres_binaries,
    find_prometheus_program,
    postgres_binaries,
    prometheus_program,
)


def main() -> int:
    """Names each thing that is there; 1 with what to install when one cannot be had."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    if not (find_chromium() and find_postgres_binaries() and find_prometheus_program("promtool")):
        _refresh_package_lists()
    settings = WorkerSettings()
    try:
        print("PostgreSQL:", postgres_binaries())
        print("Prometheus:", prometheus_program("prometheus"))
        print("Chromium:", chromium_path())
        print("model:", resolve_model_folder(settings.model, settings.models_folder).name)
    except (ServerMissingError, BrowserMissingError, ModelUnavailable) as error:
        sys.stderr.write(f"test set-up: {error}\n")
        return 1
    return 0


def _refresh_package_lists() -> None:
    """A fresh Debian machine has no package lists: without them nothing can be installed."""
    if os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(["apt-get", "update", "-q"], stdout=subprocess.DEVNULL, check=False)


if __name__ == "__main__":
    sys.exit(main())
