"""Draw the diagrams of the pages: `python -m proof.pages.diagrams` writes docs/site/diagrams.

GitHub draws mermaid itself. The site shows drawings, because a page that loads a program from another server
shows raw text offline. A test says when to draw again. `mmdc` draws, and needs a Chromium:
`npm install @mermaid-js/mermaid-cli`, and MMDC=node_modules/.bin/mmdc.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from proof.pages.blocks import ROOT, read

FOLDER: Final = ROOT / "docs" / "site" / "diagrams"
SOURCE: Final = re.compile(r"(?ms)^```mermaid\n(.*?)^```$")


def file_of(source: str) -> Path:
    """Return where the drawing of a diagram is; another source has another file."""
    return FOLDER / f"{hashlib.sha256(source.encode()).hexdigest()[:16]}.svg"


def sources() -> dict[Path, str]:
    """Return the diagrams of all pages, by the files of their drawings."""
    pages = [f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))]
    return {file_of(found[1]): found[1] for page in pages for found in SOURCE.finditer(read(page))}


def main() -> None:
    """Draw the missing diagrams, and delete those that no page has."""
    wanted = sources()
    FOLDER.mkdir(exist_ok=True)
    for file in {*FOLDER.glob("*.svg")} - wanted.keys():
        file.unlink()
    with tempfile.TemporaryDirectory() as folder:
        browser = Path(folder) / "browser.json"
        settings = {
            "args": ["--no-sandbox"],
            "executablePath": os.environ.get("CHROMIUM", "/usr/bin/chromium"),
        }
        browser.write_text(json.dumps(settings))
        for file in sorted(wanted.keys() - {*FOLDER.glob("*.svg")}):
            source = Path(folder) / "diagram.mmd"
            source.write_text(wanted[file])
            drawing = [os.environ.get("MMDC", "mmdc"), "--theme", "neutral", "--backgroundColor", "white"]
            subprocess.run([*drawing, "-p", browser, "-i", source, "-o", file], check=True)


if __name__ == "__main__":
    main()
