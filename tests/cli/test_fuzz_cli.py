"""The command line under fire: a sample of the fuzzer's commands, or all of them with `make test-long`."""

from __future__ import annotations

import pytest

from tests.fuzz_cli import fuzz, list_cases

SAMPLE = 40


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def test_a_sample_of_hostile_commands(folder):
    assert fuzz(list_cases()[:SAMPLE], folder) == []


@pytest.mark.long
def test_all_hostile_commands(folder):
    cases = list_cases()
    assert len(cases) >= 300
    assert fuzz(cases, folder) == []
