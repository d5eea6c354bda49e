"""The gateway's image is built without the worker's dependencies."""

import subprocess
import sys


def test_the_gateway_imports_without_torch():
    code = "import sys, gateway.app, gateway.cli; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert ended.stdout.strip() == "[]"
