"""Files: a process that is killed at any change of the disk leaves a checkpoint, a stream and a cache that load, old or new
bit for bit, and the next save leaves nothing of the killed one behind."""

from __future__ import annotations

import os
import random
import signal
import stat
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from expire_span import checkpoint
from expire_span.checkpoint import Snapshot
from expire_span.disk.files import sweep
from expire_span.models.decoder import Decoder
from expire_span.models.state import pack
from expire_span.runs import RunFolder
from expire_span.stream import Sampling, Stream
from tests.stream_cases import build
from tests.tiny import tiny_config, write_text

NAME = "checkpoints"
SIMPLE: dict[str, Any] = dict(seed=0, what="checkpoint", kills=[], saves=1, keep=1, truncate=False)
CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.scandir")
"""Audit events at which a process is killed: the file system is about to be changed, or a folder is walked."""


def draw(rng: random.Random) -> dict[str, Any]:
    return dict(
        seed=rng.randrange(10**6),
        what=rng.choice(["checkpoint", "stream"]),
        kills=[rng.choice([rng.randrange(8), rng.randrange(30)]) for _ in range(rng.randint(1, 4))],
        saves=rng.randint(1, 3),
        keep=rng.randint(1, 3),
        truncate=rng.random() < 0.5,
    )


def check(case: dict[str, Any]) -> None:
    case = SIMPLE | case
    with tempfile.TemporaryDirectory() as folder:
        (_check_run if case["what"] == "checkpoint" else _check_stream)(case, Path(folder))


def _killed(work: Callable[[], Any], changes: int, folder: Path, truncate: bool) -> bool:
    """Run `work` in a child process that is killed before its change number `changes` to the folder; whether it was killed.

    truncate: where the next change is that a file is synced, half of it is lost, as if only that had reached the disk.
    """
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)  # the threads of the parent are not in its child, which would wait for them
            _die_at(changes, str(folder), truncate)
            work()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def _die_at(changes: int, folder: str, truncate: bool) -> None:
    left, sync = [changes], os.fsync

    def count(lose: Callable[[], Any] = lambda: None) -> None:
        left[0] -= 1
        if left[0] < 0:
            lose()
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in CHANGES and args and folder in str(args[0]):
            count()

    def fsync(file: int) -> None:
        info = os.fstat(file)
        count(lambda: os.ftruncate(file, info.st_size // 2) if truncate and stat.S_ISREG(info.st_mode) else None)
        sync(file)

    sys.addaudithook(hook)
    os.fsync = fsync


@cache
def _snapshot(step: int) -> Snapshot:
    torch.manual_seed(step)
    decoder = Decoder(tiny_config(Path("text")).model)
    state = decoder(torch.randint(256, (2, 20)))[1]
    optimizer = {"state": {"head.weight": {"exp_avg": torch.randn(4)}}, "groups": [{"lr": 0.1}]}
    worker = {"states": [state], "bits": torch.get_rng_state()}
    return Snapshot(step, {"place": [1, step]}, worker, decoder.state_dict(), optimizer)


def _same(a: Any, b: Any) -> bool:
    (tensors, skeleton), (others, other) = pack(a), pack(b)
    return (
        skeleton == other
        and tensors.keys() == others.keys()
        and all(torch.equal(x, others[n]) for n, x in tensors.items())
    )


def _check_run(case: dict[str, Any], folder: Path) -> None:
    run = RunFolder.create(folder / "run", tiny_config(write_text(folder)), recipe="text", environment={})
    step, saved = 0, []
    for kill in case["kills"]:
        for _ in range(case["saves"]):
            step += 1
            checkpoint.save(run, _snapshot(step), keep=case["keep"])
            saved.append(step)
        step += 1
        killed = _killed(
            lambda step=step: checkpoint.save(run, _snapshot(step), keep=case["keep"]), kill, folder, case["truncate"]
        )
        found = checkpoint.load(run)
        assert found is not None, "no checkpoint is left"
        allowed = {saved[-1], step} if killed else {step}
        assert found.step in allowed, f"step {found.step} is the newest after a kill in step {step}"
        _check_equal(found)
        if found.step == step:
            saved.append(step)
    checkpoint.save(run, _snapshot(step + 1), keep=case["keep"])
    left = sorted(p.name for p in run.checkpoints.iterdir())
    wanted = [f"step-{n:08d}" for n in [*saved, step + 1]][-case["keep"] :]
    assert left == wanted, f"the folder holds other files than its checkpoints: {left}, wanted {wanted}"


def _check_equal(found: Snapshot) -> None:
    want = _snapshot(found.step)
    for name in ("state", "worker", "model", "optimizer"):
        mine, theirs = getattr(found, name), getattr(want, name)
        equal = mine.items() >= theirs.items() if name == "state" else _same(mine, theirs)
        assert equal, f"the {name} of the checkpoint is not what was saved"


def _check_stream(case: dict[str, Any], folder: Path) -> None:
    path, decoder = folder / "stream", build("spans per head")
    stream = Stream(decoder, 2)
    stream.read([b"one", b"two"])
    stream.save(path)
    for kill in case["kills"]:
        before = stream.logits
        for _ in stream.generate(Sampling(seed=case["seed"]), case["saves"]):
            pass
        killed = _killed(lambda: stream.save(path), kill, folder, case["truncate"])
        found = Stream.load(decoder, path).logits
        assert torch.equal(found, stream.logits) or (killed and torch.equal(found, before)), (
            "the stream is not what was saved"
        )
        stream.save(path)
    sweep(folder)
    assert [p.name for p in folder.iterdir()] == ["stream"], f"left {[p.name for p in folder.iterdir()]}"
