"""`python -m gateway` is the command `headstart`."""

from gateway.cli import main

main()
