"""A server that is fast and wrong is not measured."""

import threading
from dataclasses import replace

import pytest

from fixtures import bench
from fixtures.pytest_plugin.answers import PROMPTS, check_answers
from fixtures.pytest_plugin.goldens import ROUND, load_prompt, oracle, prompts
from fixtures.tables.workloads import WORKLOADS
from harness.bench.arms import parse
from harness.errors import ContractError
from harness.oracle import greedy
from harness.server.client.vllm import NOTHING

BATCH = WORKLOADS["smoke-bs2-in32-out32"]


class Client:
    """Knows the recorded answers of a pair, but for one token of one prompt."""

    def __init__(self, pair, wrong=None, place=0):
        self.open_session = {
            text: load_prompt(pair, i).token_ids for i, text in enumerate(prompts(pair))
        }
        self.wrong, self.place = wrong, place
        self.asked, self.most, self.together = [], 0, 0
        self.lock = threading.Lock()
        self.both = threading.Barrier(BATCH.batch_size)

    def generate(self, text, max_new_tokens):
        with self.lock:
            self.asked.append(text)
            self.together += 1
            self.most = max(self.most, self.together)
        self.both.wait(timeout=10)
        with self.lock:
            self.together -= 1
        tokens = list(self.open_session[text][:max_new_tokens])
        if text == self.wrong:
            tokens[self.place] += 1
        return replace(NOTHING, output_ids=tuple(tokens))


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("pair", ["gqa", "mla"])
def test_the_shortest_prompts_are_asked_as_many_at_a_time_as_the_workload(pair):
    client = Client(pair)
    check_answers(parse(f"embedded:pair={pair}"), client, BATCH)
    said = "a server is timed only after its answers to so many prompts were found right"
    assert len(set(client.asked)) == PROMPTS, said
    lengths = sorted(map(len, prompts(pair)))
    assert sorted(map(len, client.asked)) == lengths[:PROMPTS]
    assert client.most == BATCH.batch_size


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize(("pair", "rank"), [("gqa", 0), ("mla", 0), ("gqa", PROMPTS - 1)])
def test_one_wrong_token_is_named(pair, rank):
    # The answer to any prompt that was asked is judged: the first's and the last's.
    index = sorted(range(len(prompts(pair))), key=lambda i: len(prompts(pair)[i]))[rank]
    _, margins = greedy(oracle(pair)[0], prompts(pair)[index], ROUND["count"])
    place = max(range(len(margins)), key=margins.__getitem__)  # the oracle's surest
    client = Client(pair, wrong=prompts(pair)[index], place=place)
    told = ""
    try:
        check_answers(parse(f"sglang:pair={pair}"), client, BATCH)
    except ContractError as error:
        told = str(error)
    said = "one wrong token in the answer to any prompt that was asked refuses a server"
    assert f"prompt {index} of {pair}: tokens: item {place} is" in told, (
        f"{said}: token {place} of prompt {index} of {pair} is wrong, and told is {told!r}"
    )


@pytest.mark.parametrize(
    ("a", "b", "is_known"),
    [
        ("embedded:", "sglang:pair=mla", True),
        ("embedded:", "url:http://host", False),
        ("sglang:target=/models/own", "sglang:", False),
    ],
)
def test_where_one_arm_has_an_unknown_model_nobody_is_checked(a, b, is_known):
    options = bench.parser().parse_args(["--a", a, "--b", b])
    assert (bench.trials(bench.setup(options)).check is not None) == is_known
