"""What was computed for the beginning of a text serves those that begin alike, and no text is another for it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tercel.decode import reuse
from tercel.decode.draft_tree import DraftTree
from tercel.decode.eagle3 import Eagle3
from tercel.decode.engine import Engine
from tercel.decode.head_state import HeadWindow
from tercel.decode.loop import DecodingLoop
from tercel.decode.prefixes import PIECE, PrefixStore, shared
from tercel.decode.proposer import PassingOn, Proposer, Row
from tercel.decode.proposers import EAGLE3, MTP, SAMPLED_CHAIN, SPS, SUFFIX, VANILLA, make_proposer
from tercel.decode.sampling import SamplingParams
from tercel.decode.types import GenerationResult, Proposal, Request
from tercel.decode.vanilla import Vanilla
from tercel.draft.shape import TreeShape
from tercel.target_model.kept import KeptTokens
from tercel.target_model.model import Target
from tercel.target_model.output import TargetOutput
from tests.decode.drafts import random_draft, tiny_target
from tests.decode.test_every_method import CHEAP, METHODS, make
from tests.methods.mtp_worlds import random_mtp
from tests.overfit import World
from tests.target_model.test_rope import longrope

AMPLE = 1 << 24
TREE = TreeShape(3, 4, 9)
GREEDY = SamplingParams(max_new_tokens=12, ignore_eos=True)
SYSTEM = tuple(range(20, 64))
TOKEN = 8 + 4  # bytes of a token in the stores below


@cache
def target_of(arch: str) -> Target:
    return tiny_target(arch, num_hidden_layers=4)


def told(tokens: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """`[1, t, 1]`, of each token what tells it and all before it."""
    hashes = accumulate(tokens, lambda before, token: hash((before, token)) % (1 << 30), initial=0)
    return torch.tensor([*hashes][1:], dtype=dtype)[None, :, None]


class Reading(Vanilla):
    rerun = 1


class Store:
    """A store of texts whose states say what they are states of."""

    def __init__(self, tokens: int, rerun: int = 0) -> None:
        target, proposer = target_of("llama"), Reading() if rerun else Vanilla()
        self.store = PrefixStore(tokens * TOKEN)
        found = self.store.of(target, proposer)
        assert found is not None
        self.prefixes, self.rerun = found, rerun

    def keep(self, text: Sequence[int]) -> None:
        def taken(start: int) -> tuple[KeptTokens, KeptTokens]:
            whole = KeptTokens((told(text, torch.int64),)), KeptTokens((told(text, torch.int32),))
            return whole[0].part(start, len(text)), whole[1].part(start, len(text))

        self.prefixes.keep(text, taken)

    def check(self) -> None:
        """Bound, bytes and order are what they are said to be."""
        assert self.store.held <= self.store.limit
        nodes = list(self.store._order)
        assert self.store.held == sum(len(node.tokens) for node in nodes) * TOKEN
        for place, node in enumerate(nodes):
            assert 0 < len(node.tokens) <= PIECE
            assert node.parent.children[node.tokens[0]] is node
            assert node.parent is self.prefixes._root or node.parent in nodes[place + 1 :]

    def taken(self, prompt: Sequence[int]) -> int:
        """How much is known; that it is right."""
        known = self.prefixes.take(prompt)
        if known.tokens:
            target = torch.cat([piece.tensors[0] for piece in known.target], 1)
            own = torch.cat([piece.tensors[0] for piece in known.proposer if piece is not None], 1)
            assert torch.equal(target, told(prompt[: known.tokens], torch.int64))
            assert torch.equal(own, told(prompt[: known.tokens + self.rerun], torch.int32))
        return known.tokens


texts = st.lists(st.integers(0, 2), min_size=1, max_size=12) | st.lists(
    st.integers(0, 1), min_size=PIECE, max_size=2 * PIECE + 3
)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.booleans(), texts), max_size=14), st.integers(0, 1), st.integers(1, 700))
def test_a_store_knows_the_longest_beginning_and_keeps_its_bound(
    steps: list[tuple[bool, list[int]]], rerun: int, room: int
) -> None:
    small, ample, kept = Store(room, rerun), Store(1 << 20, rerun), list[list[int]]()
    for keeping, text in steps:
        longest = max((shared(text, other) for other in kept), default=0)
        usable = max(0, min(longest, len(text) - 1 + rerun) - rerun)
        assert ample.taken(text) == ample.prefixes.known(text) == usable
        assert small.taken(text) == small.prefixes.known(text) <= usable
        if keeping:
            kept.append(text)
            small.keep(text)
            ample.keep(text)
            if rerun < len(text) <= room:
                assert small.prefixes.known([*text, 7]) + rerun == len(text)  # the newest is the last to go
        small.check()
        ample.check()


def test_what_was_not_used_for_the_longest_time_goes_first() -> None:
    store = Store(30)
    first, second, third = ([number] * 10 for number in range(3))
    for text in (first, second, third):
        store.keep(text)
    assert store.taken([*first, 9]) == 10  # which uses it
    store.keep([3] * 10)
    assert [store.prefixes.known([*text, 9]) for text in (first, second, third)] == [10, 0, 10]
    store.keep([*first[:5], 4, 4, 4, 4, 4])  # shares a beginning, which stays with it
    store.keep([5] * 20)
    assert store.prefixes.known([*first[:5], 4, 9]) == 6
    assert store.prefixes.known([*first, 9]) == 5


def test_a_text_longer_than_the_store_keeps_its_beginning() -> None:
    store = Store(2 * PIECE + 5)
    store.keep([1] * 10)
    store.keep(list(range(5, 5 + 4 * PIECE)))
    assert store.prefixes.known(list(range(5, 500))) == 2 * PIECE
    assert store.prefixes.known([1] * 10) == 0


def test_a_change_that_was_interrupted_leaves_nothing_to_go_on_from() -> None:
    store = Store(1 << 20)
    store.keep([1] * 10)

    def interrupted(start: int) -> tuple[KeptTokens, KeptTokens | None]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.prefixes.keep([1, 1, 2], interrupted)  # its node is split by then
    for root in list(store.store._roots):
        assert store.store.of(*root) is not None  # as the next loop asks
    assert (store.store.held, store.prefixes.known([1] * 10)) == (0, 0)
    store.keep([1] * 10)
    assert store.taken([*[1] * 10, 2]) == 10


def proposer_of(name: str, target: Target, shape: TreeShape | None = TREE) -> Proposer:
    if name in (EAGLE3, SAMPLED_CHAIN):
        return make_proposer(name, target, head=random_draft(target), shape=shape, costs=CHEAP)
    if name == MTP:
        return make_proposer(name, target, head=random_mtp(target, modules=1), shape=shape, costs=CHEAP)
    return make(name, target, shape)


def conversation(engine: Engine, turns: int = 3, params: SamplingParams = GREEDY) -> list[GenerationResult]:
    """Every turn's prompt is all before it and a few tokens more."""
    results, text = [], SYSTEM
    for turn in range(turns):
        text = (*text, *range(5, 10 + turn))
        results += engine.generate([Request(text, params)])
        text = (*text, *results[-1].tokens)
    return results


def texts_of(results: Sequence[GenerationResult]) -> list[tuple[int, ...]]:
    return [result.tokens for result in results]


@pytest.mark.parametrize("arch", ["llama", "gemma3", "gpt2", "mixtral", "gemma2", "falcon"])
@pytest.mark.parametrize("name", [VANILLA, EAGLE3])
def test_a_turn_runs_its_new_tokens_alone(name: str, arch: str) -> None:
    target = target_of(arch)
    cold = conversation(Engine(target, proposer_of(VANILLA, target)))
    proposer = proposer_of(name, target)
    engine = Engine(target, proposer, prefix_cache=AMPLE)
    warm = conversation(engine)
    assert texts_of(warm) == texts_of(cold)
    assert [result.cached_tokens for result in cold] == [0, 0, 0]
    assert proposer.rerun is not None
    run = [result.prompt_tokens - result.cached_tokens for result in warm]
    # the turn's own tokens, and an answer's last token, whose place in the cache is its successor's affair
    assert run[0] == len(SYSTEM) + 5
    assert all(own <= new + 1 + proposer.rerun for own, new in zip(run[1:], (6, 7), strict=True))


@pytest.mark.parametrize("name", [EAGLE3, SAMPLED_CHAIN, *METHODS])
def test_every_method_says_the_same_cold_warm_and_evicting(name: str) -> None:
    target = target_of("llama")
    truth = texts_of(conversation(Engine(target, Vanilla())))
    for size in (AMPLE, 40_000):
        engine = Engine(target, proposer_of(name, target, None if size == AMPLE else TREE), prefix_cache=size)
        for again in range(2):
            results = conversation(engine)
            assert texts_of(results) == truth
            assert engine.prefixes.held <= size
            if size == AMPLE:
                assert all(result.cached_tokens for result in results[0 if again else 1 :])
        assert (engine.prefixes.held < 4_000) == (engine.proposer.rerun is None)


def test_a_proposer_that_cannot_go_on_is_not_asked_to() -> None:
    target = target_of("llama")
    draft, asked = random_draft(target), conversation(Engine(target, Vanilla()))
    windowed = Eagle3(draft, target, TREE, HeadWindow(2, 8))
    several = make_proposer(MTP, target, head=random_mtp(target, modules=2), shape=TREE)
    for proposer in (windowed, several):
        engine = Engine(target, proposer, prefix_cache=AMPLE)
        results = conversation(engine)
        assert texts_of(results) == texts_of(asked)
        assert not any(result.cached_tokens for result in results)
        assert not engine.prefixes.held


@pytest.mark.parametrize("arch", ["mamba", "bloom", "qwen3_next", "longrope"])
def test_a_target_whose_state_cannot_be_cut_reads_whole_prompts(arch: str) -> None:
    target = longrope(60) if arch == "longrope" else tiny_target(arch)
    engine = Engine(target, Vanilla(), prefix_cache=AMPLE)
    results = conversation(engine)
    assert texts_of(results) == texts_of(conversation(Engine(target, Vanilla())))
    assert not any(result.cached_tokens for result in results)
    assert not engine.prefixes.held


def mixed(count: int, seed: int) -> list[Request]:
    """Requests of all kinds that begin alike in many ways."""
    chance = random.Random(seed)
    requests = []
    for number in range(count):
        common = SYSTEM[: chance.choice((0, 5, 40, len(SYSTEM)))]
        prompt = (*common, *chance.choice(((), (9,) * 12)), *(chance.randrange(5, 120) for _ in range(number % 9 + 1)))
        params = SamplingParams(
            temperature=chance.choice((0.0, 0.8)), seed=number, max_new_tokens=1 + number % 14, ignore_eos=True
        )
        requests.append(Request(prompt, params, logprobs=0 if number % 5 == 0 else None, echo=number % 10 == 0))
    return requests


@pytest.mark.parametrize("name", [VANILLA, EAGLE3, SPS, SUFFIX])
@pytest.mark.parametrize("arch", ["llama", "gemma3"])
def test_many_at_once_say_what_each_says_alone(name: str, arch: str) -> None:
    target, requests = target_of(arch), mixed(40, seed=1)
    if name == SPS:  # drawn drafts are another draw
        requests = [replace(request, params=replace(request.params, temperature=0.0)) for request in requests]
    alone = Engine(target, Vanilla(), slots=8).generate(requests)
    for size, shape in ((AMPLE, None), (60_000, TREE)):
        engine = Engine(target, proposer_of(name, target, shape), slots=6, prefill_chunk=24, prefix_cache=size)
        for _ in range(2):
            assert texts_of(engine.generate(requests)) == texts_of(alone)
            assert engine.prefixes.held <= size


def prompt_tokens_run(target: Target, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A growing list: how many tokens of prompts each forward ran."""
    run, found = target.prefill_chunk, list[int]()

    def watched(*args: object, **kwargs: object) -> object:
        outputs = run(*args, **kwargs)  # type: ignore[arg-type]
        found.append(sum(output.hidden.shape[1] for output in outputs))
        return outputs

    monkeypatch.setattr(target, "prefill_chunk", watched)
    return found


@pytest.mark.parametrize("name", [VANILLA, EAGLE3])
def test_a_beginning_that_many_share_is_run_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if all come at the same time: those behind the first wait for it."""
    target = tiny_target("llama", num_hidden_layers=4)
    run = prompt_tokens_run(target, monkeypatch)
    proposer = proposer_of(name, target)
    rerun = proposer.rerun or 0
    engine = Engine(target, proposer, slots=8, prefill_chunk=16, prefix_cache=AMPLE)
    requests = [Request((*SYSTEM, 70 + number, 80), GREEDY) for number in range(8)]
    results = engine.generate(requests)
    assert sum(run) == len(SYSTEM) + 2 + 7 * (2 + rerun)
    assert [result.cached_tokens for result in results] == [0, *[len(SYSTEM) - rerun] * 7]
    run.clear()
    engine.generate([Request((*SYSTEM, 100 + number), GREEDY) for number in range(8)])
    assert sum(run) == 8 * (1 + rerun)
    run.clear()
    engine.generate([requests[0]] * 8)  # the same prompt as before: its last token is run for what comes behind it
    assert sum(run) == 8


def test_prompts_that_share_little_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target("llama", num_hidden_layers=4)
    run = prompt_tokens_run(target, monkeypatch)
    few = SYSTEM[: reuse.WORTH_WAITING - 1]
    engine = Engine(target, Vanilla(), slots=4, prefix_cache=AMPLE)
    engine.generate([Request((*few, 70 + number), GREEDY) for number in range(4)])
    assert run == [4 * (len(few) + 1)]


def test_nobody_waits_for_what_will_not_be_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a prompt that ends with its first token nothing is, and of others no more than the store has room for."""
    target = tiny_target("llama", num_hidden_layers=4)
    run, each = prompt_tokens_run(target, monkeypatch), len(SYSTEM) + 1
    requests = [Request((*SYSTEM, 70 + number), GREEDY) for number in range(4)]
    short = [replace(request, params=replace(GREEDY, max_new_tokens=1)) for request in requests]
    Engine(target, Vanilla(), slots=4, prefix_cache=AMPLE).generate(short)
    assert run == [4 * each]
    run.clear()
    Engine(target, Vanilla(), slots=4, prefix_cache=64).generate(requests)
    assert run == [each, 3 * each]


def test_who_wants_the_whole_prompts_logprobs_has_it_run() -> None:
    target = target_of("llama")
    request = Request((*SYSTEM, 9), GREEDY, logprobs=2, echo=True)
    engine = Engine(target, Vanilla(), prefix_cache=AMPLE)
    first, again = (
        next(event for event in engine.stream([request]) if event.prompt_logprobs).prompt_logprobs for _ in range(2)
    )
    assert first == again
    assert len(first) == len(SYSTEM)


@pytest.mark.parametrize("name", [VANILLA, EAGLE3, SPS])
def test_an_aborted_answer_is_kept_as_far_as_it_came(name: str) -> None:
    target = target_of("llama")
    store, proposer = PrefixStore(AMPLE), proposer_of(name, target)
    loop = DecodingLoop(target, proposer, slots=2, prefixes=store)
    other = loop.submit(Request((5, 6, 7), GREEDY))
    index = loop.submit(Request(SYSTEM, replace(GREEDY, max_new_tokens=40)))
    said: list[int] = []
    while len(said) < 6:
        said += [token for event in loop.step() if event.index == index for token in event.emission.tokens]
    loop.abort(index)
    while loop.pending:
        loop.step()
    assert other == 0
    prefixes = store.of(target, proposer)
    assert prefixes is not None
    known = prefixes.known((*SYSTEM, *said, 9))
    assert known >= len(SYSTEM) + len(said) - 1 - (proposer.rerun or 0) - (TREE.depth if name == SPS else 0)
    truth = Engine(target, Vanilla()).generate([Request((*SYSTEM, *said, 9), GREEDY)])
    loop.submit(Request((*SYSTEM, *said, 9), GREEDY))
    results = [event.result for _ in range(40) if loop.pending for event in loop.step() if event.result is not None]
    assert [result.cached_tokens for result in results] == [known]
    assert texts_of(results) == texts_of(truth)


def test_an_answer_that_failed_leaves_nothing_behind() -> None:
    target = target_of("llama")
    engine = Engine(target, Vanilla(), prefix_cache=AMPLE)

    def fails_later(row: object, verdict: object) -> object:
        raise RuntimeError("no text")

    loop = engine.loop()
    loop.submit(Request(SYSTEM, GREEDY))
    loop.step()
    kept = engine.prefixes.held  # of its prompt
    loop._rows[0].take = fails_later  # type: ignore[method-assign, assignment]
    events = loop.step()
    assert [event.emission.finish_reason for event in events] == ["error"]
    assert engine.prefixes.held == kept > 0


def test_proposers_and_targets_share_nothing() -> None:
    target, other = target_of("llama"), tiny_target("llama", seed=3, num_hidden_layers=4)
    engine = Engine(target, Vanilla(), prefix_cache=AMPLE)
    first = conversation(engine)
    engine.proposer = proposer_of(EAGLE3, target)
    second = conversation(engine)
    engine.target, engine.proposer = other, Vanilla()
    third = conversation(engine)
    for results, truth in ((second, first), (third, conversation(Engine(other, Vanilla())))):
        assert texts_of(results) == texts_of(truth)
        assert results[0].cached_tokens == 0


def test_a_head_goes_on_as_if_it_had_read_all(world: World) -> None:
    """It drafts as well as one that did: the same drafts are accepted."""
    target, prompt = world.target, world.prompts[0].tokens
    params = SamplingParams(max_new_tokens=20)
    head = lambda: Eagle3(world.head, target, TreeShape(3, 4, 9))  # noqa: E731
    engine = Engine(target, head(), prefix_cache=AMPLE)
    cold = engine.generate([Request(prompt, params)])[0]
    warm = engine.generate([Request(prompt, params)])[0]
    assert warm.cached_tokens == len(prompt) - 1
    assert (warm.tokens, warm.accepted) == (cold.tokens, cold.accepted)
    assert sum(cold.accepted) > 4
    longer = (*prompt, *cold.tokens[:9])
    known = engine.generate([Request(longer, params)])[0]
    anew = Engine(target, head()).generate([Request(longer, params)])[0]
    assert known.cached_tokens == len(longer) - 1
    assert (known.tokens, known.accepted) == (anew.tokens, anew.accepted)


class Resting(PassingOn):
    """A head that is left alone while drafts do not pay."""

    def __init__(self, inner: Eagle3) -> None:
        super().__init__(inner)
        self.head_proposer, self.rests = inner, False

    def idle(self, rows: int) -> bool:
        return self.rests

    def admit(self, rows: Sequence[Row], prompts: Sequence[TargetOutput]) -> None:
        self.head_proposer.policy = self if self.rests else None  # type: ignore[assignment]
        super().admit(rows, prompts)
        self.head_proposer.policy = None

    def propose(self, rows: Sequence[Row]) -> list[Proposal]:
        if not self.rests:
            return super().propose(rows)
        return [Proposal(DraftTree.root_only(row.tokens[-1])) for row in rows]


@pytest.mark.parametrize("idle", [(), (0,), (1,), (0, 1), (0, 2), (0, 1, 2)], ids=str)
def test_a_head_that_waits_is_known_by_features(idle: tuple[int, ...]) -> None:
    """idle: the turns in which drafts do not pay. Whatever was taken in when, its entries become those of a head that
    read all."""
    target = target_of("llama")
    draft = random_draft(target)
    proposer = Eagle3(draft, target, TREE)
    resting = Resting(proposer)
    engine = Engine(target, resting, prefix_cache=AMPLE)
    text: tuple[int, ...] = SYSTEM
    for turn in range(3):
        resting.rests = turn in idle
        text = (*text, 9, 8, 7)
        results = engine.generate([Request(text, GREEDY)])
        assert (results[0].cached_tokens > 0) == (turn > 0)
        text = (*text, *results[0].tokens)
    resting.rests = False
    text = (*text, 5)
    loop = engine.loop()
    loop.submit(Request(text, GREEDY))
    loop.step()
    row = loop._rows[0]
    proposer.catch_up()
    ours = proposer.state.cache.taken(0, 0, len(row.tokens) - 1)
    cold = Eagle3(draft, target, TREE)
    alone = DecodingLoop(target, cold, 1)
    alone.submit(Request(text, GREEDY))
    while not alone._rows or len(alone._rows[0].tokens) < len(row.tokens):
        alone.step()
    cold.catch_up()
    theirs = cold.state.cache.taken(0, 0, len(row.tokens) - 1)
    for mine, wanted in zip(ours.tensors, theirs.tensors, strict=True):
        torch.testing.assert_close(mine, wanted, atol=1e-4, rtol=1e-4)  # of other blocks, which round otherwise
    assert proposer._held == 0
