"""Defines shape buckets: the batch sizes that are compiled, and which one a batch is padded to. No torch."""

from collections.abc import Iterable

from snapcap.models.dataclass import dataclass


@dataclass(frozen=True)
class Bucket:
    """A compiled batch size: ``size`` rows, of which the last ones may be padding."""

    size: int


@dataclass(frozen=True)
class BucketTable:
    """Buckets in ascending order; one table serves the encoder and the decoder."""

    buckets: tuple[Bucket, ...]

    @classmethod
    def of(cls, sizes: Iterable[int]) -> "BucketTable":
        """Sort and check sizes.

        Raises:
            ValueError: there are none, one is below 1, or one is named twice.
        """
        ordered = tuple(sorted(sizes))
        if not ordered or ordered[0] < 1 or len(set(ordered)) != len(ordered):
            raise ValueError(f"bucket sizes must be distinct positive numbers, not {list(ordered)}")
        return cls(tuple(Bucket(size) for size in ordered))

    @property
    def largest(self) -> Bucket:
        return self.buckets[-1]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(bucket.size for bucket in self.buckets)

    def fit(self, rows: int) -> Bucket:
        """The smallest bucket that holds ``rows``.

        Raises:
            ValueError: ``rows`` is below 1 or above the largest bucket.
        """
        if rows < 1:
            raise ValueError(f"a batch has at least one row, not {rows}")
        for bucket in self.buckets:
            if bucket.size >= rows:
                return bucket
        raise ValueError(f"{rows} rows do not fit the largest bucket, {self.largest.size}")

    def admit(self, waiting: int) -> int:
        """How many of ``waiting`` rows to encode at once, at least one.

        An encoder bucket costs its padded size, on a CPU in full: if more than a third of the bucket that holds
        all of them would be padding, the largest bucket that they fill is taken, and the rest follow.
        """
        rows = min(waiting, self.largest.size)
        if 3 * rows >= 2 * self.fit(rows).size:
            return rows
        return max((size for size in self.sizes if size <= rows), default=rows)
