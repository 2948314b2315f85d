"""Memory straight from the system, in huge pages where it has them."""

from __future__ import annotations

import contextlib
import mmap


def zero_pages(nbytes: int) -> mmap.mmap:
    """Anonymous private pages, zeroed and allocated by the system on first write: what is unused costs no memory."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, nbytes)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Block tables walk all over the pool, products over their weights: 2 MiB pages spare most misses in the TLB.
        # A kernel without them refuses the advice, and small pages do as well.
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
