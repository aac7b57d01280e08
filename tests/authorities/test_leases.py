"""Names, extensions, the limits of a ttl, plain data and closing mean the same with every authority."""

from __future__ import annotations

import json
import time
import unicodedata
from itertools import chain
from typing import Any, Final

import pytest

from fencelock.authority.base import Grant
from fencelock.errors import AuthorityError, FencelockError, LockLostError, LockTimeoutError
from tests.authorities.faces import Face, acquire_briefly, is_free_soon, is_held, take
from tests.authorities.kinds import EACH_DRIVER, EACH_SORT_TOO, EVERYWHERE
from tests.authorities.stage import Stage, together

#: Names that some database, collation, driver or key format takes for one another, or for something else.
#: Some databases compare without the blanks at the end; a lock refuses such names by itself.
NAMES: Final = (
    *("a", "A", "á", "Á", "ä", "ae", "æ", "ß", "ss", "ẞ", "\u0131", "i", "I", "İ", "\u212a", "k", "K"),
    *(unicodedata.normalize(form, "Zoë") for form in ("NFC", "NFD")),
    *("a\u200b", "a\u00ad", "a-", "a_", "aa", "a a", "a  a"),
    *("'", "''", '"', "`", "%", "%%", "%s", "%(name)s", "_", "?", ":name", ":", "::", "a:b", "a:b:", ":a"),
    *("\\", "\\\\", "\\n", "\\'", "{a}", "{}", "{{a}}", "*", "[a]", "a*", "$1", "$$", ";", "--", "#"),
    *("0", "00", "0.0", "1", "1e0", "null", "NULL", "true", "/", "a/b", "../a", "a\\b", "&", "=", "+", "<a>"),
    *("😀", "😁", "👩\u200d💻", "👩", "\U0001d41a", "\U0010ffff", "\uffff", "日本", "日本語", "\uff41"),
    *("x" * 255, "x" * 254 + "y", "é" * 255, "😀" * 255, "😀" * 254 + "😁"),
)
#: More than fit into one batch of nodes or a database; three threads ask for a third each.
MANY: Final = 561


@pytest.mark.parametrize("stage", EVERYWHERE, indirect=True)
def test_every_driver_does_everything_in_both_worlds(stage: Stage) -> None:
    mine, other = stage.new(), stage.new()
    assert other.holder_ttl("b", "a") is None
    grant = mine.acquire("b", "a")
    with pytest.raises(LockTimeoutError) as refused:
        other.acquire("a", timeout=0)
    assert 0.0 < (refused.value.holder_ttl or 0.0) <= 30.5
    extended = mine.extend(grant, 60.0)
    assert extended.tokens == grant.tokens
    assert extended.expires_at > grant.expires_at
    minted = mine.remint(extended)
    assert all(new > old for new, old in zip(minted.tokens, grant.tokens, strict=True))
    assert is_held(other, "b")
    assert mine.release(minted) is True
    assert mine.release(minted) is False
    later = other.acquire("a", timeout=2)
    assert later.tokens[0] > minted.tokens[1]
    assert other.release(later) is True


@pytest.mark.parametrize("stage", EACH_DRIVER, indirect=True)
def test_every_name_is_a_resource_of_its_own(stage: Stage) -> None:
    mine, other = stage.new(), stage.new()
    assert len(set(NAMES)) == len(NAMES)
    grants = {name: mine.acquire(name, timeout=2) for name in NAMES}
    assert [name for name in NAMES if not is_held(other, name)] == []
    kept = mine.extend_many([(grant, 30.0) for grant in grants.values()])
    assert [grant.resources for grant in kept if isinstance(grant, Grant)] == [(name,) for name in NAMES]
    for name, grant in grants.items():
        assert mine.release(grant) is True, name
    for start in range(0, len(NAMES), stage.kind.most):
        names = NAMES[start : start + stage.kind.most]
        together_again = other.acquire(*names)
        assert together_again.resources == names
        rising = zip(together_again.tokens, names, strict=True)
        assert all(token > grants[name].tokens[0] for token, name in rising)
        assert other.release(together_again) is True


def test_an_extension_keeps_the_token_and_moves_the_end(stage: Stage) -> None:
    mine, other = stage.new(), stage.new()
    for last in (0, 1):
        first = mine.acquire("a", "b", ttl=1.0)
        asked = time.monotonic()
        second = mine.extend(first, 40.0)
        assert (second.resources, second.tokens) == (first.resources, first.tokens)
        assert first.expires_at < asked + 35.0 < second.expires_at < time.monotonic() + 40.0
        if last:
            time.sleep(max(0.0, first.expires_at + 0.1 - time.monotonic()))
        assert is_held(other, "a")
        assert is_held(other, "b")
        assert mine.release((first, second)[last]) is True
        assert is_free_soon(other, "a", "b")


@pytest.mark.parametrize("stage", EACH_SORT_TOO, indirect=True)
def test_an_extension_never_shortens(stage: Stage) -> None:
    mine, other = stage.new(), stage.new()
    first = mine.acquire("r", ttl=20.0)
    second = mine.extend(first, 0.1)
    assert second.expires_at >= first.expires_at
    time.sleep(0.25)
    assert is_held(other, "r")
    assert mine.release(second) is True


@pytest.mark.timed
@pytest.mark.parametrize("stage", EACH_SORT_TOO, indirect=True)
def test_a_lease_that_is_extended_again_and_again_is_kept_and_then_ends(stage: Stage) -> None:
    mine, other = stage.new(), stage.new()
    grant = mine.acquire("r", ttl=1.0)
    for _ in range(4):
        time.sleep(0.3)
        said = mine.extend(grant, 1.0)
        assert said.expires_at > grant.expires_at
        grant = said
    assert is_held(other, "r")
    assert is_free_soon(other, "r"), "it lasts for longer than it was extended for"


def test_many_are_extended_at_once_and_each_is_told_its_own(stage: Stage) -> None:
    mine, other = stage.new(), stage.new()
    count = MANY if stage.kind.most > 1000 else 102  # a third for each thread
    late = count - 31
    lost = {3: acquire_briefly(mine, "lost3"), late: acquire_briefly(mine, "lost late", "beside")}
    names = {0: ("gone0",), count - 46: ("gone late", "gone too"), count - 1: ("gone",)}
    released = {number: mine.acquire(*its) for number, its in names.items()}
    for grant in released.values():
        assert mine.release(grant) is True
    taken = [other.acquire("lost3", ttl=60.0, timeout=20.0), other.acquire("beside", ttl=60.0, timeout=20.0)]
    grants = _many(mine, count)
    ended = lost | released
    for number, grant in (ended | {50: mine.acquire("first", "second", ttl=40.0)}).items():
        mine.release(grants[number])
        grants[number] = grant
    began = time.monotonic()
    said = mine.extend_many([(grant, 60.0) for grant in grants])
    assert [number for number, each in enumerate(said) if isinstance(each, FencelockError)] == sorted(ended)
    for number, (grant, outcome) in enumerate(zip(grants, said, strict=True)):
        if number in ended:
            assert isinstance(outcome, LockLostError), number
        else:
            assert isinstance(outcome, Grant), number
            assert (outcome.resources, outcome.tokens) == (grant.resources, grant.tokens), number
            assert outcome.expires_at > began + 50.0
    assert is_held(mine, "lost3")
    assert mine.release(lost[late]) is not True
    assert is_free_soon(other, "lost late")
    assert is_held(mine, "beside")
    assert [other.release(grant) for grant in taken] == [True, True]
    assert mine.extend_many([]) == []


def _many(face: Face, count: int) -> list[Grant]:
    """Return so many grants, in the order of their names; three threads ask for them."""

    def ask(part: int) -> list[Grant]:
        return [face.acquire(f"many{number}", ttl=40.0, timeout=20.0) for number in range(part, count, 3)]

    parts = together(*(lambda part=part: ask(part) for part in range(3)))
    return list(chain.from_iterable(zip(*parts, strict=True)))


@pytest.mark.parametrize("ttl", [0.01, 0.05])
def test_the_shortest_leases_end(stage: Stage, ttl: float) -> None:
    """They are granted or refused in plain words, and keep others out for no longer than they last."""
    mine, other = stage.new(), stage.new()
    take(mine, "warm")
    try:
        grant = mine.acquire("r", ttl=ttl)
    except (ValueError, FencelockError) as error:
        assert str(error)  # noqa: PT017 - either outcome will do
    else:
        assert grant.expires_at < time.monotonic() + ttl
    assert is_free_soon(other, "r")


@pytest.mark.parametrize("stage", EACH_SORT_TOO, indirect=True)
def test_a_day_is_granted_or_refused_in_plain_words(stage: Stage) -> None:
    """Where it is too long, nothing is held, and an extension for a day changes nothing."""
    mine, other = stage.new(), stage.new()
    day = 86_400.0
    try:
        grant = mine.acquire("day", ttl=day)
    except ValueError as error:
        assert "ttl" in str(error)  # noqa: PT017 - either outcome will do
        assert is_free_soon(other, "day")
    else:
        assert day * 0.98 < grant.expires_at - time.monotonic() < day
        assert is_held(other, "day")
        assert mine.release(grant) is True
    grant = mine.acquire("r")
    try:
        said = mine.extend(grant, day)
    except ValueError as error:
        assert "ttl" in str(error)  # noqa: PT017 - either outcome will do
    else:
        assert said.expires_at > time.monotonic() + day * 0.98
    assert is_held(other, "r")
    assert mine.release(grant) is True


@pytest.mark.parametrize("stage", EACH_DRIVER, indirect=True)
def test_closing_twice_and_going_on(stage: Stage) -> None:
    mine, other = stage.new(), stage.new()
    mine.close()
    grant = mine.acquire("r")
    mine.close()
    mine.close()
    assert is_held(other, "r")
    said = mine.extend(grant, 30.0)
    assert mine.acquire("s").tokens
    mine.close()
    assert is_held(mine, "r")
    assert mine.release(said) is True
    assert is_free_soon(other, "r")


@pytest.mark.parametrize(
    ("stage", "blocking"),
    [
        ("asyncpg, asyncio", "postgresql+psycopg://"),
        ("psycopg_async, asyncio", "postgresql+psycopg://"),
        ("aiomysql, asyncio", "mysql+pymysql://"),
        ("asyncmy, asyncio", "mysql+pymysql://"),
        ("aiosqlite, asyncio", "the URL sqlite:///"),
    ],
    indirect=["stage"],
)
def test_a_driver_for_asyncio_names_the_url_for_blocking_code(stage: Stage, blocking: str) -> None:
    with pytest.raises((AuthorityError, TypeError)) as caught:
        stage.new_client().acquire(("r",), ttl=5.0, timeout=0)
    assert blocking in str(caught.value)
    assert is_free_soon(stage.new(), "r")


@pytest.mark.parametrize("stage", EACH_SORT_TOO, indirect=True)
def test_the_holder_of_several_is_the_last_to_end(stage: Stage) -> None:
    mine, other = stage.new(), stage.new()
    short, long = mine.acquire("a", ttl=20.0), mine.acquire("b", "c", ttl=60.0)
    for face in (mine, other):
        assert 1.0 < (face.holder_ttl("a") or 0.0) < 20.1
        assert 30.0 < (face.holder_ttl("a", "b", "d") or 0.0) < 60.1
    for grant in (short, long):
        mine.release(grant)
    assert other.holder_ttl("a", "b", "c", "d") is None
    acquire_briefly(mine, "a")
    assert is_free_soon(other, "a")
    assert other.holder_ttl("a") is None


def test_a_grant_is_known_elsewhere_by_plain_data(stage: Stage) -> None:
    mine, other = stage.new(), stage.new()
    grant = mine.acquire("b", "a", ttl=20.0)
    data: Any = json.loads(json.dumps(mine.client.dump(grant)))
    said = other.extend(other.client.load(grant.resources, grant.tokens, data), 60.0)
    assert (said.resources, said.tokens) == (grant.resources, grant.tokens)
    assert said.expires_at > time.monotonic() + 45.0
    minted = other.remint(said)
    assert all(new > old for new, old in zip(minted.tokens, grant.tokens, strict=True))
    assert other.release(minted) is True
    assert mine.holder_ttl("a", "b") is None
