"""Prints what pyproject.toml requires, or one of its extras: `requirements.py [EXTRA]`.

Lets an image install what the code needs before the code itself is copied in.
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def main(extras: list[str]) -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["project"]
    groups = [project["optional-dependencies"][extra] for extra in extras] or [project["dependencies"]]
    sys.stdout.writelines(f"{requirement}\n" for group in groups for requirement in group)


if __name__ == "__main__":
    main(sys.argv[1:])
