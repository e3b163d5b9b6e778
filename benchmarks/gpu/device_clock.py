"""A kernel that reads the device's clock all the time and notes the gaps in which it didn't run."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer


@triton.jit
def watch_clock(o_gaps, limit_ns, least_ns, most_gaps):
    """Note begin and end of the watch in row 0 of `o_gaps`, then each gap of at least `least_ns`: from, until."""
    began = globaltimer()
    last = began
    now = began
    n = 0
    while now - began < limit_ns:
        now = globaltimer()
        if (now - last >= least_ns) & (n < most_gaps):
            tl.store(o_gaps + 2 * n + 2, last)
            tl.store(o_gaps + 2 * n + 3, now)
            n += 1
        last = now
    tl.store(o_gaps, began)
    tl.store(o_gaps + 1, now)
