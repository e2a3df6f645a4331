"""Opening what the command line names: a model with its tokenizer, and text as token documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from expire_span.errors import UserError

from .layouts import check_config

PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def open_model(name: str, dtype: str = "fp32", device: str = "auto") -> tuple[Any, Any]:
    """The causal model and tokenizer in a folder, a GGUF file, or on the hub under a name; never from pickled weights."""
    options: dict[str, Any] = {"dtype": DTYPES[dtype]}
    path = Path(name)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UserError(f"no model file at {path}")
        name, options["gguf_file"] = str(path.parent), path.name
    else:
        _check_folder(path)
        options["use_safetensors"] = True
    extra = {"gguf_file": options["gguf_file"]} if "gguf_file" in options else {}
    where = find_device(device)
    try:
        config = AutoConfig.from_pretrained(name, **extra)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot load the model {name}: {str(error).splitlines()[0]}") from error
    check_config(config, (config.architectures or [type(config).__name__])[0])
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(name, **options)
        tokenizer = AutoTokenizer.from_pretrained(name, **extra)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot load the model {name}: {str(error).splitlines()[0]}") from error
    return model.to(where).eval(), tokenizer


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


def _check_folder(path: Path) -> None:
    named = len(path.parts) > 2 or path.is_absolute() or path.parts[:1] in ((".",), ("..",))  # a hub name is owner/name
    if named and not path.exists():
        raise UserError(f"no model at {path}: give a folder, a .gguf file, or the name of a model on the hub")
    if path.is_dir() and not any(path.glob("*.safetensors")):
        pickled = sorted(x.name for pattern in PICKLED for x in path.glob(pattern))
        if pickled:
            raise UserError(
                f"{path} has pickled weights only ({pickled[0]}), which can run code when loaded; save the model again "
                "with safe_serialization=True"
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
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    else:
        text = "".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant:"
    return tokenizer.encode(text, add_special_tokens=False)
