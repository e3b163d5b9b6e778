"""A server's day in a few minutes, in this order; what Prometheus saw of it is looked at afterwards, in test_queries.py."""

from __future__ import annotations

from typing import Any

from tests.observability.stack import Stack


def now(stack: Stack, expr: str) -> float:
    """The sum of an expression's series; 0 without any."""
    return sum(float(one["value"][1]) for one in stack.prometheus.now(expr))


def test_both_are_scraped_and_traffic_flows(stack: Stack) -> None:
    stack.wait_for(lambda: all(one["health"] == "up" for one in stack.prometheus.targets()), "healthy targets")
    stack.wait_for(lambda: now(stack, "honed_verify_rounds_total") > 500, "verify rounds")
    stack.wait_for(lambda: now(stack, "honed_speedup_estimated_ratio") > 0, "a step-time model")


def test_counters_agree_with_vllms_own(stack: Stack) -> None:
    with stack.traffic.paused():
        stack.settle()
        stack.wait_for(
            lambda: now(stack, "honed_verify_rounds_total") == now(stack, "vllm:spec_decode_num_drafts_total"), "equal rounds"
        )
        for ours, theirs in (
            ("honed_draft_tokens_total", "vllm:spec_decode_num_draft_tokens_total"),
            ("honed_accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"),
        ):
            assert now(stack, ours) == now(stack, theirs) > 0


def test_an_override_comes_and_goes(stack: Stack) -> None:
    stack.client.put("/v1/overrides/draft_tokens", {"value": 3, "ttl_s": 600, "reason": "a test"})
    stack.wait_for(lambda: now(stack, "honed_tree_budget_nodes") == 3, "the budget")
    stack.wait_for(lambda: now(stack, 'rate(honed_decisions_total{reason="override"}[5s])') > 0, "steps under it")
    stack.client.delete("/v1/overrides/draft_tokens")
    stack.wait_for(lambda: now(stack, "honed_tree_budget_nodes") == 7, "the budget")


def test_other_weights_of_the_target_are_marked(stack: Stack) -> None:
    with stack.traffic.paused():
        stack.reload_target()
    stack.wait_for(lambda: now(stack, "honed_target_updates_total") == 1, "the update")


def test_a_training_shows(stack: Stack) -> None:
    stack.wait_for(lambda: stack.client.get("/v1/status")["trainer"], "the trainer")
    operation = stack.operation("/v1/recalibrations", {"dry_run": True, "reason": "a test", "max_seconds": 25})
    assert operation["state"] in ("succeeded", "failed"), operation  # whether the gate is passed is not the matter here
    stack.wait_for(lambda: now(stack, "honed_training_steps_total") > 50, "training steps")
    assert operation["detail"]["steps"] > 50, operation


def test_a_change_of_traffic_is_noticed(stack: Stack) -> None:
    # The drafter was made for workload a. Under one label, traffic that turns into b's is drift.
    stack.traffic.turn("a", into="b")
    stack.wait_for(lambda: now(stack, "honed_drift_detections_total") >= 1, "a drift alarm", 240.0)
    stack.traffic.turn("a", into="a")
    stack.traffic.workloads = ["a", "b"]
    # Rounds have drafts, and for b's text drafts are hardly worth their time here: few are tried.
    stack.wait_for(lambda: now(stack, 'honed_verify_rounds_total{workload="b"}') > 0, "the second workload")


def test_bad_weights_are_rolled_back_and_alertmanager_hears_of_it(stack: Stack) -> None:
    version = stack.spoilt_version()
    promoted = stack.operation(f"/v1/drafters/{version}:promote", {"reason": "a test"})
    assert promoted["state"] == "succeeded", promoted
    stack.wait_for(lambda: now(stack, 'honed_rollbacks_total{reason="canary"}') == 1, "the canary's verdict", 180.0)

    def told() -> list[dict[str, Any]]:
        return [a for a in stack.alertmanager.alerts() if a["labels"]["alertname"] == "HonedRolledBack"]

    alerts = stack.wait_for(told, "the alert")
    assert alerts[0]["labels"]["reason"] == "canary"
    assert alerts[0]["annotations"]["runbook"].startswith("1. ")
    assert alerts[0]["status"]["state"] == "active"
