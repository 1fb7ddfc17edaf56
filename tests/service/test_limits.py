"""Holds that every refusal of 413, 429, 431 and 503 is in the one table of limits, with its option and metric."""

from collections.abc import Iterator

import pytest

from snapcap.service.config.settings import GROUPS
from snapcap.service.errors import BeamsNotReady, ModelNotAwake, Overloaded, ServiceError
from snapcap.service.images.pool import _MOST_WAITING
from snapcap.service.limits import LIMITS, OVERLOADED, REJECTED, Limit
from snapcap.service.telemetry.metrics import CLOSED
from snapcap.warmup.option import options_of


def below(kind: type[ServiceError]) -> Iterator[type[ServiceError]]:
    for each in kind.__subclasses__():
        yield each
        yield from below(each)


def all_errors() -> list[type[ServiceError]]:
    import snapcap.service.api.captioning_apis
    import snapcap.service.http.protocol
    import snapcap.service.server.http_process
    import snapcap.service.server.monitor  # noqa: F401  all that answers

    # The base is never raised, and has no code of its own.
    return [kind for kind in below(ServiceError) if kind is not Overloaded]


def test_the_table_has_every_refusal_of_these_statuses_and_no_other() -> None:
    refusals = {(kind.status, kind.code) for kind in all_errors() if kind.status in (413, 429, 431, 503)}
    assert (503, "internal_error") not in refusals
    assert {(limit.error.status, limit.error.code) for limit in LIMITS} == refusals


def test_each_limit_that_answers_429_has_its_own_code_and_title() -> None:
    kinds = [kind for kind in all_errors() if kind.status == 429]
    assert len(kinds) == 5
    assert sorted(kind.code for kind in kinds) == sorted(OVERLOADED)
    assert len({kind.title for kind in kinds}) == len(kinds)
    assert set(REJECTED) <= {kind.code for kind in all_errors()}


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: f"{limit.error.code} {limit.what[:24]}")
def test_a_limit_has_a_bound_an_option_that_exists_and_a_reason_that_is_counted(limit: Limit) -> None:
    options = {option.name for group in GROUPS.values() for option in options_of(group).values()}
    assert limit.option in options if limit.option else limit.bound
    counted = {"requests_rejected": REJECTED, "http_connections_closed": CLOSED}
    assert (limit.reason or limit.error.code) in counted[limit.metric]


def test_the_number_of_large_images_that_wait_is_that_of_the_room() -> None:
    (limit,) = [limit for limit in LIMITS if limit.error.code == "image_memory_full"]
    assert limit.bound == str(_MOST_WAITING)


@pytest.mark.parametrize("error", [BeamsNotReady(8, 4), ModelNotAwake("blip", "it is gone", 3.0)])
def test_an_error_is_printed_as_the_sentence_for_the_client(error: ServiceError) -> None:
    assert str(error) == error.detail
