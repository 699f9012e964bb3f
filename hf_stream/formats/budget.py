"""How much memory reading a file may take: in proportion to the file, so that a small one cannot ask for much."""

from __future__ import annotations

from typing import Final

from hf_stream.errors import FormatError

RATE: Final = 64
# What any file may take, however small: nobody notices.
FLOOR: Final = 16 << 20
# What the tensors that are taken from any file may come to. Expanded ones take more than their storage.
MIN_TAKEN: Final = 64 << 20


class Budget:
    """Bytes of memory that are left for what a file describes: 64 for each byte of it, and 16 MiB.

    Ordinary files take 5 to 40. Work that gives no memory is counted as memory too, a step as the bytes of a value.

    Args:
        nbytes: Size of the file, or of the part of it that describes something.
    """

    def __init__(self, nbytes: int) -> None:
        self._limit = self._left = FLOOR + RATE * nbytes

    def spend(self, nbytes: int) -> None:
        """Count what is about to be made.

        Raises:
            FormatError: It is more than is left.
        """
        self._left -= nbytes
        if self._left < 0:
            raise FormatError(
                f"what it describes would be larger than {self._limit} bytes of memory ({RATE} for each of its own, "
                f"and {FLOOR}), which no checkpoint needs; if it is right, load it with torch and save less in one file"
            )
