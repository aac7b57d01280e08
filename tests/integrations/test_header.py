"""The header `Fencing-Token` gives back exactly the leases that were written into it."""

from __future__ import annotations

import math
import re
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fencelock import CommitInDoubtError, Lease, LockLostError
from fencelock.integrations import header
from fencelock.lease import MAX_RESOURCE_LENGTH, check_resource, held_leases, holding, note_held
from fencelock.tokens import MAX_TOKEN


def is_name(text: str) -> bool:
    try:
        return bool(check_resource(text))
    except ValueError:
        return False


NAMES = st.text(min_size=1, max_size=MAX_RESOURCE_LENGTH).filter(is_name)
TOKENS = st.integers(1, MAX_TOKEN)


@given(NAMES, TOKENS)
def test_a_lease_travels(resource: str, token: int) -> None:
    text = Lease(resource, token).to_header()
    assert re.fullmatch(r"[A-Za-z0-9_.~:/@%-]+=[0-9]+", text)
    lease = Lease.from_header(text)
    assert (lease.resource, lease.token, lease.token) == (resource, token, token)
    assert lease.expires_at == math.inf
    assert not lease.lost


@given(st.dictionaries(NAMES, TOKENS, max_size=2))
def test_several_travel(tokens: dict[str, int]) -> None:
    text = header.to_header(Lease(*each) for each in tokens.items())
    assert [(lease.resource, lease.token) for lease in header.from_header(text)] == [*tokens.items()]


def test_it_is_readable() -> None:
    leases = [Lease("order:1", 123), Lease("tenant/7:a b;c=é", 45)]
    assert header.to_header(leases) == "order:1=123;tenant/7:a%20b%3Bc%3D%C3%A9=45"


@pytest.mark.parametrize("resource", ["😀" * MAX_RESOURCE_LENGTH, "%" * MAX_RESOURCE_LENGTH])
def test_the_longest_names_travel(resource: str) -> None:
    text = Lease(resource, MAX_TOKEN).to_header()
    assert Lease.from_header(text).resource == resource
    assert [lease.resource for lease in header.from_header(text)] == [resource]


BROKEN = [
    *["order:1", "order:1=", "=1", "=", ";", "order:1=1;", ";order:1=1", "order:1=1;;a=1", "a=1,b=2", "a==1"],
    *["a=0", "a=-1", "a=+1", "a=01", "a=1.0", "a=1e3", "a=0x1", "a=1_0"],
    *("a=1; b=2", "a= 1", " a=1", "a=1 ", "a=1\n"),
    *("a=\u0661", "a=²", "a=१२३", f"a={MAX_TOKEN + 1}", f"a={2**64 + 1}", "a=" + "9" * 10_000),
    *("é=1", "a b=1", "a\r\nSet-Cookie: b=1", "a\0=1", "%=1", "%4=1", "%zz=1", "%FF=1", "%ED%A0%80=1"),
    *("%00=1", "%0A=1", "%20a=1", "a%20=1", "a" * (MAX_RESOURCE_LENGTH + 1) + "=1", "a" * 1_000_000 + "=1"),
]


def test_what_is_broken_is_refused() -> None:
    for read, text in product((Lease.from_header, header.from_header), BROKEN):
        with pytest.raises(ValueError, match=r".") as caught:
            pytest.fail(f"{text[:30]!a} was read as {read(text)}")
        assert len(str(caught.value)) < 500, ascii(text[:30])


def test_one_lease_is_not_several() -> None:
    with pytest.raises(ValueError, match="'a=1;b=2'"):
        Lease.from_header("a=1;b=2")
    assert header.from_header("") == ()
    with pytest.raises(ValueError, match="not as 'None'"):
        Lease.from_header(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["a=1;a=2", "a=1;a=1", "a=1;b=2;%61=3"])
def test_no_resource_stands_twice(text: str) -> None:
    with pytest.raises(ValueError, match="names a resource twice"):
        header.from_header(text)


def test_a_header_is_short() -> None:
    leases = [Lease(f"order:{number}", MAX_TOKEN) for number in range(400)]
    with pytest.raises(ValueError, match="at most 8000 travel"):
        header.to_header(leases)
    with pytest.raises(ValueError, match="at most 8000 are read"):
        header.from_header(";".join(lease.to_header() for lease in leases))


def test_what_is_held_is_sent() -> None:
    """And no lease that has ended, or that may still be committed under."""
    assert header.held() == {}
    with header.bound("order:1=7;stock:2=8"):
        assert header.held() == {"Fencing-Token": "order:1=7;stock:2=8"}
        (order, _) = held_leases()
        order._doubt()
        with pytest.raises(CommitInDoubtError):
            header.held()
    with (
        holding([Lease("order:1", 7, expires_at=0.0)]),
        pytest.raises(LockLostError, match="nothing was sent"),
    ):
        header.held()
    assert header.held() == {}


def test_what_is_bound_takes_the_place_of_what_is_held() -> None:
    with holding([Lease("a", 1), Lease("b", 2)]):
        with header.bound("b=3;c=4"):
            assert header.held() == {"Fencing-Token": "a=1;b=3;c=4"}
            note_held(Lease("d", 5))
        assert header.held() == {"Fencing-Token": "a=1;b=2"}
