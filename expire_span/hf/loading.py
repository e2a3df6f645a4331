"""Opening what the command line names: a model with its tokenizer, and text as token documents."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from expire_span.errors import UserError

from .adapter import read_head
from .layouts import check_config

PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def open_model(name: str, dtype: str = "fp32", device: str = "auto") -> tuple[Any, Any]:
    """The causal model and tokenizer in a folder, a GGUF file, or on the hub under a name; never from pickled weights."""
    options: dict[str, Any] = {"dtype": DTYPES[dtype]}
    path, told = Path(name), name
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UserError(f"no model file at {path}")
        name, options["gguf_file"] = str(path.parent), path.name
    else:
        _check_folder(name)
        options["use_safetensors"] = True
    extra: dict[str, Any] = {"gguf_file": options["gguf_file"]} if "gguf_file" in options else {}
    # Without this, transformers asks in the terminal whether to run code of the model's folder.
    extra["trust_remote_code"] = False
    where = find_device(device)
    with _explained(f"cannot load the model {told}"):
        config = AutoConfig.from_pretrained(name, **extra)
    check_config(config, (config.architectures or [type(config).__name__])[0])
    with _explained(f"cannot load the model {told}"):
        options |= extra | {"output_loading_info": True, "ignore_mismatched_sizes": True}
        loaded: Any = AutoModelForCausalLM.from_pretrained(name, **options)
    model, found = loaded
    if "gguf_file" in extra:
        model.name_or_path = str(path)  # transformers names the file's folder, where nothing tells which file it was
    else:
        _check_weights(name, found)
    with _explained(f"the model {told} has no tokenizer that can be read, save one in its folder"):
        tokenizer = AutoTokenizer.from_pretrained(name, **extra)
    return model.to(where).eval(), tokenizer


def open_base(folder: Path, name: str | None = None, device: str = "auto") -> tuple[str, Any, Any]:
    """The base model of an adapter folder, in float32: where it is, the model, its tokenizer. name: where it is now; None takes
    the place that the adapter gives."""
    base = read_head(folder)["base"]
    where = name or base["name"]
    if not where:
        raise UserError(f"adapter {folder} does not say where its {base['class']} is; give it with --model")
    try:
        return where, *open_model(where, device=device)
    except UserError as error:
        if name is not None:
            raise
        told = str(error).rstrip(".")
        raise UserError(f"{told}; this is where adapter {folder} was made: give its base model with --model") from error


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """Tell what transformers cannot load, and the first line of its reason: files are missing or damaged, the settings do not
    fit together, or a package is needed, as for most quantised models."""
    try:
        yield
    except (OSError, ValueError, ImportError, SafetensorError, StrictDataclassError) as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        raise UserError(f"{what}: {' '.join(lines[:2])}") from error


def _check_weights(name: str, found: dict[str, Any]) -> None:
    """Refuse weights that are missing or have other shapes; transformers would replace them by random ones."""
    for key, *shapes in sorted(found["mismatched_keys"]):
        sizes = " and ".join(str(tuple(x)) for x in shapes)
        raise UserError(
            f"the weights of {name} do not fit its config.json: {key} has the shapes {sizes}; copy it again"
        )
    if missing := sorted(found["missing_keys"]):
        raise UserError(
            f"the folder {name} lacks weights of a causal language model ({len(missing)} in all, the first is {missing[0]}); "
            "give a model that was saved whole, as a ...ForCausalLM"
        )


def find_device(device: str) -> torch.device:
    """The device that auto, cpu, cuda or cuda:N means here."""
    count = torch.cuda.device_count()
    if device == "auto":
        return torch.device("cuda" if count else "cpu")
    kind, _, number = device.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdecimal()):
        raise UserError(f"the device must be auto, cpu, cuda or cuda:N, got {device!r}")
    if kind == "cuda" and int(number or 0) >= count:
        raise UserError(f"device {device} needs a GPU of that number, got {count} here; use cpu or auto")
    return torch.device(device)


def _check_folder(name: str) -> None:
    path = Path(name)
    named = len(path.parts) > 2 or path.is_absolute() or name.startswith(".")  # a hub name is owner/name
    if named and not path.exists():
        raise UserError(f"no model at {path}: give a folder, a .gguf file, or the name of a model on the hub")
    if path.is_dir() and not any(path.glob("*.safetensors")):
        pickled = sorted(x.name for pattern in PICKLED for x in path.glob(pattern))
        if pickled:
            raise UserError(
                f"{path} has pickled weights only ({pickled[0]}), which can run code when loaded; if you trust them, open the "
                "model with transformers and save it again with save_pretrained, which writes safetensors"
            )
        raise UserError(f"{path} has no *.safetensors weights")


def read_documents(tokenizer: Any, path: Path, limit: int | None = None) -> list[Tensor]:
    """Token documents [n] of a text file, or of each .txt file of a folder; at most the first `limit` tokens of each."""
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    if not files or not files[0].is_file():
        raise UserError(f"no text at {path}: give a text file, or a folder of .txt files")
    documents = []
    for file in files:
        text = file.read_text(encoding="utf-8", errors="replace")
        text = text if limit is None else text[: 12 * limit]  # more than enough characters for so many tokens
        ids = torch.tensor(tokenizer.encode(text, add_special_tokens=False), dtype=torch.long)
        documents.append(ids if limit is None else ids[:limit])
    return documents


def chat_tokens(tokenizer: Any, messages: list[dict[str, Any]]) -> list[int]:
    """Messages through the tokenizer's chat template, or as plain lines where it has none."""
    return tokenizer.encode(_chat_text(tokenizer, messages), add_special_tokens=False)


def turn_tokens(tokenizer: Any, said: str, *, first: bool = False) -> list[int]:
    """A user's next turn of a conversation that is in memory up to the end of the last answer, not counting a token that ended
    it: what the template writes after an answer, the new turn, and the beginning of its answer.

    A system prompt that a template puts before every conversation is in the first turn only.
    """
    turn = {"role": "user", "content": said}
    if first:
        return chat_tokens(tokenizer, [turn])
    before = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _MARK}]
    after = _chat_text(tokenizer, [*before, turn]).partition(_MARK)[2]
    return tokenizer.encode(after, add_special_tokens=False) if after else chat_tokens(tokenizer, [turn])


_MARK = "the-answer-ends-here"


def _chat_text(tokenizer: Any, messages: list[dict[str, Any]]) -> str:
    if not tokenizer.chat_template:
        return "".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant:"
    from jinja2 import TemplateError

    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except TemplateError as error:
        raise UserError(f"the model's chat template refuses these messages: {error}") from error


def end_tokens(model: Any, tokenizer: Any) -> set[int]:
    """Tokens that end an answer: the tokenizer's, and those of the model's generation settings, which may end a chat turn."""
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = [getattr(tokenizer, "eos_token_id", None), *(found if isinstance(found, list) else [found])]
    return {token for token in ends if token is not None}
