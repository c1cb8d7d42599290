from __future__ import annotations

import asyncio

from kvstore.byte_budget import ByteBudget


def test_a_budget_makes_others_wait_and_lets_one_that_is_larger_than_all_pass_alone() -> None:
    async def test() -> None:
        budget = ByteBudget(10)
        await budget.take(25)
        waiting = asyncio.create_task(budget.take(1))
        await asyncio.sleep(0)
        assert not waiting.done()
        budget.give_back(25)
        await waiting
        assert budget.taken == 1
        assert budget.fits(9)
        assert not budget.fits(10)

    asyncio.run(test())


def test_a_budget_lets_in_those_behind_one_that_gave_up() -> None:
    async def test() -> None:
        budget = ByteBudget(10)
        await budget.take(8)
        large, small = asyncio.create_task(budget.take(9)), asyncio.create_task(budget.take(2))
        await asyncio.sleep(0)
        assert not small.done(), "in order of arrival"
        large.cancel()
        await asyncio.wait([large, small])
        assert budget.taken == 10
        budget.give_back(10)
        assert budget.taken == 0

    asyncio.run(test())


def test_who_does_not_wait_takes_what_is_free_and_never_ahead_of_those_who_wait() -> None:
    async def test() -> None:
        budget = ByteBudget(10)
        assert budget.take_if_free(25), "alone"
        assert not budget.take_if_free(1)
        assert budget.take_if_free(0)
        budget.give_back(20)
        large = asyncio.create_task(budget.take(6))
        await asyncio.sleep(0)
        assert not budget.take_if_free(2), "the larger one came first"
        budget.give_back(5)
        await large
        assert budget.take_if_free(4)
        assert budget.taken == 10

    asyncio.run(test())
