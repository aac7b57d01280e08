"""Which colour and which letter stands for which resource.

There are six of both, since more cannot be told apart; the letters are there for those who cannot tell the
colours apart either. What is left over shares a grey.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from proof.torture.report.chart import Key
from proof.torture.report.scale import count

_LETTERS = "ABCDEF"


class Palette:
    """Colours and letters for resources, in the order in which they are given; `others` have none."""

    def __init__(self, resources: Iterable[str], others: int = 0) -> None:
        names = list(dict.fromkeys(resources))
        self._letters = dict(zip(names, _LETTERS, strict=False))
        self._others = others + len(names) - len(self._letters)

    @classmethod
    def for_few(cls, resources: Iterable[str], important: Collection[str]) -> Palette:
        """Give colours to the important ones; to others where there are enough, or none is important."""
        often = [name for name, _ in Counter(resources).most_common()]
        if not important or cls.fits(len(often)):
            return cls([*important, *often])
        return cls(important, len(set(often) - set(important)))

    @classmethod
    def fits(cls, count: int) -> bool:
        """Whether so many resources can have colours of their own."""
        return count <= len(_LETTERS)

    def letter(self, resource: str) -> str:
        """Return the letter of a resource; one of the others has none."""
        return self._letters.get(resource, "")

    def look(self, resource: str) -> str:
        """Return the name of its colour in the style sheet."""
        letter = self._letters.get(resource)
        return f"of-{letter.lower()}" if letter else "of-others"

    def keys(self) -> list[Key]:
        """Return the entries of a legend."""
        keys = [Key(f"swatch {self.look(name)}", name, letter) for name, letter in self._letters.items()]
        if self._others:
            keys.append(Key("swatch of-others", count(self._others, "more resource")))
        return keys
