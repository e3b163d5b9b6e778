"""Draft trees on vLLM's V2 model runner: `gpu.model_runner.GPUModelRunner` and its CPU subclass.

As on V1 (`runner_v1.py`) with a scheduler that runs ahead. vLLM keeps drafts by the request's slot, in
`req_states.draft_tokens`, so trees are kept likewise. Nothing here waits for the device:

    prepare_attn       slots of a chain, then the positions of the nodes' depths; M-RoPE's in `prepare_inputs`
    the target         `TreeLayers`
    rejection_sampler  vLLM's own sampler draws at every row, by the request's seed and the row's position; then the walk, K
                       and V to the slots after the anchor, positions as in a chain. vLLM's runs only for chains beside trees
    propose            rows of the accepted path first; from the drafter's candidates the next trees grow

vLLM makes the drafter, and captures its CUDA graphs, before honed attaches. So `prepare_workers` has to run when plugins are
loaded: else the drafter would draft as many tokens as there are slots, and its graphs would keep no candidates.

Attention of tree rows is Python that runs in the step. So a step with trees never runs in a full graph of the target's. It runs
in piecewise graphs, which leave attention out, or without any. Steps without trees may run in full graphs, if all requests have
a length that vLLM captured: that of all slots, and others of its table of lengths by batch size.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from honed.attach.trees.draft_candidates import DraftCandidates
from honed.attach.trees.draws import MOST_DRAWN_BYTES
from honed.attach.trees.eligible import needs_chain
from honed.attach.trees.grow import GROWS, MOST_FAILURES
from honed.attach.trees.slots import block_tokens_of
from honed.attach.trees.telling import Told, tell_later, to_host
from honed.attach.trees.tree_layers import TreeLayers, target_layers
from honed.attach.trees.tree_step import TreeStep, on_device, tree_step
from honed.attach.trees.walk import Walk, order_of_rows, walk
from honed.attach.trees.warm_up import WarmUp
from honed.kernels.trees.reference import DraftTrees
from honed.kernels.trees.tree_build import allocate, tree_build
from honed.kernels.trees.warm_up import Run
from honed.kernels.verify.walk_tree import compile_walk

logger = logging.getLogger("honed.attach")

_CANDIDATES = "honed_candidates"
_MODEL_STATES = ("DefaultModelState", "MambaHybridModelState")
"""Those that take nothing from neighbouring rows but what the layers do."""
_GROWING = ("DFlashSpeculator", "DFlash2Speculator")
"""vLLM's speculators that trees grow from."""
_NO_LOGPROBS = -1
"""vLLM's number of log-probabilities of a request that wants none."""
_OWN_PROCESSORS = 3
"""Logits processors of vLLM itself: biases, penalties, bad words."""


def prepare_workers(may_have_graphs: bool = False) -> None:
    """Let this process's workers make DFlash drafters of their block's size, however many slots a request has.

    Args:
        may_have_graphs: find the tokens that trees grow from also where vLLM captures CUDA graphs.

    The model runner is imported once a worker knows its configuration, as vLLM does it: some of its parts look at that then.
    May be called several times; raises nothing.
    """
    try:
        worker_base = importlib.import_module("vllm.v1.worker.worker_base")
        init_device = worker_base.WorkerWrapperBase.init_device
    except Exception:
        logger.warning("honed: vLLM's workers can't be prepared for draft trees", exc_info=True)
        return
    if getattr(init_device, "is_honed", False):
        return

    @functools.wraps(init_device)
    def preparing(self: Any) -> Any:
        try:
            if _has_slots(self.vllm_config):
                with worker_base.set_current_vllm_config(self.vllm_config):
                    _prepare_drafters(may_have_graphs)
        except Exception:
            logger.warning("honed: the drafter can't be prepared for draft trees", exc_info=True)
        return init_device(self)

    preparing.is_honed = True  # type: ignore[attr-defined]
    worker_base.WorkerWrapperBase.init_device = preparing


def _has_slots(config: Any) -> bool:
    """Whether a V2 runner will make a DFlash drafter."""
    speculative = config.speculative_config
    return speculative is not None and speculative.method == "dflash" and bool(config.use_v2_model_runner)


def _prepare_drafters(may_have_graphs: bool) -> None:
    model_runner = importlib.import_module("vllm.v1.worker.gpu.model_runner")  # which looks the function up by this name
    make = model_runner.init_speculator
    if getattr(make, "is_honed", False):
        return

    def init_speculator(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        speculative = vllm_config.speculative_config
        if speculative.method != "dflash" or _needs_every_slot(speculative):
            return make(vllm_config, *args, **kwargs)
        smaller = copy.copy(vllm_config)
        smaller.speculative_config = copy.copy(speculative)
        smaller.speculative_config.num_speculative_tokens = block_tokens_of(speculative)
        speculator = make(smaller, *args, **kwargs)
        may_run = speculator.draft_logits is None and (may_have_graphs or not _has_graphs(vllm_config))
        if type(speculator).__name__ in _GROWING and may_run:
            candidates = DraftCandidates(speculator)
            candidates.wrap()
            setattr(speculator, _CANDIDATES, candidates)
        propose, slots = speculator.propose, speculative.num_speculative_tokens

        def propose_padded(*given: Any, **more: Any) -> Any:
            return _padded(propose(*given, **more), slots)

        speculator.propose = propose_padded
        return speculator

    init_speculator.is_honed = True  # type: ignore[attr-defined]
    model_runner.init_speculator = init_speculator  # type: ignore[attr-defined]


def _needs_every_slot(speculative: Any) -> bool:
    """Whether vLLM reads more of a drafter than its tokens, for every slot: a smaller one would end the engine."""
    return bool(speculative.enable_adaptive_verification) or speculative.draft_sample_method == "probabilistic"


def _has_graphs(config: Any) -> bool:
    return bool(config.compilation_config.cudagraph_mode) and not config.model_config.enforce_eager


def _padded(drafts: torch.Tensor, slots: int) -> torch.Tensor:
    return torch.nn.functional.pad(drafts, (0, slots - drafts.shape[1])) if drafts.shape[1] < slots else drafts


class TreesV2:
    """Gives a V2 runner's requests draft trees.

    Args:
        model_runner: vLLM's.
        on_error: called in the place of every exception here.
        on_order: told that row i of the drafter's inputs is row `order[i]` of the target's pass, in steps where rows move.
        may_have_graphs: also where vLLM captured CUDA graphs.

    Raises:
        TypeError: this engine can't verify trees; the text says why.
    """

    def __init__(
        self,
        model_runner: Any,
        on_error: Callable[[str], None],
        on_order: Callable[[torch.Tensor], None],
        may_have_graphs: bool = False,
    ) -> None:
        self._runner, self._on_error, self._on_order = model_runner, on_error, on_order
        speculator = model_runner.speculator
        if (found := getattr(speculator, _CANDIDATES, None)) is not None:
            found.is_wanted = False
        if reason := _misfit(model_runner, may_have_graphs):
            raise TypeError(reason)
        self.slots: int = model_runner.num_speculative_steps
        assert found is not None
        self._candidates: DraftCandidates = found
        self.depth = self._candidates.depth
        groups = target_layers(model_runner.kv_cache_config, set(speculator.draft_attn_layer_names))
        context = model_runner.vllm_config.compilation_config.static_forward_context
        layers, cache_config = {name: context[name] for name in groups}, model_runner.vllm_config.cache_config
        self.layers = TreeLayers(layers, groups, on_error, self.slots, cache_config)
        self._warm_up = WarmUp(model_runner.device, self._kernels())
        self._trees = allocate(model_runner.max_num_reqs, self.slots, model_runner.device)
        self._has_tree = [False] * model_runner.max_num_reqs
        self._chained: set[str] = set()
        """Running requests that keep vLLM's own chain."""
        self._wanted: set[str] = set()
        """Requests whose drafts in this step are nodes, or too many for a chain."""
        self._are_trees_scheduled = False
        """Whether the step that begins may verify a tree."""
        self._may_grow = False
        """Whether the next step is to verify trees."""
        self._slot_mappings: torch.Tensor | None = None
        self._walked: tuple[TreeStep, Walk] | None = None
        self._told: Told | None = None
        self._num_failures = 0

    @property
    def is_off(self) -> bool:
        """Whether something failed so often that there are no trees any more."""
        return self._num_failures > MOST_FAILURES

    def wrap(self) -> None:
        """Begin."""
        runner, speculator = self._runner, self._runner.speculator
        execute, prepare, verify = runner.execute_model, runner.prepare_attn, runner.rejection_sampler
        finish, propose, prepare_inputs = runner.sample_tokens, speculator.propose, runner.model_state.prepare_inputs

        def execute_model(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self.layers.begin()
            self._walked, self._told = None, None
            try:
                self._note(scheduler_output)
            except Exception:
                self._are_trees_scheduled = any(self._has_tree)
                self._fail("noting requests")
            return execute(scheduler_output, *args, **kwargs)

        def prepare_attn(input_batch: Any) -> Any:
            prepared = prepare(input_batch)
            try:
                self._slot_mappings = prepared[1]
                self.layers.step = self._place(input_batch)
            except Exception:
                self._fail("placing trees")
            return prepared

        def prepare_model_inputs(*args: Any, **kwargs: Any) -> Any:
            inputs = prepare_inputs(*args, **kwargs)
            try:
                step, positions = self.layers.step, inputs.get("positions")
                if step is not None and positions is not None:  # M-RoPE: the same offset in every dimension
                    positions[:, step.rows] = positions[:, step.first_row[step.request]] + step.depths.to(positions.dtype)
            except Exception:
                self.layers.has_failed = True
                self._fail("placing trees")
            return inputs

        def sample_tokens(*args: Any, **kwargs: Any) -> Any:
            output = finish(*args, **kwargs)
            told, self._told = self._told, None
            if (told is not None or self._wanted or self.is_off) and hasattr(output, "get_output"):
                tell_later(output, told, self._wanted, self.is_off, self._on_error)
            return output

        def propose_trees(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dummy_run"):
                return _padded(propose(input_batch, *args, **kwargs), self.slots)
            most = kwargs.get("num_speculative_tokens", self.slots)
            if most is not None:
                kwargs["num_speculative_tokens"] = min(most, self.depth)
            given = (input_batch, *args)
            try:
                if self._walked is not None:
                    given = self._in_order(*given)
            except Exception:
                self._fail("ordering rows")
            self._candidates.has_run, self._candidates.is_wanted = False, self._may_grow
            drafts = propose(*given, **kwargs)
            padded = _padded(drafts, self.slots)
            try:
                if most != 0:
                    padded = self._grow(padded, input_batch)
            except Exception:
                self._fail("growing trees")
                for slot in input_batch.idx_mapping_np.tolist():
                    self._has_tree[slot] = False
            return padded

        self._warm_up.begin()
        self.layers.wrap()
        self._candidates.watch_graphs()
        self._keep_out_of_full_graphs()
        runner.execute_model, runner.prepare_attn, runner.sample_tokens = execute_model, prepare_attn, sample_tokens
        runner.rejection_sampler = _Verifying(verify, self._verify)
        runner.model_state.prepare_inputs = prepare_model_inputs
        speculator.propose = propose_trees

    def _kernels(self) -> Iterator[Run]:
        runner = self._runner
        yield from self._candidates.kernels(self.slots)
        yield functools.partial(compile_walk, self.slots, self.depth, runner.device)
        yield from self.layers.kernels(runner.max_num_reqs, runner.max_model_len, self.depth)

    def _keep_out_of_full_graphs(self) -> None:
        manager = self._runner.cudagraph_manager
        if manager is None:
            return
        dispatch = manager.dispatch

        def dispatch_trees(num_reqs: int, num_tokens: int, uniform_token_count: int | None, *args: Any, **kwargs: Any) -> Any:
            if self._are_trees_scheduled:  # full graphs are for steps that are known to be uniform, or short enough
                uniform_token_count, kwargs["max_query_len"] = None, None
            return dispatch(num_reqs, num_tokens, uniform_token_count, *args, **kwargs)

        manager.dispatch = dispatch_trees

    def _fail(self, where: str) -> None:
        self._on_error(where)
        self._num_failures += 1

    def _note(self, scheduler_output: Any) -> None:
        """Note which requests keep their chain, and whether this step and the next are to verify trees."""
        self._may_grow = self._warm_up.is_over and not self.is_off and bool(getattr(scheduler_output, GROWS, False))
        self._chained.difference_update(scheduler_output.finished_req_ids)
        self._chained.update(new.req_id for new in scheduler_output.scheduled_new_reqs if needs_chain(new.sampling_params))
        slot_of = self._runner.req_states.req_id_to_index
        drafted = scheduler_output.scheduled_spec_decode_tokens
        noded = {name for name in drafted if name in slot_of and self._has_tree[slot_of[name]]}
        self._are_trees_scheduled = bool(noded)
        self._wanted = noded | {name for name in drafted if len(drafted[name]) > self.depth}

    # --- the target's pass --------------------------------------------------------------------------------------------

    def _place(self, batch: Any) -> TreeStep | None:
        """Lay out the rows of requests with a tree, and give them positions by depth."""
        counts = batch.num_draft_tokens_per_req
        if counts is None or not batch.num_draft_tokens:
            return None
        scheduled, slots, starts = batch.num_scheduled_tokens, batch.idx_mapping_np, batch.query_start_loc_np
        chosen = [
            i
            for i in range(batch.num_reqs)
            if counts[i] > 0
            and scheduled[i] == counts[i] + 1
            and self._has_tree[int(slots[i])]
            and batch.num_computed_tokens_np[i] >= batch.prefill_len_np[i]
        ]
        if not chosen:
            return None
        first = [int(starts[i]) for i in chosen]
        at, first_at = on_device(([int(slots[i]) for i in chosen], first), batch.positions.device)
        trees = DraftTrees(*(part[at] for part in self._trees))
        prefix = batch.positions[first_at].int()
        step = tree_step([batch.req_ids[i] for i in chosen], chosen, first, prefix, [int(counts[i]) for i in chosen], trees)
        _move(batch.positions, step, step.depths)
        return step

    # --- verification -------------------------------------------------------------------------------------------------

    def _verify(self, stock: Callable[..., Any], logits: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        step, self.layers.step = self.layers.step, None
        if step is None:
            return stock(logits, batch, *args, **kwargs)
        drawn = output = None
        try:
            if not self.layers.has_failed:
                drawn = self._draw(logits, batch)
                output = self._of_draws(step, drawn, batch)
        except Exception:
            self._fail("drawing at tree rows")
        if output is None:
            output = stock(logits, batch, *args, **kwargs)
            # vLLM took the tree for a chain: of its round only the first token is sure, which is from the anchor's row.
            output.num_sampled.index_fill_(0, step.batch_index, 1)  # indexed, a number would be copied to the device first
            output.num_rejected[step.batch_index] = step.num_nodes.to(output.num_rejected.dtype)
        try:
            _move(batch.positions, step, step.place)
            if drawn is None:
                self._num_failures += self.layers.has_failed
                return output
            first = batch.cu_num_logits[step.batch_index].long()
            of_trees = step.by_request(drawn[first[step.request] + step.place])
            walked = walk(step.trees, step.num_verified, of_trees, self.depth)
            mappings = self._slot_mappings
            assert mappings is not None
            self.layers.compact(step, lambda group: step.slots(mappings[group]), walked.path, walked.num_accepted)
            sampled = output.sampled_token_ids
            room = min(sampled.shape[1], walked.emitted.shape[1])
            sampled[step.batch_index, :room] = walked.emitted[:, :room].clamp(min=0).to(sampled.dtype)
            accepted = walked.num_accepted.to(output.num_sampled.dtype)
            output.num_sampled[step.batch_index] = accepted + 1
            output.num_rejected[step.batch_index] = (step.num_nodes - walked.num_accepted).to(output.num_rejected.dtype)
            self._walked = step, walked
            self._told = to_host(step, walked, self._runner.output_copy_stream)
        except Exception:
            self._fail("walking trees")
        return output

    def _draw(self, logits: torch.Tensor, batch: Any) -> torch.Tensor:  # -> [L]
        """The target's draw at each row, by vLLM's own sampler, which makes float32 copies of the logits."""
        at, lengths = batch.logits_indices, batch.seq_lens_cpu_upper_bound.numpy()
        positions, tokens, drawn = batch.positions[at], batch.input_ids[at], []
        for requests, rows in _parts(batch.cu_num_logits_np, MOST_DRAWN_BYTES // (4 * logits.shape[1])):
            part, _ = self._runner.sampler.sample(
                logits[rows],
                batch.expanded_idx_mapping[rows],
                batch.idx_mapping[requests],
                batch.idx_mapping_np[requests],
                positions[rows],
                tokens[rows],
                batch.expanded_local_pos[rows],
                lengths[requests],
            )
            drawn.append(part)
        return torch.cat(drawn)

    def _of_draws(self, step: TreeStep, drawn: torch.Tensor, batch: Any) -> Any:  # [L]
        """What vLLM's rejection sampler would give, with the draw at each request's first row.

        None where vLLM's own has more to do: chains to verify, log-probabilities, numbers that aren't finite to count.
        """
        sampler = self._runner.sampler
        has_chains = np.count_nonzero(batch.num_draft_tokens_per_req) > len(step.request_ids)
        if has_chains or sampler.compute_nans or sampler.sampling_states.max_num_logprobs(batch.idx_mapping_np) != _NO_LOGPROBS:
            return None
        from vllm.v1.worker.gpu.input_batch import get_num_sampled_and_rejected
        from vllm.v1.worker.gpu.sample.output import SamplerOutput

        sampled = drawn.new_zeros((batch.num_reqs, self.slots + 1))
        sampled[:, 0] = drawn[batch.cu_num_logits[:-1].long()]
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            batch.seq_lens.new_ones(batch.num_reqs),
            batch.seq_lens,
            batch.cu_num_logits,
            batch.idx_mapping,
            self._runner.req_states.prefill_len.gpu,
        )
        return SamplerOutput(sampled, None, None, num_sampled, num_rejected)

    # --- the drafter's pass -------------------------------------------------------------------------------------------

    def _in_order(self, batch: Any, metadata: Any, slots: Any, last: Any, aux: Any, *others: Any) -> tuple[Any, ...]:
        """The drafter's inputs with the rows of accepted paths right after their anchors."""
        assert self._walked is not None
        step, walked = self._walked
        order = order_of_rows(step, walked, len(batch.input_ids))
        self._on_order(order)
        permuted = dataclasses.replace(batch, input_ids=batch.input_ids[order])
        aux = [layer[order[: len(layer)]] for layer in aux] if aux else aux
        return (permuted, metadata, slots, last[order[: len(last)]] if not aux else last, aux, *others)

    def _grow(self, padded: torch.Tensor, batch: Any) -> torch.Tensor:  # [R, N]
        """Grow a tree for each request that can have one; the others keep their chain."""
        found, count = self._candidates, batch.num_reqs
        slots = batch.idx_mapping_np[:count].tolist()
        for slot in slots:
            self._has_tree[slot] = False
        if found.problem:
            raise RuntimeError(found.problem)
        may_grow = self._may_grow and found.has_run
        grown = [i for i in range(count) if batch.req_ids[i] not in self._chained] if may_grow else []
        if not grown:
            return padded
        at, slot_at = on_device((grown, [slots[i] for i in grown]), padded.device)
        budgets = torch.full((len(grown),), self.slots, device=padded.device)
        places = None if found.places is None else found.places[at]
        trees = tree_build(found.log_probs[at], found.ids[at], budgets, self.slots, candidates=places)
        padded = padded.clone()
        padded[at] = trees.tokens.to(padded.dtype)
        for kept, fresh in zip(self._trees, trees, strict=True):
            kept[slot_at] = fresh
        for index in grown:
            self._has_tree[slots[index]] = True
        return padded


class _Verifying:
    """vLLM's rejection sampler, called through honed's."""

    def __init__(self, stock: Any, verify: Callable[..., Any]) -> None:
        self._stock, self._verify = stock, verify

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._verify(self._stock, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stock, name)


def _parts(row_starts: npt.NDArray[np.int32], most_rows: int) -> Iterator[tuple[slice, slice]]:  # [R + 1]
    """Divide a batch into requests, and their rows, of at most so many rows each, unless one request has more."""
    start, count = 0, len(row_starts) - 1
    while start < count:
        end = int(np.searchsorted(row_starts, row_starts[start] + most_rows, side="right")) - 1
        end = min(max(end, start + 1), count)
        yield slice(start, end), slice(int(row_starts[start]), int(row_starts[end]))
        start = end


def _move(positions: torch.Tensor, step: TreeStep, offsets: torch.Tensor) -> None:  # [T], [R]
    """Set the positions of tree rows, from their anchors on."""
    positions[step.rows] = positions[step.first_row[step.request]] + offsets.to(positions.dtype)


def _problem(speculator: Any) -> str:
    return getattr(getattr(speculator, _CANDIDATES, None), "problem", "")


def _misfit(runner: Any, may_have_graphs: bool) -> str:
    """Reason why this engine's runner can't have trees; empty if it can."""
    config, speculator = runner.vllm_config, runner.speculator
    parallel = config.parallel_config
    graphs = runner.cudagraph_manager
    state = type(runner.model_state).__name__
    has_graphs = graphs is not None and bool(graphs.cudagraph_mode) and not config.model_config.enforce_eager
    reasons = {
        "there are several ranks": parallel.world_size > 1 or parallel.data_parallel_size > 1,
        "the drafter samples instead of taking its best tokens": getattr(speculator, "draft_logits", None) is not None,
        f"trees don't grow from vLLM's {type(speculator).__name__}": type(speculator).__name__ not in _GROWING,
        "vLLM's own adaptive verification is on": bool(config.speculative_config.enable_adaptive_verification),
        "acceptance is synthetic": config.speculative_config.rejection_sample_method == "synthetic",
        f"honed doesn't know vLLM's {state}": state not in _MODEL_STATES,
        "a KV connector moves blocks": config.kv_transfer_config is not None,
        "custom logits processors may look at the rows before": len(runner.sampler.logits_processors) > _OWN_PROCESSORS,
        "trees beside CUDA graphs weren't seen on a GPU yet: HONED_TREES=graphs tries them": has_graphs and not may_have_graphs,
        "full CUDA graphs hold every step, with its attention": has_graphs
        and graphs.cudagraph_mode.mixed_mode().name == "FULL",
        "breakable CUDA graphs aren't known": has_graphs and graphs.use_breakable_cg,
        "the drafter was made before honed was switched on": not hasattr(speculator, _CANDIDATES),
        f"tokens to grow from weren't found: {_problem(speculator)}": bool(_problem(speculator)),
        "the drafter finds its best tokens without logits": bool(getattr(speculator, "use_local_argmax_reduction", False)),
        "sampling masks are returned": bool(getattr(runner.sampler, "return_sampling_mask", False)),
        "routed experts are returned": getattr(runner, "aux_output_connector", None) is not None,
    }
    return next((reason for reason, is_so in reasons.items() if is_so), "")
