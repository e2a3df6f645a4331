"""The adapter folder: what a retrofit learned, apart from the model it was learned for.

    adapter.json         format, settings, the base model (class, name, hash), the tokens that began each context (begins_with),
                         and checksums of both files
    adapter.safetensors  the predictors' weights, and the LoRA weights where there are any

The base model is identified by a hash of its weights' names and shapes and of 64 evenly spaced numbers of each. These are
hashed as bfloat16, so that a model has the same hash in float32 and bfloat16; and since they are few, hashing a large model is
quick. A model of another hash is accepted if its fingerprint (fingerprint.py) says that it is the same one, rounded.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import nn

from expire_span.checks import check_count, require, show
from expire_span.disk.files import read_json, to_json, write_together
from expire_span.errors import StorageError, UserError, describe
from expire_span.settings.retrofit import RetrofitConfig
from expire_span.settings.run import from_dict

from .fingerprint import check_record, find_difference, reader_of, record_of
from .gguf import check_unpacked
from .texts import Beginning

FORMAT = 1
_SAMPLES = 64


def save_adapter(retrofitted: Any, folder: Path) -> None:
    weights = {name: x.detach().cpu().contiguous() for name, x in retrofitted.learned().items()}
    data = safetensors.torch.save(weights)
    model = retrofitted.model
    base: dict[str, Any] = {"class": type(model).__name__, "name": _place_of(model), "hash": base_hash(model)}
    base["fingerprint"] = record_of(_own_weights(model))
    head = {"format": FORMAT, "config": asdict(retrofitted.config), "base": base, "sha256": _sha256(data)}
    head["lora_rank"] = retrofitted.lora_rank if retrofitted.lora else 0
    if retrofitted.beginning is not None:
        head["begins_with"] = retrofitted.beginning.record
    head["settings_sha256"] = _settings_sha256(head)
    try:
        write_together(folder, {"adapter.safetensors": data, "adapter.json": to_json(head)})
    except OSError as error:
        raise StorageError(
            f"the adapter could not be saved to {folder}: {describe(error)}; save it elsewhere"
        ) from error


def _place_of(model: Any) -> str:
    """The model's hub name, or the absolute path of its folder or file, which is found from any working directory."""
    name = getattr(model, "name_or_path", "") or ""
    return str(Path(name).resolve()) if name and Path(name).exists() else name


def budget_folder(share: float) -> str:
    """The subfolder of an adapter that holds what was trained at a further budget."""
    return f"budget-{share:g}"


def find_budget(folder: Path, budget: float) -> Path:
    """The folder of what an adapter learned at a further budget; refused if it was not trained at it."""
    found = folder / budget_folder(budget)
    if not (found / "adapter.json").is_file():
        known = sorted(path.name.removeprefix("budget-") for path in folder.glob("budget-*") if path.is_dir())
        told = f"its further budgets are {', '.join(known)}" if known else "it has no further budgets"
        raise UserError(
            f"adapter {folder} was not trained at a further budget of {budget:g}, {told}; train it with --more-budgets"
        )
    return found


def list_budgets(folder: Path) -> list[Path]:
    """The folders of all that an adapter learned: its own, and those of its further budgets."""
    return [folder, *(x for x in sorted(folder.glob("budget-*")) if (x / "adapter.json").is_file())]


def use_budget(retrofitted: Any, folder: Path | None, budget: float) -> None:
    """Go on with what an adapter learned at this budget, if that is one of its further ones, else with its first."""
    if folder is not None:
        further = folder / budget_folder(budget)
        use_folder(retrofitted, further if further in list_budgets(folder) else folder)


def use_folder(retrofitted: Any, folder: Path) -> None:
    """Go on with what lies in one folder of an adapter."""
    retrofitted.load_learned(read_weights(folder, read_head(folder)))


def read_head(folder: Path) -> dict[str, Any]:
    path = folder / "adapter.json"
    if not path.is_file():
        inside = folder / "adapter"
        hint = f"; there is one at {inside}" if (inside / "adapter.json").is_file() else ""
        raise UserError(f"no adapter at {folder}: it has no adapter.json{hint}")
    head = read_json(path)
    if head.get("format") != FORMAT:
        raise UserError(
            f"adapter {folder} has format {head.get('format')}, this version reads format {FORMAT}; make it anew with: "
            "expire-span retrofit"
        )
    try:
        _check_head(head)
    except ValueError as error:
        raise UserError(f"{path}: {error}; copy the adapter again") from error
    return head


def _check_head(head: dict[str, Any]) -> None:
    """Refuse fields of another type than `save_adapter` writes, naming the field."""
    from_dict(RetrofitConfig, head.get("config"), "config")
    base: Any = head.get("base")
    require(isinstance(base, dict), f"base must be a table of fields, got {show(base)}")
    texts = {f"base.{name}": base.get(name) for name in ("class", "name", "hash")} | {"sha256": head.get("sha256")}
    check_record(base.get("fingerprint"))
    for name, value in texts.items():
        require(isinstance(value, str), f"{name} must be text, got {show(value)}")
    check_count("lora_rank", head.get("lora_rank"), least=0)
    Beginning.from_record(head.get("begins_with"))
    require(head.get("settings_sha256") == _settings_sha256(head), "its settings do not match their checksum")


def load_into(retrofitted: Any, folder: Path) -> None:
    head = read_head(folder)
    check_base(retrofitted.model, head, folder)
    theirs, ours = (asdict(RetrofitConfig(**head["config"])), asdict(retrofitted.config))
    for name in ("max_span", "ramp", "temperature", "keep_first"):
        if theirs[name] != ours[name]:
            raise ValueError(f"adapter {folder} was made with {name} {theirs[name]}, this retrofit has {ours[name]}")
    theirs, ours = head["lora_rank"], retrofitted.lora_rank if retrofitted.lora else 0
    if theirs != ours:
        raise ValueError(f"adapter {folder} has low-rank additions of rank {theirs}, this retrofit of rank {ours}")
    weights = read_weights(folder, head)
    _check_weights(retrofitted.learned(), weights, folder)
    retrofitted.load_learned(weights)
    retrofitted.beginning = Beginning.from_record(head.get("begins_with"))


def _check_weights(wanted: dict[str, torch.Tensor], found: dict[str, torch.Tensor], folder: Path) -> None:
    """Refuse weights that are not those of this retrofit, or are not numbers."""
    for name in sorted(wanted.keys() | found.keys()):
        ours, theirs = (tuple(x[name].shape) if name in x else "none" for x in (wanted, found))
        if ours != theirs:
            raise UserError(
                f"adapter {folder} does not fit its model: {name} must have shape {ours}, got {theirs}; copy it again"
            )
        if not bool(found[name].isfinite().all()):
            raise UserError(f"adapter {folder} is damaged: {name} must be finite, got NaN or infinity; copy it again")


def read_weights(folder: Path, head: dict[str, Any]) -> dict[str, torch.Tensor]:
    path = folder / "adapter.safetensors"
    if not path.is_file():
        raise UserError(f"adapter {folder} has no adapter.safetensors")
    data = path.read_bytes()
    if _sha256(data) != head["sha256"]:
        raise UserError(f"{path} does not match its checksum in adapter.json; copy the adapter again")
    try:
        weights = safetensors.torch.load(data)
    except safetensors.SafetensorError as error:
        raise UserError(f"{path} cannot be read ({error}); copy the adapter again") from error
    ranks = {len(x) for name, x in weights.items() if ".lora_A." in name} or {0}
    if ranks != {head["lora_rank"]}:
        told = f"{path} has LoRA weights of rank {', '.join(map(str, sorted(ranks)))}"
        raise UserError(f"{told}, adapter.json says {head['lora_rank']}; copy the adapter again")
    return weights


def base_hash(model: nn.Module) -> str:
    """The hash that identifies a model's weights; see the top of this file."""
    digest = hashlib.sha256()
    for name, x in sorted(_own_weights(model).items()):
        flat = x.detach().flatten()
        places = torch.linspace(0, max(x.numel() - 1, 0), min(_SAMPLES, x.numel()), dtype=torch.float64).long()
        sample = flat[places.to(flat.device)].to(torch.bfloat16).cpu()
        digest.update(f"{name} {tuple(x.shape)}".encode())
        digest.update(sample.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def _own_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's weights by name, without LoRA weights."""
    return {n.replace(".base_layer.", "."): x for n, x in _weights_of(model).items() if "lora_" not in n}


def _weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's weights by name; those that a device map has offloaded are read from where they are."""
    weights = model.state_dict()
    if not any(x.is_meta for x in weights.values()):
        return weights
    from accelerate.utils.modeling import get_state_dict_offloaded_model

    return get_state_dict_offloaded_model(model)


def check_base(model: nn.Module, head: dict[str, Any], folder: Path) -> None:
    check_unpacked(model)
    base, ours = head["base"], base_hash(model)
    if base["hash"] == ours:
        return
    why, kind = "", type(model).__name__
    if record := base["fingerprint"]:
        why = find_difference(record, reader_of(model, _own_weights(model)))
        if why is None:
            return
        why = f", and {why}"
    was = base["name"] or base["class"]
    raise ValueError(
        f"adapter {folder} was made for {was} (hash {base['hash'][:12]}), this {kind} has hash {ours[:12]}{why}; load the "
        "model it was made for"
    )


def _settings_sha256(head: dict[str, Any]) -> str:
    """The checksum of everything that adapter.json says, apart from this checksum itself."""
    told = {name: value for name, value in head.items() if name != "settings_sha256"}
    return _sha256(json.dumps(told, sort_keys=True).encode())


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
