"""The dashboard to look at first: is drafting worth it, is anything lost, which weights serve."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from honed.dashboards.make.frame import board
from honed.dashboards.make.panels import Panel, number, plot, timeline
from honed.dashboards.make.queries import ENGINE, JOB, VLLM, new, quantile, rate, ratio

ACCEPTED, ROUNDS, DRAFTED = "honed_accepted_tokens_total", "honed_verify_rounds_total", "honed_draft_tokens_total"
BY, LEGEND = "workload, drafter_version", "{{workload}} {{drafter_version}}"


def overview() -> dashboard.Dashboard:
    """How well the drafter does."""
    text = "How well a vLLM server's drafter does, and what honed does about it."
    rows = [("Now", now()), ("Acceptance", acceptance()), ("Speed", speed()), ("Weights and events", weights())]
    return board("Overview", text, rows)


def now() -> list[Panel]:
    """Figures of this moment."""
    length = f"1 + {ratio(ACCEPTED, ROUNDS, 'job')}"
    lost = f"sum by (job) (honed_events_lost_total{{{ENGINE}}})"
    return [
        number("Acceptance length", "Tokens a verify round emits, bonus token included.", [(length, "")], decimals=2),
        number(
            "Estimated speed-up",
            "Tokens per second against not drafting at all, as the controller estimates it.",
            [(f"honed_speedup_estimated_ratio{{{ENGINE}}}", "{{engine}}")],
            decimals=2,
        ),
        number("Engines heard", "Engines that the daemon hears.", [(f"sum by (job) (honed_engine_connected{{{ENGINE}}})", "")]),
        number("Rounds lost", "Verify rounds that engines had to drop, in their present boots.", [(lost, "")], worst=1),
        number(
            "Active drafter",
            "Version in the role active.",
            [(f'honed_drafter_info{{{JOB},role="active"}}', "{{version}}")],
            shows_name=True,
        ),
        number("Database errors", "Refusals by the database.", [(f"honed_db_errors_total{{{JOB}}}", "")], worst=1),
    ]


def acceptance() -> list[Panel]:
    """What the drafter is worth."""
    length = f"1 + {ratio(ACCEPTED, ROUNDS, BY)}"
    at = ratio("honed_position_accepted_total", "honed_position_tried_total", "position")
    return [
        plot(
            "Acceptance length",
            "Tokens a round emits, bonus token included, by workload and drafter version.",
            [(length, LEGEND)],
            low=1,
        ),
        plot(
            "Acceptance rate",
            "Share of draft tokens that are accepted. Falls when more are drafted; compare it at equal draft lengths.",
            [(ratio(ACCEPTED, DRAFTED, BY), LEGEND)],
            unit="percentunit",
            low=0,
            high=1,
        ),
        plot(
            "Acceptance by position",
            "Of the rounds that accepted every draft before a position (from 0), the share that accepted it too.",
            [(at, "position {{position}}")],
            unit="percentunit",
            low=0,
            high=1,
        ),
        plot(
            "Draft tokens a round",
            "What the controller chose, by workload.",
            [(ratio(DRAFTED, ROUNDS, "workload"), "{{workload}}")],
            low=0,
        ),
    ]


def speed() -> list[Panel]:
    """What users get."""
    latency = "vllm:inter_token_latency_seconds"
    return [
        plot(
            "Tokens a second",
            "Tokens emitted, plain decode steps included, by workload; and all that vLLM generated.",
            [
                (rate("honed_emitted_tokens_total", "workload"), "{{workload}}"),
                (rate("vllm:generation_tokens_total", "model_name", VLLM), "vLLM {{model_name}}"),
            ],
            low=0,
        ),
        plot(
            "Inter-token latency",
            "As vLLM measures it; drafts that are accepted arrive together.",
            [
                (quantile(0.5, latency, "model_name", VLLM), "median {{model_name}}"),
                (quantile(0.99, latency, "model_name", VLLM), "p99 {{model_name}}"),
            ],
            unit="s",
            low=0,
        ),
    ]


def weights() -> list[Panel]:
    """Which weights serve, and whether everything that happened arrives."""
    by = "model_name, engine, reason"
    return [
        timeline(
            "Drafter in use",
            "The version that each engine runs; a bar ends where another one took over.",
            [(f"honed_engine_drafter_info{{{ENGINE}}}", "{{engine}} {{version}}")],
        ),
        plot(
            "Events lost",
            "Rounds dropped by engines, batches that never came or contradicted themselves, frames that nobody could read.",
            [
                (new("honed_events_lost_total", by, ENGINE), "rounds {{engine}} {{reason}}"),
                (new("honed_event_batches_lost_total", by, ENGINE), "batches {{engine}} {{reason}}"),
                (new("honed_frames_rejected_total", "reason", JOB), "frames {{reason}}"),
            ],
            low=0,
        ),
    ]
