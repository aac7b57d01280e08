"""The list of materials that the wheel has: fencelock and the packages that it asks for, as CycloneDX.

`python -m proof.release.materials` writes it. A test compares.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
FILE: Final = Path(__file__).with_name("fencelock.cdx.json")


def render() -> str:
    """Return the list for this `pyproject.toml`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = _names(project["dependencies"])
    optional = _names(line for lines in extras.values() for line in lines)
    # The versions are the lowest that are accepted, because a library leaves the rest to its users.
    ours = _component(
        project["name"], version=project["version"], licenses=[{"license": {"id": project["license"]}}]
    )
    others = [_component(name, required[name], scope="required") for name in sorted(required)]
    others += [
        _component(name, optional[name], scope="optional") for name in sorted(optional.keys() - required)
    ]
    listed: dict[str, Any] = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": ours},
        "components": others,
        "dependencies": [{"ref": ours["bom-ref"], "dependsOn": [each["bom-ref"] for each in others]}],
    }
    return json.dumps(listed, indent=2) + "\n"


def _names(lines: Iterable[str]) -> dict[str, str]:
    """Return the names of packages, with their lowest versions."""
    found = (re.match(r"([\w.-]+)(?:\[[^]]*\])?[^;]*?>=([\w.]+)", line) for line in lines)
    return {each[1].lower(): each[2] for each in found if each is not None}


def _component(name: str, version: str = "", **more: Any) -> dict[str, Any]:
    url = f"pkg:pypi/{name}@{version}" if version else f"pkg:pypi/{name}"
    known = {"version": version} if version else {}
    return {"type": "library", "bom-ref": url, "name": name, **known, "purl": url, **more}


if __name__ == "__main__":
    FILE.write_text(render())
