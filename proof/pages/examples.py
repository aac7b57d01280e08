"""The code of the examples, in the pages that walk through them: the files are the place.

`python -m proof.pages.examples` writes them. A test compares.
"""

from __future__ import annotations

from typing import Final

from proof.pages.blocks import ROOT, blocks, read

#: Blocks that begin with `# name.py` are that file of the example, where it has such a file.
EXAMPLES: Final = {
    "docs/celery.md": "examples/celery_shop",
    "docs/fastapi.md": "examples/fastapi_shop",
    "docs/flask-sqlalchemy.md": "examples/flask_shop",
    "docs/sqlmodel.md": "examples/sqlmodel_shop",
}


def render(page: str) -> str:
    """Return a page with the code as the example has it."""
    text = read(page)
    for block in blocks(text):
        if block.file and (path := ROOT / EXAMPLES[page] / block.file).exists():
            text = text.replace(f"\n{block.text}```", f"\n# {block.file}\n{path.read_text()}```")
    return text


if __name__ == "__main__":
    for name in EXAMPLES:
        (ROOT / name).write_text(render(name))
