"""Opening what the command line names: a model with its tokenizer, and text as token documents."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from expire_span.errors import UserError

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
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(name, **options)
        tokenizer = AutoTokenizer.from_pretrained(name, **extra)
    except (OSError, ValueError) as error:
        raise UserError(f"cannot load the model {name}: {str(error).splitlines()[0]}") from error
    where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    return model.to(where).eval(), tokenizer


def _check_folder(path: Path) -> None:
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
