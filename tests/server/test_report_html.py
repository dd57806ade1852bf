"""The page: complete, offline, escaped, and right at the edges (no steps, no failure, not started)."""

from __future__ import annotations

import copy
from html.parser import HTMLParser
from typing import Any

import pytest

from myriad.server.report_html import headline, render_html
from myriad.server.report_svg import Range, number, thin, ticks
from myriad.spec.causes import Cause

VOID = {"meta", "br"}
ATTACKS = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "'&</title></style>",
    "javascript:alert(1)",
    "\u4e07 \u202eabc \ud800",
)


class Page(HTMLParser):
    """Reads a page strictly: every element closed in order, nothing loaded, nothing run."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text.append(data)


def read(report: dict[str, Any]) -> Page:
    text = render_html(report)
    page = Page()
    page.feed(text)
    page.close()
    assert page.open == []
    tags = {tag for tag, _ in page.elements}
    assert not tags & {"script", "img", "link", "iframe", "object", "base", "form", "a"}
    for tag, attributes in page.elements:
        assert not {name for name in attributes if name.startswith("on") or name in ("src", "href")}, tag
    assert "url(" not in text and "@import" not in text and "http://" not in text and "https://" not in text
    text.encode("utf-8")
    return page


def report(**fields: Any) -> dict[str, Any]:
    """A broken run of two generations, as ``build_report`` returns it."""
    executions = [
        {
            "step": step,
            "generation": generation,
            "kept": kept,
            "at_s": at_s,
            "wall_s": 0.5,
            "loss": (4.0 / step).hex(),
            "tokens_per_s": 8192.0,
        }
        for generation, step, kept, at_s in (
            *((1, s, s <= 3, 1 + s / 2) for s in range(1, 6)),
            *((2, s, True, 5 + (s - 3) / 2) for s in range(4, 9)),
        )
    ]
    moments = (
        "begun",
        "fenced",
        "forked",
        "rendezvous",
        "restored",
        "first_step",
        "failed",
        "verdict",
        "ended",
    )
    first = dict(zip(moments, (0.0, 0.1, 0.3, 0.8, 1.0, 1.5, 3.6, 4.0, 4.1), strict=True))
    second = dict(zip(moments, (4.0, 4.2, 4.4, 4.8, 5.0, 5.5, None, None, 7.6), strict=True))
    base = {
        "version": 1,
        "job": "j1",
        "name": "tiny",
        "status": "SUCCEEDED",
        "reason": "completed",
        "detail": "",
        "exit_code": 0,
        "restarts": 1,
        "nodes": 2,
        "spares": 1,
        "layout": {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "tp": 2, "microbatches": 1},
        "accelerators": 6,
        "wall_time_s": 8.0,
        "effective_accelerators": 1.5,
        "largest_loss": {"cause": "node_down", "accelerator_seconds": 8.8, "accelerators": 1.1},
        "mfu": 0.21,
        "peak_flops_per_s": 5e10,
        "ettr": 0.5,
        "ledger": {"compute": 12.0, "node_down": 8.8, "spare_idle": 8.0, "other": 19.2},
        "predicted_ledger": {"compute": 11.0, "startup": 4.0, "data_wait": None},
        "losses": [(4.0 / s).hex() for s in range(1, 9)],
        "reference_losses": [(4.0 / s).hex() for s in range(1, 9)],
        "losses_equal_reference": True,
        "sample_ids_seen_once": True,
        "redone_steps": 2,
        "redone_losses_equal": True,
        "executions": executions,
        "recoveries": [
            {
                "generation": 1,
                "cause": "node b was lost (kill -9)",
                "culprit_node": "b",
                "culprit_rank": 3,
                "replacement": {"b": "c"},
                "failed_step": 5,
                "restore_step": 3,
                "tiers": ["memory", "durable"],
                "tier_counts": {"durable": 1, "memory": 1},
                "lost_steps": 2,
                "seconds": {
                    "detection": 0.4,
                    "fencing": 0.2,
                    "start": 0.2,
                    "rendezvous": 0.4,
                    "restore": 0.2,
                    "first_step": None,
                },
                "queued_s": 0.0,
                "downtime_s": 1.9,
            }
        ],
        "timeline": [{"at_s": 0.0, "event": "granted", "generation": None, "detail": "3 nodes"}],
        "generations": [
            {"generation": g, "allocation": 1, "nodes": nodes, "restore_step": step, "cause": cause}
            | {f"{name}_s": at_s for name, at_s in times.items()}
            for g, nodes, step, cause, times in (
                (1, ["a", "b"], 0, "node_failed", first),
                (2, ["a", "c"], 3, "", second),
            )
        ],
        "allocations": [
            {
                "number": 1,
                "granted_s": 0.0,
                "released_s": 8.0,
                "accelerators": 6,
                "wall_time_s": 8.0,
                "ledger": {},
                "node_roles": {
                    "a": [{"role": "ranks", "start_s": 0.0, "end_s": 8.0}],
                    "b": [
                        {"role": "ranks", "start_s": 0.0, "end_s": 3.6},
                        {"role": "down", "start_s": 3.6, "end_s": 8.0},
                    ],
                    "c": [
                        {"role": "spare", "start_s": 0.0, "end_s": 4.0},
                        {"role": "ranks", "start_s": 4.0, "end_s": 8.0},
                    ],
                },
            }
        ],
    }
    return {**base, **fields}


def test_the_page_says_what_the_report_says() -> None:
    page = read(report())
    text = " ".join(page.text)
    for words in (
        "6 accelerators owned, 1.5 effective; largest loss:",
        "node down 1.1",
        "not predicted",
        "not measured",
        "c took over from b",
        "node b was lost (kill -9)",
        "1 ranks from durable",
        "Bit-identical",
        "dp_shard 2 x tp 2",
        "compute",
    ):
        assert words in text, words
    drawn = [attributes for tag, attributes in page.elements if tag == "svg"]
    assert len([a for a in drawn if a.get("role") == "img"]) == 2 + 1 + 3  # curves, ledger bar, three nodes
    assert all(a.get("role") == "img" or a.get("aria-hidden") == "true" for a in drawn)
    pictures = len([a for a in drawn if a.get("role") == "img"])
    assert sum(1 for tag, _ in page.elements if tag == "title") >= pictures + 1


@pytest.mark.parametrize("attack", ATTACKS)
def test_every_string_is_escaped(attack: str) -> None:
    evil = copy.deepcopy(report(name=attack, detail=attack, job=attack))
    evil["recoveries"][0] |= {"cause": attack, "culprit_node": attack, "replacement": {attack: attack}}
    evil["timeline"][0] |= {"event": attack, "detail": attack}
    evil["allocations"][0]["node_roles"][attack] = evil["allocations"][0]["node_roles"]["a"]
    page = read(evil)
    assert attack.encode("utf-8", "replace").decode() in " ".join(page.text)


@pytest.mark.parametrize(
    ("story", "fields", "words"),
    [
        ("no failure", {"recoveries": [], "redone_steps": 0}, "no failure"),
        (
            "a command",
            {
                "executions": [],
                "losses": [],
                "sample_ids_seen_once": None,
                "effective_accelerators": None,
                "mfu": None,
                "predicted_ledger": None,
                "ledger": {"running_unattributed": 40.0, "startup": 8.0},
                "layout": None,
            },
            "sends no step reports",
        ),
        (
            "not started",
            {
                "status": "PENDING",
                "executions": [],
                "losses": [],
                "recoveries": [],
                "timeline": [],
                "generations": [],
                "allocations": [],
                "ledger": {},
                "wall_time_s": 0.0,
                "accelerators": 0,
                "effective_accelerators": None,
                "largest_loss": None,
                "ettr": None,
                "mfu": None,
            },
            "PENDING",
        ),
        ("samples twice", {"sample_ids_seen_once": False}, "NO"),
        ("a loss of nan", {"losses": ["nan"] * 8}, "tiny"),
    ],
)
def test_edges(story: str, fields: dict[str, Any], words: str) -> None:
    assert words in " ".join(read(report(**fields)).text), story


def test_losses_that_are_not_numbers_leave_a_gap() -> None:
    broken = report()
    broken["executions"][1]["loss"] = "nan"
    broken["executions"][2]["loss"] = None
    broken["executions"][9]["loss"] = "inf"
    text = render_html(broken)
    read(broken)
    assert "nan," not in text and ",nan" not in text


def test_a_step_whose_tokens_nobody_told_leaves_a_gap_and_is_no_standstill() -> None:
    """The rank that reports the tokens died with its node; the other ranks' reports of the step are there."""
    found = report()
    found["executions"][4] |= {"tokens_per_s": None, "loss": None}
    curves = [a["points"] or "" for tag, a in read(found).elements if a.get("class") in ("thrown", "series")]
    assert curves and not any(point.endswith(",1000.0") for points in curves for point in points.split())


def test_a_long_run_makes_a_small_page() -> None:
    long = report()
    template = long["executions"][0]
    long["executions"] = [
        {
            **template,
            "step": step,
            "at_s": step / 2,
            "loss": (1.0 if step != 7777 else 99.0).hex(),
            "kept": True,
        }
        for step in range(1, 20_001)
    ]
    text = render_html(long)
    assert len(text) < 400_000
    assert ">80<" in text or ">100<" in text  # the spike is on the axis, so it was not thinned away


def test_headline_of_a_job_nobody_measured() -> None:
    assert headline(report(effective_accelerators=None, largest_loss=None)) == "6 accelerators owned"
    assert headline(report(accelerators=10_000, effective_accelerators=4130.2)).startswith(
        "10,000 accelerators owned, 4,130 effective"
    )


def test_every_cause_of_a_job_has_its_own_colour() -> None:
    from myriad.server.report_style import COLOURS

    inside = {cause.value for cause in Cause if cause.in_allocation}
    assert set(COLOURS) == inside and len(set(COLOURS.values())) == len(inside)


def test_axes() -> None:
    assert ticks(0, 100) == [0, 20, 40, 60, 80, 100]
    assert ticks(0.9, 1.1, 4) == pytest.approx([0.9, 0.95, 1.0, 1.05, 1.1])
    assert ticks(3, 3) == [3]
    assert Range.around([5.0, 5.0]).at(5.0) == pytest.approx(500)
    assert Range.around([]).high > 0
    assert number(12345.6) == "12,346" and number(0.0001237) == "0.0001237" and number(float("nan")) == "nan"
    spike = [(float(x), 100.0 if x == 500 else 0.0) for x in range(100_000)]
    assert len(thin(spike)) <= 1202 and (500.0, 100.0) in thin(spike)
