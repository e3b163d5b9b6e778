import pytest
from hypothesis import given
from hypothesis import strategies as st

from honed.adapt.lengths.decider import Decider
from honed.adapt.lengths.length_policy import LengthPolicy
from honed.adapt.lengths.rules import RULES, make_rule
from honed.adapt.lengths.rules_base import MOST_REQUESTS
from honed.adapt.lengths.rules_priced import Kelly, expected_tokens
from honed.adapt.steps.step_time import PARAMETERS, StepTimeModel

K = 7
NO_MODEL = StepTimeModel()


def make_model(captured_tokens=(), **seconds):
    return StepTimeModel.of(captured_tokens, **seconds)


def make(name, num_spec_tokens=K, seed=0, ceilings=(), **limits):
    rule = make_rule(name, num_spec_tokens, seed)
    limits = {"max_k": num_spec_tokens, "static_k": 4, "table": [], "model": NO_MODEL, **limits}
    rule.set_limits(**limits)
    for number, ceiling in enumerate(ceilings):
        rule.start(f"r{number}", ceiling=ceiling)
    return rule


def decide(rule, request_ids=("a",), context_tokens=100, num_prefill_tokens=0, now_s=0.0):
    decision = rule.decide(list(request_ids), context_tokens, num_prefill_tokens, now_s)
    assert decision.block == max(decision.num_draft_tokens, default=0)
    assert decision.reason == rule.name
    return decision.num_draft_tokens


def serve(rule, num_steps, accept, request_ids=("a",)):
    """Serve steps in which `accept(k)` of k drafts are accepted; returns the lengths of the step after them."""
    for _ in range(num_steps):
        lengths = decide(rule, request_ids)
        rule.observe(list(request_ids), lengths, [accept(k) for k in lengths])
    return decide(rule, request_ids)


def all_of(k):
    return k


def none_of(k):
    return 0


def mixed_of(share):
    """Accepts all drafts of the first request, and that share of the others'."""
    return lambda request_id, k: k if request_id == "r0" else round(share * k)


# --- all of them --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("share", [0.0, 0.4, 0.8, 1.0])
@pytest.mark.parametrize("model", [NO_MODEL, make_model(base=5e-3, per_token=1e-3, drafting=5e-4)])
def test_where_lengths_are_shared_all_requests_get_one_of_them(name, share, model):
    rule = make(name, table=[(1, 7), (8, 5)], model=model, shared_lengths=(0, 3, 7), ceilings=[-1] * 4)
    ids, accept, seen = [f"r{i}" for i in range(4)], mixed_of(share), set()
    for _ in range(300):
        lengths = decide(rule, ids)
        assert len(set(lengths)) == 1
        seen.update(lengths)
        rule.observe(ids, lengths, [accept(request_id, k) for request_id, k in zip(ids, lengths, strict=True)])
    assert seen <= {0, 3, 7}
    before = decide(rule, ids)
    rule.start("short", ceiling=2)
    assert decide(rule, [*ids, "short"]) == [*before, min(before[0], 2)], "its ceiling is nobody else's"


@pytest.mark.parametrize("name", ["threshold", "ema", "kelly"])
def test_a_rule_that_never_stops_drafting_comes_back_from_the_shortest_shared_length(name):
    rule = make(name, model=make_model(base=5e-3, per_token=1e-3), shared_lengths=(0, 3, 7))
    assert serve(rule, 200, none_of) == [3]
    assert serve(rule, 200, all_of) == [7]


def test_requests_that_share_a_length_are_judged_together():
    rule = make("threshold", shared_lengths=(0, 3, 7), ceilings=[-1] * 4)
    ids = [f"r{i}" for i in range(4)]
    for _ in range(200):
        lengths = decide(rule, ids)
        rule.observe(ids, lengths, [lengths[0], 0, 0, 0])
    assert decide(rule, ids) == [3] * 4


@pytest.mark.parametrize("name", RULES)
def test_without_a_length_to_share_nothing_is_drafted(name):
    assert decide(make(name, table=[(8, 5)], shared_lengths=(0,)), "ab") == [0, 0]


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="unknown length policy 'best', known are static, table, threshold, ema, kelly, tide"):
        make_rule("best", K)


@pytest.mark.parametrize("name", RULES)
def test_each_is_a_length_policy_that_signs_with_its_name(name):
    rule: LengthPolicy = make_rule(name, K)
    assert rule.decide(["a"], 10, 0, 0.0).reason == name
    assert rule.decide([], 0, 0, 0.0).num_draft_tokens == []


@pytest.mark.parametrize("name", RULES)
def test_max_k_and_ceilings_bound_every_rule(name):
    rule = make(name, ceilings=(-1, 2, 0, 99), max_k=3, static_k=5, table=[(8, 6)])
    assert decide(rule, ("r0", "r1", "r2", "r3", "new")) == [3, 2, 0, 3, 3]
    rule.finish("r1")
    rule.finish("r2")
    assert decide(rule, ("r0", "r1")) == [3, 3]
    rule.start("r0", ceiling=1)  # known already: changes nothing
    assert decide(rule, ("r0",)) == [3]
    rule.set_limits(-5, 4, [(8, 6)], NO_MODEL)
    assert decide(rule, ("r0", "r3")) == [0, 0]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("num_spec_tokens", [0, -3])
def test_an_engine_without_speculation_gets_no_drafts(name, num_spec_tokens):
    rule = make(name, num_spec_tokens, table=[(8, 3)])
    rule.observe(["a"], [3], [2])
    assert decide(rule) == [0]


@pytest.mark.parametrize("name", RULES)
def test_memory_is_bounded_when_requests_never_finish(name):
    rule = make(name)
    rule.start("first", ceiling=1)
    for number in range(MOST_REQUESTS):
        rule.start(str(number))
    rule.observe(["one more"], [3], [1])
    assert len(rule._requests) <= MOST_REQUESTS
    assert rule._num_ceilings == 0


@pytest.mark.parametrize("name", RULES)
def test_impossible_rounds_count_as_the_nearest_possible_ones(name):
    odd, plain = make(name), make(name)
    for _ in range(30):
        odd.observe(["a", "b", "c", "d", "e"], [99, 3, 3, -2, 0], [99, 4, -1, 2, 1])
        plain.observe(["a", "b", "c"], [K, 3, 3], [K, 3, 0])
        assert decide(odd, "abc") == decide(plain, "abc")
    assert all(getattr(odd, figure) == value for figure, value in vars(plain).items() if isinstance(value, float))


# --- static and table ---------------------------------------------------------------------------------------------------


def test_static_gives_everybody_the_policys_length_whatever_happens():
    rule = make("static", static_k=4)
    assert serve(rule, 50, none_of, ("a", "b")) == [4, 4]
    assert decide(make_rule("static", K)) == [K]  # no policy yet: what vLLM was configured for


TABLE = [(4, 6), (16, 3), (32, 0)]


@pytest.mark.parametrize(
    ("table", "batch", "length"),
    [
        (TABLE, 1, 6),
        (TABLE, 4, 6),
        (TABLE, 5, 3),
        (TABLE, 16, 3),
        (TABLE, 17, 0),
        (TABLE, 32, 0),
        (TABLE, 33, 0),
        (TABLE[:2], 500, 3),
        (TABLE[::-1], 5, 3),
        ([(8, 99)], 1, K),
        ([(8, -1)], 1, 0),
        ([], 1, 4),
    ],
)
def test_table_takes_the_first_row_that_is_large_enough(table, batch, length):
    rule = make("table", table=table)
    assert decide(rule, [str(number) for number in range(batch)]) == [length] * batch


# --- threshold ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("accepted", "length"), [(0, 9), (5, 9), (6, 10), (8, 10), (9, 10), (10, 11)])
def test_threshold_moves_by_one_a_window_outside_60_to_90_percent(accepted, length):
    rule = make("threshold", 20, max_k=10)
    serve(rule, 8 * 2, all_of)  # brings both the engine and the request to the limit in force
    assert serve(rule, 7, lambda k: accepted) == [10]
    rule.set_limits(20, 4, [], NO_MODEL)
    assert serve(rule, 1, lambda k: accepted) == [length]


def test_threshold_shrinks_to_one_and_never_below():
    rule = make("threshold")
    assert serve(rule, 8 * 3, none_of) == [K - 3]
    assert serve(rule, 8 * 20, none_of) == [1]


def test_threshold_grows_back_to_the_limit_and_never_beyond():
    rule = make("threshold", max_k=5)
    serve(rule, 8 * 20, none_of)
    assert serve(rule, 8 * 2, all_of) == [3]
    assert serve(rule, 8 * 20, all_of) == [5]
    rule.set_limits(K, 4, [], NO_MODEL)
    assert decide(rule) == [5]  # never tried more than 5, so it has yet to earn more


def test_threshold_judges_requests_one_by_one_and_starts_young_ones_where_the_engine_is():
    rule = make("threshold")
    for _ in range(8 * 4):
        lengths = decide(rule, ("good", "bad"))
        rule.observe(["good", "bad"], lengths, [lengths[0], 0])
    assert decide(rule, ("good", "bad")) == [K, K - 4]
    engine = rule._engine.length
    assert engine <= K
    assert decide(rule, ("young",)) == [engine]
    serve(rule, 8 * 4, none_of, ("bad",))
    assert decide(rule, ("young",))[0] < engine  # follows the engine until it has a window of its own
    assert decide(rule, ("good",)) == [K]


def test_threshold_of_a_request_with_a_ceiling_starts_over_from_what_it_may_have():
    rule = make("threshold", ceilings=(3,))
    assert serve(rule, 8, none_of, ("r0",)) == [2]


# --- ema ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_spec_tokens", "tiers"),
    [(0, [0]), (1, [1]), (2, [1, 2]), (3, [1, 3]), (7, [1, 3, 7]), (8, [1, 3, 7, 8]), (16, [1, 3, 7, 15, 16])],
)
def test_ema_tiers(num_spec_tokens, tiers):
    assert make_rule("ema", num_spec_tokens).tiers == tiers


@pytest.mark.parametrize(
    ("tier", "accepted", "after"),
    [
        (7, 2.25, 3),
        (7, 2.26, 7),
        (7, 0.25, 1),
        (7, 0.26, 3),
        (3, 2.5, 3),
        (3, 2.51, 7),
        (3, 0.25, 1),
        (3, 0.26, 3),
        (1, 0.5, 1),
        (1, 0.51, 3),
        (1, 2.51, 7),
    ],
)
def test_ema_moves_only_past_the_border_and_its_margin(tier, accepted, after):
    rule = make("ema")
    rule._tier, rule._accepted = rule.tiers.index(tier), accepted
    rule._move()
    assert rule.tiers[rule._tier] == after


def test_ema_waits_for_its_warm_up_and_then_judges_every_fifth_step():
    rule = make("ema")
    assert serve(rule, 14, none_of) == [K]
    assert serve(rule, 1, none_of) == [1]  # EMA is 6 · 0.8^15 = 0.21
    assert serve(rule, 4, all_of) == [1]
    assert serve(rule, 1, all_of) == [3]  # all that one draft can give is above the border to the next tier
    assert serve(rule, 50, all_of) == [K]


def test_ema_between_the_borders_keeps_the_tier_it_has():
    """Hysteresis: 2.4 accepted is too few to climb from 3 to 7 and too many to fall from 7 to 3."""
    for tier in (3, 7):
        rule = make("ema")
        rule._tier, rule._accepted = rule.tiers.index(tier), 2.4
        for _ in range(100):
            rule.observe(["a"] * 5, [tier] * 5, [2, 3, 2, 3, 2])
        assert decide(rule) == [tier]


def test_ema_ignores_steps_without_drafts():
    rule = make("ema")
    for _ in range(100):
        rule.observe(["a"], [0], [0])
    assert decide(rule) == [K]


# --- kelly --------------------------------------------------------------------------------------------------------------


def argmax_by_hand(rate, first_s, slope_s, most):
    return max(range(1, most + 1), key=lambda k: sum(rate**j for j in range(k + 1)) / (first_s + slope_s * (k - 1)))


@pytest.mark.parametrize(("accepted", "length"), [(0, 1), (2, 1), (5, 3), (6, 6), (7, 7)])
def test_kelly_with_its_authors_costs(accepted, length):
    rule = make("kelly")
    for _ in range(40):
        rule.observe(["a"], [K], [accepted])
    assert decide(rule) == [length]
    if accepted < K:
        assert length == argmax_by_hand(accepted / K, 47.0 + 2 * 8.7, 8.7, K)


def test_kelly_drafts_the_limit_until_two_steps_are_known():
    rule = make("kelly", max_k=6)
    assert serve(rule, 1, none_of) == [6]
    assert serve(rule, 1, none_of) == [1]
    assert serve(make("kelly"), 2, all_of) == [K]  # a mean of two, not an EMA that starts from 0


def test_kelly_is_longer_where_tokens_are_cheap_and_shorter_in_large_batches():
    cheap = make_model(base=20e-3, per_token=1e-6, per_token_above_64=5e-4, drafting=1e-3)
    rule = make("kelly", model=cheap)
    for _ in range(40):
        rule.observe(["a"], [K], [5])
    assert decide(rule) == [K]
    many = [str(number) for number in range(64)]
    assert decide(rule, many) == [1] * 64


@pytest.mark.parametrize("batch", [1, 20, 24, 28, 32, 40])
def test_kelly_draws_its_line_through_the_prices_of_one_draft_and_of_the_limit(batch):
    rule = make("kelly", model=make_model(base=20e-3, per_token_above_64=1e-4, drafting=1e-3, per_block_token=5e-4))
    for _ in range(40):
        rule.observe(["a"], [K], [6])
    first, last = (21e-3 + 1e-4 * max(batch * (k + 1) - 64, 0) + 5e-4 * k for k in (1, K))
    expected = argmax_by_hand(6 / 7, first, (last - first) / (K - 1), K)
    assert decide(rule, [str(number) for number in range(batch)]) == [expected] * batch


def test_kelly_takes_an_average_over_about_eight_steps():
    rule = make("kelly")
    for _ in range(100):
        rule.observe(["a"], [K], [0])
    for _ in range(8):
        rule.observe(["a", "b"], [K, 1], [K, 1])
    assert rule._rate == pytest.approx(1.0 - (1.0 - Kelly.WEIGHT) ** 8)
    assert 0.8 < rule._rate < 0.9


def test_kelly_mistakes_the_share_of_accepted_drafts_for_acceptance():
    """The weakness that its author measured: drafts of which each is accepted with 0.8 are worth 5, and it settles lower."""
    rule = make("kelly", 15)
    accepted_of = {k: expected_tokens(0.8, k) - 1.0 for k in range(16)}
    assert argmax_by_hand(0.8, 47.0 + 2 * 8.7, 8.7, 15) == 5
    assert serve(rule, 300, lambda k: accepted_of[k]) == [3]


# --- tide ---------------------------------------------------------------------------------------------------------------


def test_expected_tokens_is_the_geometric_sum():
    assert expected_tokens(0.5, 3) == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    assert expected_tokens(0.7, 0) == pytest.approx(1.0)
    assert expected_tokens(1.0, 4) == pytest.approx(5.0, rel=0.01)
    assert expected_tokens(-1.0, 4) == pytest.approx(1.0, rel=0.01)


class NoProbe:
    def random(self):
        return 1.0


def make_tide(**limits):
    rule = make("tide", **limits)
    rule._random = NoProbe()
    return rule


def test_tide_switches_off_when_drafts_are_refused_and_on_again():
    rule = make_tide()
    assert decide(rule) == [K]  # α = 0.6 at first: 2.46 tokens for 1.7 steps
    assert serve(rule, 50, none_of) == [0]
    for _ in range(50):
        rule.observe(["a"], [K], [K])
    assert decide(rule) == [K]


@pytest.mark.parametrize(("acceptance", "is_on"), [(0.40, False), (0.42, True)])
def test_tide_without_a_model_is_on_above_its_default_costs(acceptance, is_on):
    assert (expected_tokens(acceptance, K) > 1.0 + 0.1 * K) == is_on
    rule = make_tide()
    rule._accepted, rule._reached = 1e9 * acceptance, 1e9
    assert decide(rule) == [K if is_on else 0]


def test_tide_switches_by_batch_where_the_speed_up_falls_below_one():
    """Free while memory-bound; beyond 64 tokens a step each token costs: S(b) crosses 1 between two batch sizes."""
    model = make_model(base=10e-3, per_token_above_64=2e-4, drafting=1e-3)
    rule = make_tide(model=model)
    rule._accepted, rule._reached = 6e8, 1e9
    tokens = expected_tokens(0.6, K)

    def speed_up(batch):
        on, off = (10e-3 + 2e-4 * max(batch * (k + 1) - 64, 0) + 1e-3 * (k > 0) for k in (K, 0))
        return tokens * off / on

    verdicts = [decide(rule, [str(number) for number in range(batch)])[0] > 0 for batch in range(1, 65)]
    assert verdicts == [speed_up(batch) > 1.0 for batch in range(1, 65)]
    assert verdicts[0]
    assert not verdicts[-1]


def test_tide_estimates_acceptance_from_tokens_that_were_reached():
    rule = make("tide")
    for _ in range(400):
        rule.observe(["a", "b"], [3, 3], [3, 1])  # 4 accepted, 1 rejected, 1 never reached
    assert rule.acceptance == pytest.approx(0.8, abs=0.02)
    before = rule.acceptance
    rule.observe(["a"], [0], [0])
    assert rule.acceptance == before


def test_tide_probes_a_small_share_of_steps_so_that_it_can_come_back():
    rule = make("tide")
    serve(rule, 50, none_of)
    probes = sum(serve(rule, 1, none_of)[0] > 0 for _ in range(3000))
    assert 30 <= probes <= 90
    serve(rule, 3000, all_of)
    assert decide(rule) == [K]
    assert decide(rule) == [K]


# --- properties ---------------------------------------------------------------------------------------------------------

SMALL = st.integers(-3, 20)
ANY = st.integers(-(2**62), 2**62)
IDS = st.lists(st.sampled_from([*"abcdefgh"]), max_size=9)
MODELS = st.one_of(
    st.just(NO_MODEL),
    st.builds(
        lambda seconds, sizes: StepTimeModel(tuple(seconds), tuple(sorted(sizes))),
        st.lists(st.floats(0.0, 1.0), min_size=len(PARAMETERS), max_size=len(PARAMETERS)),
        st.lists(st.integers(1, 600), max_size=3),
    ),
)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("start"), st.sampled_from([*"abcdefgh"]), st.just("w"), ANY | SMALL),
        st.tuples(st.just("finish"), st.sampled_from([*"abcdefgh", "never seen"])),
        st.tuples(st.just("observe"), IDS, st.lists(ANY | SMALL, max_size=9), st.lists(ANY | SMALL, max_size=9)),
        st.tuples(st.just("set_limits"), ANY | SMALL, ANY | SMALL, st.lists(st.tuples(SMALL, ANY | SMALL), max_size=3), MODELS),
        st.tuples(st.just("decide"), IDS, ANY, ANY, st.floats()),
    ),
    max_size=25,
)


def replay(rule, events):
    """Apply events; returns the decisions."""
    return [answer for verb, *args in events if (answer := getattr(rule, verb)(*args)) is not None]


@pytest.mark.parametrize("name", RULES)
@given(num_spec_tokens=SMALL, seed=st.integers(0, 3), events=EVENTS, ids=IDS)
def test_lengths_are_within_bounds_and_odd_input_never_raises(name, num_spec_tokens, seed, events, ids):
    rule = make_rule(name, num_spec_tokens, seed)
    most = limit = max(num_spec_tokens, 0)
    ceilings = {}
    for verb, *args in [*events, ("decide", ids, 0, 0, 0.0)]:
        decision = getattr(rule, verb)(*args)
        if verb == "start":
            ceilings.setdefault(args[0], args[2])
        elif verb == "observe" and name == "threshold":  # the one that keeps figures of requests nobody announced
            for request_id, drafted, _ in zip(*args, strict=False):
                if drafted > 0 < most:
                    ceilings.setdefault(request_id, -1)
        elif verb == "finish":
            ceilings.pop(args[0], None)
        elif verb == "set_limits":
            limit = min(max(args[0], 0), most)
        elif verb == "decide":
            assert len(decision.num_draft_tokens) == len(args[0])
            assert decision.block == max(decision.num_draft_tokens, default=0)
            for request_id, length in zip(args[0], decision.num_draft_tokens, strict=True):
                ceiling = ceilings.get(request_id, -1)
                assert type(length) is int
                assert 0 <= length <= min(limit, ceiling if ceiling >= 0 else most)


@pytest.mark.parametrize("name", RULES)
@given(events=EVENTS, one=EVENTS, other=EVENTS, ids=IDS)
def test_a_decision_is_a_function_of_the_history_alone(name, events, one, other, ids):
    """Non-anticipation: the same history gives the same answers, whatever comes after them."""
    left, right = make_rule(name, K, 1), make_rule(name, K, 1)
    ask = ("decide", ids, 100, 0, 0.0)
    for rule, later in ((left, one), (right, other)):
        rule.answers = replay(rule, [*events, ask])
        rule.copies = [(list(a.num_draft_tokens), a.block, a.reason) for a in rule.answers]
        replay(rule, later)
    assert left.answers == right.answers
    for rule in (left, right):
        assert rule.copies == [(a.num_draft_tokens, a.block, a.reason) for a in rule.answers]


@pytest.mark.parametrize("name", RULES)
@given(events=EVENTS)
def test_the_clock_and_the_workload_play_no_part(name, events):
    def plain(event):
        return {"decide": (*event[:4], 0.0), "start": (*event[:2], "default", *event[3:])}.get(event[0], event)

    left, right = make_rule(name, K), make_rule(name, K)
    assert replay(left, events) == replay(right, [plain(event) for event in events])


def test_the_default_answers_the_same_questions():
    default: LengthPolicy = Decider(K, 8)
    default.start("a", ceiling=3)
    assert default.decide(["a"], 10, 0, 0.0).num_draft_tokens == [3]
