"""Quick launches of a compiled kernel: the key under which it is cached, and the arguments that Triton's launcher gets."""

from types import SimpleNamespace

import pytest
import torch

from expire_span.ops import expire_attention
from tests.operator_cases import GRADS, Case
from tests.triton_interpreter import DEVICE, ON_GPU, launch, lists

LAUNCH = launch.run_kernel
X = torch.zeros(64)


class Kernel:
    """Looks like a JIT function of (x, n, scale, BLOCK, WIDE), and counts how often it is asked to compile or find itself."""

    pre_run_hooks = ()
    arg_names = ("x", "n", "scale", "BLOCK", "WIDE")

    def __init__(self) -> None:
        self.plain: list[tuple] = []
        self.quick: list[tuple] = []

    def __getitem__(self, grid):
        def run(*args, **constants):
            self.plain.append((grid, args, constants))
            return self

        return run

    function, packed_metadata = "function", "metadata"

    def launch_metadata(self, grid, stream, *args):
        return {"grid": grid}

    def run(self, *args):
        self.quick.append(args)


@pytest.fixture
def kernel(monkeypatch):
    """On a machine that seems to have a GPU and the Triton that quick launches know."""
    active = SimpleNamespace(device=0, get_current_device=lambda: active.device, get_current_stream=lambda d: 70 + d)
    monkeypatch.setattr(launch, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(launch, "JITFunction", Kernel)
    monkeypatch.setattr(launch, "KNOWN", True)
    monkeypatch.setattr(launch, "_compiled", {})
    return Kernel()


def test_the_second_launch_goes_straight_to_the_compiled_kernel(kernel):
    for _ in range(2):
        LAUNCH(kernel, (5, 2), X, 33, 0.5, WIDE=True, BLOCK=8)
    assert len(kernel.plain) == len(kernel.quick) == 1
    want = (5, 2, 1, 70, "function", "metadata", None, None, None, X.data_ptr(), 33, 0.5, 8, True)
    assert kernel.quick[0] == want  # the constants stand in the order of the parameters
    LAUNCH(kernel, (9,), X, 35, 0.25, WIDE=True, BLOCK=8)  # another grid and other numbers of the same kind
    assert kernel.quick[1][:4] == (9, 1, 1, 70) and kernel.quick[1][-4:-2] == (35, 0.25)
    assert len(kernel.plain) == 1


@pytest.mark.parametrize(
    "other",
    [
        dict(x=X.half()),
        dict(x=X[1:]),
        dict(n=48),
        dict(n=1),
        dict(n=33 + 2**31),
        dict(BLOCK=16),
        dict(WIDE=False),
        dict(device=1),
        dict(scale=2),
    ],
    ids=lambda x: next(iter(x)),
)
def test_what_triton_specialises_on_leads_to_another_kernel(kernel, other):
    given = dict(x=X, n=33, scale=0.5, BLOCK=8, WIDE=True)
    for change in ({}, other, {}, other):
        launch.driver.active.device = change.get("device", 0)
        x, n, scale, block, wide, *_ = {**given, **change}.values()
        LAUNCH(kernel, (1,), x, n, scale, BLOCK=block, WIDE=wide)
    assert len(kernel.plain) == 2 and len(kernel.quick) == 2


def test_hooks_of_profilers_are_called_if_there_are_any(kernel, monkeypatch):
    chain = SimpleNamespace(calls=[])
    runtime = SimpleNamespace(debug=False, launch_enter_hook=chain, launch_exit_hook=None)
    monkeypatch.setattr(
        launch, "knobs", SimpleNamespace(runtime=runtime, compilation=SimpleNamespace(instrumentation_mode=""))
    )
    for calls in ([], [], [print]):
        chain.calls = calls
        LAUNCH(kernel, (3,), X, 33, 0.5, BLOCK=8, WIDE=True)
    assert [args[6:9] for args in kernel.quick] == [(None, None, None), ({"grid": (3,)}, chain, None)]


@pytest.mark.parametrize("why", ["another version", "switched off", "a hook before each run"])
def test_the_plain_way_where_the_quick_one_is_not_sure(kernel, monkeypatch, why):
    if why == "another version":
        monkeypatch.setattr(launch, "KNOWN", False)
    elif why == "switched off":
        monkeypatch.setattr(launch, "_quick", False)
    else:
        kernel.pre_run_hooks = [print]
    for _ in range(3):
        LAUNCH(kernel, (1,), X, 33, 0.5, BLOCK=8, WIDE=True)
    assert len(kernel.plain) == 3 and not kernel.quick


def test_few_kernels_are_kept(kernel, monkeypatch):
    monkeypatch.setattr(launch, "MOST", 4)
    for block in range(11):
        LAUNCH(kernel, (1,), X, 33, 0.5, BLOCK=block, WIDE=True)
    assert 1 <= len(launch._compiled) <= 4


@pytest.mark.skipif(ON_GPU, reason="no interpreter here")
def test_interpreted_kernels_go_the_plain_way(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert type(lists._classify) is not launch.JITFunction
    before = dict(launch._compiled)
    words = torch.zeros(1, 400, dtype=torch.int32)
    launch.run_kernel(lists._find_runs, (1, 1), words, torch.arange(4), 4, 32, 2, 1, 400, 0, BLOCK_M=16, PIECE=16)
    assert launch._compiled == before


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_quick_launches_give_what_plain_ones_give():
    for case in (
        Case(2, 4, 2, 300, 100, 64),
        Case(1, 2, 1, 77, 10, 128, relative=32, options={"normalizer_eps": 1e-3}),
    ):
        x = {n: t.detach().to(DEVICE) for n, t in case.tensors(torch.float32).items()}
        x |= {n: x[n].bfloat16() for n in ("q", "k", "v")}
        leaves = [x[n].requires_grad_() for n in GRADS]
        results = []
        for quick in (False, True, True):
            launch.switch(quick)
            y = expire_attention(**x, ramp=7.0, impl="triton", deterministic=True, **case.options)
            few = expire_attention(**{**x, "q": x["q"].detach()[:, :, -3:], "q_pos": x["q_pos"][-3:]}, ramp=7.0)
            results.append([y, few, *torch.autograd.grad(y, leaves, torch.ones_like(y))])
        for got in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(got, results[0]))
