"""`headstart serve` with the scripted worker in the model's place; arguments go to that worker."""

import sys

from gateway.cli import refusals_told, serve_locally
from gateway.settings import Settings

with refusals_told():
    serve_locally(
        Settings(), [sys.executable, "-m", "tests.integration.gateway.scripted_worker", *sys.argv[1:]]
    )
