"""Draft trees on vLLM's V1 model runner: `gpu_model_runner.GPUModelRunner` and its CPU subclass.

A request's drafts are the nodes of a tree, the best first and parents before children, so every cut is a tree as well. The
scheduler takes them for a chain: N slots, as many as it was started with. In which steps trees grow, honed says on its output.
What differs lies in the runner alone, in this order:

    _prepare_inputs   tree rows get the slots of a chain, then the positions of their depths
    the target        `TreeLayers`: a row attends to its ancestors
    _sample           vLLM samples as ever; then the walk replaces what it found for trees, K/V of the accepted path move to the
                      slots after the anchor, and positions count on from it again
    propose           rows of the accepted path come first, as in a chain; where trees may grow, the drafter drafts its whole
                      block, D tokens, however few nodes are wanted, and from its logits the next trees grow
    take_draft_token_ids   in step with the scheduler, each list is cut to its tree's nodes

Where the scheduler runs a step ahead, drafts stay on the device, and nothing here waits for it. vLLM puts the last step's
drafts behind its tokens, so the trees of a step are those that the step before it grew.

Where anything of this fails, the step's trees count as refused: their anchors' tokens are emitted, which no draft can have
changed. Later steps verify chains.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from honed.attach.trees.draws import draw
from honed.attach.trees.eligible import needs_chain
from honed.attach.trees.grow import GROWS, MOST_FAILURES, grow
from honed.attach.trees.telling import Told, tell, tell_later, to_host
from honed.attach.trees.tree_layers import TreeLayers, target_layers
from honed.attach.trees.tree_step import TreeStep, on_device, tree_step
from honed.attach.trees.walk import Walk, order_of_rows, walk
from honed.attach.trees.warm_up import WarmUp
from honed.kernels.trees.reference import MAX_DEPTHS, NUM_CANDIDATES, DraftTrees
from honed.kernels.trees.warm_up import Run, build_run, candidate_runs
from honed.kernels.verify.walk_tree import compile_walk


class _Growing(NamedTuple):
    """Trees that the next step verifies."""

    trees: DraftTrees
    row_of: dict[str, int]
    """Requests with a tree, and its row."""
    tokens: list[list[int]] | None
    """Each row's nodes; None where the scheduler, which runs ahead, doesn't know them."""


class TreesV1:
    """Gives a V1 runner's requests draft trees.

    Args:
        model_runner: vLLM's.
        block_tokens: D, tokens that the drafter was made to draft.
        on_error: called in the place of every exception here.
        on_order: told that row i of the drafter's inputs is row `order[i]` of the target's pass, in steps where rows move.

    Raises:
        TypeError: this engine can't verify trees; the text says why.
    """

    def __init__(
        self,
        model_runner: Any,
        block_tokens: int,
        on_error: Callable[[str], None],
        on_order: Callable[[torch.Tensor], None],
    ) -> None:
        self._runner, self._on_error, self._on_order = model_runner, on_error, on_order
        self._is_ahead: bool = model_runner.use_async_scheduling
        self.depth = min(block_tokens, model_runner.num_spec_tokens, MAX_DEPTHS)
        if reason := _misfit(model_runner):
            raise TypeError(reason)
        of_drafter = set(model_runner.drafter._draft_attn_layer_names)
        groups = target_layers(model_runner.kv_cache_config, of_drafter)
        context = model_runner.vllm_config.compilation_config.static_forward_context
        layers, cache_config = {name: context[name] for name in groups}, model_runner.vllm_config.cache_config
        self.layers = TreeLayers(layers, groups, on_error, model_runner.num_spec_tokens, cache_config)
        self._warm_up = WarmUp(model_runner.device, self._kernels())
        self._growing: _Growing | None = None
        self._walked: tuple[TreeStep, Walk] | None = None
        self._logits: torch.Tensor | None = None
        self._lengths: list[int] | None = None
        self._told: Told | None = None
        self._noded: set[str] = set()
        """Requests whose next drafts are nodes."""
        self._wanted: set[str] = set()
        """Requests whose drafts in this step are nodes, or too many for a chain."""
        self._may_grow = False
        """Whether the next step is to verify trees."""
        self._has_drafted = False
        """Whether the drafter ran in the last step."""
        self._num_failures = 0

    @property
    def is_off(self) -> bool:
        """Whether something failed so often that there are no trees any more."""
        return self._num_failures > MOST_FAILURES

    def wrap(self) -> None:
        """Begin."""
        runner, drafter = self._runner, self._runner.drafter
        prepare, sample, take = runner._prepare_inputs, runner._sample, runner.take_draft_token_ids
        finish, propose, pick = runner.sample_tokens, drafter.propose, drafter._sample_draft_tokens
        fits = runner._input_fits_in_drafter

        def _prepare_inputs(scheduler_output: Any, num_scheduled_tokens: Any, *args: Any, **kwargs: Any) -> Any:
            prepared = prepare(scheduler_output, num_scheduled_tokens, *args, **kwargs)
            self.layers.begin()
            self._walked, self._may_grow = None, self._warm_up.is_over and not self.is_off
            self._may_grow &= bool(getattr(scheduler_output, GROWS, False))
            try:
                drafted = scheduler_output.scheduled_spec_decode_tokens
                self._wanted = {name for name in drafted if name in self._noded or len(drafted[name]) > self.depth}
                self._noded -= scheduler_output.finished_req_ids
                self.layers.step = self._place(scheduler_output)
            except Exception:
                self._fail("placing trees")
            return prepared

        def _sample(logits: Any, spec_decode_metadata: Any, *args: Any, **kwargs: Any) -> Any:
            step, self.layers.step = self.layers.step, None
            if step is None:
                return sample(logits, spec_decode_metadata, *args, **kwargs)
            drawn = None
            try:  # before vLLM's sampler changes the logits
                if not self.layers.has_failed:
                    drawn = self._draw(step, logits, spec_decode_metadata)
            except Exception:
                self._on_error("drawing at tree rows")
            output = sample(logits, spec_decode_metadata, *args, **kwargs)
            self._settle(step, drawn, output)
            return output

        def propose_trees(*args: Any, **kwargs: Any) -> Any:
            most = kwargs["num_speculative_tokens"]
            length = min(most, self.depth)  # of a chain
            kwargs["num_speculative_tokens"] = self.depth if most and self._may_grow else length
            try:
                if self._walked is not None:
                    kwargs |= self._in_order(kwargs)
            except Exception:
                self._fail("ordering rows")
            self._logits = self._growing = self._lengths = None
            self._has_drafted = True
            self._noded.difference_update(runner.input_batch.req_ids)
            drafts = propose(*args, **kwargs)
            if not most:
                return drafts
            chains = drafts[:, :length]
            # A scheduler that runs ahead has scheduled so many already, and vLLM's runner looks for them.
            padded = torch.nn.functional.pad(chains, (0, most - length))
            self._lengths = [length] * len(chains)
            try:
                self._grow(padded, kwargs["sampling_metadata"])
            except Exception:
                self._fail("growing trees")
                self._growing, self._lengths = None, [length] * len(chains)
                padded[:, :length] = chains
            return padded

        def _sample_draft_tokens(hidden_states: Any, sampling_metadata: Any) -> Any:
            if not self._may_grow:
                return pick(hidden_states, sampling_metadata)
            self._logits = drafter.model.compute_logits(hidden_states)
            return self._logits.argmax(dim=-1), None

        def sample_tokens(*args: Any, **kwargs: Any) -> Any:
            self._told, self._has_drafted = None, False
            output = finish(*args, **kwargs)
            told, self._told = self._told, None
            try:
                if hasattr(output, "get_output"):
                    tell_later(output, told, self._wanted, self.is_off, self._on_error)
                elif hasattr(output, "sampled_token_ids"):
                    tell(output, told, self._wanted, self.is_off)
            except Exception:
                self._on_error("telling of trees")
            return output

        def take_draft_token_ids() -> Any:
            taken = take()
            if self._is_ahead:  # they are for grammars alone
                return taken
            if taken is not None and not self._has_drafted:  # vLLM made zeros in place of drafts
                taken.draft_token_ids[:] = [[] for _ in taken.draft_token_ids]
            elif taken is not None and self._lengths is not None and len(self._lengths) == len(taken.draft_token_ids):
                rows = zip(taken.draft_token_ids, self._lengths, strict=True)
                taken.draft_token_ids[:] = [row[:length] for row, length in rows]
            return taken

        def _input_fits_in_drafter(metadata: Any) -> bool:
            # vLLM counts N tokens, and would end the drafting of all requests N tokens before one of them is full.
            if metadata is not None:
                metadata = copy.copy(metadata)
                metadata.max_seq_len -= runner.num_spec_tokens - self.depth
            return bool(fits(metadata))

        self._warm_up.begin()
        self.layers.wrap()
        runner._input_fits_in_drafter = _input_fits_in_drafter
        runner._prepare_inputs, runner._sample = _prepare_inputs, _sample
        runner.sample_tokens, runner.take_draft_token_ids = sample_tokens, take_draft_token_ids
        drafter.propose, drafter._sample_draft_tokens = propose_trees, _sample_draft_tokens

    def _kernels(self) -> Iterator[Run]:
        runner, model = self._runner, self._runner.model_config
        shape = self.depth, min(NUM_CANDIDATES, model.get_vocab_size()), model.get_vocab_size(), model.dtype
        yield from candidate_runs(*shape, runner.device, runner.max_num_reqs, [False, True])
        yield build_run(*shape[:2], runner.num_spec_tokens, runner.device)
        yield functools.partial(compile_walk, runner.num_spec_tokens, self.depth, runner.device)
        yield from self.layers.kernels(runner.max_num_reqs, runner.max_model_len, self.depth)

    def _fail(self, where: str) -> None:
        self._on_error(where)
        self._num_failures += 1

    # --- the target's pass --------------------------------------------------------------------------------------------

    def _place(self, scheduler_output: Any) -> TreeStep | None:
        """Find the requests whose scheduled drafts are the nodes of their trees, and give their rows positions by depth."""
        growing, scheduled = self._growing, scheduler_output.scheduled_spec_decode_tokens
        self._growing = None
        if growing is None or not scheduled:
            return None
        batch, starts = self._runner.input_batch, self._runner.query_start_loc.np
        was_in_batch = self._runner.prev_positions.np
        found: list[tuple[str, int, int, int]] = []
        for request_id, drafts in scheduled.items():
            row, index = growing.row_of.get(request_id, -1), batch.req_id_to_index[request_id]
            count = len(drafts)
            is_whole = scheduler_output.num_scheduled_tokens[request_id] == count + 1
            # Running ahead, vLLM forgets the drafts of a request that has left the batch since, if only for an empty step.
            is_known = was_in_batch[index] >= 0 if growing.tokens is None else growing.tokens[row][:count] == drafts
            if row >= 0 and is_whole and is_known:
                found.append((request_id, index, int(starts[index]), row))
        if not found:
            return None
        found.sort(key=lambda one: one[2])  # in the order of rows
        names, indices, first, rows = (list(column) for column in zip(*found, strict=True))
        first_at, at = on_device((first, rows), growing.trees.tokens.device)
        trees = DraftTrees(*(part[at] for part in growing.trees))
        prefix = self._runner.positions[first_at].int()
        counts = [len(scheduled[name]) for name in names]
        step = tree_step(names, indices, first, prefix, counts, trees)
        self._move(step, step.depths)
        return step

    def _move(self, step: TreeStep, offsets: torch.Tensor) -> None:  # [R]
        """Set the positions of tree rows, from their anchors on."""
        runner, anchors = self._runner, step.first_row[step.request]
        moved = runner.positions[anchors] + offsets
        if runner.uses_mrope:
            runner.mrope_positions.gpu[:, step.rows] = runner.mrope_positions.gpu[:, anchors] + offsets
        runner.positions[step.rows] = moved

    # --- verification -------------------------------------------------------------------------------------------------

    def _draw(self, step: TreeStep, logits: torch.Tensor, metadata: Any) -> torch.Tensor:  # -> [B, 1 + N]
        """The target's draw at each row."""
        ends = metadata.cu_num_sampled_tokens[step.batch_index].long()
        rows = (ends - step.num_nodes - 1)[step.request] + step.place
        return step.by_request(draw(logits, rows, step, self._runner.input_batch.sampling_metadata))

    def _settle(self, step: TreeStep, drawn: torch.Tensor | None, output: Any) -> None:
        """Replace what vLLM's sampler found for trees by what the walk finds.

        Should that fail, the first token stays, which no draft can have changed: vLLM drew it from the anchor's row.
        """
        sampled = output.sampled_token_ids
        sampled[:, 1:].index_fill_(0, step.batch_index, -1)  # indexed, a number would be copied to the device first
        try:
            self._move(step, step.place)
            if drawn is None:
                self._num_failures += 1
                return
            walked = self._walk(step, drawn)
            tables, path, num_accepted = self._runner.input_batch.block_table, walked.path, walked.num_accepted
            self.layers.compact(step, lambda group: step.slots(tables[group].slot_mapping.gpu), path, num_accepted)
            room = min(sampled.shape[1], walked.emitted.shape[1])
            sampled[step.batch_index, :room] = walked.emitted[:, :room].to(sampled.dtype)
            self._walked = step, walked
            self._told = to_host(step, walked, self._runner.async_output_copy_stream)
        except Exception:
            self._fail("walking trees")

    def _walk(self, step: TreeStep, drawn: torch.Tensor) -> Walk:
        return walk(step.trees, step.num_verified, drawn, self.depth)

    # --- the drafter's pass -------------------------------------------------------------------------------------------

    def _in_order(self, given: dict[str, Any]) -> dict[str, Any]:
        """The drafter's inputs with the rows of accepted paths right after their anchors."""
        assert self._walked is not None
        step, walked = self._walked
        hidden, tokens = given["target_hidden_states"], given["target_token_ids"]
        order = order_of_rows(step, walked, len(tokens))
        self._on_order(order)
        return {"target_hidden_states": hidden[order], "target_token_ids": tokens[order]}

    def _grow(self, padded: torch.Tensor, sampling_metadata: Any) -> None:  # [R, most nodes of a tree]
        """Grow a tree in the place of the drafts of each request that can have one; the others keep their chain."""
        batch, logits = self._runner.input_batch, self._logits
        count, most = padded.shape
        self._logits = None
        ids = batch.req_ids[:count]
        grown = [] if logits is None else [i for i in range(count) if not self._needs_chain(ids[i])]
        if not grown:
            return
        assert logits is not None
        (at,) = on_device((grown,), padded.device)
        temperature = None if sampling_metadata.all_greedy else sampling_metadata.temperature[at]
        trees = grow(logits.view(count, self.depth, -1)[at], temperature, most, self._runner.num_spec_tokens)
        padded[at] = trees.tokens[:, :most].to(padded.dtype)
        tokens, lengths = None, self._lengths
        assert lengths is not None
        if not self._is_ahead:
            tokens = trees.tokens.tolist()
            for index, length in zip(grown, trees.num_nodes.tolist(), strict=True):
                lengths[index] = length
        self._growing = _Growing(trees, {ids[index]: row for row, index in enumerate(grown)}, tokens)
        self._noded.update(self._growing.row_of)

    def _needs_chain(self, request_id: str) -> bool:
        return needs_chain(self._runner.requests[request_id].sampling_params)


def _misfit(runner: Any) -> str:
    """Reason why this engine's runner can't have trees; empty if it can."""
    config = runner.vllm_config
    parallel = config.parallel_config
    reasons = {
        "trees grow from DFlash drafters only": config.speculative_config.method != "dflash",
        "there are several ranks": parallel.world_size > 1 or parallel.data_parallel_size > 1,
        "the drafter samples instead of taking its best tokens": bool(
            getattr(runner.drafter, "_enable_probabilistic_draft_probs", False)
        ),
        "the drafter has another vocabulary": bool(getattr(runner.drafter, "use_heterogeneous_vocab", False)),
        "a KV connector moves blocks": config.kv_transfer_config is not None,
        "acceptance is synthetic": config.speculative_config.rejection_sample_method == "synthetic",
        "the target reads the tokens of neighbouring rows": getattr(runner, "lookback_token_ids", None) is not None,
        "CUDA graphs were captured for chains": runner.device.type == "cuda" and not config.model_config.enforce_eager,
        "the drafter's batch isn't padded": bool(config.speculative_config.disable_padded_drafter_batch),
    }
    return next((reason for reason, is_so in reasons.items() if is_so), "")
