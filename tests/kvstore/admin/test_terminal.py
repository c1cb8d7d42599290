from __future__ import annotations

import io

import pytest
from rich.console import Console

from kvstore.admin import local_commands, terminal
from kvstore.errors import NotFound


def test_a_command_to_copy_stays_on_one_line_in_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(terminal, "out", Console(file=screen, force_terminal=True, width=40, highlight=False))
    record = {
        "gateway_url": "http://127.0.0.1:8000",
        "redis_url": "redis://127.0.0.1:6379/0",
        "folder": "/state/[old]",
        "model": "some-model",
    }
    lines = local_commands._how_to_use(record)
    terminal.show(record, False, *lines)
    assert screen.getvalue().splitlines() == lines


def test_an_error_before_any_progress_is_not_led_by_an_empty_line(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(terminal, "err", Console(file=screen, width=80))
    with pytest.raises(NotFound), terminal.progress_bars():
        raise NotFound("no member")
    assert screen.getvalue() == ""
    with terminal.progress_bars() as advance:
        advance("s1 drains", 1, 2)
    assert "s1 drains" in screen.getvalue()
