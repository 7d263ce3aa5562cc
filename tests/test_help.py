"""The `kvbench` command around its commands: instant help, lazy commands, and errors in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Annotated

import pytest
import typer

from kvbench import __version__
from kvbench.cli import app
from kvbench.errors import KvbenchError

ROOT = Path(__file__).resolve().parent.parent
HEAVY = {"torch", "transformers", "triton", "pandas", "pyarrow", "matplotlib", "numpy", "scipy", "jinja2"}


def run(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of `kvbench ARGS…`."""
    with pytest.raises(SystemExit) as exit_:
        app.main(args)
    code = exit_.value.code or 0
    assert isinstance(code, int)
    return code, *capsys.readouterr()


def one_line(text: str) -> str:
    assert text.startswith("kvbench: ")
    assert text.endswith("\n")
    assert text.count("\n") == 1
    return text


@pytest.fixture
def brew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command of the test's own, in a module like any other command's."""

    def brew(cups: Annotated[int, typer.Option("--cups", min=0)] = 1, style: str = "") -> None:
        """Brew, or fail in the way asked for."""
        if style == "user":
            raise KvbenchError("no beans;\n  buy some")
        if style == "ctrl-c":
            raise KeyboardInterrupt
        if style == "exit":
            raise typer.Exit(3)
        if style == "fault":
            raise RuntimeError("leak")
        typer.echo(f"{cups} cups")

    module = ModuleType("kvbench.cli.brew")
    module.brew = brew  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "kvbench.cli.brew", module)
    monkeypatch.setitem(app.COMMANDS, "brew", "Brew coffee.")


def test_help_imports_nothing_heavy_and_no_command() -> None:
    script = (
        "import sys, json\n"
        "from kvbench.cli.app import main\n"
        "try: main(['--help'])\n"
        "finally: print(json.dumps(sorted(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    modules = set(json.loads(done.stderr))
    assert all(name in done.stdout for name in app.COMMANDS)
    assert not modules & HEAVY
    assert {name for name in modules if name.startswith("kvbench.cli.")} == {"kvbench.cli.app"}


@pytest.mark.parametrize("name", list(app.COMMANDS))
def test_every_command_has_its_own_help(capsys: pytest.CaptureFixture[str], name: str) -> None:
    code, out, err = run(capsys, name, "--help")
    assert (code, err) == (0, "")
    assert f"kvbench {name}" in out


def test_help_without_a_command_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys)
    assert (code, err) == (0, "")
    assert "Usage: kvbench" in out
    assert run(capsys, "--version") == (0, f"kvbench {__version__}\n", "")


@pytest.mark.usefixtures("brew")
def test_a_command_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "brew", "--cups", "2") == (0, "2 cups\n", "")
    assert run(capsys, "brew", "--style", "exit") == (3, "", "")


@pytest.mark.usefixtures("brew")
@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["brw"], "'brew'"),
        (["--versoin"], "--version"),
        (["brew", "--cupps", "2"], "--cups"),
        (["brew", "--cups"], "'--cups' requires an argument"),
        (["brew", "--cups", "many"], "--cups"),
        (["brew", "--cups", "-1"], "--cups"),
        (["brew", "beans"], "beans"),
    ],
)
def test_a_wrong_command_line_is_one_line_that_names_the_cure(
    capsys: pytest.CaptureFixture[str], args: list[str], says: str
) -> None:
    code, out, err = run(capsys, *args)
    assert (code, out) == (2, "")
    assert says in one_line(err)
    assert "--help`" in err


@pytest.mark.usefixtures("brew")
def test_a_users_error_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "brew", "--style", "user") == (2, "", "kvbench: no beans; buy some\n")


@pytest.mark.usefixtures("brew")
def test_ctrl_c_ends_with_130(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, "brew", "--style", "ctrl-c") == (130, "", "kvbench: interrupted\n")


@pytest.mark.usefixtures("brew")
def test_a_fault_of_ours_keeps_its_traceback() -> None:
    with pytest.raises(RuntimeError, match="leak"):
        app.main(["brew", "--style", "fault"])


def test_a_reader_that_stops_early_sees_no_traceback() -> None:
    command = [sys.executable, "-m", "kvbench", "--help"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        assert process.stderr.read() == ""
