"""Small loops compiled for the host, so that a decision costs microseconds.

A round's arrays hold tens of numbers; numpy spends a microsecond per operation on them, and a
decision takes a hundred operations. numba, which SGLang depends on, makes each loop one call.
"""

from __future__ import annotations

from collections.abc import Callable

import numba


def compiled(function: Callable) -> Callable:
    """``function`` as machine code, compiled at its first call and cached on disk where possible.

    The Python original stays reachable as ``.py_func``.
    """
    try:
        return numba.njit(function, cache=True)
    except RuntimeError:  # no place to write a cache: an unwritable install without a home
        return numba.njit(function)
