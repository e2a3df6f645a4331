"""Fixtures of all tests. Each worker has one thread; without a GPU, Triton kernels run in the interpreter."""

import gc
import importlib.util
import os

import pytest
import torch

if importlib.util.find_spec("triton") is not None:
    from tests import triton_interpreter  # noqa: F401  (before any other test defines a kernel)

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # and for the programs that tests start


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """All modules and tests, some 600,000 objects, stay until the end: nobody looks for garbage among them, now or later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture
def one_thread():
    """One thread, as child processes have it: results are equal to the last bit only with equally many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def browser():
    """A real browser, one for all tests of a module."""
    from tests.browser import open_browser

    with open_browser() as found:
        yield found


@pytest.fixture
def call_compare(capsys, monkeypatch, tmp_path):
    """`expire-span compare` in this process, in an empty folder: exit code, output, errors."""
    from expire_span.cli import main

    monkeypatch.chdir(tmp_path)

    def run(*args: str) -> tuple[int, str, str]:
        code = main(["compare", *args])
        out = capsys.readouterr()
        return code, out.out, out.err

    return run
