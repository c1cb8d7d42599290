"""Limits of one engine."""

from __future__ import annotations

from dataclasses import dataclass

from kvstore.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    pool_blocks: int = 512
    """KV blocks in the device pool. The longest sequence has pool_blocks * block_tokens tokens."""
    max_batch: int = 32
    """Sequences that run at once."""
    chunk_tokens: int = 512
    """Most tokens of one prompt computed in one prefill step."""
    mixed_tokens: int = 64
    """Most tokens of prefill chunks in a step that has decode rows: how long an answer may wait for a prompt."""
    first_come: bool = False
    """A prompt is computed whole in one step as soon as it runs, and all decode rows wait for it. For comparison."""
    step_tokens: int = 512
    """Most tokens computed in one step over all sequences, so the longest wait between two tokens is bounded."""
    tail_blocks: int = 2
    """An uncovered tail of up to so many blocks is computed as decode rows (same bits as when it was generated)."""
    exact_blocks: bool = True
    """Each block of a prompt attends to canonical KV of the blocks before it, as it does when these come from the store; so hit,
    miss, recompute and any chunking give the same bits. False: the blocks of one chunk see each other before they are sealed."""
    max_queue: int = 1024
    """Requests that wait; more are refused as Overloaded."""
    threads: int = 0
    """Compute threads; 0: one for each core this process may use."""

    def validate(self, *, block_tokens: int) -> None:
        """Raises ConfigError, naming the key and the limit."""
        for key in ("pool_blocks", "max_batch", "chunk_tokens", "step_tokens", "max_queue"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key} must be at least 1, not {getattr(self, key)}")
        if self.threads < 0 or self.tail_blocks < 0:
            raise ConfigError(f"threads and tail_blocks must be at least 0, not {self.threads} and {self.tail_blocks}")
        if self.chunk_tokens < block_tokens:
            raise ConfigError(f"chunk_tokens must be at least one block ({block_tokens} tokens), not {self.chunk_tokens}")
        if self.mixed_tokens < block_tokens:
            raise ConfigError(f"mixed_tokens must be at least one block ({block_tokens} tokens), not {self.mixed_tokens}")
        if self.step_tokens < self.max_batch + block_tokens:
            raise ConfigError(
                f"step_tokens must be at least max_batch + block_tokens ({self.max_batch + block_tokens}), not {self.step_tokens}: "
                "otherwise a full batch leaves no room for any prompt"
            )
