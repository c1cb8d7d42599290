from __future__ import annotations

from collections.abc import Callable

import pytest

from kvstore.core.admission import Admission, AdmissionConfig
from kvstore.core.index import Entry
from kvstore.errors import ConfigError


def test_blocks_are_admitted_by_the_uses_they_have_had(chain: Callable, space) -> None:
    admission = Admission(AdmissionConfig(demote_after_uses=1, promote_after_uses=3))
    entry = Entry(key_space=space, block=chain(1)[0], length=1, checksum=1)
    seen = []
    for uses in range(4):
        entry.uses = uses
        seen.append((admission.demotes(entry), admission.promotes(entry)))
    assert seen == [(False, False), (True, False), (True, False), (True, True)]
    assert admission.counted_uses == 3


@pytest.mark.parametrize("wrong", [{"demote_after_uses": -1}, {"promote_after_uses": 0}])
def test_impossible_numbers_are_refused(wrong: dict) -> None:
    with pytest.raises(ConfigError, match="admission"):
        AdmissionConfig(**wrong)
