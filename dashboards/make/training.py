"""The dashboard of weights: the trainer's work and yielding, its cost to users, and its candidates."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from honed.dashboards.make.frame import board
from honed.dashboards.make.panels import ROWS, STEPS, TOKENS, Panel, number, plot, timeline
from honed.dashboards.make.queries import DAEMON, ENGINE, VLLM, if_training, largest, new, quantile, rate, ratio


def training() -> dashboard.Dashboard:
    """Make the dashboard from samples to swaps."""
    text = "The trainer's work, its cost to users, and the results of its candidates."
    rows = [("Now", now()), ("Training", progress()), ("What it costs users", costs()), ("Weights", weights())]
    return board("Training and weights", text, rows)


def now() -> list[Panel]:
    """Present values."""
    state = f"honed_trainer_state{{{DAEMON}}} == 1"
    return [
        number("Trainer", "The trainer's state.", [(state, "{{state}}")], shows_name=True, span=6),
        number(
            "Active drafter",
            "Version in the role active.",
            [(f'honed_drafter_info{{{DAEMON},role="active"}}', "{{version}}")],
            shows_name=True,
            span=6,
        ),
        number(
            "Latest swap's pause",
            "Time for which it held the engine.",
            [(f"honed_swap_pause_seconds{{{DAEMON}}}", "")],
            unit="s",
            decimals=1,
            span=6,
        ),
        number(
            "On trial",
            "1 while two drafter versions take turns.",
            [(f"honed_canary_active{{{DAEMON}}}", "")],
            span=6,
        ),
    ]


def progress() -> list[Panel]:
    """Progress of training."""
    return [
        timeline("Trainer", "1 for its present state.", [(largest("honed_trainer_state", "state", DAEMON), "{{state}}")]),
        plot(
            "Idle share",
            "Share of time in which the engine was idle and the trainer could work.",
            [(largest("honed_gpu_idle_ratio", "", DAEMON), "idle")],
            unit="percentunit",
            low=0,
            high=1,
        ),
        plot("Loss", "Latest training loss.", [(largest("honed_training_loss", "", DAEMON), "loss")], low=0),
        plot(
            "Speed",
            "Micro-steps a second, and tokens trained on a second (right axis).",
            [
                (rate("honed_training_steps_total", "", DAEMON), "steps"),
                (rate("honed_training_tokens_total", "", DAEMON), "tokens (right)"),
            ],
            unit=STEPS,
            low=0,
            right="B",
            right_unit=TOKENS,
        ),
        plot(
            "Samples held",
            "In the trainer's memory, and on its disk if that is allowed.",
            [
                (largest("honed_samples_held_bytes", "", DAEMON), "in memory"),
                (largest("honed_samples_spilled_bytes", "", DAEMON), "on disk"),
            ],
            unit="bytes",
            low=0,
        ),
        plot(
            "Capture",
            "Rows of context features that engines pass on a second, rows that they skipped, and rows with NaN or infinity. "
            "Requests with images or other media aren't captured.",
            [
                (rate("honed_captured_rows_total", "engine", ENGINE), "captured {{engine}}"),
                (rate("honed_capture_skipped_rows_total", "engine", ENGINE), "skipped {{engine}}"),
                (rate("honed_capture_nonfinite_rows_total", "engine", ENGINE), "not finite {{engine}}"),
                (
                    rate("honed_capture_media_requests_total", "engine", ENGINE),
                    "requests with media {{engine}} (right)",
                ),
            ],
            unit=ROWS,
            right="D",
            right_unit="reqps",
            low=0,
        ),
    ]


def costs() -> list[Panel]:
    """Cost of training to users."""
    latency = quantile(0.99, "vllm:inter_token_latency_seconds", "model_name", VLLM)
    return [
        plot(
            "Pre-emptions",
            "Times a second that the trainer yielded to the engine; right axis: p99 of the time that took, and of the "
            "computing in it, which users lose. On a CPU the rest is waiting for a core.",
            [
                (rate("honed_training_preemptions_total", "", DAEMON), "pre-emptions"),
                (quantile(0.99, "honed_training_preemption_seconds", "", DAEMON), "p99 seconds (right)"),
                (
                    quantile(0.99, "honed_training_preemption_computing_seconds", "", DAEMON),
                    "p99 seconds of computing (right)",
                ),
            ],
            unit="ops",
            low=0,
            right="BC",
            right_unit="s",
        ),
        plot(
            "Training beside requests",
            "Share of the time with requests that training may take, what it is estimated to add to steps of serving, and the "
            "share of steps beside it that are slower than 99 of 100 without.",
            [
                (largest("honed_training_beside_requests_duty", "", DAEMON), "duty"),
                (largest("honed_training_harm_ratio", "", DAEMON), "added to steps"),
                (largest("honed_training_slow_steps_ratio", "", DAEMON), "slow steps"),
            ],
            unit="percentunit",
        ),
        plot(
            "Inter-token latency p99, while training and not",
            "vLLM's own measurement, split by whether the host's trainer was at work (computing, yielding or gating).",
            [
                (if_training(latency, 1), "while training {{model_name}}"),
                (if_training(latency, 0), "not training {{model_name}}"),
            ],
            unit="s",
            low=0,
        ),
    ]


def weights() -> list[Panel]:
    """Results of candidates."""
    length = ratio("honed_accepted_tokens_total", "honed_verify_rounds_total", "drafter_version")
    return [
        timeline(
            "Drafter in use",
            "The version that each engine runs; a bar ends at a change of version.",
            [(f"honed_engine_drafter_info{{{ENGINE}}}", "{{engine}} {{version}}")],
        ),
        plot(
            "Acceptance length by version",
            "Tokens a round emits, bonus token included.",
            [(f"1 + {length}", "{{drafter_version}}")],
            low=1,
        ),
        plot(
            "Canary evidence",
            "log10 of the evidence on the version on trial, over all traffic; about 2 and more is proof.",
            [(f'honed_canary_log_evidence{{{DAEMON}, workload=""}}', "{{version}} is {{says}}")],
            good=2.0,
        ),
        plot(
            "Swaps, promotions and roll-backs",
            "Swap commands that engines answered, versions made active, versions taken back.",
            [
                (new("honed_swaps_total", "result", DAEMON), "swap {{result}}"),
                (new("honed_promotions_total", "reason", DAEMON), "promotion {{reason}}"),
                (new("honed_rollbacks_total", "reason", DAEMON), "roll-back {{reason}}"),
            ],
            low=0,
        ),
        plot(
            "Operations",
            "Operations that ended.",
            [(new("honed_operations_total", "kind, result", DAEMON), "{{kind}} {{result}}")],
            low=0,
        ),
    ]
