"""The public function and the twin here; the kernels themselves under Triton's interpreter, and on a GPU where there is one."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from honed.kernels.trees import reference, tree_build
from honed.kernels.trees import tree_attention as kernel
from honed.kernels.trees import tree_attention_plan as plans
from honed.kernels.trees.reference import AttendedPrefix, PagedPrefix
from honed.kernels.trees.tree_attention_plan import SPLITS, STAGES, Device, Plan, choose_plan, different_plans
from tests.kernels.draft_tree import build_tree
from tests.kernels.interpreting import needs_gpu, needs_triton, run_cases

HEADS, KV_HEADS, SIZE, PAGE = 4, 2, 8, 4


@needs_triton
def test_the_kernels_equal_their_twin_under_the_interpreter() -> None:
    run_cases("tree_attention", "cpu")


@pytest.mark.gpu
@needs_gpu
def test_the_kernels_equal_their_twin_on_a_gpu() -> None:
    run_cases("tree_attention", "cuda")


class Step:
    """A verify step of three requests, one of them idle, with trees that `tree_build` made."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.log_probs = -torch.rand(3, 4, 3, generator=generator).cumsum(-1)
        self.budgets = [6, 0, 40]
        ids = torch.zeros(3, 4, 3, dtype=torch.int32)
        self.trees = tree_build.tree_build(self.log_probs, ids, torch.tensor(self.budgets), 40)
        self.starts = torch.tensor([0, 7, 8, 49], dtype=torch.int32)  # each has its anchor, too
        self.lengths = [10, 5, 0]
        self.q = torch.randn(51, HEADS, SIZE, generator=generator)
        self.k, self.v = torch.randn(2, 51, KV_HEADS, SIZE, generator=generator)
        self.cache = torch.randn(2, 9, PAGE, KV_HEADS, SIZE, generator=generator)
        self.table = torch.tensor([[3, 8, 1], [7, 0, 0], [0, 0, 0]], dtype=torch.int32)
        self.paged = PagedPrefix(*self.cache, block_table=self.table, lengths=torch.tensor(self.lengths, dtype=torch.int32))

    def args(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]:
        return self.q, self.k, self.v, self.starts, self.trees.row_masks, 41


@pytest.mark.parametrize("window", [0, 5, 7, 100])
def test_every_node_attends_as_if_its_path_alone_had_been_decoded(window: int) -> None:
    step, prefix, seen = Step(), None, window or 1000
    if window:
        depths = torch.nn.functional.pad(step.trees.depths, (1, 0))  # an anchor has 0
        firsts = [length + depths[b, : step.budgets[b] + 1] - window + 1 for b, length in enumerate(step.lengths)]
        spare = torch.zeros(len(step.q) - sum(len(one) for one in firsts), dtype=torch.int32)
        prefix = step.paged._replace(firsts=torch.cat([*firsts, spare]).clamp(min=0).int())
    out, lse = kernel.tree_attention(*step.args(), prefix=prefix or step.paged)
    for b, length in enumerate(step.lengths):
        tree = build_tree(step.log_probs[b].double().numpy(), step.budgets[b])
        first = int(step.starts[b])
        for node, path in enumerate([[], *tree.ancestors()]):
            rows = torch.tensor([first, *(first + 1 + one for one in path)])
            pages = step.cache[:, step.table[b].long()].flatten(1, 2)[:, :length]
            k, v = torch.cat([pages[0], step.k[rows]])[-seen:], torch.cat([pages[1], step.v[rows]])[-seen:]
            k, v = (part.repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1) for part in (k, v))
            q = step.q[first + node][:, None]
            wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v)[:, 0]
            torch.testing.assert_close(out[first + node], wanted)
            scores = (q @ k.transpose(1, 2))[:, 0] / SIZE**0.5
            torch.testing.assert_close(lse[first + node], scores.logsumexp(-1))


def test_a_prefix_that_another_kernel_attended_to_is_the_same() -> None:
    step = Step()
    nobody = torch.zeros_like(step.trees.row_masks)
    attended = AttendedPrefix(*reference.tree_attention(*step.args()[:4], nobody, 41, SIZE**-0.5, step.paged))
    got, wanted = (kernel.tree_attention(*step.args(), prefix=prefix) for prefix in (attended, step.paged))
    torch.testing.assert_close(got[0][:49], wanted[0][:49])
    torch.testing.assert_close(got[1][:49], wanted[1][:49])


def test_a_scaled_cache_is_the_cache_times_its_scales() -> None:
    step = Step()
    scaled = step.paged._replace(
        k_cache=step.cache[0] / 2.0, v_cache=step.cache[1] / 4.0, k_scale=torch.tensor(2.0), v_scale=torch.tensor([4.0])
    )
    got, wanted = (kernel.tree_attention(*step.args(), prefix=prefix)[0] for prefix in (scaled, step.paged))
    torch.testing.assert_close(got[:49], wanted[:49])


def test_it_writes_where_it_is_told_to_and_nowhere_else() -> None:
    step = Step()
    out, lse = torch.full_like(step.q, 7.0), torch.full((51, HEADS), 7.0)
    assert kernel.tree_attention(*step.args(), prefix=step.paged, out=out, lse=lse)[0] is out
    assert (out[49:] == 7.0).all()
    assert (lse[49:] == 7.0).all()
    assert (out[:49] != 7.0).all()


def test_nothing_to_attend_to_and_nobody_to_attend() -> None:
    step = Step()
    out, lse = kernel.tree_attention(*step.args()[:4], torch.zeros_like(step.trees.row_masks), 41)
    assert not out[:49].any()
    assert (lse[:49] == float("-inf")).all()
    none = torch.zeros(0, HEADS, SIZE)
    kernel.tree_attention(none, none, none, torch.zeros(1, dtype=torch.int32), torch.zeros(0, 1, 1, dtype=torch.int32), 1)


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_parts_merge_in_any_cut(seed: int, parts: int) -> None:
    rng = np.random.default_rng(seed)
    scores, values = torch.tensor(rng.normal(0, 3, (2, 12))), torch.tensor(rng.normal(size=(2, 12, 3)))
    scores[0, :6] = float("-inf")  # a whole part may be empty
    cuts = [0, *sorted(rng.integers(0, 13, parts)), 12]
    out, lse = torch.zeros(2, 3, dtype=torch.float64), torch.full((2,), float("-inf"), dtype=torch.float64)
    for start, end in itertools.pairwise(cuts):
        own = scores[:, start:end].logsumexp(-1)
        weights = (scores[:, start:end] - own[:, None]).exp()  # NaN where the part is empty: not looked at
        out, lse = reference.merge(out, lse, (weights[:, None] @ values[:, start:end])[:, 0], own)
    torch.testing.assert_close(lse, scores.logsumexp(-1))
    torch.testing.assert_close(out, (scores.softmax(-1)[:, None] @ values)[:, 0])


@pytest.mark.parametrize("which", ["paged", "attended", "none"])
def test_the_registered_op(which: str) -> None:
    step = Step()
    out, lse = torch.zeros_like(step.q), torch.zeros(51, HEADS)
    paged: tuple[Any, ...] = step.paged if which == "paged" else (None,) * 7
    attended = (step.q + 1.0, lse + 0.5) if which == "attended" else (None, None)
    args = (*step.args(), 0.3, *paged, 12, *attended, out, lse)
    torch.library.opcheck(torch.ops.honed.tree_attention.default, args)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"q": torch.zeros(51, 3, SIZE)}, "multiple of H_kv"),
        ({"k": torch.zeros(50, KV_HEADS, SIZE)}, "k .50, 2, 8."),
        ({"row_starts": torch.zeros(3, dtype=torch.int32)}, "row starts"),
        ({"row_masks": torch.zeros(3, 41, 1, dtype=torch.int32)}, "41 rows need"),
        ({"row_masks": torch.zeros(3, 41, 2, dtype=torch.int64)}, "int32 masks"),
        ({"v": torch.zeros(51, SIZE, KV_HEADS).transpose(1, 2)}, "unit stride"),
        ({"prefix": AttendedPrefix(torch.zeros(51, HEADS, SIZE), torch.zeros(HEADS, 51))}, "prefix pass"),
        (
            {"prefix": PagedPrefix(torch.zeros(9, PAGE, 1, SIZE), torch.zeros(9, PAGE, 1, SIZE), *Step().paged[2:])},
            "a cache of",
        ),
        ({"prefix": Step().paged._replace(lengths=torch.zeros(2))}, "one row"),
        ({"prefix": Step().paged._replace(k_scale=torch.ones(1))}, "either both K and V have a scale"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], text: str) -> None:
    step = Step()
    names = ("q", "k", "v", "row_starts", "row_masks", "max_rows")
    with pytest.raises(ValueError, match=text):
        kernel.tree_attention(**dict(zip(names, step.args(), strict=True)) | {"prefix": step.paged} | change)


SHAPES = st.tuples(
    st.integers(1, 512),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.integers(1, 16),
    st.integers(1, 257),
    st.sampled_from([64, 128, 256]),
    st.integers(0, 131_072),
    st.sampled_from([2, 4]),
)


@settings(deadline=None)
@given(SHAPES, st.sampled_from([Device(), Device(142, 101_376), Device(108, 166_912)]))
def test_plans_fit_the_device(shape: tuple[int, ...], device: Device) -> None:
    plan = choose_plan(*shape, shape[-1], device)
    head_size, itemsize = shape[4], shape[-1]
    held = (plan.block_m * itemsize + STAGES[plan.num_stages] * 2 * plan.block_n * itemsize) * head_size
    assert held <= device.shared_bytes
    assert plan.num_splits in SPLITS
    assert (plan.num_splits - 1) * plan.block_n * 4 <= shape[5]  # a split has four tiles
    assert 16 <= plan.merge_block_m <= 64
    assert plan == choose_plan(*shape, shape[-1], device)


def test_few_requests_share_their_prefixes_and_many_do_not() -> None:
    def splits(num_requests: int, max_prefix: int) -> int:
        return choose_plan(num_requests, 8, 4, 32, 128, max_prefix, 2, 2, Device()).num_splits

    assert splits(1, 4096) > 8
    assert splits(64, 4096) == 1
    assert splits(1, 100) == 1


def test_all_layers_of_a_step_share_one_choice_of_a_plan() -> None:
    choose_plan.cache_clear()
    for _ in range(36):
        choose_plan(3, 8, 4, 8, 128, 4096, 2, 2, Device())
    assert choose_plan.cache_info().misses == 1


# Most requests, K/V heads, heads of each, most rows, head size, most tokens of a prefix, bytes of a query's value and of K's.
OF_ENGINES = [
    (1024, 8, 4, 64, 128, 40_960, 2, 2),
    (1024, 8, 16, 64, 128, 131_072, 2, 1),
    (1024, 8, 8, 64, 128, 2048, 2, 2),
    (256, 8, 8, 32, 128, 8192, 2, 2),
    (256, 1, 7, 17, 256, 32_768, 2, 2),
    (100, 5, 3, 40, 64, 300, 2, 2),
    (48, 16, 1, 64, 128, 131_072, 4, 4),
    (7, 8, 4, 16, 128, 0, 2, 2),
    (1, 8, 4, 2, 128, 4096, 2, 2),
]


@pytest.mark.parametrize("device", [Device(), Device(142, 101_376)], ids=["H200", "L40S"])
@pytest.mark.parametrize("sizes", OF_ENGINES, ids=str)
def test_the_plans_of_all_steps_are_found_by_trying_few(
    sizes: tuple[int, ...], device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kernels_of(plan: Plan) -> Plan:
        is_split = plan.num_splits > 1
        return plan._replace(num_splits=1 + is_split, merge_block_m=plan.merge_block_m * is_split)

    most_requests, num_kv_heads, group, most_rows, *others = sizes
    steps = itertools.product(range(1, most_requests + 1), range(2, most_rows + 1))
    wanted = {kernels_of(choose_plan(n, num_kv_heads, group, rows, *others, device)) for n, rows in steps}
    tried = list[tuple[Any, ...]]()
    monkeypatch.setattr(plans, "choose_plan", lambda *shape: tried.append(shape) or choose_plan(*shape))
    found = different_plans(*sizes, device=device)
    assert {kernels_of(plan) for plan in found} == wanted
    assert len(found) == len(wanted)
    if most_requests >= 256:
        assert 20 * len(tried) <= most_requests * (most_rows - 1)
