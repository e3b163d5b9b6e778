"""The controller's dashboard: draft lengths by load, the source of each decision, and the predictions' accuracy."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from honed.dashboards.make.frame import board
from honed.dashboards.make.panels import STEPS, Panel, plot, timeline
from honed.dashboards.make.queries import DAEMON, ENGINE, VLLM, WORKLOAD, largest, new, rate, ratio


def controller() -> dashboard.Dashboard:
    """Make the dashboard of decisions and their basis."""
    text = "Draft lengths by load, the source of each decision, and predicted against measured times."
    return board("Controller", text, [("Lengths and load", lengths()), ("Who decides", deciders()), ("Grounds", grounds())])


def lengths() -> list[Panel]:
    """Draft length and budget, against load."""
    per_round = ratio("honed_draft_tokens_total", "honed_verify_rounds_total", "engine")
    running = f"sum by (instance, engine) (honed_engine_requests_running{{{ENGINE}}})"
    return [
        plot(
            "Draft tokens a round, and load",
            "Average draft tokens, the policy's limit (nodes; for a chain its length), and requests in the batch (right axis).",
            [
                (per_round, "drafted {{engine}}"),
                (largest("honed_tree_budget_nodes", "engine"), "budget {{engine}}"),
                (running, "running {{engine}} (right)"),
            ],
            low=0,
            right="C",
            span=24,
        ),
        plot(
            "Draft tokens a round by workload",
            "Requests of one batch may get different lengths.",
            [(ratio("honed_draft_tokens_total", "honed_verify_rounds_total", "workload"), "{{workload}}")],
            low=0,
        ),
        plot(
            "Load",
            "Requests in the batch and waiting, as the engine reports them to honed, and vLLM's own count.",
            [
                (running, "running {{engine}}"),
                (f"sum by (instance, engine) (honed_engine_requests_waiting{{{ENGINE}}})", "waiting {{engine}}"),
                (
                    f"sum by (instance, model_name) (vllm:num_requests_running{{{VLLM}}})",
                    "vLLM running {{model_name}}",
                ),
            ],
            low=0,
        ),
    ]


def deciders() -> list[Panel]:
    """Sources of decisions."""
    return [
        plot(
            "Decisions",
            "Engine steps a second by the reason for their draft lengths.",
            [(rate("honed_decisions_total", "reason", ENGINE), "{{reason}}")],
            unit=STEPS,
            is_stacked=True,
            low=0,
        ),
        plot(
            "Policy age",
            "Seconds since each engine's policy arrived; negative if it has none.",
            [(largest("honed_policy_age_seconds", "engine"), "{{engine}}")],
            unit="s",
        ),
        timeline(
            "Fallback",
            "1 while an engine decides without a policy, by reason.",
            [(largest("honed_fallback_active", "engine, reason", ENGINE), "{{engine}} {{reason}}")],
        ),
        timeline(
            "Overrides",
            "1 while an operator's override is in force.",
            [(largest("honed_override_active", "name", DAEMON), "{{name}}")],
        ),
    ]


def grounds() -> list[Panel]:
    """Basis of decisions."""
    predicted = largest("honed_step_time_predicted_seconds", "engine")
    measured = largest("honed_step_time_measured_seconds", "engine")
    at = ratio("honed_position_accepted_total", "honed_position_tried_total", "position")
    return [
        plot(
            "Step time, predicted and measured",
            "Step time of the engine's recent steps; both curves are smoothed equally.",
            [(predicted, "predicted {{engine}}"), (measured, "measured {{engine}}")],
            unit="s",
            low=0,
        ),
        plot(
            "Prediction error",
            "Predicted step time over measured, minus 1.",
            [(f"-1 + {predicted} / ({measured} > 0)", "{{engine}}")],
            unit="percentunit",
        ),
        plot(
            "Estimated speed-up",
            "Tokens per second relative to no drafting, at the present load.",
            [(largest("honed_speedup_estimated_ratio", "engine"), "{{engine}}")],
            good=1.0,
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
            "Drift alarms",
            "New alarms, by workload.",
            [(new("honed_drift_detections_total", "workload", WORKLOAD), "{{workload}}")],
            low=0,
        ),
        plot(
            "Cost inside vLLM",
            "p99 of honed's time on the engine's thread, a step.",
            [
                (largest("honed_engine_decide_seconds", "engine"), "decide {{engine}}"),
                (largest("honed_engine_log_seconds", "engine"), "log {{engine}}"),
            ],
            unit="s",
            low=0,
        ),
    ]
