"""The simulated server: by hand where it is small, and what must hold of batches and CPUs whatever the load."""

import os
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import replace

import pytest

pytest.importorskip("simpy", reason="SIMPY IS NOT INSTALLED: THE SIMULATION IS NOT TESTED")

import simpy

from snapcap.benchmarks.autoscaling.calibrate import Buckets, OtherThreads, Usage, costs_of, weight
from snapcap.benchmarks.autoscaling.check import Measured, idle_seconds
from snapcap.benchmarks.autoscaling.cpus import Cpus
from snapcap.benchmarks.autoscaling.engine_model import ServerCosts, ServerModel

# Only the engine costs anything: an encode 100 ms, of four images 300 ms; a step 10 ms, of up to four rows 20 ms.
ENGINE = ServerCosts(
    encode={1: 0.1, 4: 0.3},
    step={1: 0.01, 4: 0.02},
    turn=0.0,
    http=0.0,
    image=0.0,
    client=0.0,
    hand_over=0.0,
    cpus=8,
    decoders=8,
)
WHOLE = replace(ENGINE, http=0.02, image=0.03, client=0.004, hand_over=0.005, turn=0.001)


def ended(number: int, work: list[float], others: float = 0.0) -> list[float]:
    """When pieces of work that begin together end."""
    world = simpy.Environment()
    cpus, moments = Cpus(world, number, others), [0.0] * len(work)

    def run(index: int, seconds: float) -> object:
        yield cpus.work(seconds)
        moments[index] = world.now

    for index, seconds in enumerate(work):
        world.process(run(index, seconds))
    world.run()
    return moments


def test_cpus_are_shared_equally_and_nobody_has_more_than_one() -> None:
    assert ended(2, [1.0]) == pytest.approx([1.0])
    assert ended(2, [1.0, 3.0]) == pytest.approx([1.0, 3.0])
    # Three on two: all at 2/3 until the first has its second, then the others have a CPU each.
    assert ended(2, [1.0, 2.0, 2.0]) == pytest.approx([1.5, 2.5, 2.5])
    assert ended(2, [1.0], others=3.0) == pytest.approx([2.0])


def test_a_request_that_is_alone_takes_the_sum_of_what_is_done_for_it() -> None:
    assert ServerModel(WHOLE, [3]).open_loop([0.0, 10.0]) == pytest.approx([WHOLE.lone(3)] * 2)
    assert WHOLE.lone(3) == pytest.approx(0.02 + 0.03 + 0.004 + 0.005 + 0.1 + 3 * 0.011)


def test_who_comes_during_an_encode_waits_for_its_turn_and_is_encoded_after_the_step() -> None:
    # The first turn: encode and step until 0.11. The second: the other's encode and a step of both, until 0.23.
    # The first has its two steps then; the other has its second at 0.24, alone again.
    first, second = ServerModel(ENGINE, [2]).open_loop([0.0, 0.05])
    assert (first, second) == pytest.approx((0.11 + 0.1 + 0.02, 0.24 - 0.05))


def test_those_that_wait_together_are_encoded_together_in_the_bucket_that_fits() -> None:
    # One is alone until 0.11; the three that came meanwhile fill a bucket of four well enough: encode and step.
    latencies = ServerModel(ENGINE, [1]).open_loop([0.0, 0.01, 0.02, 0.03])
    assert latencies == pytest.approx([0.11, *(0.11 + 0.32 - came for came in (0.01, 0.02, 0.03))])


def test_a_step_takes_as_long_as_its_bucket_and_no_row_leaves_early() -> None:
    model = ServerModel(ENGINE, [1, 5])
    latencies = model.open_loop([0.0, 0.0])
    # Two would leave half of the bucket of four empty, so the second is encoded in the turn after.
    assert sorted(latencies) == pytest.approx([0.11, 0.11 + 0.11 + 4 * 0.01])


def test_other_programs_stretch_all_work_but_not_the_hand_over() -> None:
    costs = replace(WHOLE, cpus=2, others=3.0)  # one thread of ours and three others on two CPUs: half the speed
    (latency,) = ServerModel(costs, [3]).open_loop([0.0])
    assert latency == pytest.approx(2 * (WHOLE.lone(3) - 0.005) + 0.005)


def test_a_closed_loop_is_as_fast_as_the_engine_where_nothing_else_costs() -> None:
    # Batches of four: an encode, one step. More clients than slots, so a batch always waits.
    assert ServerModel(ENGINE, [1]).closed_loop(8, 400) == pytest.approx(4 / 0.32, rel=0.05)


def test_http_on_the_same_cpu_takes_from_the_engine() -> None:
    alone = ServerModel(replace(ENGINE, cpus=1), [1]).closed_loop(8, 200)
    beside = ServerModel(replace(ENGINE, cpus=1, http=0.05), [1]).closed_loop(8, 200)
    assert beside == pytest.approx(1 / (1 / alone + 0.05), rel=0.1), "one CPU does one thing at a time"


def test_costs_are_cpu_time_shared_out_as_the_buckets_compare() -> None:
    counts = {("encoder", 1): 2.0, ("encoder", 4): 1.0, ("decoder", 1): 10.0, ("decoder", 4): 20.0}
    buckets = Buckets(encode={1: 0.2, 4: 0.6}, step={1: 0.02, 4: 0.04})
    assert buckets.seconds(counts) == pytest.approx(0.4 + 0.6 + 0.2 + 0.8)
    costs = costs_of(Usage(http=0.6, engine=1.0, images=1.2, counts=counts, at=5.0), 6, 0.12, buckets)
    assert costs.encode == pytest.approx({1: 0.1, 4: 0.3})
    assert costs.step == pytest.approx({1: 0.01, 4: 0.02})
    assert (costs.http, costs.image, costs.client) == pytest.approx((0.1, 0.2, 0.02))


def test_what_a_lone_request_waits_is_what_no_process_works() -> None:
    """Of 100 ms, the engine works for 20 + 3 × 5, HTTP for 10, the image for 8 and the load generator for 2."""
    counts = {("encoder", 1): 10.0, ("decoder", 1): 30.0}
    used = Usage(http=0.1, engine=0.35, images=0.08, counts=counts, at=1.0)
    buckets = Buckets(encode={1: 0.04}, step={1: 0.01})
    alone = Measured([0.1] * 10, client=0.02, others=0.0, used=used)
    assert idle_seconds(alone, buckets, [3]) == pytest.approx(0.1 - 0.055)
    assert idle_seconds(replace(alone, latencies=[0.05] * 10), buckets, [3]) == 0.0


def test_usage_is_counted_from_the_beginning_of_a_stretch() -> None:
    before = Usage(1.0, 2.0, 3.0, {("encoder", 1): 5.0}, 10.0)
    after = Usage(1.5, 2.5, 4.0, {("encoder", 1): 5.0, ("decoder", 1): 7.0}, 12.0)
    assert after.since(before) == Usage(0.5, 0.5, 1.0, {("decoder", 1): 7.0}, 2.0)


def test_threads_of_other_programs_that_have_work_are_counted() -> None:
    everyone = {int(entry) for entry in os.listdir("/proc") if entry.isdigit()}
    with ExitStack() as stack:
        command = [sys.executable, "-c", "print('begun', flush=True)\nwhile True: pass"]
        process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE))
        stack.callback(process.kill)
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        with OtherThreads(everyone) as others:
            time.sleep(0.7)
        expected = 1.25 ** -os.getpriority(os.PRIO_PROCESS, process.pid)
    assert others.mean >= 0.9 * expected, "more where somebody else has begun since"


def test_a_thread_counts_by_its_niceness_and_one_without_work_does_not() -> None:
    def stat(state: str, nice: int) -> list[str]:
        return [state, *["0"] * 15, str(nice), *["0"] * 20]

    assert weight(stat("R", 0)) == 1.0
    assert weight(stat("R", 10)) == pytest.approx(110 / 1024, rel=0.01), "the kernel's table"
    assert weight(stat("S", 0)) == 0.0
