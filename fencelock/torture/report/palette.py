"""Which colour and which letter stands for which resource.

There are six of both, since more cannot be told apart; the letters are there for those who cannot tell the
colours apart either. What is left over shares a grey and a dot.
"""

from __future__ import annotations

from collections.abc import Iterable

from fencelock.torture.report.chart import Key

_LETTERS = "ABCDEF"
_OTHERS = "·"


class Palette:
    """Colours and letters for resources, in the order in which they are given."""

    def __init__(self, resources: Iterable[str]) -> None:
        names = list(dict.fromkeys(resources))
        self._letters = dict(zip(names, _LETTERS, strict=False))
        self._others = len(names) - len(self._letters)

    @classmethod
    def fits(cls, count: int) -> bool:
        """Whether so many resources can have colours of their own."""
        return count <= len(_LETTERS)

    def letter(self, resource: str) -> str:
        """Return the letter of a resource."""
        return self._letters.get(resource, _OTHERS)

    def look(self, resource: str) -> str:
        """Return the name of its colour in the style sheet."""
        letter = self._letters.get(resource)
        return f"of-{letter.lower()}" if letter else "of-others"

    def keys(self) -> list[Key]:
        """Return the entries of a legend."""
        keys = [Key(f"swatch {self.look(name)}", name, letter) for name, letter in self._letters.items()]
        if self._others:
            keys.append(Key("swatch of-others", f"{self._others:,} other resources", _OTHERS))
        return keys
