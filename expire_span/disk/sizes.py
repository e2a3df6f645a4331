"""Numbers of bytes as they are shown. Standard library only."""


def show_bytes(count: float) -> str:
    """Bytes with three digits: 512 B, 12.3 kB, 4.56 GB. The one format of every page and terminal."""
    if count < 999.5:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB", "TB"):
        count /= 1000
        if count < 999.5 or unit == "TB":
            return f"{count:.{2 if count < 9.995 else 1 if count < 99.95 else 0}f} {unit}"
    raise AssertionError("TB has no larger unit")
