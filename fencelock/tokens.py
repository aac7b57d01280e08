"""Fencing tokens; those of Redis nodes have an epoch and a counter: `token = epoch << 44 | counter`.

In epoch 0 a token equals its counter, and so is readable. Only this module puts epoch and counter together. A
node's script never sees the whole token, because Lua's numbers are exact only below 2**53.

A token fits a signed BIGINT: 44 bits of counter and 19 bits of epoch. Counters start at Unix milliseconds by
default, which fit until the year 2527. A larger value is refused, because a token that wrapped around would
be below all older ones.
"""

from __future__ import annotations

COUNTER_BITS = 44
EPOCH_BITS = 19
MAX_COUNTER = (1 << COUNTER_BITS) - 1
MAX_EPOCH = (1 << EPOCH_BITS) - 1
MAX_TOKEN = (1 << (COUNTER_BITS + EPOCH_BITS)) - 1
FORGED = 1 << 62  # a token that starts with the time reaches half of all tokens only if it was forged
#: Milliseconds, 69 years, by which `init(above=)` goes further: a token below the base is of an earlier base.
JUMP = 1 << 41


def compose(epoch: int, counter: int) -> int:
    """Return the token of a counter in an epoch; OverflowError if either half is outside its range."""
    if not 0 <= epoch <= MAX_EPOCH:
        raise OverflowError(f"epoch {epoch} does not fit {EPOCH_BITS} bits")
    if not 0 < counter <= MAX_COUNTER:
        raise OverflowError(f"counter {counter} does not fit {COUNTER_BITS} bits")
    return epoch << COUNTER_BITS | counter


def split(token: int) -> tuple[int, int]:
    """Return the epoch and the counter of a token: the inverse of `compose`."""
    return token >> COUNTER_BITS, token & MAX_COUNTER


def check(token: object) -> int:
    """Return `token`; raise TypeError if it is no int, ValueError if it is outside 1 … 2**63 - 1."""
    if isinstance(token, bool) or not isinstance(token, int):
        raise TypeError(f"a fencing token is an int, not {type(token).__name__}")
    if not 1 <= token <= MAX_TOKEN:
        raise ValueError(f"a fencing token lies between 1 and {MAX_TOKEN}, and {token} does not")
    return token


def check_above(above: int) -> int:
    """Return a token that others shall exceed; raise ValueError if that would close rows for good."""
    if check(above) >= FORGED - (JUMP << 12):  # with room for the jump, shifted by the bits below the time
        raise ValueError(
            f"no use explains token {above}, and tokens above it would close rows for good: see what programs"
            " can write there, and lower it while none runs"
        )
    return above


def epoch_above(highest: int) -> int:
    """Return an epoch in which every token is larger than `highest`, a token that the storage has seen.

    A larger counter in the same epoch is not enough, because holders of later tokens, which the storage has
    not seen yet, may still write.
    """
    epoch = split(check(highest))[0] + 1 if highest else 0
    if epoch > MAX_EPOCH:
        raise ValueError(f"token {highest} is of the last epoch, and there are no larger tokens")
    return epoch
