"""What is written down beside the code agrees with the code. Needs no Docker."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from tests.compose.stack import CHECKOUT, SHIPPED

TOP_PACKAGES = ("billing", "gateway", "migrations", "model_worker", "prefix_store")


def read(name: str) -> str:
    return (CHECKOUT / name).read_text("utf-8")


def names_in(pattern: str, text: str) -> set[str]:
    return set(re.findall(pattern, text, flags=re.MULTILINE))


def test_every_package_folder_is_in_the_distribution() -> None:
    """A folder that is left out is missed only where headstart is installed from a wheel, as in an image."""
    named = set(tomllib.loads(read("pyproject.toml"))["tool"]["setuptools"]["packages"])
    folders = {
        ".".join(path.parent.relative_to(CHECKOUT).parts)
        for top in TOP_PACKAGES
        for path in (CHECKOUT / top).rglob("__init__.py")
    }
    assert named == folders


def test_every_package_goes_into_the_images() -> None:
    assert set(TOP_PACKAGES) <= names_in(r"^COPY (\w+) \1$", read("deploy/Dockerfile"))
    assert set(TOP_PACKAGES) <= names_in(r"^!(\w+)$", read(".dockerignore"))
    assert set(TOP_PACKAGES) <= set(SHIPPED)


def test_every_setting_of_compose_is_explained_and_none_is_explained_in_vain() -> None:
    used = names_in(r"\$\{([A-Z_]+)", read("compose.yaml")) | {"COMPOSE_PROFILES"}  # Compose's own
    explained = names_in(r"^#?([A-Z_]+)=", read(".env.example"))
    assert explained == used - {"HEADSTART_TAG"}  # for tests alone


def test_no_wheel_is_committed() -> None:
    """The folder ignores all but the file that says so."""
    assert {path.name for path in Path(CHECKOUT, "deploy", "wheels").glob(".*")} == {".gitignore"}
    assert "*\n!.gitignore\n" in read("deploy/wheels/.gitignore")
