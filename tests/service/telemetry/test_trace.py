"""The start as a Chrome trace: overlaps on different tracks, parts within wholes, the times of /startup."""

import random
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from starlette.testclient import TestClient

from snapcap.service.api.app import Services
from snapcap.service.telemetry.trace import chrome_trace
from snapcap.warmup.progress.timeline import Phase

Json = dict[str, Any]


def startup_report(phases: list[Json], buckets: list[Json] | None = None, **members: Any) -> Json:
    facts = dict.fromkeys(("state", "model", "tier", "device", "dtype"))
    return {**facts, "now": 10.0, "marks": {}, "phases": phases, "buckets": buckets or [], **members}


def phase(name: str, start: float, end: float | None) -> Json:
    return {"name": name, "start": start, "end": end}


def warmed(component: str, size: int, start: float | None, seconds: float | None) -> Json:
    return {
        "component": component,
        "size": size,
        "state": "warm",
        "backend": "aot",
        "start": start,
        "seconds": seconds,
    }


def spans(trace: Json) -> Iterator[tuple[str, int, int, int, str]]:
    """Name, start, end, track and category of each complete event."""
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            yield event["name"], event["ts"], event["ts"] + event["dur"], event["tid"], event["cat"]


def track_of(trace: Json, name: str) -> int:
    (track,) = {track for found, _, _, track, _ in spans(trace) if found == name}
    return track


def assert_sound(trace: Json) -> None:
    """On one track, two spans either do not overlap, or one is a warm-up within its phase."""
    on_track: dict[int, list[tuple[int, int, str]]] = {}
    for name, start, end, track, category in spans(trace):
        assert isinstance(start, int)
        assert 0 <= start <= end
        on_track.setdefault(track, []).append((start, -end, f"{category} {name}"))
    for events in on_track.values():
        for (start, end, whole), (other_start, other_end, part) in pairwise(sorted(events)):
            if other_start < -end:
                assert whole.startswith("phase warm_"), (whole, part)
                assert part.startswith("warm-up"), (whole, part)
                assert start <= other_start <= -other_end <= -end
        wholes = [event for event in sorted(events) if event[2].startswith("phase")]
        parts = [event for event in sorted(events) if event[2].startswith("warm-up")]
        for row in (wholes, parts):
            assert all(-first[1] <= second[0] for first, second in pairwise(row))
    named = {event["tid"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert named >= set(on_track)
    assert {event["pid"] for event in trace["traceEvents"]} == {7}


def test_phases_that_overlap_are_on_two_tracks_and_the_others_follow_what_ended_last() -> None:
    trace = chrome_trace(
        startup_report(
            [
                phase("interpreter", 0.0, 0.2),
                phase("fetch_weights", 0.5, 0.7),
                phase("import_torch", 0.51, 2.0),
                phase("fetch_artifacts", 0.7, 0.9),
                phase("load_weights", 2.0, 2.5),
            ]
        ),
        pid=7,
    )
    assert_sound(trace)
    tracks = [track_of(trace, name) for name in ("interpreter", "fetch_weights", "fetch_artifacts")]
    assert tracks == [1, 1, 1]
    assert [track_of(trace, name) for name in ("import_torch", "load_weights")] == [2, 2]


def test_a_warm_up_lies_within_its_phase_and_one_left_for_later_after_the_start() -> None:
    trace = chrome_trace(
        startup_report(
            [phase("warm_encoder", 1.0, 2.0), phase("warm_decoder", 2.0, 3.0), phase("self_test", 3.0, 3.5)],
            [
                warmed("encoder", 1, 1.0, 0.5),
                warmed("encoder", 4, 1.5, 0.5),
                warmed("decoder", 1, 2.0, 0.4),
                warmed("decoder", 4, 5.0, 0.25),
                warmed("encoder", 8, None, None),
            ],
        ),
        pid=7,
    )
    assert_sound(trace)
    assert {track for *_, track, _ in spans(trace)} == {1}
    assert ("decoder 4", 5_000_000, 5_250_000, 1, "warm-up") in set(spans(trace))
    assert "encoder 8" not in {name for name, *_ in spans(trace)}


def test_a_running_phase_ends_with_the_report_and_says_that_it_runs() -> None:
    trace = chrome_trace(startup_report([phase("import_torch", 0.5, None)], now=0.75), pid=7)
    (event,) = (event for event in trace["traceEvents"] if event["ph"] == "X")
    assert (event["ts"], event["dur"], event["args"]) == (500_000, 250_000, {"running": True})


def test_marks_are_instants_of_the_process() -> None:
    trace = chrome_trace(startup_report([], marks={"live": 0.4, "ready": 1.8}), pid=7)
    instants = [(e["name"], e["ts"], e["s"]) for e in trace["traceEvents"] if e["ph"] == "i"]
    assert instants == [("live", 400_000, "p"), ("ready", 1_800_000, "p")]


@pytest.mark.parametrize("seed", range(40))
def test_any_phases_and_warm_ups_make_a_sound_trace(seed: int) -> None:
    rng = random.Random(seed)

    def span(limit: float) -> tuple[float, float]:
        first, second = sorted(round(rng.uniform(0, limit), rng.choice((1, 6))) for _ in range(2))
        return first, second

    phases = [phase(rng.choice(("a", "warm_encoder", "b")), *span(4.0)) for _ in range(rng.randrange(12))]
    buckets = []
    for size in range(rng.randrange(8)):
        start, end = span(4.0)
        buckets.append(warmed("encoder", size, start, end - start))
    trace = chrome_trace(startup_report(phases, buckets), pid=7)
    assert_sound(trace)
    assert len(list(spans(trace))) == len(phases) + len(buckets)


def test_the_route_gives_the_times_that_startup_gives(services: Services, client: TestClient) -> None:
    timeline, status = services.timeline, services.status
    timeline.mark("live")
    status.expect((1, 4), "cpu", "float32")
    with timeline.phase("warm_encoder"):
        for size in (1, 4):
            start = timeline.now()
            status.update("encoder", size, "warm", "aot", timeline.now() - start, start)
    timeline.add(Phase("self_test", timeline.now(), timeline.now() + 1e-4))
    report, trace = client.get("/startup").json(), client.get("/startup?format=trace").json()
    found = {name: (start, end) for name, start, end, _, _ in spans(trace)}
    for each in report["phases"]:
        assert found.pop(each["name"]) == (round(each["start"] * 1e6), round(each["end"] * 1e6))
    for bucket in report["buckets"][:2]:
        start, end = found.pop(f"{bucket['component']} {bucket['size']}")
        assert start == round(bucket["start"] * 1e6)
        assert abs(end - start - bucket["seconds"] * 1e6) <= 1
    assert found == {}
    assert {e["name"]: e["ts"] for e in trace["traceEvents"] if e["ph"] == "i"} == {
        name: round(seconds * 1e6) for name, seconds in report["marks"].items()
    }
    assert trace["otherData"]["model"] == "fake"


def test_nothing_in_the_report_is_later_than_now(services: Services, client: TestClient) -> None:
    with services.timeline.phase("import_torch"):
        body = client.get("/startup").json()
    assert all(each["start"] <= body["now"] for each in body["phases"])
    assert body["phases"][-1]["end"] is None


@pytest.mark.parametrize("query", ["format=xml", "format=", "format=TRACE"])
def test_an_unknown_format_names_the_known_ones(client: TestClient, query: str) -> None:
    reply = client.get(f"/startup?{query}")
    assert (reply.status_code, reply.json()["code"], reply.json()["option"]) == (422, "invalid_option", "format")
    assert "json, trace" in reply.json()["detail"]


def test_a_format_is_given_once(client: TestClient) -> None:
    assert client.get("/startup?format=json&format=trace").status_code == 422
    assert client.get("/startup?format=json").json().keys() == client.get("/startup").json().keys()
