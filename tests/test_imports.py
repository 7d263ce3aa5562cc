"""Who may import whom, and when a heavy library may be imported: read from the sources, so nothing has to run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

MAY_IMPORT: dict[str, set[str]] = {
    "kvbench": {"cli"},
    "metrics": set(),
    "engine": {"metrics"},
    "paged": {"engine", "metrics"},
    "contiguous": {"engine", "metrics"},
    "workloads": {"engine", "metrics"},
    "planner": {"engine", "metrics", "workloads"},
    "reports": {"metrics"},
    "cli": {"contiguous", "engine", "metrics", "paged", "planner", "reports", "workloads"},
}
BACKENDS = {"contiguous", "paged"}
COMPOSITION_ROOT = "cli/stack.py"  # the one file that puts the parts together, so the one that names the backends

HEAVY = {"torch", "transformers", "triton", "pandas", "pyarrow", "matplotlib", "numpy", "scipy", "jinja2"}
HEAVY |= {"accelerate", "gguf", "safetensors"}
# These work on tensors from end to end. Others import them inside the functions that need them, like torch itself.
HEAVY_FILES = {
    "contiguous/cache.py",
    "engine/arena.py",
    "engine/attention/cpu_path.py",
    "engine/attention/layout.py",
    "engine/attention/kernels.py",
    "engine/attention/reference.py",
    "engine/attention/torch_path.py",
    "engine/attention/triton_path.py",
    "engine/attention/varlen_path.py",
    "engine/ceilings.py",
    "engine/decoder.py",
    "engine/linear.py",
    "engine/model.py",
    "engine/runner.py",
    "engine/sampling.py",
    "engine/weights.py",
    "paged/cache.py",
}

FILES = sorted(path.relative_to(ROOT).as_posix() for folder in MAY_IMPORT for path in (ROOT / folder).rglob("*.py"))


def imports(node: ast.AST, *, at_import: bool = False) -> Iterator[str]:
    """Dotted names of all that `node` imports; `at_import`: only of what runs when the module itself is imported."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.module and not node.level, f"line {node.lineno}: write relative imports out in full"
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    elif at_import and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        return
    else:
        types_only = at_import and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        children = node.orelse if types_only and isinstance(node, ast.If) else ast.iter_child_nodes(node)
        for child in children:
            yield from imports(child, at_import=at_import)


def tree(file: str) -> ast.Module:
    return ast.parse((ROOT / file).read_text(encoding="utf-8"))


def folders(file: str) -> set[str]:
    """The project's own folders, other than its own, from which a file imports anything."""
    parts = [name.split(".") for name in imports(tree(file))]
    assert not any(part[0] in MAY_IMPORT and part[0] != "kvbench" for part in parts), "import it as kvbench.<folder>"
    return {part[1] for part in parts if part[0] == "kvbench" and part[1:2]} & MAY_IMPORT.keys() - {file.split("/")[0]}


def heavy(file: str) -> set[str]:
    """What a file imports, as soon as it is imported itself, that is heavy or imports something heavy in turn."""
    modules = {f"kvbench.{name.removesuffix('.py').replace('/', '.')}" for name in HEAVY_FILES}
    names = set(imports(tree(file), at_import=True))
    return {
        name for name in names if name.split(".")[0] in HEAVY or any(f"{name}.".startswith(f"{m}.") for m in modules)
    }


@pytest.mark.parametrize("file", FILES)
def test_a_folder_imports_only_from_the_folders_below_it(file: str) -> None:
    assert folders(file) <= MAY_IMPORT[file.split("/")[0]]


@pytest.mark.parametrize("file", FILES)
def test_only_the_composition_root_names_a_backend(file: str) -> None:
    assert file == COMPOSITION_ROOT or not folders(file) & BACKENDS


@pytest.mark.parametrize("file", sorted(set(FILES) - HEAVY_FILES))
def test_heavy_libraries_are_imported_inside_functions(file: str) -> None:
    assert not heavy(file)


@pytest.mark.parametrize("file", sorted(HEAVY_FILES))
def test_the_list_of_exceptions_is_no_longer_than_needed(file: str) -> None:
    assert heavy(file)


def test_imports_are_read_as_meant() -> None:
    module = ast.parse(
        "import a.b\n"
        "from kvbench.c import d\n"
        "if TYPE_CHECKING:\n    import typed\nelse:\n    import untyped\n"
        "class K:\n    import inside\n    def f(self):\n        import late\n"
        "try:\n    import tried\nexcept ImportError:\n    pass\n"
    )
    early = ["a.b", "kvbench.c.d", "untyped", "inside", "tried"]
    assert list(imports(module, at_import=True)) == early
    assert set(imports(module)) == {*early, "typed", "late"}


def test_every_folder_with_sources_is_in_the_table() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages - {"tests"} == MAY_IMPORT.keys()
