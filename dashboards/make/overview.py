"""The first dashboard to look at: the gain from drafting, lost events, and the serving weights."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from honed.dashboards.make.frame import board
from honed.dashboards.make.panels import TOKENS, Panel, number, plot, timeline
from honed.dashboards.make.queries import DAEMON, ENGINE, VLLM, new, quantile, rate, ratio

ACCEPTED, ROUNDS, DRAFTED = "honed_accepted_tokens_total", "honed_verify_rounds_total", "honed_draft_tokens_total"
BY, LEGEND = "workload, drafter_version", "{{workload}} {{drafter_version}}"


def overview() -> dashboard.Dashboard:
    """Make the dashboard of the drafter's quality."""
    text = "Quality of a vLLM server's drafter, and honed's work on it."
    rows = [("Now", now()), ("Acceptance", acceptance()), ("Speed", speed()), ("Weights and events", weights())]
    return board("Overview", text, rows)


def now() -> list[Panel]:
    """Present values."""
    lost = new("honed_events_lost_total", "", ENGINE, "$__range")
    errors = new("honed_db_errors_total", "", DAEMON, "$__range")
    return [
        number(
            "Acceptance length",
            "Tokens a verify round samples, bonus token included: vLLM's own figure.",
            [(f"1 + {ratio(ACCEPTED, ROUNDS)}", "")],
            decimals=2,
        ),
        number(
            "Estimated speed-up",
            "Tokens per second relative to no drafting, estimated by the controller.",
            [(f"honed_speedup_estimated_ratio{{{ENGINE}}}", "{{engine}}")],
            decimals=2,
            good=1.0,
        ),
        number(
            "Engines heard",
            "Engines connected to the daemon.",
            [(f"sum by (instance) (honed_engine_connected{{{ENGINE}}})", "")],
            good=1,
        ),
        number("Rounds lost", "Verify rounds that engines had to drop, in the time shown.", [(lost, "")], bad=1),
        number(
            "Active drafter",
            "Version in the role active.",
            [(f'honed_drafter_info{{{DAEMON},role="active"}}', "{{version}}")],
            shows_name=True,
        ),
        number("Database errors", "Refusals by the database, in the time shown.", [(errors, "")], bad=1),
    ]


def acceptance() -> list[Panel]:
    """Acceptance of drafts."""
    length = f"1 + {ratio(ACCEPTED, ROUNDS, BY)}"
    at = ratio("honed_position_accepted_total", "honed_position_tried_total", "position")
    return [
        plot(
            "Acceptance length",
            "Tokens a round samples, bonus token included, by workload and drafter version: vLLM's own figure.",
            [(length, LEGEND)],
            low=1,
        ),
        plot(
            "Acceptance rate",
            "Share of draft tokens that are accepted. Falls when more are drafted; compare at equal draft lengths.",
            [(ratio(ACCEPTED, DRAFTED, BY), LEGEND)],
            unit="percentunit",
            low=0,
            high=1,
        ),
        plot(
            "Acceptance by position",
            "Among rounds that accepted all drafts before a position (from 0), the share that accepted it too.",
            [(at, "position {{position}}")],
            unit="percentunit",
            low=0,
            high=1,
        ),
        plot(
            "Draft tokens a round",
            "The controller's choice, by workload.",
            [(ratio(DRAFTED, ROUNDS, "workload"), "{{workload}}")],
            low=0,
        ),
    ]


def speed() -> list[Panel]:
    """Speed for users."""
    latency = "vllm:inter_token_latency_seconds"
    return [
        plot(
            "Tokens a second",
            "Tokens delivered, including plain decode steps, by workload; and all tokens that vLLM generated.",
            [
                (rate("honed_delivered_tokens_total", "workload"), "{{workload}}"),
                (rate("vllm:generation_tokens_total", "model_name", VLLM), "vLLM {{model_name}}"),
            ],
            unit=TOKENS,
            low=0,
        ),
        plot(
            "Inter-token latency",
            "vLLM's measurement; accepted drafts arrive together.",
            [
                (quantile(0.5, latency, "model_name", VLLM), "median {{model_name}}"),
                (quantile(0.99, latency, "model_name", VLLM), "p99 {{model_name}}"),
            ],
            unit="s",
            low=0,
        ),
    ]


def weights() -> list[Panel]:
    """Serving weights, and completeness of events."""
    by = "model_name, engine, reason"
    return [
        timeline(
            "Drafter in use",
            "The version that each engine runs; a bar ends at a change of version.",
            [(f"honed_engine_drafter_info{{{ENGINE}}}", "{{engine}} {{version}}")],
        ),
        plot(
            "Events lost",
            "Rounds dropped by engines, batches that were missing or inconsistent, and unreadable frames.",
            [
                (new("honed_events_lost_total", by, ENGINE), "rounds {{engine}} {{reason}}"),
                (new("honed_event_batches_lost_total", by, ENGINE), "batches {{engine}} {{reason}}"),
                (new("honed_frames_rejected_total", "reason", DAEMON), "frames {{reason}}"),
            ],
            low=0,
        ),
    ]
