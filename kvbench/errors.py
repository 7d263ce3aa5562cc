"""The errors a user meets. Anything else that is raised is a fault of kvbench."""


class KvbenchError(Exception):
    """Something the user can change: one line that says what, shown on standard error with exit code 2."""


class CellError(Exception):
    """One cell of a sweep could not run; its row says why and the sweep goes on. `status` as in `cells.csv`."""

    status = "failed"


class CellOutOfMemory(CellError):
    """The device has no room for the cell. The message names the bytes asked for and the bytes there were."""

    status = "oom"
