"""Messages between honed's processes.

Every message is one ZeroMQ frame: msgpack of one of the structs below, identified by its tag (the class name). The law of this
file: fields are only ever added, at the end, with a default. A field's type and meaning never change. A message that is no
longer sent is kept until no supported release sends it. A receiver ignores unknown fields, and counts and drops frames that it
can't decode. A field's type bounds its values (`fields`), so whoever has a message needn't check them again. Nothing here is
ever pickled.

Letters: K = the engine's configured number of draft tokens, R = verify rounds in a batch, S = engine steps in a batch.
"""

from __future__ import annotations

import contextlib
from typing import Annotated, TypeAlias, TypeVar

import msgspec

from honed.adapt.protocol.fields import (
    Amount,
    Amounts,
    Count,
    Details,
    Drafts,
    Figures,
    FilePath,
    FilePaths,
    Identifier,
    Label,
    Labels,
    Most,
    Name,
    Number,
    PositiveNumber,
    Real,
    Reals,
    Requests,
    RoundDrafts,
    RoundHashes,
    RoundNumbers,
    RoundTemperatures,
    RoundTokens,
    Sizes,
    StepCounts,
    StepNumbers,
    StepReasons,
    StepTokens,
    Text,
    Texts,
    TokenIds,
)

WIRE_VERSION = 1
"""Raised only when an older peer could misread a newer one; fields added with defaults don't raise it."""

LOST_DRAFTER = "lost"
"""Stands for a drafter's version whose weights nobody knows: vLLM discarded them in its sleep, or a copy failed half way."""
FOREIGN_DRAFTER = "foreign"
"""Stands for a drafter's version: its weights came through vLLM's own endpoints, not from honed."""


class WireError(ValueError):
    """A frame that isn't a message of this wire version; the text names the defect."""

    command_id: str = ""
    """Id of the command that couldn't be read, so that its sender can be answered; "": the frame names none."""
    batch: BatchNumbers | None = None
    """Place of the batch that couldn't be read, so that those behind it aren't held up; None: the frame names none."""


class _Message(msgspec.Struct, tag=True, frozen=True, omit_defaults=True, gc=False, kw_only=True):
    """Base of all messages: tagged by class name, encoded as a map."""


# --- engine -> daemon -------------------------------------------------------------------------------------------------


class EngineHello(_Message, frozen=True):
    """Introduction of an engine; sent at start and again after every reconnect.

    `capabilities` lists what the attachment can do on this engine: "events", "draft_length" (per-request k), "capture",
    "swap", "estimates" (feeding vLLM's adaptive verification), "trees" (draft trees: then K counts nodes). `limits` explains
    missing ones (one sentence each).
    """

    wire_version: Count
    engine_id: Identifier
    boot_id: Name
    """Random per engine process: sequence numbers are only comparable within one boot."""
    model_name: Text
    target_path: FilePath
    drafter_path: FilePath
    """Folder of a drafter that honed trains, else ""."""
    drafter_version: Name
    """Live version: "" until the daemon has named the registry version of the engine's checkpoint."""
    vllm_version: Name
    honed_version: Name
    runner: Name
    """"v1" or "v2": which of vLLM's model runners executes."""
    method: Name
    """vLLM's speculative method, for example "dflash"; "" when the engine doesn't speculate."""
    num_spec_tokens: Drafts
    """K: most draft tokens of a round (anchor excluded), or nodes where the engine verifies trees."""
    max_num_seqs: Requests
    draft_model: FilePath = ""
    """Folder or name of the separate draft model, of any method; "" if there is none."""
    capabilities: Texts = []
    limits: Texts = []
    untrained: Texts = []
    """Reasons why this target and drafter can't be trained; empty if they can."""
    capture_path: FilePath = ""
    """File of the shared-memory sample ring, "" when capture is off."""
    features: Name = ""
    """Content of a captured row: "fused" or "layers"."""
    captured_tokens: Sizes = []
    """Tokens of a decode step that full CUDA graphs were captured for, ascending; empty: none, or not known yet."""
    captured_lengths: Sizes = []
    """Draft lengths of these graphs, the same for all requests of a step; empty: any mix."""
    shortens_block: bool = False
    """Whether the drafter makes no pass, or no row, for tokens that no request of a step will verify."""
    chain_tokens: Drafts = 0
    """Tokens that the drafter drafts, where trees have more nodes; 0: K."""


class StepColumns(_Message, frozen=True):
    """Engine steps of a batch, one list per figure, each of length S."""

    step: StepNumbers = []
    """Step number within the boot, from 1."""
    end_ns: StepNumbers = []
    """Engine's monotonic clock when the step's output was processed."""
    duration_us: StepCounts = []
    """From schedule() to update_from_output() of the same step."""
    num_requests: StepTokens = []
    num_tokens: StepTokens = []
    """All tokens that the step computed: decode, draft and prefill."""
    num_prefill_tokens: StepTokens = []
    num_draft_tokens: StepTokens = []
    """Without drafts that vLLM's own adaptive verification trimmed."""
    context_tokens: StepCounts = []
    """Sum of the context lengths of the requests in the step."""
    num_drafting: StepTokens = []
    """Block length requested from the drafter in this step (0: drafter skipped)."""
    decision: StepReasons = []
    """Reason for this step's draft lengths: "policy", "override", "cold", "off", …; see `adapt.lengths.decider`."""


class RoundColumns(_Message, frozen=True):
    """Verify rounds of a batch: a request's decode rows of one step. One list per figure, each of length R, but the
    flattened token lists.

    A round with `num_draft_tokens` 0 is a plain decode step of that request: it is logged, but it is not a draft in
    vLLM's counters (`vllm:spec_decode_num_drafts` counts rounds with at least one scheduled draft token).
    """

    step: RoundNumbers = []
    request: RoundHashes = []
    """64-bit keyed hash of the request id (unsigned): equal within a boot, meaningless outside it."""
    workload: RoundTokens = []
    """Index into the batch's `workloads`."""
    position: RoundTokens = []
    """Sequence position of the round's anchor (its last verified token)."""
    num_draft_tokens: RoundDrafts = []
    num_accepted_tokens: RoundDrafts = []
    """Bonus token excluded; 0 ≤ accepted ≤ drafted."""
    num_invalid_tokens: RoundDrafts = []
    """Scheduled drafts that a grammar rejected beforehand; vLLM doesn't count them as drafted."""
    temperature: RoundTemperatures = []
    num_emitted: RoundDrafts = []
    """Tokens sampled: the accepted ones and the bonus token, as vLLM counts them."""
    emitted: TokenIds = []
    """Token ids emitted, concatenated; empty unless token ids are logged."""
    draft: TokenIds = []
    """Draft token ids, concatenated (num_draft_tokens each, -1 where unknown); empty unless token ids are logged."""
    num_trimmed_tokens: RoundDrafts = []
    """Scheduled drafts that vLLM's own adaptive verification left unverified on the device, without the invalid ones; vLLM
    counts them as drafted. Empty: none."""
    num_delivered: RoundDrafts = []
    """Emitted tokens that vLLM kept: fewer than `num_emitted` where the request ended within the round. Empty: all."""
    chain_tokens: RoundDrafts = []
    """Where the drafts were a tree's nodes: those of the drafter's own chain, from the root on; 0: no tree. Empty: no trees."""
    chain_accepted: RoundDrafts = []
    """Tokens that would have been accepted if that chain alone had been verified."""
    nodes: TokenIds = []
    """The accepted nodes of trees, concatenated (num_accepted_tokens for each); node 0 is the tree's best."""
    num_struck_tokens: RoundDrafts = []
    """Drafts that a grammar struck, behind the verified ones: the first of them was tried and refused. They are among the
    invalid ones if they were scheduled. Empty: none."""


class EventBatch(_Message, frozen=True):
    """Events of an engine since its previous batch, in order.

    (engine_id, boot_id, seq) identifies it; seq counts from 1 without gaps. The losses are this boot's totals of what the
    engine's bounded queue had to drop, so `stored + lost` equals vLLM's own counters. One empty batch stands for a run of
    dropped batches; `first_seq` is the first number of that run.

    The daemon accepts a batch only directly after its committed ones (`first_seq` or `seq` is at most the committed
    number + 1, and `seq` is above it). It discards any other batch and answers with an `Ack` of what it has.
    """

    engine_id: Identifier
    boot_id: Name
    seq: PositiveNumber
    sent_unix_ns: Number
    sent_mono_ns: Number
    """Both clocks read at the same moment, so that steps' `end_ns` can be placed in wall time."""
    drafter_version: Name
    workloads: Labels
    steps: StepColumns
    rounds: RoundColumns
    lost_rounds: Count = 0
    """Rounds with at least one draft token in batches dropped so far."""
    lost_draft_tokens: Count = 0
    lost_accepted_tokens: Count = 0
    lost_batches: Count = 0
    first_seq: Number = 0
    """First number that this batch stands for; 0: only `seq`."""


class BatchNumbers(msgspec.Struct, tag="EventBatch", frozen=True, gc=False):
    """The fields that place a batch in its boot."""

    engine_id: Identifier
    boot_id: Name
    seq: PositiveNumber
    first_seq: Number = 0


class EngineStatus(_Message, frozen=True):
    """A heartbeat, about once a second, also while the engine is idle."""

    engine_id: Identifier
    boot_id: Name
    num_running: Count
    num_waiting: Count
    policy_generation: Count
    policy_age_s: Real
    """Seconds since the policy in force arrived; negative when there is none."""
    fallback: Name
    """"" while the policy is in force; else "no_policy", "stale_policy", "observe_only" or "error"."""
    drafter_version: Name
    drafter_generation: Count
    """Swaps applied in this boot."""
    queue_bytes: Count
    errors: Count
    """Exceptions caught at our boundary inside vLLM."""
    log_us_p50: Amount = 0.0
    log_us_p99: Amount = 0.0
    decide_us_p50: Amount = 0.0
    decide_us_p99: Amount = 0.0
    captured_rows: Count = 0
    capture_skipped_rows: Count = 0
    is_asleep: bool = False
    """vLLM's sleep mode: the weights aren't on the device."""
    target_updates: Count = 0
    """Number of times that vLLM was given new weights of the target in this boot, without a restart."""
    pooled_requests: Count = 0
    """Requests of this boot that counted as `workloads.OTHER_WORKLOAD`, since clients sent too many labels."""
    capture_nonfinite_rows: Count = 0
    """Rows with NaN or infinity, which capture dropped."""
    capture_media_requests: Count = 0
    """Requests with images or other media, which capture passed over."""


class CommandResult(_Message, frozen=True):
    """The answer to a `Command`; `figures` are numbers (for a swap: pause_ms, stage_ms), `detail` is text."""

    engine_id: Identifier
    boot_id: Name
    command_id: Name
    ok: bool
    error: Text = ""
    figures: Figures = {}
    detail: Details = {}


# --- daemon -> engine -------------------------------------------------------------------------------------------------


class Welcome(_Message, frozen=True):
    """The daemon's answer to `EngineHello`: where to resend from, and the engine's registry version."""

    daemon_id: Name
    boot_id: Name
    committed_seq: Number
    """Highest committed sequence number of this boot; the engine forgets up to it and resends the rest."""
    drafter_version: Name = ""
    """Registry version of the checkpoint that the engine loaded; "" when unknown."""
    log_token_ids: bool = False


class Ack(_Message, frozen=True):
    """All batches up to `seq` of this boot are committed to the store."""

    boot_id: Name
    seq: Number


class WorkloadPrior(_Message, frozen=True):
    """Estimated acceptance of a workload's requests before their own rounds."""

    workload: Label
    acceptance: Reals
    """[K] conditional acceptance a_j: P(draft j accepted | drafts < j accepted)."""
    strength: Amount = 8.0
    """Weight of this prior in pseudo-rounds, against the request's own rounds."""
    context_shift: Reals = []
    """[B] factor on the failure odds by context length, in the buckets of adapt.acceptance.context_shift; empty: no
    difference."""
    depth_intercepts: Reals = []
    """[K] α_j of adapt.acceptance.depth_calibration, which corrects a request's acceptance at each depth; empty: no
    correction."""
    depth_slopes: Reals = []
    """[K] β_j of the same."""
    keeps_chain: bool = False
    """True: this prior is for requests that keep the drafter's chain beside draft trees. Other priors' `acceptance` is of nodes
    there."""


class Policy(_Message, frozen=True):
    """Rules by which an engine chooses draft lengths until the next policy or until `ttl_s` after arrival.

    The engine decides every step itself, from this and from its own requests' finished rounds.
    """

    generation: Count
    ttl_s: Amount
    kind: Name
    """"goodput", "latency", "off" (observe only: leave vLLM alone), "static" or "table"; an unknown one is "static"."""
    static_k: Most
    """Draft tokens for kind "static", and of the others while they know no costs."""
    max_k: Most
    priors: list[WorkloadPrior] = []
    """The first is the engine-wide one, used for unnamed workloads."""
    step_seconds: Reals = []
    """Step-time model, see adapt.steps.step_time.StepTimeModel.from_policy: its parameters in its documented order."""
    captured_tokens: Sizes = []
    """Token counts for which a CUDA graph was captured; empty: none."""
    hysteresis: Real = 0.02
    """Relative predicted gain below which draft lengths stay unchanged."""
    explore_share: Real = 0.02
    """Share of steps that try a neighbouring draft length, so that the model keeps learning."""
    compare_share: Real = 0.0
    """Share of steps in which requests that would get no draft get one: drafters are compared by their drafts."""
    request_ceiling: Most = -1
    """No request gets more draft tokens than this; -1: no ceiling."""
    capture_share: Real = 0.0
    """Share of requests whose context features are captured for training."""
    override: Text = ""
    """Name of the operator override behind this policy, "" when there is none."""
    table: list[tuple[Most, Most]] = []
    """For kind "table": (largest batch in requests, draft tokens), ascending."""
    equal_lengths: bool = False
    """Every request of a step gets the same length: unequal lengths would lose the captured CUDA graph."""
    captured_lengths: Sizes = []
    """With `equal_lengths`: the only lengths, beside 0, that are chosen; empty: all are."""
    equal_up_to: Most = -1
    """With `equal_lengths`: kinds that choose by prices keep to it in steps of so many requests at most, since no graph holds
    more; -1: in all."""
    feeds_estimates: bool = False
    """Where vLLM's own adaptive verification is on, it gets step costs and each workload's acceptance."""
    tells_steps: bool = False
    """The engine writes each step into its page, for a trainer that works beside requests."""
    kind_effects: list[tuple[Most, Most, Real]] = []
    """Corrections of `step_seconds` for kinds of steps, see adapt.steps.step_time.StepTimeModel.kinds."""
    fallback_k: Most = -1
    """Draft tokens once the policy has expired, and with it an operator's override; -1: `static_k`."""
    tree_step_seconds: Reals = []
    """As `step_seconds`, of steps that verify draft trees; those are of the others then. Empty: unknown, or there are none."""
    tree_kind_effects: list[tuple[Most, Most, Real]] = []
    """As `kind_effects`, of `tree_step_seconds`."""


class DrafterWeights(_Message, frozen=True):
    """A drafter version and where its weights lie."""

    version: Name
    path: FilePath
    """Folder in the registry."""
    sha256: Name = ""
    """Of its model.safetensors; "": the file isn't checked."""


class Turns(_Message, frozen=True):
    """Two versions take turns: both stay staged, and an engine that hears nothing more goes home."""

    beside: DrafterWeights
    """The version whose turn comes next."""
    home_version: Name
    """Which of the two is active."""
    lease_s: Amount
    """How long the version that isn't at home may serve without further word."""


class SwapCommand(_Message, frozen=True):
    """Run these drafter weights from now on. The result's figures are pause_ms, stage_ms, copy_ms and ranks."""

    command_id: Name
    weights: DrafterWeights
    drops_cache: bool
    """Whether the new weights can't use cached context keys and values."""
    takes_over: bool = False
    """Whether weights that came through vLLM's own endpoints may be overwritten."""
    turns: Turns | None = None


class ChecksumCommand(_Message, frozen=True):
    """Hash the live drafter weights in checkpoint order. The result's detail has "sha256", and "rank0" … for each rank."""

    command_id: Name


Command = SwapCommand | ChecksumCommand
"""Something to be done between two engine steps, also while the engine is idle. Each is answered by a `CommandResult`."""


# --- trainer <-> daemon -----------------------------------------------------------------------------------------------


class TrainerHello(_Message, frozen=True):
    """Introduction of a trainer process; sent at start and after every reconnect."""

    trainer_id: Name
    device: Name
    operation_id: Name = ""
    """Current operation, "" when idle."""
    yields_to: Texts = []
    """Engines that it yields to, see `trainer.yields_to`."""


class TrainRequest(_Message, frozen=True):
    """daemon -> trainer: make a candidate."""

    operation_id: Name
    target_path: FilePath
    parent_version: Name
    scope: Name = "kv-frozen"
    workloads: Texts = []
    """Workloads that must gain; empty: any gain overall."""
    max_seconds: Amount = 600.0
    max_steps: Count = 0
    """0: the trainer's own setting."""
    reason: Text = ""
    dry_run: bool = False
    vllm_version: Name = ""
    """The engine's."""
    error_share: float = 1.0
    """This attempt's part of the gate's error, see recalib.gate.gate."""
    since_s: Amount = 0.0
    """Unix time from which on samples are of the traffic that must gain; earlier ones are only kept. 0: all are."""
    num_draft_tokens: Count = 0
    """The engine's draft tokens of a round, for drafters that draft token after token; 0: as the drafter's config says."""
    target_sha256: Text = ""
    """Digest of the target that the engine loaded, see recalib.registry.target_digest; "": unknown."""
    capture_paths: FilePaths = []
    """Rings of the engines whose samples it learns from: replicas of one target and drafter."""


class TrainCancel(_Message, frozen=True):
    """daemon -> trainer: cancel the operation; nothing of it is kept."""

    operation_id: Name
    reason: Text = ""


class TrainPause(_Message, frozen=True):
    """daemon -> trainer: pause (or resume) work between two micro-steps."""

    paused: bool


TreeLengths: TypeAlias = Annotated[dict[Name, float], msgspec.Meta(max_length=16)]


class GateFigures(_Message, frozen=True):
    """Expected acceptance length on held-out sessions, one workload."""

    workload: Name
    sessions: Count
    parent: float
    candidate: float
    gain_low: float
    """Lower end of the paired-bootstrap interval of candidate / parent. Those of workloads that needn't gain hold together."""
    gain_high: float
    passed: bool
    must_gain: bool = False
    p_value: float = 1.0
    """Probability of such a gain if both drafters were equal; 1 where no gain is asked for."""
    is_judged: bool = True
    """Whether there were held-out sessions enough to judge a loss. Without them it has passed unjudged."""
    parent_trees: TreeLengths = {}
    """Acceptance lengths that the same sessions would have with draft trees, by number of nodes; empty: none grow."""
    candidate_trees: TreeLengths = {}


GateTable: TypeAlias = Annotated[list[GateFigures], msgspec.Meta(max_length=256)]


class TrainerStatus(_Message, frozen=True):
    """trainer -> daemon, about once a second and at each change: its current state."""

    trainer_id: Name
    state: Name
    """"idle", "collecting", "training", "waiting" (engine busy), "gating", "paused"."""
    operation_id: Name = ""
    samples: Count = 0
    samples_bytes: Count = 0
    sessions: Count = 0
    steps: Count = 0
    max_steps: Count = 0
    tokens: Count = 0
    loss: float = 0.0
    train_seconds: Amount = 0.0
    elapsed_s: Amount = 0.0
    preemptions: Count = 0
    idle_ratio: Real = 0.0
    ring_lost_records: Count = 0
    gate: GateTable = []
    preemption_delays_s: Amounts = []
    """Delay of each pre-emption since the previous status: from work's arrival until the trainer had stopped."""
    preemption_computing_s: Amounts = []
    """Most computing time in each of them; the rest of the delay it waited for a core."""
    memory_bytes: Count = 0
    """Estimated memory of the training on its device; 0 before it is known."""
    spilled_bytes: Count = 0
    """Samples on disk."""
    defective_rings: Count = 0
    """Sample rings that can't be read, or not all of them."""
    nonfinite_rows: Count = 0
    """Rows with NaN or infinity that were read and dropped since its start."""
    dropped_updates: Count = 0
    """Updates of the operation whose loss or gradient wasn't finite; they changed no weight."""
    beside_seconds: Amount = 0.0
    """Training beside requests since its start."""
    beside_duty: Amount = 0.0
    """Share of the time with requests that training may take now; 0: it doesn't run beside requests."""
    beside_harm: Real = 0.0
    """Estimate of what that adds to steps of serving, as a share of their time."""
    beside_harm_error: Amount = 0.0
    """Standard error of the estimate."""
    beside_slow_share: Amount = 0.0
    """Share of steps beside training that are slower than 99 of 100 without."""
    beside_limit: Text = ""
    """What made that share fall: "mean" or "p99" of the steps' times; empty if it has grown since."""
    beside_pause: Text = ""
    """Why nothing may run beside requests now; empty if it may."""
    device: Name = ""
    """Device of the operation's work; empty before it needs one."""
    device_reason: Text = ""
    """Why the operation isn't on the device that `trainer.device` prefers; empty if it is."""


class TrainResult(_Message, frozen=True):
    """trainer -> daemon: an operation's end. `version` names the candidate in the registry if one was made and passed."""

    operation_id: Name
    ok: bool
    version: Name = ""
    error: Text = ""
    gate: GateTable = []
    steps: Count = 0
    tokens: Count = 0
    train_seconds: Amount = 0.0
    elapsed_s: Amount = 0.0
    dropped_updates: Count = 0
    """See `TrainerStatus.dropped_updates`."""
    is_cut_short: bool = False
    """Whether the trainer's deadline ended the training before its own limits: another one may win more."""


class Purge(_Message, frozen=True):
    """daemon -> trainer: forget all samples, the ring's included."""

    operation_id: Name = ""


class Purged(_Message, frozen=True):
    """trainer -> daemon: all samples are forgotten, except those named in `problems`."""

    operation_id: Name
    problems: Texts = []


FromTrainer = TrainerHello | TrainerStatus | TrainResult | Purged
ToDaemon = EngineHello | EventBatch | EngineStatus | CommandResult | FromTrainer
ToEngine = Welcome | Ack | Policy | Command
ToTrainer = Welcome | TrainRequest | TrainCancel | TrainPause | Purge

T = TypeVar("T")


class _Addressed(msgspec.Struct, gc=False):
    """The one field that all commands have."""

    command_id: str


_encoder = msgspec.msgpack.Encoder()
_to_daemon: msgspec.msgpack.Decoder[ToDaemon] = msgspec.msgpack.Decoder(ToDaemon)
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_to_trainer: msgspec.msgpack.Decoder[ToTrainer] = msgspec.msgpack.Decoder(ToTrainer)
_addressed: msgspec.msgpack.Decoder[_Addressed] = msgspec.msgpack.Decoder(_Addressed)
_batch_numbers: msgspec.msgpack.Decoder[BatchNumbers] = msgspec.msgpack.Decoder(BatchNumbers)
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError)


def encode(message: _Message) -> bytes:
    """Turn a message into the bytes of its frame."""
    return _encoder.encode(message)


def decode_to_daemon(frame: bytes) -> ToDaemon:
    """Read a frame from an engine or a trainer. Raises WireError, with the cause, for anything else.

    The error has the place of a batch with a wrong field.
    """
    try:
        return _decode(_to_daemon, frame)
    except WireError as error:
        with contextlib.suppress(*_UNREADABLE):
            error.batch = _batch_numbers.decode(frame)
        raise


def decode_to_engine(frame: bytes) -> ToEngine:
    """Read a frame that the daemon sent to an engine. Raises WireError, with the cause, for anything else.

    The error has the `command_id` of a command that is unknown here or has a wrong field.
    """
    try:
        return _decode(_to_engine, frame)
    except WireError as error:
        with contextlib.suppress(*_UNREADABLE):
            error.command_id = _addressed.decode(frame).command_id
        raise


def decode_to_trainer(frame: bytes) -> ToTrainer:
    """Read a frame from the daemon to a trainer. Raises WireError, with the cause, for anything else."""
    return _decode(_to_trainer, frame)


def _decode(decoder: msgspec.msgpack.Decoder[T], frame: bytes) -> T:
    try:
        message: T = decoder.decode(frame)
        return message
    except _UNREADABLE as error:
        raise WireError(f"not a honed message of wire version {WIRE_VERSION}: {error}") from error
