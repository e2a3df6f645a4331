"""Errors that end a command, and the one sentence that a user reads about each. Standard library only."""

from __future__ import annotations

import errno

from expire_span.extras import EXTRAS, install_command

_OS_CAUSES = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EACCES: "permission was denied",
    errno.EPERM: "permission was denied",
    errno.EROFS: "the file system is read-only",
    errno.ENAMETOOLONG: "the name is too long",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.EISDIR: "it is a folder, not a file",
    errno.ENOENT: "there is no such file or folder",
    errno.EMFILE: "too many files are open",
}


class RunError(Exception):
    """A command cannot continue; the message says why and what to do. The command line prints it and exits with `exit_code`."""

    exit_code = 1


class UserError(RunError, ValueError):
    """The input is wrong: a name, a value or a folder."""

    exit_code = 2


class StorageError(RunError):
    """A file cannot be read, written or fetched: a full disk, a read-only folder, a damaged file. The user can mend it."""

    exit_code = 2


def describe(error: OSError) -> str:
    """The cause of a failed read or write in words."""
    return _OS_CAUSES.get(error.errno or 0) or error.strerror or str(error)


def explain(error: BaseException) -> tuple[str, int] | None:
    """The sentence and the exit code for an error that a user can cause, or None for a bug of this package.

    Errors of other libraries are recognised by their names, so that a command that did not load torch need not load it here.
    """
    if isinstance(error, RunError):
        return str(error), error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "stopped", 130
    if isinstance(error, OSError):
        place = f"{error.filename}: " if isinstance(error.filename, (str, bytes)) else ""
        return f"{place}{describe(error)}; fix that and repeat the command", 2
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] in EXTRAS:
        missing = (error.name or "").split(".")[0]
        return f"this needs the package {missing}; install it with: {install_command(EXTRAS[missing])}", 2
    if is_out_of_memory(error):
        return f"there is not enough memory ({_first_line(error)}); {_LESS_MEMORY}", 2
    if is_lost_process(error):
        return f"another process of this run has ended or does not answer ({_first_line(error)}); {_START_AGAIN}", 1
    if type(error).__name__ == "SafetensorError":
        return f"a safetensors file cannot be read or written: {_first_line(error)}", 2
    if isinstance(error, UnicodeEncodeError) or (isinstance(error, ValueError) and "null byte" in str(error)):
        return "a name holds a character that no file name can have (a null character, or half of a pair); rename it", 2
    if isinstance(error, ValueError):
        return str(error), 2
    return None


_LESS_MEMORY = "try smaller sizes: batch, block, context, rows, or the model's"
_OUT_OF_MEMORY = ("allocate memory", "out of memory", "not enough memory", "bad_alloc", "bad allocation")
_OUT_OF_MEMORY += ("Storage size calculation overflowed", "array is too big", "numel: integer multiplication overflow")
_OUT_OF_MEMORY += ("Maximum allowed dimension exceeded",)


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, (RuntimeError, ValueError)) and any(words in str(error) for words in _OUT_OF_MEMORY)


_START_AGAIN = (
    "its own message says why, if it had the time; start all processes again, with resume if the run had begun"
)
_LOST = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Timed out waiting",
    "connection was aborted",
)


def is_lost_process(error: BaseException) -> bool:
    """Whether processes that work together have lost one of them, by the errors of torch.distributed's backends."""
    if type(error).__name__ in ("DistBackendError", "DistNetworkError"):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _LOST)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
