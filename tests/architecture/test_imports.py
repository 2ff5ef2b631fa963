"""The import graph of STYLE: an arrow that is not drawn there is a failing test here."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ALLOWED = {
    "domain": set(),
    "predictors": {"domain"},
    "policies": {"domain"},
    "backends": {"domain"},
    "gateway": {"domain", "predictors", "policies", "backends"},
    "training": {"domain", "predictors", "policies", "backends"},
    "sluice": {"domain", "predictors", "policies", "backends", "gateway", "training"},
}
HEAVY = ("torch", "triton", "lightgbm", "gymnasium")


def python_files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported_roots(tree: ast.AST) -> Iterator[str]:
    """First name of every import in the file, functions and import_module included."""
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from (alias.name.split(".")[0] for alias in node.names)
            case ast.ImportFrom(level=0, module=str(module)):
                yield module.split(".")[0]
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module"),
                args=[ast.Constant(value=str(module)), *_],
            ):
                yield module.split(".")[0]


@pytest.mark.parametrize("package", ALLOWED)
def test_packages_import_only_along_the_drawn_arrows(package):
    forbidden = (set(ALLOWED) | {"tests"}) - ALLOWED[package] - {package}
    wrong = [
        f"{file.relative_to(ROOT)} imports {root}"
        for file in python_files(package)
        for root in imported_roots(ast.parse(file.read_text()))
        if root in forbidden
    ]
    assert wrong == []


def test_domain_needs_only_the_standard_library_and_numpy():
    allowed = sys.stdlib_module_names | {"domain", "numpy"}
    wrong = [
        f"{file.relative_to(ROOT)} imports {root}"
        for file in python_files("domain")
        for root in imported_roots(ast.parse(file.read_text()))
        if root not in allowed
    ]
    assert wrong == []


@pytest.mark.parametrize("package", ALLOWED)
def test_package_inits_hold_only_a_docstring(package):
    """Importing one module of a package never loads its neighbours."""
    inits = [file for file in python_files(package) if file.name == "__init__.py"]
    assert inits != []
    for file in inits:
        body = ast.parse(file.read_text()).body
        assert len(body) == 1, file
        assert isinstance(body[0], ast.Expr), file
        assert isinstance(body[0].value, ast.Constant), file


def test_the_walk_sees_imports_inside_functions():
    source = "def f():\n    from gateway.app import x\n    import_module('training.y')\n"
    assert list(imported_roots(ast.parse(source))) == ["gateway", "training"]


def test_start_up_is_light():
    """Importing every module of gateway and sluice loads none of the heavy libraries."""
    modules = [
        ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for package in ("gateway", "sluice")
        for file in python_files(package)
        if file.name != "__main__.py"
    ]
    script = (
        f"import importlib, sys\n"
        f"for name in {modules!r}:\n"
        f"    importlib.import_module(name)\n"
        f"    loaded = [heavy for heavy in {HEAVY!r} if heavy in sys.modules]\n"
        f"    assert not loaded, f'{{name}} loads {{loaded}}'\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
