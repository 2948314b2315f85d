"""Memory directly from the system, in huge pages if available."""

from __future__ import annotations

import contextlib
import mmap


def zero_pages(nbytes: int) -> mmap.mmap:
    """Map private anonymous pages, which the system zeroes and allocates on first write: unused ones cost nothing."""
    if not hasattr(mmap, "MAP_PRIVATE"):
        return mmap.mmap(-1, nbytes)
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Accesses to blocks are scattered over the pool, so 2 MiB pages avoid most TLB misses. A kernel without huge
        # pages refuses the advice, and small pages work too.
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
