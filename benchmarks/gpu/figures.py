"""The figures of stages, each with what it has to reach: what the table, the page and the README state.

A figure is computed from the result of one line, so it never compares two cards. A result that lacks something, because
the stage ran out of time, has fewer figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

Result = Mapping[str, Any]

PARITY = 1e-10
BF16 = 1e-2
"""Tolerance in bfloat16, relative to the largest value. The significand of bfloat16 has 8 bits."""
ON_CPU = {"fp64": 1e-8, "fp32": 1e-3}
"""Largest difference between a card and a CPU, whose kernels sum in another order."""
SAME_LOSS = 1e-3
SLOWEST = 0.98
"""Tokens a second of one rank, as a share of plain PyTorch's."""
MOST_MEMORY = 1.03
PEAK_ERROR, PRESET_ERROR, CALIBRATED_ERROR = 0.03, 0.10, 0.05
MOST_GROWTH = 16 << 20
"""Bytes that a soak may end with more than in its middle."""

PEAK_RATE = {"H100": 989.4e12, "H200": 989.4e12}
"""Part of a device's name -> bf16 FLOP/s of its data sheet, dense."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure: what it is of, its value and its target as text, and whether it is reached.

    passed: None if there is no target.  claim: how the README says it, if it is reached; empty if it does not.
    """

    what: str
    value: str
    target: str = ""
    passed: bool | None = None
    claim: str = ""


def figures(name: str, result: Result, *, device: str = "") -> list[Figure]:
    """The figures of a stage's result on a device."""
    return list(_OF[name](result, device)) if name in _OF else []


def at_most(what: str, value: float, most: float, *, form: str = ".1e", claim: str = "") -> Figure:
    """A figure that has an upper limit. NaN fails."""
    return Figure(what, format(value, form), f"≤ {most:{form}}", value <= most, claim)


def at_least(what: str, value: float, least: float, *, form: str = ".3f", claim: str = "") -> Figure:
    """A figure that has a lower limit. NaN fails."""
    return Figure(what, format(value, form), f"≥ {least:{form}}", value >= least, claim)


def _worst(rows: Sequence[Result]) -> float:
    """The largest difference of some rows. Infinity is text in a line."""
    return max(float(row["worst"]) for row in rows)


def _parity(cases: Sequence[Result], of: str) -> Figure:
    """The largest difference of some cases from one process."""
    said, match = ("1 case", "matches") if len(cases) == 1 else (f"{len(cases)} cases", "match")
    return at_most(f"{said} {of}", _worst(cases), PARITY, claim=f"{said} {of} {match} one process within 1e-10")


def _failed(rows: Sequence[Result]) -> Iterator[Figure]:
    """A missed target for each row that failed by another reason than memory."""
    for row in rows:
        if row["problem"] and not row["problem"].startswith("out of memory"):
            yield Figure(row["name"], row["problem"][:80], "runs", False)


def _named(rows: Sequence[Result]) -> dict[str, Result]:
    """Rows that ran, by name."""
    return {row["name"]: row for row in rows if not row["problem"]}


# ---- stages


def _card(result: Result, device: str) -> Iterator[Figure]:
    if "copy_bytes_per_second" in result:
        yield Figure("copy, read and written", f"{result['copy_bytes_per_second'] / 1e12:.2f} TB/s")
    if "product_flops_per_second" in result:
        size = result["product_size"]
        yield Figure(f"bf16 product {size}³", f"{result['product_flops_per_second'] / 1e12:.0f} TFLOP/s")


def _truth(result: Result, device: str) -> Iterator[Figure]:
    rows = result.get("parity", [])
    if rows:
        claim = f"{len(rows)} pairs of layout and recompute match plain PyTorch in float64 within 1e-10"
        yield at_most("parity in float64", _worst(rows), PARITY, claim=claim)
    for row in result.get("against_cpu", []):
        yield at_most(f"{row['precision']} against the CPU", float(row["worst"]), ON_CPU[row["precision"]])
    yield from _failed(result.get("contenders", []))
    found = _named(result.get("contenders", []))
    plain = [found[name] for name in ("torch", "torch again") if name in found]
    if plain:
        yield from _race(result["job"], plain, found, device)


def _race(job: Result, plain: Sequence[Result], found: Mapping[str, Result], device: str) -> Iterator[Figure]:
    rate = fmean(row["tokens_per_second"] for row in plain)
    drift = plain[-1]["tokens_per_second"] / plain[0]["tokens_per_second"] - 1.0
    yield Figure("model A, plain PyTorch", f"{rate:,.0f} tokens/s, second run {drift:+.1%}")
    ours = found.get("atoll NNG")
    if ours is None:
        return
    peak_rate = next((flops for part, flops in PEAK_RATE.items() if part in device), None)
    if peak_rate is not None:
        mfu = ours["flops_per_second"] / peak_rate
        yield Figure("model A, NNG", f"{ours['tokens_per_second']:,.0f} tokens/s, MFU {mfu:.1%}")
    ratio = ours["tokens_per_second"] / rate
    billions = f"{job['parameters'] / 1e9:.2f} billion parameters"
    claim = f"a step of {billions} takes {1 / ratio:.3f} times as long as in plain PyTorch"
    yield at_least("NNG / plain, tokens/s", ratio, SLOWEST, claim=claim)
    if "peak_allocated" in ours and "peak_allocated" in plain[0]:
        share = ours["peak_allocated"] / plain[0]["peak_allocated"]
        yield at_most("NNG / plain, peak memory", share, MOST_MEMORY, form=".3f", claim=f"in {share:.3f} of its memory")
    for name in ("torch FSDP2", "atoll NNN"):
        if name in found:
            against = ours["tokens_per_second"] / found[name]["tokens_per_second"]
            if name == "torch FSDP2":
                yield at_least("NNG / FSDP2, tokens/s", against, 1.0, claim=f"{against:.3f} times as fast as FSDP2")
            else:
                yield Figure("NNG / NNN, tokens/s", f"{against:.3f}")
    differences = [
        abs(a - b) / abs(b) for row in found.values() for a, b in zip(row["losses"], plain[0]["losses"], strict=False)
    ]
    yield at_most("losses of all contenders differ", max(differences), SAME_LOSS)


def _tests(result: Result, device: str) -> Iterator[Figure]:
    counts = result.get("counts", {})
    bad = counts.get("failed", 0) + counts.get("error", 0)
    total = sum(counts.values()) - counts.get("skipped", 0)
    is_whole = not result.get("unfinished", ["stopped"])
    words = f"{total - bad} of {total} passed" + ("" if is_whole else ", stopped early")
    claim = f"{total} tests of `tests/gpu` pass"
    yield Figure("tests/gpu", words, "all", bad == 0 and total > 0 and is_whole, claim)


def _gaps(result: Result, device: str) -> Iterator[Figure]:
    ours, plain = (result.get(name, {}) for name in ("atoll NNG", "torch"))
    yield from _failed([{"problem": "", **each, "name": "profile"} for each in (ours, plain)])
    if ours.get("events") and plain.get("events"):
        yield at_least("device busy in a step, NNG − plain", ours["busy"] - plain["busy"], -0.01)
        yield Figure("kernels and copies, NNG and plain", f"{ours['events']:,} and {plain['events']:,}")


def _ranks(result: Result, device: str) -> Iterator[Figure]:
    rows = result.get("cases", [])
    if rows:
        yield _parity(rows, "on 2 and 4 ranks that share the card")
        again = sum(row["repeats"] for row in rows)
        yield Figure("same bits in a second run", f"{again} of {len(rows)}", "all", again == len(rows))


def _options(result: Result, device: str) -> Iterator[Figure]:
    rows = result.get("rows", [])
    yield from _failed(rows)
    found = _named(rows)
    usual = found.get("NNG")
    if usual is None:
        return
    for name in ("NNG, recompute block", "NNG, recompute selective", "GGG", "NNG, microbatch doubled"):
        if name in found:
            words = f"{found[name]['tokens_per_second'] / usual['tokens_per_second']:.3f} of the tokens/s"
            if "peak_allocated" in usual:
                words += f", {found[name]['peak_allocated'] / usual['peak_allocated']:.3f} of the peak"
            yield Figure(f"{name} / NNG", words)
    too_large = [row["name"] for row in rows if row["problem"].startswith("out of memory")]
    if too_large:
        yield Figure("out of memory", ", ".join(too_large))


def _predictions(result: Result, device: str) -> Iterator[Figure]:
    yield from _failed([{"name": "measured card", "problem": result.get("problem", "")}, *result.get("rows", [])])
    rows = _named(result.get("rows", []))
    given = result.get("committed", {})
    known = [name for name in rows if name in given]
    if known and all("peak_allocated" in rows[name] for name in known):
        errors = [given[name]["peak_bytes"] / rows[name]["peak_allocated"] - 1.0 for name in known]
        yield _errors(f"predicted peak of {len(known)} settings", errors, PEAK_ERROR, "peak memory is predicted")
    for what, source, most, claim in (
        ("predicted time, preset", given, PRESET_ERROR, "the preset predicts step time"),
        ("predicted time, measured card", result.get("from_measurements", {}), None, ""),
        (
            "predicted time, calibrated",
            result.get("calibrated", {}),
            CALIBRATED_ERROR,
            "step time is predicted after calibration",
        ),
    ):
        errors = [source[name]["seconds"] / rows[name]["median_seconds"] - 1.0 for name in rows if name in source]
        if errors:
            yield _errors(what, errors, most, claim)


def _errors(what: str, errors: Sequence[float], most: float | None, claim: str = "") -> Figure:
    worst = max(errors, key=abs)
    words = f"median {median(map(abs, errors)):.1%}, worst {worst:+.1%}"
    if most is None:
        return Figure(what, words)
    said = f"{claim} within {abs(worst):.1%}" if claim else ""
    return Figure(what, words, f"worst ≤ {most:.0%}", abs(worst) <= most, said)


def _compile(result: Result, device: str) -> Iterator[Figure]:
    if result.get("parity"):
        worst = _worst(result["parity"])
        yield at_most(
            "compiled blocks, parity", worst, PARITY, claim="compiled blocks match plain PyTorch within 1e-10"
        )
    yield from _failed(result.get("rows", []))
    rows = list(_named(result.get("rows", [])).values())
    for row in rows[1:]:
        ratio = row["tokens_per_second"] / rows[0]["tokens_per_second"]
        yield Figure(f"{row['name']} / as it is, tokens/s", f"{ratio:.3f}, {row['graphs']} graphs")


def _small(result: Result, device: str) -> Iterator[Figure]:
    yield from _failed(result.get("rows", []))
    rows = [row for row in result.get("rows", []) if not row["problem"]]
    plain, ours = ([row["tokens_per_second"] for row in rows if row["name"] == name] for name in ("torch", "atoll NNG"))
    if plain and ours:
        yield Figure("125 million, NNG / plain, tokens/s", f"{fmean(ours) / fmean(plain):.3f}")


def _checks(result: Result, device: str) -> Iterator[Figure]:
    if not result.get("sanitizer", False):
        yield Figure("compute-sanitizer", "not there")
    for row in result.get("tools", []):
        has_said = row["errors"] is not None and row.get("has_run", False)
        value = f"{row['errors']} errors" if has_said else "no summary"
        yield Figure(row["tool"], value, "0 errors", has_said and row["errors"] == 0)
    found = result.get("allocations")
    if found and not found["problem"]:
        yield Figure("GGG, allocations of a step", f"{found['allocations']:,}, {found['retries']} retries")


def _codecs(result: Result, device: str) -> Iterator[Figure]:
    if result.get("codecs"):
        yield at_most("codec kernels against formulas", _worst(result["codecs"]), 1e-12)
        compiled = [row["worst_fp32"] for row in result["codecs"] if "worst_fp32" in row]
        if compiled:
            yield at_most("compiled in fp32", max(map(float, compiled)), 1e-6)
    if result.get("muon"):
        claim = "Muon matches its formula within 1e-10"
        yield at_most("Muon, parity", _worst(result["muon"]), PARITY, claim=claim)


def _soak(result: Result, device: str) -> Iterator[Figure]:
    if "worst" in result:
        yield at_most(f"soak of {result['cases']} cases, losses", result["worst"], PARITY)
        grown = result["growth_bytes"]
        yield at_most("soak, memory gained, MiB", grown / 2**20, MOST_GROWTH / 2**20, form=".1f")


def _experts(result: Result, device: str) -> Iterator[Figure]:
    products, cases, speed = result.get("products", []), result.get("cases", []), result.get("speed", {})
    yield from _failed([*products, *cases, {"problem": "", **speed, "name": "speed"}])
    if products:
        yield at_most("grouped products of experts in bf16, error", _worst(products), BF16)
    if cases:
        yield _parity(cases, "with divided experts")
    if speed.get("dense"):
        yield Figure("a grouped product of 64 experts, dense = 1", f"{speed['grouped'] / speed['dense']:.2f}")


def _sequences(result: Result, device: str) -> Iterator[Figure]:
    cases = result.get("cases", [])
    yield from _failed(cases)
    if cases:
        yield _parity(cases, "with divided sequences")


def _host(result: Result, device: str) -> Iterator[Figure]:
    cases, speeds = result.get("cases", []), {row["name"]: row for row in result.get("speeds", [])}
    yield from _failed(cases)
    if cases:
        yield _parity(cases, "with host memory")
        yield Figure("as many again, the same bits", "yes" if all(row["repeats"] for row in cases) else "no")
    for name, row in speeds.items():
        size = f"{result['job']['parameters'] / 1e9:.1f} billion, {name}"
        if row["problem"]:
            yield Figure(size, row["problem"])
        else:
            peak = f", {row['peak_allocated'] / 2**30:.1f} GiB" if "peak_allocated" in row else ""
            yield Figure(size, f"{row['tokens_per_second']:,.0f} tokens/s{peak}")


def _stream(result: Result, device: str) -> Iterator[Figure]:
    streams, changes = result.get("streams", []), result.get("changes", [])
    yield from _failed(streams)
    yield from _failed([{"name": f"changes held on {row['held']}", **row} for row in changes])
    right = [row["is_right"] for row in (*streams, *changes) if "is_right" in row]
    if right:
        yield Figure("kept weights, and digests of changes, as they have to be", f"{sum(right)} of {len(right)}", "all",
                     all(right))  # fmt: skip
    for row in streams:
        if not row["problem"]:
            more = row.get("peak_allocated", 0) - row["allocated_before"]
            peak = f", {more / 2**20:,.0f} MiB more than before" if "peak_allocated" in row else ""
            yield Figure(f"all weights in bf16, {row['name']}", f"{row['seconds']:.3f} s{peak}")
    for row in changes:
        if not row["problem"]:
            share = row["bytes"] / row["whole_bytes"]
            yield Figure(
                f"changes of a step, held on {row['held']}", f"{row['seconds']:.3f} s, {share:.1%} of the bytes"
            )


def _float8(result: Result, device: str) -> Iterator[Figure]:
    rows, losses = result.get("rows", []), result.get("losses", [])
    yield from _failed([*rows, *losses])
    plain = {row["compiled"]: row for row in rows if row["precision"] == "bf16"}
    for row in rows:
        base = plain[row["compiled"]]
        if row is not base and not row["problem"] and not base["problem"]:
            ratio = row["tokens_per_second"] / base["tokens_per_second"]
            yield Figure(f"FP8 {row['name']} / bf16, tokens/s", f"{ratio:.3f}")
    base, *others = losses or [{"problem": "none"}]
    for row in others:
        if not row["problem"] and not base["problem"]:
            ratio = fmean(row["losses"][-30:]) / fmean(base["losses"][-30:])
            what = f"{row['name']} / bf16, last 30 of {len(row['losses'])} steps"
            yield Figure(what, f"{ratio - 1:+.2%}", "within 1%", abs(ratio - 1) <= 0.01)


_OF: Mapping[str, Callable[[Result, str], Iterator[Figure]]] = {
    "card": _card,
    "truth": _truth,
    "tests": _tests,
    "gaps": _gaps,
    "ranks": _ranks,
    "options": _options,
    "predictions": _predictions,
    "compile": _compile,
    "small": _small,
    "checks": _checks,
    "codecs": _codecs,
    "experts": _experts,
    "sequences": _sequences,
    "host": _host,
    "stream": _stream,
    "float8": _float8,
    "soak": _soak,
}
