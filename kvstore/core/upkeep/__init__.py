"""Processes of one store that keep the cluster's copies in order: each is a coroutine that waits for nothing but its Surroundings.

So they have no loop, clock or network of their own. The shell gives them those of asyncio, a simulation those of its timeline.
"""
