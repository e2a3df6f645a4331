"""Opening what the command line names: a model with its tokenizer, and text as token documents."""

from __future__ import annotations

import contextlib
import importlib.util
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from logging import ERROR, getLogger
from pathlib import Path
from types import NoneType
from typing import Any

import tokenizers
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig
from transformers.utils import logging, quantization_config
from transformers.utils.hub import cached_file

from expire_span.checks import as_whole, show
from expire_span.errors import UserError, is_out_of_memory

from .adapter import read_head
from .gguf import check_gguf
from .layouts import check_config
from .model_files import INDEX, Shapes, check_index, check_model_size, check_tables, check_weights
from .texts import Beginning, cut_contexts, join_short, text_beginning

PLAIN = (OSError, ValueError, ImportError, SafetensorError, StrictDataclassError)
"""Errors whose text is a sentence for a user; others are told with their name."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
BITS: dict[str, dict[str, Any]] = {
    "int8": {"load_in_8bit": True},
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
}
"""Weights in 8 and 4 bits, by bitsandbytes; keys and values are then bfloat16."""
_GGUF: Any = getattr(quantization_config, "GgufConfig", None)
_UNPACKED: dict[str, Any] = {"quantization_config": _GGUF(dequantize=True)} if _GGUF else {}
"""Read a GGUF file into plain numbers. Newer transformers would else keep its blocks on a GPU with the package kernels, and
they are no weights that a fingerprint, low-rank additions or another precision could use."""
SPREAD = "spread"
"""The device that means all GPUs, and where these are too small the memory beside them: accelerate's device_map="auto"."""


def open_model(name: str, dtype: str = "fp32", device: str = "auto") -> tuple[Any, Any]:
    """The causal model and tokenizer in a folder, a GGUF file, or on the hub under a name; never from pickled weights."""
    spread = device == SPREAD
    where, path = find_device("auto" if spread else device), Path(name)
    files, read_shapes = _check_files(name)
    settings = str(path / "config.json") if path.is_dir() else name
    # Without this, transformers asks in the terminal whether to run code of the model's folder.
    extra: dict[str, Any] = {"trust_remote_code": False, **files}
    place = str(path.parent) if "gguf_file" in files else name
    told = f"cannot load the model {name}" + (f", see {settings}" if path.is_dir() else "")
    with _quiet(), _explained(told):
        config = AutoConfig.from_pretrained(place, **extra)
        check_config(config, (config.architectures or [type(config).__name__])[0])
        if (shapes := read_shapes()) is not None:
            check_model_size(config, shapes, settings)
    with _quiet(), _explained(told):
        if "gguf_file" in files:
            print(f"reading the {len(shapes or ()):,} tensors of {name}", file=sys.stderr, flush=True)
        options = _options(dtype, extra, where) | ({"device_map": "auto"} if spread else {})
        loaded: Any = AutoModelForCausalLM.from_pretrained(place, **options)
    model, found = loaded
    _check_weights(name, found)
    _check_ends(name, model)
    if "gguf_file" in files:
        model.name_or_path = name  # transformers names the file's folder, where nothing tells which file it was
        _check_numbers(name, model, shapes or {})
        _make_plain(model)
    with _quiet(), _explained(lambda: f"the model {name} has no tokenizer that can be read{_blame(path)}"):
        tokenizer = AutoTokenizer.from_pretrained(place, **extra)
        _try_tokenizer(tokenizer)
    return (model if spread or dtype in BITS else model.to(where)).eval(), tokenizer


def _options(dtype: str, extra: dict[str, Any], where: torch.device) -> dict[str, Any]:
    """How weights are loaded: never pickled ones, and what does not fit is reported instead of raised, for `_check_weights`."""
    safe = {} if "gguf_file" in extra else {"use_safetensors": True}
    told = {"output_loading_info": True, "ignore_mismatched_sizes": True, **safe, **extra}
    if dtype not in BITS:
        return {"dtype": DTYPES[dtype], **(_UNPACKED if "gguf_file" in extra else {}), **told}
    if "gguf_file" in extra:
        raise UserError(
            f"--dtype {dtype} rounds a model of safetensors, got a .gguf file, which is rounded already; give bf16"
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError(f"--dtype {dtype} needs bitsandbytes, which is not installed: pip install bitsandbytes")
    # With weights in 8 bits it warns in every layer of every pass that it multiplies in float16.
    getLogger("bitsandbytes.autograd._functions").setLevel(ERROR)
    given: dict[str, Any] = BITS[dtype] | ({"bnb_4bit_compute_dtype": torch.bfloat16} if dtype == "nf4" else {})
    bits = BitsAndBytesConfig(**given)
    return {"dtype": torch.bfloat16, "quantization_config": bits, "device_map": {"": where}, **told}


def _check_files(name: str) -> tuple[dict[str, str], Callable[[], Shapes | None]]:
    """What transformers must be told about a model's files, and what reads the shapes of its weights; None on the hub. Files
    that are missing, damaged, or could run code are refused."""
    path = Path(name)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UserError(f"no model file at {path}")
        shapes = check_gguf(path)
        return {"gguf_file": path.name}, lambda: shapes
    if path.is_dir():
        settings = check_tables(path)
        return {}, lambda: check_weights(path, settings)
    if len(path.parts) > 2 or path.is_absolute() or name.startswith("."):  # a hub name is owner/name
        raise UserError(f"no model at {path}: give a folder, a .gguf file, or the name of a model on the hub")
    with _explained(f"cannot load the model {name}"):
        missing_is_fine: Any = {"_raise_exceptions_for_missing_entries": False}
        index = cached_file(name, INDEX, **missing_is_fine)
    if index is not None:
        check_index(Path(index))
    return {}, lambda: None


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
def _explained(what: str | Callable[[], str]) -> Iterator[None]:
    """Tell what cannot be loaded, and the first lines of the reason. Damaged files make transformers and tokenizers raise
    anything at all, and Rust panic; only a lack of memory and a user's stop pass."""
    try:
        yield
    except BaseException as error:
        panicked = type(error).__name__ == "PanicException"
        if isinstance(error, UserError) or is_out_of_memory(error) or not (panicked or isinstance(error, Exception)):
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = (
            " ".join(lines[:2]) if isinstance(error, PLAIN) and lines else f"{type(error).__name__} {lines[:1] or ''}"
        )
        raise UserError(f"{what if isinstance(what, str) else what()}: {reason}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' reports of what it loads: what matters in them is an error here."""
    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with _no_gguf_bar():
            yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


@contextlib.contextmanager
def _no_gguf_bar() -> Iterator[None]:
    """Without the bar with which transformers reads GGUF files: it heeds no setting, and writes hundreds of lines into logs."""
    from transformers import modeling_gguf_pytorch_utils as reader

    before: Any = getattr(reader, "tqdm", None)
    if before is not None:
        setattr(reader, "tqdm", lambda found, *args, **kwargs: found)  # noqa: B010 - a module's name
    try:
        yield
    finally:
        if before is not None:
            setattr(reader, "tqdm", before)  # noqa: B010


def _blame(path: Path) -> str:
    """Which of a folder's tokenizer files cannot be read, as the end of a clause; nothing for other places."""
    if not path.is_dir():
        return ""
    file = path / "tokenizer.json"
    if not file.exists():
        return f", save one in its folder (there is no {file})"
    try:
        tokenizers.Tokenizer.from_file(str(file))
    except BaseException as error:
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        return f", see {file}"
    return f", see {path / 'tokenizer_config.json'}"


def _try_tokenizer(tokenizer: Any) -> None:
    """Refuse a tokenizer that loads and cannot read or write."""
    ids = tokenizer.encode("A b.", add_special_tokens=False)
    if not ids:
        raise ValueError("it reads 'A b.' as no tokens")
    tokenizer.decode(ids)
    template = tokenizer.chat_template
    if not isinstance(template, (str, dict, NoneType)) or "\ud800" <= max(str(template)) <= "\udfff":
        raise ValueError(f"its chat_template must be text, got {show(template)}")


def _check_ends(name: str, model: Any) -> None:
    """Refuse tokens that end an answer and are no tokens."""
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    for token in found if isinstance(found, list) else [found]:
        if token is not None and as_whole(token) is None:
            raise UserError(
                f"the generation_config.json of {name} must have whole numbers as eos_token_id, got {show(found)}"
            )


def _check_weights(name: str, found: dict[str, Any]) -> None:
    """Refuse weights that are missing or have other shapes, which transformers would replace by random ones, and weights that
    the model would leave out."""
    for key, *shapes in sorted(found["mismatched_keys"]):
        sizes = " and ".join(str(tuple(x)) for x in shapes)
        raise UserError(
            f"the weights of {name} do not fit its config.json: {key} has the shapes {sizes}; copy it again"
        )
    if missing := sorted(found["missing_keys"]):
        raise UserError(
            f"{name} lacks weights of a causal language model ({len(missing)} in all, the first is {missing[0]}); "
            "give a model that was saved whole, as a ...ForCausalLM"
        )
    if spare := sorted(found["unexpected_keys"]):
        raise UserError(
            f"the weights of {name} hold {spare[0]} ({len(spare)} such in all), which its config.json does not describe; "
            "give the config and the weights of one model"
        )


def _check_numbers(name: str, model: Any, shapes: Shapes) -> None:
    """Refuse a GGUF file that holds other numbers than its model: transformers drops tensors that it does not know."""
    have, took = sum(map(math.prod, shapes.values())), sum(p.numel() for p in model.parameters())
    if have != took:
        odd = next((x for x in shapes if not x.startswith(("blk.", "token_embd.", "output", "position_embd."))), None)
        hint = f", the first of another name is {odd}" if odd else ""
        raise UserError(
            f"{name} holds {have:,} numbers, and the model that transformers makes of it has {took:,}{hint}; it would compute "
            "something else: take the same model as a folder of safetensors"
        )


def _make_plain(model: Any) -> None:
    """Remove the marks of rounding from a model whose weights were read from a GGUF file into plain numbers; with these marks
    transformers would refuse to save it."""
    for held, name in ((model, "hf_quantizer"), (model, "quantization_method"), (model.config, "quantization_config")):
        if hasattr(held, name):
            delattr(held, name)
    model.is_quantized = False


def find_device(device: str) -> torch.device:
    """The device that auto, cpu, cuda or cuda:N means here."""
    count = torch.cuda.device_count()
    if device == "auto":
        return torch.device("cuda" if count else "cpu")
    kind, _, number = device.partition(":")
    if kind not in ("cpu", "cuda") or (number and not number.isdecimal()):
        raise UserError(f"the device must be auto, cpu, cuda, cuda:N or {SPREAD}, got {device!r}")
    if kind == "cuda" and int(number or 0) >= count:
        raise UserError(f"device {device} needs a GPU of that number, got {count} here; use cpu or auto")
    return torch.device(device)


def check_context(model: Any, context: int, option: str = "--context") -> None:
    """Refuse contexts that are longer than those for which the model was made."""
    most = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(most, int) and context > most:
        raise UserError(
            f"{type(model).__name__} was made for contexts of {most} tokens, got {option} {context}; give at most {most}"
        )


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


def read_contexts(tokenizer: Any, path: Path, length: int, beginning: Beginning) -> list[Tensor]:
    """All whole contexts of a text file or a folder of them; refused where no document is long enough."""
    rest = length - len(beginning.context)
    documents = join_short(read_documents(tokenizer, path), rest, tokenizer, beginning.text)
    if found := cut_contexts(documents, length, beginning.context):
        return found
    longest = max(len(x) for x in documents) + len(beginning.context)
    raise UserError(
        f"no document has {length} tokens, the longest has {longest}; give a shorter --context or more text"
    )


def chat_tokens(tokenizer: Any, messages: list[dict[str, Any]], *, begins: Sequence[int] | None = None) -> list[int]:
    """Messages through the tokenizer's chat template, or as plain lines where it has none."""
    return tokenizer.encode(chat_text(tokenizer, messages, begins=begins), add_special_tokens=False)


def turn_tokens(tokenizer: Any, said: str, *, first: bool = False, begins: Sequence[int] | None = None) -> list[int]:
    """A user's next turn of a conversation that is in memory up to the end of the last answer, not counting a token that ended
    it: what the template writes after an answer, the new turn, and the beginning of its answer.

    A system prompt that a template puts before every conversation is in the first turn only.
    """
    turn = {"role": "user", "content": said}
    if first:
        return chat_tokens(tokenizer, [turn], begins=begins)
    before = [{"role": "user", "content": "-"}, {"role": "assistant", "content": _MARK}]
    after = chat_text(tokenizer, [*before, turn]).partition(_MARK)[2]
    return tokenizer.encode(after, add_special_tokens=False) if after else chat_tokens(tokenizer, [turn], begins=())


_MARK = "the-answer-ends-here"


def chat_text(tokenizer: Any, messages: list[dict[str, Any]], *, begins: Sequence[int] | None = None) -> str:
    """The text that `chat_tokens` encodes. begins: tokens before a text, which a template writes itself where the model needs
    them; None takes the tokenizer's own."""
    if not tokenizer.chat_template:
        start = tokenizer.decode(list(text_beginning(tokenizer) if begins is None else begins))
        return start + "".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant:"
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
