"""Tries versions of Triton, transformers and Python, each in an environment of its own: `make test-matrix`.

    python -m tests.matrix                         # Triton 3.6 to 3.9, the oldest and the newest transformers on this Python,
                                                   # the newest Triton also on all other Pythons found
    python -m tests.matrix --triton 3.9.0          # other versions
    python -m tests.matrix --triton "" --transformers 5.17.0    # only this one
    python -m tests.matrix --whole                 # all of the kernels' tests in place of a quick part

Environments are kept in .matrix/, so that a second call only runs the tests. Torch is shared: on this Python, an environment
holds only Triton, or transformers with its hub client, and takes everything else from the one that runs this script; every
other Python has one environment with torch, which its environments with a Triton use. Kernels run in Triton's interpreter where
there is no GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACE = ROOT / ".matrix"
TRITONS = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
TRANSFORMERS = {"5.17.0": "1.33.0", "5.23.0": "2.4.0"}
"""The oldest and the newest supported version, each with a version of huggingface_hub that it can use."""
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
CORE = ("torch", "numpy", "safetensors", "pytest", "hypothesis")
"""What the operator's tests need, without Triton."""
KERNELS = ("tests/ops/test_triton.py", "tests/ops/test_triton_plan.py", "tests/store/test_slots_kernel.py")
HUGGING_FACE = tuple(sorted(str(x.relative_to(ROOT)) for x in (ROOT / "tests" / "hf").glob("test_*.py")))
PLAIN = ("tests/ops/test_operator_inputs.py", "tests/store/test_memory.py")
"""Tests without kernels, for the other Pythons."""
QUICK = (
    "(every_gradient and (63 or edges) and not relative) or (half_precision and False and bfloat16) or (decoding and relative) "
    "or runs_hold or descriptors or (fused_step and (cap or reach)) or operator_inputs or test_memory"
)
"""A part of them with every kernel in it, as pytest's -k has it."""
LIMIT = 1800
"""Seconds that the tests of one environment may take."""


@dataclass(frozen=True)
class Outcome:
    python: str
    package: str
    """The package that was tried, with its version."""
    torch: str
    said: str
    """The last line of pytest, or why there is none."""
    seconds: float
    passed: bool | None
    """None where the environment could not be made."""


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--triton", default=",".join(TRITONS), help="versions, with commas")
    parser.add_argument("--transformers", default=",".join(TRANSFORMERS), help="versions, with commas")
    parser.add_argument(
        "--python", default="", help="versions like 3.12,3.13 beside this one; all that are found by default"
    )
    parser.add_argument("--whole", action="store_true", help="all of the kernels' tests in place of a quick part")
    given = parser.parse_args(args)
    tritons, here = versions(given.triton), ".".join(map(str, sys.version_info[:2]))
    wanted = [v for v in (versions(given.python) or PYTHONS) if v != here and tritons]
    outcomes = [try_pair(here, Path(sys.executable), f"triton=={x}", given.whole) for x in tritons]
    outcomes += [try_pair(here, Path(sys.executable), f"transformers=={x}", True) for x in versions(given.transformers)]
    skipped = []
    for version in wanted:
        found = find_python(version)
        if found is None:
            skipped.append(f"Python {version} was skipped, because no interpreter of that version was found here.")
        else:
            outcomes.append(try_pair(version, found, f"triton=={tritons[-1]}", given.whole))
    print(as_table(outcomes), *skipped, sep="\n")
    return 1 if any(outcome.passed is False for outcome in outcomes) or not any(o.passed for o in outcomes) else 0


def versions(text: str) -> list[str]:
    return text.split(",") if text else []


def find_python(version: str) -> Path | None:
    """An interpreter of this version that really starts: on the path, of pyenv, or one that uv knows."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [
        shutil.which(f"python{version}"),
        *sorted(root.glob(f"{version}.*/bin/python{version}"), reverse=True),
    ]
    if shutil.which("uv"):
        candidates.append(output("uv", "python", "find", "--no-python-downloads", version))
    for candidate in candidates:
        asked = ("-c", "import sys; print('%d.%d' % sys.version_info[:2])")
        if candidate and output(str(candidate), *asked) == version:
            return Path(candidate)
    return None


def output(*command: str) -> str:
    """What a command prints, or nothing where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def try_pair(version: str, python: Path, package: str, whole: bool) -> Outcome:
    print(f"Python {version} with {package} ...", flush=True)
    start = time.monotonic()
    try:
        environment = make_environment(version, python, package)
        tests = [*KERNELS, *(PLAIN if python != Path(sys.executable) else ())]
        tests = list(HUGGING_FACE) if package.startswith("transformers") else tests
        done = run_tests(environment, tests, whole)
        said = (done.stdout.strip().splitlines() or ["nothing was printed"])[-1]
        torch = output(str(environment), "-c", "import torch; print(torch.__version__)")
    except subprocess.CalledProcessError as error:
        words = [line for line in (error.stderr or "").splitlines() if line.startswith("ERROR")] or ["no reason given"]
        return Outcome(version, package, "", f"skipped, not installed: {words[0]}", time.monotonic() - start, None)
    except subprocess.TimeoutExpired:
        return Outcome(version, package, "", f"took more than {LIMIT} s", time.monotonic() - start, False)
    if done.returncode:
        print(done.stdout[-6000:], done.stderr[-2000:], sep="\n", flush=True)
    return Outcome(version, package, torch, said, time.monotonic() - start, done.returncode == 0)


def make_environment(version: str, python: Path, package: str) -> Path:
    """The interpreter of an environment with this package on top of a shared torch."""
    if python == Path(sys.executable):
        shared = Path(sysconfig.get_paths()["purelib"])
    else:
        shared = make_base(version, python)
    name, number = package.split("==")
    folder = PLACE / f"python{version}-{name}{number}"
    packages = folder / "lib" / f"python{version}" / "site-packages"
    if not (packages / name).is_dir():
        make_venv(python, folder)
        (packages / "shared.pth").write_text(f"{shared}\n")  # read after this environment's own packages
        if name == "transformers":
            hub = TRANSFORMERS.get(number)
            install(folder, "httpx", f"huggingface_hub=={hub}" if hub else "huggingface_hub")
        install(folder, "--no-deps", package)
    return folder / "bin" / "python"


def make_base(version: str, python: Path) -> Path:
    """Packages of an environment of another Python with torch and what the tests need."""
    folder = PLACE / f"python{version}"
    packages = folder / "lib" / f"python{version}" / "site-packages"
    if not (folder / "ready").is_file():
        make_venv(python, folder)
        # Torch's own Triton comes along; the environments that read this one put theirs before it.
        pins = [pin for pin in (ROOT / "constraints.txt").read_text().splitlines() if not pin.startswith("triton==")]
        (folder / "constraints.txt").write_text("\n".join(pins))
        install(folder, "--constraint", str(folder / "constraints.txt"), *CORE)
        (folder / "ready").touch()
    return packages


def make_venv(python: Path, folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    command = [str(python), "-m", "venv", "--without-pip", str(folder)]
    subprocess.run(command, check=True, capture_output=True, text=True)


def install(folder: Path, *arguments: str) -> None:
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--quiet", *arguments], check=True, capture_output=True, text=True)


def run_tests(python: Path, tests: list[str], whole: bool) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [str(python), "-m", "pytest", "-p", "no:cacheprovider", *tests, *([] if whole else ["-k", QUICK])]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT)


def as_table(outcomes: list[Outcome]) -> str:
    lines = ["", "| Python | package | torch | tests | seconds |", "|---|---|---|---|---:|"]
    for o in outcomes:
        said = re.sub(r" in [\d.]+s.*", "", o.said.strip("= "))
        lines.append(f"| {o.python} | {o.package} | {o.torch} | {said} | {o.seconds:.0f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
