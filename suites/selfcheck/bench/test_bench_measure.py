"""A trial warms up, proves its flushes and times every request; numbers are worked out by hand."""

import threading
import time
from dataclasses import replace

import pytest
import requests

from harness.bench import measure
from harness.bench.arms import parse
from harness.bench.jsonl import from_json, to_json
from harness.bench.load_generator import WorkloadRun, drive, one
from harness.bench.measure import TrialMaker, TrialSlot
from harness.bench.metrics import metrics, percentile_99
from harness.bench.prompts import prompts
from harness.bench.session_records import Sample, Workload
from harness.errors import Busy, ContractError, NotReady, ServerError, UsageError, brief
from harness.server.client.flush import Flushed
from harness.server.client.sglang import Answer, StreamChunk

LOOP = Workload(id="loop", batch_size=2, input_len=3, output_len=5, requests=6)
PROMPTS = [(n, 7, 7) for n in range(6)]
SLOT = TrialSlot(session="candidate", block=3, place=1, arm="B")
DIED = ServerError("503: the worker died")


def answer(tokens, *, cached=0, steps=2, counted=None):
    return Answer(
        output_ids=tuple(range(tokens)),
        text="",
        prompt_tokens=3,
        completion_tokens=tokens if counted is None else counted,
        cached_tokens=cached,
        spec_verify_ct=steps,
        finish_reason="length",
    )


class Client:
    """Streams two chunks after an empty one; records which prompts were in flight."""

    def __init__(self, log, *, cached=0, fails=(), last=5, on_gpu=False, error=DIED):
        self.log, self.cached, self.fails, self.last = log, cached, fails, last
        self.on_gpu, self.error = on_gpu, error

    def stream(self, input_ids, max_new_tokens):
        self.log.append(("sent", input_ids[0], threading.get_ident(), len(input_ids)))
        if input_ids[0] in self.fails:
            raise self.error
        yield StreamChunk(answer=answer(0), at=time.perf_counter())
        yield StreamChunk(answer=answer(1, cached=self.cached), at=time.perf_counter())
        time.sleep(0.01)
        yield StreamChunk(answer=answer(self.last, cached=self.cached), at=time.perf_counter())

    def slow_down(self, seconds):
        self.log.append(("slow_down", seconds))

    def delays_gpu(self):
        return self.on_gpu


class Server:
    url, pid = "http://server", None

    def wait_ready(self):
        return 0.0

    def stop(self):
        pass


def trials(log, **client):
    def empty(url):
        log.append(("flush", url))
        return Flushed(tries=2, seconds=0.5)

    return TrialMaker(
        prompts=lambda _: PROMPTS,
        connect=lambda _: Client(log, **client),
        empty=empty,
        warm_ups=1,
        passes=2,
    )


def sample(ttft, latency, tokens, steps, gaps=(1.0,)):
    return Sample(
        ttft_ms=ttft,
        latency_ms=latency,
        chunk_gaps_ms=gaps,
        completion_tokens=tokens,
        spec_verify_ct=steps,
        cached_tokens=0,
    )


@pytest.mark.parametrize(("many", "wanted"), [(1, 1), (99, 99), (100, 99), (101, 100), (200, 198)])
def test_99_percent_do_not_exceed_the_99th_percentile(many, wanted):
    assert percentile_99(range(many, 0, -1)) == wanted


def test_metrics_by_hand():
    # Decode times 80, 30, 60 ms; per token after the first 8, 5, 3; per step 20, 10, 12.
    first = WorkloadRun(
        samples=(sample(20, 100, 11, 4, (7.0, 9.0)), sample(50, 80, 7, 3)),
        failures=(),
        seconds=0.2,
    )
    second = WorkloadRun(samples=(sample(10, 70, 21, 5, (30.0,)),), failures=(), seconds=0.1)
    assert metrics([first, second]) == pytest.approx(
        {
            "ttft": 20.0,
            "tpot": 5.0,
            "step_time": 12.0,
            "accept_length": 39 / 12,
            "output_throughput": 39 / 0.3,
            "ttft_p99": 50.0,
            "tpot_p99": 8.0,
            "itl": 8.0,
        }
    )


def test_without_speculation_there_are_no_steps_and_a_failure_leaves_no_number():
    plain = WorkloadRun(samples=(sample(20, 100, 11, 0, ()),), failures=(), seconds=0.2)
    found = metrics([plain])
    assert found["tpot"] == pytest.approx(8.0)
    assert not {"step_time", "accept_length", "itl"} & set(found)
    verified = sample(20, 100, 11, 4)
    for samples in ((*plain.samples, verified), (verified, *plain.samples)):
        some = metrics([replace(plain, samples=samples)])
        assert "step_time" not in some, "of two requests one has no steps"
    assert metrics([plain, replace(plain, failures=("request 1: 503",))]) == {}
    assert metrics([]) == {}


def test_a_request_is_timed_from_its_sending_to_its_chunks_with_tokens():
    timed = one(Client([]), (1, 2), 5)
    assert 0.0 < timed.ttft_ms < timed.latency_ms
    assert len(timed.chunk_gaps_ms) == 1
    assert timed.chunk_gaps_ms[0] == pytest.approx(timed.latency_ms - timed.ttft_ms)
    assert timed.chunk_gaps_ms[0] >= 10.0


def test_an_answer_with_fewer_tokens_than_asked_for_is_refused():
    with pytest.raises(ContractError, match="5 tokens came, 5 counted, 6 asked for"):
        one(Client([]), (1, 2), 6)


def test_a_stream_without_tokens_is_no_sample():
    class Silent:
        def stream(self, input_ids, max_new_tokens):
            yield StreamChunk(answer=answer(0), at=0.0)

    with pytest.raises(ContractError, match="no token came"):
        one(Silent(), (1,), 5)


def test_a_closed_loop_sends_every_prompt_once_and_holds_its_batch_size():
    log = []
    done = drive(lambda: Client(log, fails=(4,)), LOOP, PROMPTS)
    assert sorted(entry[1] for entry in log) == list(range(6))
    assert len({entry[2] for entry in log}) == 2
    assert len(done.samples) == 5
    assert done.failures == ("request 4: ServerError: 503: the worker died",)
    # Six requests of 10 ms, two at a time; the one that fails takes no time.
    assert 0.03 <= done.seconds < 1.0


def test_samples_are_in_the_order_of_the_prompts_whichever_is_answered_first():
    last_is_sent = threading.Event()

    class Unlike(Client):
        """The first prompt is answered behind the others; as many tokens are cached as its id."""

        def stream(self, input_ids, max_new_tokens):
            self.cached = input_ids[0]
            if self.cached == 5:
                last_is_sent.set()
            if self.cached == 0:
                last_is_sent.wait(10.0)
                time.sleep(0.1)
            yield from super().stream(input_ids, max_new_tokens)

    done = drive(lambda: Unlike([]), LOOP, PROMPTS)
    told = "the n-th sample is that of the n-th prompt"
    assert [one.cached_tokens for one in done.samples] == [0, 1, 2, 3, 4, 5], told


def test_every_measured_pass_follows_a_flush_and_warm_ups_are_not_counted():
    log = []
    trial = trials(log).run(SLOT, parse("embedded:slowdown=0.05"), Server(), LOOP)
    words = [entry[0] for entry in log]
    assert words == ["sent"] * 6 + (["flush"] + ["sent"] * 6) * 2
    assert (trial.session, trial.block, trial.place, trial.arm) == ("candidate", 3, 1, "B")
    assert len(trial.samples) == 12
    assert (trial.flush_tries, trial.flush_seconds) == (4, 1.0)
    assert trial.conditions.flushed is True
    assert (trial.conditions.failed, trial.conditions.output_tokens) == (0, 60)
    assert trial.invalid == ()
    assert trial.metrics["accept_length"] == pytest.approx(2.5)


def test_a_server_is_warmed_up_once_for_each_workload():
    log, warm, measured = [], ["sent"] * 6, (["flush"] + ["sent"] * 6) * 2
    made = trials(log)
    for workload in (LOOP, LOOP, replace(LOOP, id="other")):
        made.run(SLOT, parse("embedded:"), Server(), workload)
    assert [entry[0] for entry in log] == [*warm, *measured, *measured, *warm, *measured]
    del log[:]
    launched_again = Server()
    launched_again.url = "http://another"
    made.run(SLOT, parse("embedded:"), launched_again, LOOP)
    assert [entry[0] for entry in log] == [*warm, *measured]


@pytest.mark.parametrize(
    ("spec", "warm"),
    [("embedded:", 4096), ("url:http://server", 4096), ("embedded:slowdown=0.01", 9000)],
)
def test_a_long_prompt_is_cut_to_warm_up_unless_a_part_of_its_step_is_added(spec, warm):
    log = []
    made = replace(trials(log), prompts=lambda _: [(7,) * 9000, (8,) * 30])
    made.run(SLOT, parse(spec), Server(), LOOP)
    lengths = [entry[3] for entry in log if entry[0] == "sent"]
    cold, timed = sorted(lengths[:2]), sorted(lengths[2:])
    rule = "warm-up prompts are cut to 4096 tokens, and not where a part of a step is added"
    assert cold == [30, warm], f"{rule}: [30, {warm}], not {cold}"
    assert timed == [30, 30, 9000, 9000], f"measured prompts are whole, not {timed}"


def test_an_added_part_is_one_of_whole_steps_though_arm_a_warmed_the_server_up_with_cut_prompts():
    log = []
    made = replace(trials(log), prompts=lambda _: [(7,) * 9000, (8,) * 30])
    attached = parse("url:http://server")
    made.run(SLOT, attached, Server(), LOOP)
    del log[:]
    made.run(SLOT, attached.slowed(0.05), Server(), LOOP)
    before = [entry[3] for entry in log[: [entry[0] for entry in log].index("slow_down")]]
    rule = "before a part of its step is added a server warms up with whole prompts"
    assert sorted(before) == [30, 9000], f"{rule}, [30, 9000], not {before}"


def test_answers_are_checked_before_every_warm_up():
    log, arm = [], parse("embedded:")

    def check(arm, client, workload):
        log.append(("check", arm.pair, workload.id))

    made = replace(trials(log), check=check)
    found = [made.run(SLOT, arm, Server(), LOOP) for _ in range(2)]
    assert [trial.conditions.correct for trial in found] == [True, True]
    assert [entry for entry in log if entry[0] == "check"] == [("check", "gqa", "loop")]
    assert log[0] == ("check", "gqa", "loop")
    assert trials([]).run(SLOT, arm, Server(), LOOP).conditions.correct is None


def test_a_server_that_answers_wrongly_has_no_speed():
    def check(arm, client, workload):
        raise ContractError("prompt 3 of gqa: tokens: item 1 is 5, expected 6")

    trial = replace(trials([]), check=check).run(SLOT, parse("embedded:"), Server(), LOOP)
    assert trial.invalid == ("ContractError: prompt 3 of gqa: tokens: item 1 is 5, expected 6",)
    assert trial.metrics == {}


@pytest.mark.parametrize(
    ("batch_size", "counts"),
    [(1, {"completion_tokens": 60, "spec_verify_ct": 24}), (2, {})],
)
def test_counts_are_exact_where_requests_come_one_by_one(batch_size, counts):
    workload = replace(LOOP, batch_size=batch_size)
    assert trials([]).run(SLOT, parse("embedded:"), Server(), workload).counts == counts


def test_counts_of_a_fixed_accept_length_are_exact_in_batches_too(tmp_path):
    arm = parse("sglang:shape=wide", shapes={"wide": tmp_path})
    counts = trials([]).run(SLOT, arm, Server(), LOOP).counts
    assert LOOP.batch_size > 1
    assert counts == {"completion_tokens": 60, "spec_verify_ct": 24}


def test_an_added_part_is_one_of_a_step_of_warm_servers(monkeypatch):
    passes = []
    real = measure.metrics
    monkeypatch.setattr(measure, "metrics", lambda runs: passes.append(len(runs)) or real(runs))
    made = replace(trials([]), warm_ups=3)
    made.run(SLOT, parse("url:http://server").slowed(0.05), Server(), LOOP)
    said = "the first pass of a warm-up, which is cold, is none of those a step's time is taken of"
    assert passes[0] == 2, said


def test_a_server_that_does_not_slow_itself_is_asked_to_sleep_after_the_warm_up():
    log = []
    arm = parse("url:http://server").slowed(0.05)
    trial = trials(log).run(SLOT, arm, Server(), LOOP)
    assert [entry[0] for entry in log].index("slow_down") == 6
    # A step takes at least 5 ms: 10 ms of decoding over two steps; on a busy machine it is longer.
    said = "an injected sleep is the slowdown's share of a step, in seconds"
    assert 0.05 * 0.005 <= trial.slept_s <= 0.05 * 0.5, said
    asked = [entry[1] for entry in log if entry[0] == "slow_down"]
    assert asked == [trial.slept_s, None]
    assert log[-1] == ("slow_down", None)  # an attached server is arm A as well


@pytest.mark.parametrize(("step_ms", "asked_s"), [(1600.0, 0.08), (5000.0, 0.1)])
def test_after_a_disturbed_warm_up_no_step_sleeps_for_more_than_a_tenth_of_a_second(
    step_ms, asked_s
):
    log = []
    warm = {(Server.url, LOOP.id, None): step_ms}
    arm = parse("url:http://server").slowed(0.05)
    trial = replace(trials(log), warm=warm).run(SLOT, arm, Server(), LOOP)
    slept = trial.slept_s
    rule = "a launch is warmed up itself, and a step sleeps 5 % of its warm-up's, at most 0.1 s"
    assert slept == pytest.approx(asked_s), f"{rule}: {asked_s} s of {step_ms} ms, not {slept} s"
    assert ("slow_down", slept) in log, f"the server is told to sleep {slept} s: {log}"


@pytest.mark.parametrize(("on_gpu", "slept_on"), [(True, "gpu"), (False, "host")])
def test_a_slowed_trial_says_who_sleeps(on_gpu, slept_on):
    arm = parse("url:http://server")
    made = trials([], on_gpu=on_gpu)
    slowed = made.run(SLOT, arm.slowed(0.05), Server(), LOOP)
    assert slowed.slept_on == slept_on
    assert from_json(to_json(slowed)) == slowed
    assert made.run(SLOT, arm, Server(), LOOP).slept_on == ""


def test_an_injected_sleep_is_removed_when_the_trial_breaks():
    log = []
    made = replace(trials(log), empty=lambda _: (_ for _ in ()).throw(Busy("400")))
    trial = made.run(SLOT, parse("url:http://server").slowed(0.05), Server(), LOOP)
    assert trial.invalid == ("Busy: 400",)
    assert log[-1] == ("slow_down", None)


def test_a_trial_that_breaks_between_its_passes_has_no_number():
    flushes = iter([Flushed(tries=1, seconds=0.5)])

    def empty(_):
        if flushed := next(flushes, None):
            return flushed
        raise Busy("400")

    trial = replace(trials([]), empty=empty).run(SLOT, parse("embedded:"), Server(), LOOP)
    assert (trial.invalid, len(trial.samples)) == (("Busy: 400",), 6)
    assert trial.metrics == {}, "numbers of some passes are none of the trial"
    assert trial.counts == {}, "nor are their counts"


def test_cached_tokens_after_a_flush_refute_it():
    trial = trials([], cached=2).run(SLOT, parse("embedded:"), Server(), LOOP)
    assert trial.conditions.cached_tokens == 24
    assert trial.conditions.flushed is False


@pytest.mark.parametrize(
    ("client", "why"),
    [
        ({"fails": (2,)}, "request 2: ServerError: 503"),
        (
            {"fails": (4,), "error": requests.ConnectionError("reset by peer")},
            "request 4: ConnectionError: reset by peer",
        ),
        ({"last": 4}, "request 0: ContractError: 4 tokens came"),
    ],
)
def test_what_the_server_does_wrong_makes_the_trial_invalid(client, why):
    trial = trials([], **client).run(SLOT, parse("embedded:"), Server(), LOOP)
    assert trial.metrics == {}, f"a trial with a failed request has no metrics, not {trial.metrics}"
    told = [line for line in trial.invalid if line.startswith(why)]
    assert told, f"a failed request is told with its number and reason, {why}: {trial.invalid}"


def test_a_server_that_never_is_ready_makes_the_trial_invalid():
    server = Server()
    server.wait_ready = lambda: (_ for _ in ()).throw(ServerError("ended with 1"))
    trial = trials([]).run(SLOT, parse("embedded:"), server, LOOP)
    assert trial.invalid == ("ServerError: ended with 1",)
    assert trial.conditions.flushed is False


def test_prompts_follow_from_the_id_and_begin_with_different_tokens():
    text = [*range(40), *range(40)]
    made = prompts(LOOP, text)
    assert made == prompts(LOOP, text)
    assert made != prompts(replace(LOOP, id="other"), text)
    assert [len(prompt) for prompt in made] == [3] * 6
    assert len({prompt[0] for prompt in made}) == 6
    scarce = prompts(LOOP, [*range(6)] * 3)
    begun = sorted(prompt[0] for prompt in scarce)
    assert begun == [0, 1, 2, 3, 4, 5], "of six tokens each begins one prompt, or a cache finds it"
    for _, second, third in made:
        assert third == (second + 1) % 40
    with pytest.raises(UsageError, match="workload loop"):
        prompts(LOOP, [1, 2, 3, 4, 1, 2])
    with pytest.raises(UsageError, match="workload loop"):
        prompts(replace(LOOP, input_len=81), text)


def test_of_a_long_reason_the_beginning_and_the_end_are_kept() -> None:
    log = "\n".join(
        ["server at http://x ended with 137", *["a frame"] * 200, "EADDRINUSE: port 42011"]
    )
    said = brief(NotReady(log))
    assert said.startswith("NotReady: server at http://x ended with 137")
    assert said.endswith("EADDRINUSE: port 42011")
    assert len(said) < 600
    assert brief(NotReady("short")) == "NotReady: short"
