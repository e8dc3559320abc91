"""Lengths of training given in steps, samples, tokens or epochs, and how many windows they are."""

import dataclasses
import math
import re
from fractions import Fraction

_TEXT = re.compile(r"\s*(\d[\d_]*(?:\.\d+)?(?:[eE]\+?\d{1,2})?)\s*([kMBT]?)\s*(step|sample|token|epoch)s?\s*")
_FACTORS = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def parse(text: str) -> tuple[Fraction, str]:
    """``"1.5B tokens"`` -> ``(1500000000, "tokens")``, exactly.

    Raises:
        ValueError: the text is not a number (``300``, ``1e9``, ``1_000``, ``50k``, ``10M``, ``1.5B``, ``2T``) with one
            of the units steps, samples, tokens and epochs.
    """
    found = _TEXT.fullmatch(text)
    if found is None:
        raise ValueError(
            f"{text!r} is not a number or a length: write '300', '2 epochs', '50k samples' or '1.5B tokens'."
        )
    number, factor, unit = found.groups()
    return Fraction(number.replace("_", "")) * _FACTORS[factor], unit + "s"


@dataclasses.dataclass(frozen=True)
class Batching:
    """What a window takes from the data: the one place where lengths are converted.

    A run is planned in whole windows, and what is planned is what runs: micro-batches at the end of a length that make
    no whole window are left out.

    Attributes:
        rows: of the global micro-batch.
        k: micro-batches a window.
        warmup: of the batch size: pairs (until which window, micro-batches a window), rising; ``k`` from then on.
        weight_per_row: loss weight of a full row, as tokens.
        epoch_rows: rows of the training data, or None where it is not known.
    """

    rows: int
    k: int = 1
    warmup: tuple[tuple[int, int], ...] = ()
    weight_per_row: int = 1
    epoch_rows: int | None = None

    def micro_batches(self, length: int | str) -> int:
        """How many whole micro-batches a length holds; an int is a number of windows.

        An epoch is counted in rows: micro-batches cross from one epoch into the next.
        """
        amount, unit = (Fraction(length), "steps") if isinstance(length, int) else parse(length)
        if unit == "steps":
            if amount.denominator != 1:
                raise ValueError(f"{length!r}: give a whole number of steps.")
            return sum(windows * k for windows, k in self._stages(int(amount)))
        if unit == "epochs" and self.epoch_rows is None:
            raise ValueError(f"{length!r} needs the data to be counted; give a number of steps, samples or tokens.")
        rows = {"samples": 1, "tokens": Fraction(1, self.weight_per_row), "epochs": self.epoch_rows}[unit]
        return math.floor(amount * rows / self.rows)

    def windows(self, length: int | str) -> int:
        """How many whole windows a length holds; an int is that many.

        Raises:
            ValueError: it is no length, or less than one window.
        """
        left = self.micro_batches(length)
        done = 0
        for windows, k in self._stages(left):  # a window takes 1 micro-batch or more: these are enough
            done += min(windows, left // k)
            if left < windows * k:
                break
            left -= windows * k
        if not done and length != 0:
            first = self._stages(1)[0][1]
            raise ValueError(
                f"{length!r} is {left} micro-batches of {self.rows} rows, and a window takes {first}; give "
                f"'{first * self.rows} samples' or more."
            )
        return done

    def left_over(self, length: int | str) -> int:
        """Micro-batches of a length that make no whole window."""
        return self.micro_batches(length) - self.micro_batches(self.windows(length))

    def _stages(self, windows: int) -> list[tuple[int, int]]:
        """The first ``windows`` windows as pairs (how many, micro-batches each)."""
        pairs, begin = [], 0
        for until, k in (*self.warmup, (math.inf, self.k)):
            end = min(until, windows)
            if end > begin:
                pairs.append((end - begin, k))
                begin = end
        return pairs
