"""Wheel, sdist, editable install and bare checkout are all the same package. Built offline, from a copy."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from kvbench import __version__

ROOT = Path(__file__).resolve().parent.parent
NO_SOURCES = (".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info", "build", "dist", "runs")
VERSION = f"kvbench {__version__}\n"
WHERE = "import kvbench, kvbench.engine.attention as a; print(kvbench.__file__, a.__file__, sep='\\n')"


def run(*command: str | Path, cwd: Path, path: str = "") -> str:
    """Standard output of a command; `path` is its PYTHONPATH."""
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def build(kind: str, tree: Path, into: Path) -> Path:
    """Let setuptools build a `wheel`, `sdist` or `editable` of the project in `tree`."""
    script = f"from setuptools import build_meta; print(build_meta.build_{kind}({str(into)!r}))"
    return into / run(sys.executable, "-c", script, cwd=tree).splitlines()[-1]


def install(wheel: Path, venv: Path) -> Path:
    """Install a wheel alone into a new environment that sees this one's libraries; the environment's programs."""
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=wheel.parent)
    pip = (sys.executable, "-m", "pip", "--python", venv / "bin" / "python")
    run(*pip, "install", "--quiet", "--no-index", "--no-deps", wheel, cwd=wheel.parent)
    site = next(venv.glob("lib/python*/site-packages"))
    (site / "libraries.pth").write_text(f"{sysconfig.get_path('purelib')}\n{sysconfig.get_path('platlib')}\n")
    return venv / "bin"


def packed(wheel: Path) -> set[str]:
    """The files in a wheel, its metadata left out."""
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def modules(programs: Path, cwd: Path, path: str = "") -> list[Path]:
    """Where `kvbench` and a package deep inside it are imported from."""
    return [Path(line) for line in run(programs / "python", "-c", WHERE, cwd=cwd, path=path).split()]


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, so that building leaves nothing in it and finds nothing old."""
    return shutil.copytree(
        ROOT, tmp_path_factory.mktemp("copy") / "tree", symlinks=True, ignore=shutil.ignore_patterns(*NO_SOURCES)
    )


@pytest.fixture(scope="module")
def wheel(copy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("wheel", copy, tmp_path_factory.mktemp("wheel"))


def test_the_wheel_holds_every_file_of_the_folders_and_nothing_else(copy: Path, wheel: Path) -> None:
    folders = [path.parent for path in copy.glob("*/__init__.py") if path.parent.name != "tests"]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    names = [path.relative_to(copy).as_posix() for path in files if "__pycache__" not in path.parts]
    expected = {name if name.startswith("kvbench/") else f"kvbench/{name}" for name in names}
    assert packed(wheel) == expected


def test_the_sdist_builds_the_same_wheel(copy: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(build("sdist", copy, tmp_path)) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / f"kvbench-{__version__}"
    assert (unpacked / "LICENSE").is_file()
    assert packed(build("wheel", unpacked, tmp_path)) == packed(wheel)


def test_an_installed_wheel_runs(wheel: Path, tmp_path: Path) -> None:
    programs = install(wheel, tmp_path / "venv")
    assert run(programs / "kvbench", "--version", cwd=tmp_path) == VERSION
    assert all(path.is_relative_to(tmp_path / "venv") for path in modules(programs, tmp_path))


def test_an_editable_install_runs_the_checkout(copy: Path, tmp_path: Path) -> None:
    programs = install(build("editable", copy, tmp_path), tmp_path / "venv")
    assert run(programs / "kvbench", "--version", cwd=tmp_path) == VERSION
    assert modules(programs, tmp_path) == [copy / "kvbench/__init__.py", copy / "engine/attention/__init__.py"]


@pytest.mark.parametrize("inside", [True, False], ids=["in it", "elsewhere"])
def test_a_bare_checkout_runs(copy: Path, tmp_path: Path, inside: bool) -> None:
    cwd, path = (copy, "") if inside else (tmp_path, str(copy))
    assert run(sys.executable, "-m", "kvbench", "--version", cwd=cwd, path=path) == VERSION
    programs = Path(sys.executable).parent
    assert modules(programs, cwd, path) == [copy / "kvbench/__init__.py", copy / "engine/attention/__init__.py"]


def test_every_dependency_has_its_pin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = project["dependencies"] + project["optional-dependencies"]["dev"]
    lines = (ROOT / "constraints-cpu.txt").read_text(encoding="utf-8").splitlines()
    pins = {line.split("==")[0] for line in lines if not line.startswith("#")}
    assert {re.split("[<>=]", name)[0] for name in wanted} <= pins
