"""Arrows point down only: who may import what. `make check` runs this file."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("kvstore", "prefill_node", "decode_node")

LAYERS = (
    # Lowest first; a file may import its own layer and those below. The first prefix that fits a module counts.
    ("kvstore.ids", "kvstore.units", "kvstore.errors"),
    ("kvstore.clock", "kvstore.byte_budget"),
    ("kvstore.core",),
    ("kvstore.config",),
    ("kvstore.config_help",),
    ("kvstore.process",),
    ("kvstore.telemetry",),
    ("kvstore.codec",),
    ("kvstore.tiers",),
    ("kvstore.rpc", "kvstore.transport"),
    ("kvstore.registry",),
    ("kvstore.client",),
    ("kvstore.node", "kvstore.admin"),
    ("prefill_node",),
    ("decode_node",),
)

ONLY_IN = {
    "fastapi": ("decode_node/gateway/",),
    "starlette": ("decode_node/gateway/",),
    "uvicorn": ("decode_node/gateway/",),
    "grpc": ("kvstore/rpc/", "kvstore/transport/grpc", "/servicer.py", "_servicer.py", "decode_node/gateway/backends.py"),
    "redis": ("kvstore/registry/", "kvstore/admin/bench_redis.py"),
    "ucxx": ("kvstore/transport/ucx_worker.py",),
    "typer": ("kvstore/admin/",),
    "rich": ("kvstore/admin/",),
    "torch": ("prefill_node/", "decode_node/", "kvstore/codec/torch_codec.py", "kvstore/codec/triton_kernels.py", "kvstore/tiers/gpu.py"),
    "transformers": ("prefill_node/", "decode_node/"),
    "numba": ("kvstore/codec/", "prefill_node/engine/"),
    "llvmlite": ("prefill_node/engine/", "kvstore/codec/"),
    "triton": ("kvstore/codec/triton_kernels.py",),
}
"""Package -> the only files (a part of their path) that may import it."""


def source_files() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]


def imported_modules(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text(), filename=str(path))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layer_of(module: str) -> int | None:
    for number, prefixes in enumerate(LAYERS):
        if any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes):
            return number
    return None


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_its_own_layer_and_those_below(path: Path) -> None:
    own = layer_of(module_of(path))
    if own is None:
        assert module_of(path) == "kvstore", f"{path} belongs to no layer: give it one"
        return
    for module in imported_modules(path):
        other = layer_of(module)
        assert other is None or other <= own, f"{path.relative_to(ROOT)} imports {module}, which lies above it"


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_library_is_imported_only_where_it_belongs(path: Path) -> None:
    place = path.relative_to(ROOT).as_posix()
    for module in imported_modules(path):
        allowed = ONLY_IN.get(module.partition(".")[0])
        assert allowed is None or any(part in place for part in allowed), f"{place} imports {module}; only {allowed} may"


@pytest.mark.parametrize("path", sorted((ROOT / "kvstore" / "core").rglob("*.py")), ids=lambda path: path.name)
def test_the_core_imports_the_standard_library_and_identities_only(path: Path) -> None:
    for module in imported_modules(path):
        top = module.partition(".")[0]
        if top == "kvstore":
            assert module.startswith(("kvstore.core", "kvstore.ids", "kvstore.units", "kvstore.errors")), f"{path.name} imports {module}"
        else:
            assert top in sys.stdlib_module_names, f"{path.name} imports {module}"
            assert top not in ("asyncio", "socket", "threading", "time", "random"), (
                f"{path.name} imports {module}: not decided by arguments"
            )


def test_every_package_is_listed_for_the_build() -> None:
    import tomllib

    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    there = {module_of(path) for package in PACKAGES for path in (ROOT / package).rglob("__init__.py")}
    assert there <= listed, f"not listed in pyproject.toml: {sorted(there - listed)}"


def test_whatever_a_test_defines_inside_itself_it_uses() -> None:
    """An inner coroutine that nobody runs is a test that cannot fail."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for function in ast.walk(ast.parse(path.read_text(), filename=str(path))):
            if isinstance(function, ast.FunctionDef) and function.name.startswith("test_"):
                inner = [node for node in function.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
                used = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
                assert used.issuperset(node.name for node in inner), f"{path.relative_to(ROOT)}: {function.name}"
