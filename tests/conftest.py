"""What all tests share: no network, the same examples on every CI run, and the reference data beside the checkout."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

os.environ["HF_HUB_OFFLINE"] = "1"  # read by transformers when it is first imported
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read by torch; tiny models gain nothing from more, busy machines lose
os.environ["TRITON_INTERPRET"] = "1"  # read by triton when it is first imported: kernels run without a card

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in the background of a script; the tests of Ctrl-C need it
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent.parent

settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture(scope="module")
def what_is_loaded_stays() -> Iterator[None]:
    """Every cell ends with a full collection; it need not look through torch each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def root() -> Path:
    """The project's root folder."""
    return ROOT


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of reference data that lies beside a checkout of the project, but is no part of it."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no reference data at {folder}")
    return folder
