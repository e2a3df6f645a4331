"""Which extra of this package brings a package that is missing, and the command that installs it. Standard library only."""

from __future__ import annotations

import json
from pathlib import Path

EXTRAS = {
    "accelerate": "train",
    "tyro": "train",
    "rich": "train",
    "tensorboard": "train",
    "matplotlib": "view",
    "PIL": "view",
    "jinja2": "view",
    "fastapi": "view",
    "uvicorn": "view",
    "gymnasium": "rl",
    "popgym": "popgym",
    "minigrid": "minigrid",
    "transformers": "hf",
    "peft": "hf",
    "tokenizers": "tokens",
    "triton": "gpu",
    "fla": "fla",
}
"""For packages that are not always installed, the extra of this package that installs them."""


def install_command(extra: str) -> str:
    """The command that adds an extra to this installation, from the clone, wheel or git address that it came from."""
    source, editable = _find_source()
    if editable:
        return f"pip install -e '{source.removeprefix('file://')}[{extra}]'"
    if source:
        return f"pip install 'expire-span[{extra}] @ {source}'"
    return (
        f'pip install "expire-span[{extra}] @ $SOURCE", where SOURCE is the address that you installed expire-span from'
    )


def _find_source() -> tuple[str, bool]:
    """Address that this package was installed from, and whether its files are used in place; "" where that is not known."""
    package = Path(__file__).resolve().parent
    if (package.parent / "pyproject.toml").is_file():  # a clone: used in place, whether it was installed or not
        return package.parent.as_uri(), True
    try:
        (record,) = package.parent.glob("expire_span-*.dist-info/direct_url.json")
        found = json.loads(record.read_text(encoding="utf-8"))
        git = found.get("vcs_info")
        if git is None:
            return found["url"], False
        revision = git.get("requested_revision")
        return f"{git['vcs']}+{found['url']}" + (f"@{revision}" if revision else ""), False
    except (OSError, ValueError, KeyError):
        return "", False
