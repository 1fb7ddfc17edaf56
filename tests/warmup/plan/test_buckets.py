"""Which bucket a batch is padded to, and how many waiting rows are encoded at once."""

import pytest

from snapcap.warmup.plan.plan import Bucket, BucketTable

TABLE = BucketTable.of((8, 1, 4))


def test_sizes_are_sorted() -> None:
    assert TABLE.sizes == (1, 4, 8)
    assert TABLE.largest == Bucket(8)


@pytest.mark.parametrize("sizes", [(), (0, 1), (-4,), (1, 4, 4)], ids=str)
def test_bad_sizes_are_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"distinct positive numbers, not \["):
        BucketTable.of(sizes)


def test_fit_is_the_smallest_bucket_that_holds_the_rows() -> None:
    assert [TABLE.fit(rows).size for rows in range(1, 9)] == [1, 4, 4, 4, 8, 8, 8, 8]


@pytest.mark.parametrize(("rows", "says"), [(0, "at least one row, not 0"), (9, "9 rows do not fit .* 8")])
def test_rows_that_fit_no_bucket_are_an_error(rows: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        TABLE.fit(rows)


@pytest.mark.parametrize("sizes", [(1, 4, 8), (1, 4, 16, 64), (3,), (2, 64)], ids=str)
def test_admit_takes_some_and_never_pads_more_than_a_third_where_a_bucket_can_be_filled(
    sizes: tuple[int, ...],
) -> None:
    table = BucketTable.of(sizes)
    for waiting in range(1, 2 * table.largest.size):
        rows = table.admit(waiting)
        assert 1 <= rows <= min(waiting, table.largest.size)
        padding = table.fit(rows).size - rows
        assert 3 * padding <= table.fit(rows).size or waiting < table.sizes[0]


def test_admit_takes_all_when_little_is_padded_and_else_fills_a_bucket() -> None:
    assert [TABLE.admit(waiting) for waiting in range(1, 11)] == [1, 1, 3, 4, 4, 6, 7, 8, 8, 8]


def test_a_batch_below_the_smallest_bucket_goes_as_it_is() -> None:
    assert BucketTable.of((8, 16)).admit(2) == 2
