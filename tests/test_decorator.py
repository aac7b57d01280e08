"""`@fenced` runs a function only while it holds the lock that the function's arguments name."""

# ruff: noqa: ARG001, ARG004, ARG005 - the arguments name the locks

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, assert_type

import pytest

from fencelock import Redlock, fenced
from fencelock.lease import held_leases


@dataclass
class Account:
    id: int


def names() -> list[str]:
    return [lease.resource for lease in held_leases()]


def test_function_runs_under_the_lock_that_its_arguments_name(authority: Redlock) -> None:
    @fenced("order:{order_id}", authority=authority)
    def ship(order_id: int, note: str = "") -> tuple[list[str], str]:
        return names(), note

    @fenced("account:{source.id:04}", "shard:{shards[0]}", authority=authority)
    def transfer(source: Account, shards: list[str], region: str = "eu") -> list[str]:
        return [*names(), region]

    @fenced("region:{region}", authority=authority)
    def close(*, region: str = "eu") -> list[str]:
        return names()

    assert ship(7, "x") == (["order:7"], "x")
    assert ship(order_id=8) == (["order:8"], "")
    assert transfer(Account(3), ["a"]) == ["account:0003", "shard:a", "eu"]
    assert close() == ["region:eu"]
    assert names() == []


def test_two_templates_that_name_one_resource_lock_it_once(authority: Redlock) -> None:
    """A transfer from an account to itself is no error of the lock."""

    @fenced("account:{source}", "account:{target}", authority=authority)
    def transfer(source: int, target: int) -> list[str]:
        return names()

    assert transfer(1, 1) == ["account:1"]
    assert transfer(2, 1) == ["account:2", "account:1"]


def test_a_function_may_name_what_to_lock(authority: Redlock) -> None:
    @fenced(lambda order, note: f"order:{order.id}", "all", authority=authority)
    def ship(order: Account, note: str = "") -> tuple[list[str], str]:
        return names(), note

    @fenced(lambda self_id: f"order:{self_id}" if self_id else "order:none", authority=authority)
    async def later(self_id: int | None) -> list[str]:
        return names()

    @fenced(lambda _: 7, authority=authority)  # type: ignore[arg-type, return-value]
    def wrong(order: Account) -> None:
        raise AssertionError

    assert ship(Account(7), note="x") == (["order:7", "all"], "x")
    assert ship(order=Account(8)) == (["order:8", "all"], "")
    assert asyncio.run(later(None)) == ["order:none"]
    with pytest.raises(TypeError, match="resource"):
        wrong(Account(7))


def test_method_may_name_its_object(authority: Redlock) -> None:
    class Cart:
        def __init__(self) -> None:
            self.id = 5

        @fenced("cart:{self.id}", authority=authority)
        def check_out(self) -> list[str]:
            return names()

        @staticmethod
        @fenced("cart:{number}", authority=authority)
        def drop(number: int) -> list[str]:
            return names()

    assert Cart().check_out() == ["cart:5"]
    assert Cart.drop(9) == ["cart:9"]


def test_coroutine_function_waits_without_blocking(authority: Redlock) -> None:
    inside = most = 0

    @fenced("order:{order_id}", authority=authority)
    async def ship(order_id: int) -> int:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.02)
        inside -= 1
        return order_id

    async def main() -> list[int]:
        done = await asyncio.gather(*(ship(order_id=1) for _ in range(5)))
        await authority.aio.close()
        return done

    assert inspect.iscoroutinefunction(ship)
    assert asyncio.run(main()) == [1] * 5
    assert most == 1


def test_function_keeps_its_face(authority: Redlock) -> None:
    @fenced("order:{order_id}", authority=authority)
    def ship(order_id: int) -> str:
        """Send it."""
        return str(order_id)

    assert ship.__name__ == "ship"
    assert ship.__doc__ == "Send it."
    assert str(inspect.signature(ship)) == "(order_id: 'int') -> 'str'"
    assert_type(ship(1), str)
    with pytest.raises(TypeError, match="order_id"):
        ship()  # type: ignore[call-arg]


class Shipper:
    """An object that is called like a coroutine function."""

    async def __call__(self, order_id: int) -> list[str]:
        await asyncio.sleep(0 * order_id)
        return names()


def test_what_is_awaited_runs_inside_however_it_is_made(authority: Redlock) -> None:
    async def with_more(order_id: int, /, *rest: int, **options: int) -> list[str]:
        await asyncio.sleep(0)
        return names()

    async def main() -> None:
        fence = fenced("order:{order_id}", authority=authority)
        assert await fence(Shipper())(7) == ["order:7"]
        assert await fence(functools.partial(Shipper(), order_id=8))() == ["order:8"]
        assert await fence(functools.partial(with_more, more=1))(9, 1, order_id=2) == ["order:9"]
        assert await fence(Shipper().__call__)(order_id=10) == ["order:10"]
        await authority.aio.close()

    asyncio.run(main())


def test_coroutine_that_would_run_after_the_release_is_refused(authority: Redlock) -> None:
    async def work() -> None:
        pytest.fail("it ran without the lock")

    @fenced("r", authority=authority)
    def plain() -> Coroutine[Any, Any, None]:
        return work()

    with pytest.raises(TypeError, match="after the release"):
        _ = plain()
    with authority.lock("r", timeout=0):
        pass
