"""Memory and time per step of an endless stream stay constant."""

import os
import statistics
import time

import pytest
import torch

transformers = pytest.importorskip("transformers")

from expire_span.stream import Stream  # noqa: E402
from tests.hf_models import VOCAB, forgetful, tiny  # noqa: E402


def read(stream, count, generator):
    """Read so many random tokens in chunks; the most bytes that the stream held meanwhile."""
    held = 0
    while count:
        part = min(count, 256)
        stream.feed(torch.randint(3, VOCAB, (1, part), generator=generator))
        held, count = max(held, stream.bytes_held), count - part
    return held


def time_steps(stream, count, generator):
    """Processor seconds of `count` single steps, from the median of ten groups: other programs take turns with us."""
    ids = torch.randint(3, VOCAB, (1, count), generator=generator)
    times = []
    for group in ids.split(count // 10, 1):
        began = time.process_time()
        for token in group.split(1, 1):
            stream.feed(token)
        times.append(time.process_time() - began)
    return 10 * statistics.median(times)


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def begin():
    stream = Stream(forgetful(tiny(), max_span=200, ramp=16), 1)
    stream.read([[5]])
    return stream, torch.Generator().manual_seed(0)


def test_what_a_stream_holds_stays_flat():
    stream, generator = begin()
    early, late = read(stream, 2_000, generator), read(stream, 4_000, generator)
    assert stream.position == 6_000
    assert late <= 1.1 * early
    assert 0 < stream.live.max() <= 217


@pytest.mark.long
@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="resident memory is read from /proc")
def test_a_million_tokens_cost_what_twenty_thousand_do(capsys):
    stream, generator = begin()
    read(stream, 20_000, generator)
    early = time_steps(stream, 1_000, generator), resident_bytes()
    read(stream, 1_000_000 - stream.position - 1_000, generator)
    late = time_steps(stream, 1_000, generator), resident_bytes()
    assert stream.position == 1_000_000
    with capsys.disabled():
        for name, (seconds, held) in {"20k": early, "1M": late}.items():
            print(f"\n{name}: {seconds:.2f} s of 1,000 steps, {held / 2**20:.1f} MiB resident", end="")
    assert late[0] <= 1.1 * early[0] and late[1] <= 1.1 * early[1]
