"""Fuzzes the loading of models: `python -m tests.fuzz_models [SEED]`.

Hundreds of damaged model folders and GGUF files, each opened in this process. Each must load, or be refused within 20 seconds
in one sentence that names the file, with little memory; anything else is a failure.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from expire_span.errors import explain

LIMIT = 20
"""Seconds that a load may take."""
ROOM = 2 * 2**30
"""Bytes of address space that loads may add; the model has 32,000 numbers."""
VALUES = (None, True, 0, -1, 1.5, 10**12, 10**40, "x", "", [], {}, [[[]]], [1, "x"], {"x": None}, "\ud800")
CONTENTS = (
    b"",
    b"{",
    b"{}",
    b"null",
    b"[]",
    b"3",
    b'"x"',
    b"\xff\xfe\0",
    b"[" * 50_000,
    b'{"a":' * 400 + b"1" + b"}" * 400,
)
PLACES = (
    "missing",
    "a folder",
    "a link to nothing",
    "a link to itself",
    "a pipe",
    "half",
    "all but three bytes",
    "zeros inside",
)
SIZES = ("num_hidden_layers", "hidden_size", "vocab_size", "num_attention_heads", "num_key_value_heads", "head_dim")
SIZES += ("intermediate_size", "max_position_embeddings", "num_labels")
SETTINGS = ("model_type", "hidden_act", "rope_parameters", "rope_scaling", "rope_theta", "rms_norm_eps", "pad_token_id")
SETTINGS += (
    "sliding_window",
    "transformers_weights",
    "auto_map",
    "quantization_config",
    "layer_types",
    "id2label",
    "dtype",
)
SETTINGS += ("torch_dtype", "architectures", "tie_word_embeddings", "attention_bias", "text_config")
PARTS = ("model", "decoder", "added_tokens", "pre_tokenizer", "version", "normalizer", "post_processor", "truncation")
FIELDS = {
    "config.json": SIZES + SETTINGS,
    "generation_config.json": ("eos_token_id", "max_length", "do_sample", "cache_implementation"),
    "tokenizer_config.json": ("eos_token", "model_max_length", "tokenizer_class", "auto_map", "chat_template"),
    "tokenizer.json": PARTS,
}


class Case(NamedTuple):
    """A sound folder or file (folder, shards, gguf), the file that is damaged, how, and whether loading must fail."""

    base: str
    file: str
    what: str
    damage: Callable[[Path], None]
    fatal: bool = False


class Hang(BaseException):
    """A load took too long."""


def list_cases(seed: int = 0) -> list[Case]:
    """All cases, in an order that depends on the seed."""
    cases = [*whole_files(), *fields(), *indices(), *ggufs()]
    random.Random(seed).shuffle(cases)
    return cases


def whole_files() -> Iterator[Case]:
    for base, file in [*(("folder", x) for x in (*FIELDS, "model.safetensors")), ("gguf", "model.gguf")]:
        needed = file in ("config.json", "model.safetensors", "tokenizer.json", "model.gguf")
        for content in CONTENTS:
            yield Case(base, file, f"content {content[:9]!r}", _writer(content), needed)
        for place in PLACES:
            yield Case(
                base, file, place, lambda path, place=place: _put(path, place), needed and place != "zeros inside"
            )


def fields() -> Iterator[Case]:
    """Fields of each file with each value, and a config with nothing but its kind."""
    for file, names in FIELDS.items():
        for field in names:
            for value in VALUES:
                fatal = field in SIZES[:3] and value is not True and value in (0, -1, 10**12, 10**40, "x")
                yield Case("folder", file, f"{field} = {value!r:.20}", _setter(field, value), fatal)
    for kind in ("llama", "gpt2", "qwen2", "gemma3_text", "mistral", "gpt_neox", "bert", "t5", "x", 3):
        only = json.dumps({"model_type": kind}).encode()
        yield Case("folder", "config.json", f"nothing but {kind}", _writer(only), True)
    for field in ("rope_type", "rope_theta", "factor"):
        for value in VALUES:
            rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4} | {field: value}
            yield Case("folder", "config.json", f"{field} = {value!r:.20}", _setter("rope_parameters", rope))


def indices() -> Iterator[Case]:
    file = "model.safetensors.index.json"
    for content in CONTENTS:
        yield Case("shards", file, f"content {content[:9]!r}", _writer(content), True)
    for place in PLACES[:6]:
        yield Case("shards", file, place, lambda path, place=place: _put(path, place), True)
    for name in ("x.bin", "../x.safetensors", "/etc/passwd", "", None, 3, "x.safetensors", ["x"]):
        weights = _setter("weight_map", {"lm_head.weight": name})
        yield Case("shards", file, f"a weight in {name!r}", weights, True)


def ggufs() -> Iterator[Case]:
    """Numbers in the head of a GGUF file replaced by hostile ones."""
    for place in (4, 8, 16, 24, 32, *range(36, 220, 7)):
        for number in (0, 1, 2**31, 2**63, 2**64 - 1):
            yield Case("gguf", "model.gguf", f"{number} at byte {place}", _patcher(place, number))


def _writer(content: bytes) -> Callable[[Path], None]:
    return lambda path: (path.unlink(missing_ok=True), path.write_bytes(content))[0]


def _setter(field: str, value: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))

    return write


def _patcher(place: int, number: int) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        data = path.read_bytes()
        path.write_bytes(data[:place] + struct.pack("<Q", number) + data[place + 8 :])

    return write


def _put(path: Path, place: str) -> None:
    data = path.read_bytes()
    path.unlink()
    if place == "a folder":
        path.mkdir()
    elif place.startswith("a link"):
        path.symlink_to(path if "itself" in place else "nothing")
    elif place == "a pipe":
        os.mkfifo(path)
    elif place != "missing":
        cut = {"half": len(data) // 2, "all but three bytes": len(data) - 3}.get(place)
        path.write_bytes(data[:cut] if cut else data[: len(data) // 2] + bytes(99) + data[len(data) // 2 + 99 :])


def prepare(folder: Path) -> None:
    """A sound model as one safetensors file, as two with an index, and as a GGUF file."""
    import transformers

    from tests.hf_models import llama_gguf, model_folder

    model_folder(folder / "folder")
    shutil.copytree(folder / "folder", folder / "shards", ignore=lambda *_: ["model.safetensors"])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "folder")
    model.save_pretrained(folder / "shards", max_shard_size="70KB")
    (folder / "gguf").mkdir()
    llama_gguf(folder / "gguf" / "model.gguf")


def run_case(case: Case, folder: Path) -> str | None:
    """Open a damaged copy; what is wrong with how it ended, or None."""
    place = folder / "hurt"
    shutil.copytree(folder / case.base, place)
    try:
        case.damage(place / case.file)
        return _open(case, place)
    finally:
        shutil.rmtree(place)


def _open(case: Case, place: Path) -> str | None:
    from expire_span.hf.loading import open_model

    signal.signal(signal.SIGALRM, _hang)
    signal.alarm(LIMIT)
    try:
        open_model(str(place / case.file if case.base == "gguf" else place), device="cpu")
    except Hang:
        return "hung"
    except BaseException as error:
        told = explain(error)
        if told is None or isinstance(error, (OSError, MemoryError)):
            return f"raised {type(error).__name__}: {str(error)[:200]}"
        return None if _names(told[0], case) else f"did not name its file: {told[0][:300]}"
    finally:
        signal.alarm(0)
    return "was loaded" if case.fatal else None


def _names(said: str, case: Case) -> bool:
    """Whether a sentence names the damaged file; of tokenizers, either file, since the two go together."""
    either = ("tokenizer.json", "tokenizer_config.json") if case.file.startswith("tokenizer") else (case.file,)
    return "\n" not in said and any(name in said for name in either)


def _hang(signum: int, frame: Any) -> None:
    raise Hang


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """A context in which the address space grows by at most `ROOM`."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def fuzz(cases: list[Case], folder: Path) -> list[str]:
    """Open all cases; a sentence for each failure."""
    prepare(folder)
    with bounded():
        found = [(case, run_case(case, folder)) for case in cases]
    return [f"{case.base}/{case.file}, {case.what}: {fault}" for case, fault in found if fault is not None]


if __name__ == "__main__":
    everything = list_cases(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    with tempfile.TemporaryDirectory() as name:
        failures = fuzz(everything, Path(name))
    print(f"{len(everything)} cases, {len(failures)} failures", *failures, sep="\n")
    sys.exit(bool(failures))
