"""Who has which pages of keys and values: bookkeeping alone, the pages themselves are on the device.

Answers to one prompt share the pages that the prompt fills; what it begins of one more page is copied for each.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

PAGE = 64  # tokens


def num_pages(num_tokens: int) -> int:
    return -(-num_tokens // PAGE)


class PagePool:
    """Page 0 belongs to nobody: rows that only fill a batch up write there."""

    def __init__(self, num: int) -> None:
        self.num = max(0, num - 1)
        self._free = list(range(num - 1, 0, -1))
        self._holders = np.zeros(num, np.int32)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, num: int) -> list[int]:
        assert num <= len(self._free), "more pages than there are"
        taken = [self._free.pop() for _ in range(num)]
        self._holders[taken] = 1
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """One more holds them."""
        self._holders[list(pages)] += 1

    def give_back(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._holders[page] -= 1
            assert self._holders[page] >= 0, "a page was given back twice"
            if not self._holders[page]:
                self._free.append(page)
