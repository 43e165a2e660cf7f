"""One flat piece of memory for all n-gram indexes, handed out in blocks: a buddy allocator."""

from __future__ import annotations

import numpy as np

MIN_BLOCK = 256
"""Words in the smallest block: 2 KiB, an index of up to 128 tokens."""


class Arena:
    """Blocks of `2 ** i` words of 8 bytes out of memory that is reserved at once and becomes real when it is first written.

    Reserving keeps growth free of copies, and compiled code can address every index through one array. A free block joins
    its free neighbour, and the lowest free block is taken first, so that what was once touched is used again.
    Raises MemoryError where the system does not even let it be reserved.
    """

    def __init__(self, max_words: int) -> None:
        self.words = np.empty(max(max_words, MIN_BLOCK) // MIN_BLOCK * MIN_BLOCK, dtype=np.int64)
        self.tokens = self.words.view(np.int32)
        self.used_words = 0
        self.touched_words = 0
        """The end of the highest block that was ever handed out."""
        self._free: dict[int, set[int]] = {}
        offset = 0
        while offset < len(self.words):
            size = 1 << ((len(self.words) - offset).bit_length() - 1)
            self._free[size] = {offset}
            offset += size

    def allocate(self, size: int) -> int | None:
        """The offset of a block of `size` words (a power of two, MIN_BLOCK or more), or None where there is no room."""
        fitting = [have for have, blocks in self._free.items() if have >= size and blocks]
        if not fitting:
            return None
        have = min(fitting)
        offset = min(self._free[have])
        self._free[have].remove(offset)
        while have > size:
            have //= 2
            self._free.setdefault(have, set()).add(offset + have)
        self.used_words += size
        self.touched_words = max(self.touched_words, offset + size)
        return offset

    def free(self, offset: int, size: int) -> None:
        """Give back a block of `allocate`."""
        self.used_words -= size
        while (offset ^ size) in self._free.get(size, ()):
            self._free[size].remove(offset ^ size)
            offset &= ~size
            size *= 2
        self._free.setdefault(size, set()).add(offset)
