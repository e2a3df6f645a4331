"""The kernels pass Triton's compiler, without a GPU: the interpreter accepts code that the compiler refuses."""

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")

CODE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from expire_span.ops.triton import decode, forward, lists, memory_gradients, query_gradient

KERNELS = [lists._classify, lists._scatter, lists._gather, lists._find_runs, memory_gradients.long_tiles, forward._forward,
           query_gradient.query_gradient, memory_gradients.memory_gradients, decode._decode, decode._join]
POINTERS = {"words": "i32", "scratch": "i32", "q_pos": "i64", "k_pos": "i64", "starts": "i64", "counts": "i64"}
POINTERS |= dict(k_doc="i64", q_doc="i64")
POINTERS |= dict.fromkeys(("lse", "delta", "span", "dspan", "sums", "parts", "peaks", "totals", "sinks"), "fp32")
POINTERS |= dict.fromkeys("q k v y dy dq dk dv k_out v_out table dtable".split(), "bf16")
FLOATS = ("scale", "log_scale", "ramp", "half", "inv_ramp")
fixed = dict(D=64, D_PAD=64, BLOCK_M=64, BLOCK_N=64, PLAN_M=64, PLAN_N=64, PRECISION="ieee", TMA=False, HAS_DOCS=False)
fixed |= dict(BLOCK=1024, PIECE=64, FINISH=True, SPLIT=True, MIN_AGE=1, SHARP=False, SEGMENTS=True, **json.loads(sys.argv[1]))

def compile(kernel):
    names = kernel.arg_names
    given = {n: fixed[n] for n in names if n in fixed}
    if kernel is decode._decode:
        given["BLOCK_M"] = 16
    types = {n: "*" + POINTERS[n] if n in POINTERS else "fp32" if n in FLOATS else "i32" for n in names}
    types |= dict.fromkeys(given, "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names) if n in POINTERS}
    source = ASTSource(fn=kernel, signature=types, constexprs={(names.index(n),): x for n, x in given.items()}, attrs=aligned)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(num_warps=4, num_stages=2))
    assert made.asm["cubin"] and made.metadata.shared < 227 * 1024, made.metadata.shared
    return kernel.__name__

print("compiled", *map(compile, KERNELS))
"""


@pytest.mark.parametrize(
    "constants",
    [
        dict(WINDOW=0, EPS=0.0, SQUASH=0.01, SINKS=True),
        pytest.param(dict(WINDOW=0, EPS=0.0, SQUASH=0.0, SINKS=False), marks=pytest.mark.long),
        pytest.param(dict(WINDOW=256, EPS=1e-8, SQUASH=0.0, SINKS=False), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_kernels_compile_for_compute_capability_9(constants):
    out = subprocess.run([sys.executable, "-c", CODE, json.dumps(constants)], capture_output=True, text=True)
    assert out.stdout.startswith("compiled"), out.stderr[-3000:]
