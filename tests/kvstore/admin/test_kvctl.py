from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvstore.admin import kvctl


def test_a_command_to_copy_stays_on_one_line_in_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(kvctl, "_out", Console(file=terminal, force_terminal=True, width=40, highlight=False))
    record = {
        "gateway_url": "http://127.0.0.1:8000",
        "redis_url": "redis://127.0.0.1:6379/0",
        "folder": "/state/[old]",
        "model": "some-model",
    }
    lines = kvctl._how_to_use(record)
    kvctl._show(record, False, *lines)
    assert terminal.getvalue().splitlines() == lines
