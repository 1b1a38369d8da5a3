"""Loops of a search, compiled if numba is installed (the extra `fast`), otherwise plain Python.

Kernels are written for both: flat arrays created by `floats` and `integers`, indices, numbers. Arithmetic is bitwise
equal, so both find the same order for the same number of trials.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableSequence, Sequence
from importlib.util import find_spec
from typing import Any, TypeVar, cast

Floats = MutableSequence[float]
Integers = MutableSequence[int]
Function = TypeVar("Function", bound=Callable[..., Any])

IS_COMPILED = find_spec("numba") is not None
"""True if kernels are compiled."""


def kernel(function: Function) -> Function:
    """Return the function, compiled if possible: once per machine, if its cache can be written."""
    if not IS_COMPILED:
        return function
    import numba

    try:
        compiled: Any = numba.njit(cache=True)(function)
    except RuntimeError:  # no folder for a cache
        compiled = numba.njit(function)
    resolve: Any = compiled.get_call_template
    plain: Any = numba.types.unliteral

    def for_any_number(args: Sequence[Any], kws: Mapping[str, Any]) -> Any:
        """Resolve a call from another kernel by the types of its arguments alone. Numba also takes the values of
        constants into account, and would compile the kernel once for each of them."""
        return resolve(tuple(map(plain, args)), {name: plain(each) for name, each in kws.items()})

    compiled.get_call_template = for_any_number
    return cast(Function, compiled)


def floats(values: Sequence[float]) -> Floats:
    """Return an array of floats."""
    if not IS_COMPILED:
        return list(values)
    import numpy as np

    return cast(Floats, np.array(values, dtype=np.float64))


def integers(values: Sequence[int]) -> Integers:
    """Return an array of integers."""
    if not IS_COMPILED:
        return list(values)
    import numpy as np

    return cast(Integers, np.array(values, dtype=np.int64))


def zeros(count: int) -> Floats:
    """Return an array of zeros."""
    if not IS_COMPILED:
        return [0.0] * count
    import numpy as np

    return cast(Floats, np.zeros(count, dtype=np.float64))


def integer_zeros(count: int) -> Integers:
    """Return an array of integer zeros."""
    if not IS_COMPILED:
        return [0] * count
    import numpy as np

    return cast(Integers, np.zeros(count, dtype=np.int64))
