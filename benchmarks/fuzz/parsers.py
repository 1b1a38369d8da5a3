"""The parsers of untrusted documents, each with valid seed documents for the fuzzer.

A parser gets the bytes of one document and reads them as the program does. It accepts them, or raises one of the errors
that it documents; anything else is a defect.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.fuzz import checkpoints, configs, corpora, messages, runs, weights
from benchmarks.fuzz.reading import Made

MODULES = {each.__name__: each.PARSERS for each in (messages, corpora, weights, checkpoints, runs, configs)}
"""The module of each parser: a result depends on what that imports."""

PARSERS: Mapping[str, Made] = {name: made for each in MODULES.values() for name, made in each.items()}
