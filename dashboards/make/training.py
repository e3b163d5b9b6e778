"""The dashboard of weights: the trainer's work and yielding, its cost to users, and its candidates."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from honed.dashboards.make.frame import board
from honed.dashboards.make.panels import Panel, number, plot, timeline
from honed.dashboards.make.queries import ENGINE, JOB, VLLM, new, quantile, rate, ratio, training_is


def training() -> dashboard.Dashboard:
    """Make the dashboard from samples to swaps."""
    text = "The trainer's work, its cost to users, and the results of its candidates."
    rows = [("Now", now()), ("Training", progress()), ("What it costs users", costs()), ("Weights", weights())]
    return board("Training and weights", text, rows)


def now() -> list[Panel]:
    """Present values."""
    state = f"honed_trainer_state{{{JOB}}} == 1"
    return [
        number("Trainer", "The trainer's state.", [(state, "{{state}}")], shows_name=True, span=6),
        number(
            "Active drafter",
            "Version in the role active.",
            [(f'honed_drafter_info{{{JOB},role="active"}}', "{{version}}")],
            shows_name=True,
            span=6,
        ),
        number(
            "Latest swap's pause",
            "Time for which it held the engine.",
            [(f"honed_swap_pause_seconds{{{JOB}}}", "")],
            unit="s",
            decimals=1,
            span=6,
        ),
        number("On trial", "1 while two drafter versions take turns.", [(f"honed_canary_active{{{JOB}}}", "")], span=6),
    ]


def progress() -> list[Panel]:
    """Progress of training."""
    return [
        timeline("Trainer", "1 for its present state.", [(f"max by (state) (honed_trainer_state{{{JOB}}})", "{{state}}")]),
        plot(
            "Idle share",
            "Share of time in which the engine was idle and the trainer could work.",
            [(f"max by (job) (honed_gpu_idle_ratio{{{JOB}}})", "idle")],
            unit="percentunit",
            low=0,
            high=1,
        ),
        plot("Loss", "Latest training loss.", [(f"max by (job) (honed_training_loss{{{JOB}}})", "loss")], low=0),
        plot(
            "Speed",
            "Micro-steps a second, and tokens trained on a second (right axis).",
            [
                (rate("honed_training_steps_total", "job", JOB), "steps/s"),
                (rate("honed_training_tokens_total", "job", JOB), "tokens/s (right)"),
            ],
            low=0,
            right="B",
        ),
        plot(
            "Samples held",
            "In the trainer's memory, and on its disk if that is allowed.",
            [
                (f"max by (job) (honed_samples_held_bytes{{{JOB}}})", "in memory"),
                (f"max by (job) (honed_samples_spilled_bytes{{{JOB}}})", "on disk"),
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
                (rate("honed_capture_media_requests_total", "engine", ENGINE), "requests with media {{engine}}"),
            ],
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
                (rate("honed_training_preemptions_total", "job", JOB), "pre-emptions/s"),
                (quantile(0.99, "honed_training_preemption_seconds", "job", JOB), "p99 seconds (right)"),
                (quantile(0.99, "honed_training_preemption_computing_seconds", "job", JOB), "p99 seconds of computing (right)"),
            ],
            low=0,
            right="BC",
        ),
        plot(
            "Training beside requests",
            "Share of the time with requests that training may take, what it is estimated to add to steps of serving, and the "
            "share of steps beside it that are slower than 99 of 100 without.",
            [
                (f"max by (job) (honed_training_beside_requests_duty{{{JOB}}})", "duty"),
                (f"max by (job) (honed_training_harm_ratio{{{JOB}}})", "added to steps"),
                (f"max by (job) (honed_training_slow_steps_ratio{{{JOB}}})", "slow steps"),
            ],
            unit="percentunit",
        ),
        plot(
            "Inter-token latency p99, while training and not",
            "vLLM's own measurement, split by whether a trainer of these jobs was at work (computing, yielding or gating).",
            [
                (f"{latency} and {training_is(1)}", "while training {{model_name}}"),
                (f"{latency} and {training_is(0)}", "not training {{model_name}}"),
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
            [(f'honed_canary_log_evidence{{{JOB}, workload=""}}', "{{version}} is {{says}}")],
        ),
        plot(
            "Swaps, promotions and roll-backs",
            "Swap commands that engines answered, versions made active, versions taken back.",
            [
                (new("honed_swaps_total", "result", JOB), "swap {{result}}"),
                (new("honed_promotions_total", "reason", JOB), "promotion {{reason}}"),
                (new("honed_rollbacks_total", "reason", JOB), "roll-back {{reason}}"),
            ],
            low=0,
        ),
        plot(
            "Operations",
            "Operations that ended since the daemon's start.",
            [(f"sum by (kind, result) (honed_operations_total{{{JOB}}})", "{{kind}} {{result}}")],
            low=0,
        ),
    ]
