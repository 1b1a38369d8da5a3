"""The first error wins, in a store of one process."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from atoll.errors import ConfigError, RankError
from atoll.runtime import failure


@pytest.fixture
def store() -> HashStore:
    return HashStore()


def test_the_first_error_is_that_of_all(store: HashStore) -> None:
    assert failure.first(store) is None
    failure.report(store, ValueError("the sky fell"), 3)
    failure.report(store, ConfigError("too late"), 1)
    found = failure.first(store)
    assert found is not None
    assert (str(found), found.rank, found.exit_code) == ("ValueError: the sky fell", 3, 1)


def test_the_users_mistakes_keep_their_exit_code_and_their_words(store: HashStore) -> None:
    failure.report(store, ConfigError("no such layout"), 0)
    found = failure.first(store)
    assert found is not None
    assert (str(found), found.exit_code) == ("no such layout", 2)


def test_what_was_heard_from_another_rank_is_not_said_again(store: HashStore) -> None:
    failure.report(store, RankError("rank 2 failed", rank=2), 0)
    assert failure.first(store) is None


def test_refusals_do_not_end_the_run(store: HashStore) -> None:
    failure.report(store, ConfigError("not this batch"), 0, key="atoll/refusal/7")
    assert failure.first(store) is None
    assert failure.first(store, key="atoll/refusal/7") is not None


def test_without_a_store_there_is_nobody_to_tell() -> None:
    failure.report(None, ValueError("alone"), 0)
    assert failure.first(None) is None
