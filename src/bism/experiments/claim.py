"""A folder belongs to one experiment with one set of settings."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def claim(folder: Path, experiment: str, settings: Any, free: Sequence[str]) -> None:
    """Write the settings once; a later call with others is refused, not mixed in. Those named `free` may change."""
    path = folder / "config.json"
    wanted = {name: value for name, value in vars(settings).items() if name not in free}
    if path.exists():
        found = json.loads(path.read_text()).get("settings", {})
        changed = [
            f"{name} {found.get(name)} there, {value} here"
            for name, value in wanted.items()
            if found.get(name) != value
        ]
        if changed:
            raise ValueError(f"{folder} holds other settings ({'; '.join(changed)}); give another --out.")
        return
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"experiment": experiment, "settings": wanted}, indent=2) + "\n")
