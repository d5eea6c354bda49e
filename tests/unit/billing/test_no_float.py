"""Money is exact because nothing in `billing/` can make a float."""

import ast
from pathlib import Path

import pytest

import billing

FORBIDDEN_NAMES = {"float", "complex", "Float", "Double", "Numeric", "REAL", "fsum"}
FORBIDDEN_MODULES = {"math", "cmath", "decimal", "numpy", "statistics"}
SOURCES = sorted(Path(billing.__file__).parent.rglob("*.py"))


def floats_in(source: str) -> list[str]:
    """What in the source makes a float, or could: constants, names, modules, true division."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Constant(value=float() | complex()):
                found.append(f"{node.lineno}: constant {node.value}")
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in FORBIDDEN_NAMES:
                found.append(f"{node.lineno}: {name}")
            case ast.BinOp(op=ast.Div()) | ast.AugAssign(op=ast.Div()):
                found.append(f"{node.lineno}: true division")
            case ast.Import(names=names) if {name.name for name in names} & FORBIDDEN_MODULES:
                found.append(f"{node.lineno}: import")
            case ast.ImportFrom(module=module) if module in FORBIDDEN_MODULES:
                found.append(f"{node.lineno}: import from {module}")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_module_of_billing_has_a_float(path):
    assert floats_in(path.read_text()) == []


@pytest.mark.parametrize(
    "source", ["x = 0.1", "y = 2j", "float(3)", "a = b / c", "a /= 2", "import math", "from math import fsum"]
)
def test_the_search_for_floats_finds_them(source):
    assert floats_in(source)


def test_the_search_covers_the_package():
    assert {"ledger.py", "meter.py", "prices.py", "reports.py"} <= {path.name for path in SOURCES}
