"""The list of materials that the wheel has: fencelock and the packages that it asks for, as CycloneDX.

`python -m proof.release.materials` writes it. A test compares.
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
FILE: Final = Path(__file__).with_name("fencelock.cdx.json")


def render() -> str:
    """Return the list for this `pyproject.toml`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = _names(project["dependencies"])
    optional = _names(line for lines in extras.values() for line in lines) - required
    ours = _component(
        project["name"], version=project["version"], licenses=[{"license": {"id": project["license"]}}]
    )
    others = [_component(name, scope="required") for name in sorted(required)]
    others += [_component(name, scope="optional") for name in sorted(optional)]
    listed: dict[str, Any] = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": ours},
        "components": others,
        "dependencies": [{"ref": ours["bom-ref"], "dependsOn": [each["bom-ref"] for each in others]}],
    }
    return json.dumps(listed, indent=2) + "\n"


def _names(lines: Any) -> set[str]:
    return {re.match(r"[\w.-]+", line)[0].lower() for line in lines}  # type: ignore[index]


def _component(name: str, version: str = "", **more: Any) -> dict[str, Any]:
    url = f"pkg:pypi/{name}@{version}" if version else f"pkg:pypi/{name}"
    known = {"version": version} if version else {}
    return {"type": "library", "bom-ref": url, "name": name, **known, "purl": url, **more}


if __name__ == "__main__":
    FILE.write_text(render())
