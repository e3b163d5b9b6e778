"""The daemon's own dashboard: incoming events, database and process."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from honed.dashboards.make.frame import board
from honed.dashboards.make.panels import Panel, number, plot, timeline
from honed.dashboards.make.queries import DAEMON, ENGINE, largest, new, quantile, rate


def daemon() -> dashboard.Dashboard:
    """Make the dashboard of the daemon's health."""
    text = "The daemon's incoming events, its database, its disk and its process."
    rows = [("Now", now()), ("Events", events()), ("Database", database()), ("Process", process())]
    return board("Daemon", text, rows)


def now() -> list[Panel]:
    """Present values."""
    age = f"time() - honed_start_time_seconds{{{DAEMON}}}"
    silent = f"time() - honed_last_event_timestamp_seconds{{{DAEMON}}}"
    free = f"honed_disk_free_bytes{{{DAEMON}}} / (honed_disk_size_bytes{{{DAEMON}}} > 0)"
    errors = new("honed_db_errors_total", "", DAEMON, "$__range")
    return [
        number("Up", "Scrapes that succeed.", [(f"up{{{DAEMON}}}", "")], good=1),
        number("Running for", "Time since the daemon's start.", [(age, "")], unit="s"),
        number("Since the last event", "Grows without traffic.", [(silent, "")], unit="s"),
        number("Disk free", "Share of the state directory's filesystem.", [(free, "")], unit="percentunit", good=0.05),
        number("Database errors", "Refusals by the database, in the time shown.", [(errors, "")], bad=1),
        number("Version", "Of honed.", [(f"honed_build_info{{{DAEMON}}}", "{{version}}")], shows_name=True),
    ]


def events() -> list[Panel]:
    """Arrival of events."""
    return [
        plot(
            "Events",
            "Verify rounds a second that reached the daemon, and batches a second (right axis).",
            [
                (rate("honed_events_received_total", "", DAEMON), "rounds"),
                (rate("honed_event_batches_received_total", "", DAEMON), "batches (right)"),
            ],
            unit="ops",
            low=0,
            right="B",
            right_unit="ops",
        ),
        plot(
            "Queues",
            "Batches waiting to be committed, and bytes waiting in engines (right axis).",
            [
                (f"honed_event_queue_length{{{DAEMON}}}", "batches"),
                (largest("honed_engine_queue_bytes", "engine"), "bytes {{engine}} (right)"),
            ],
            low=0,
            right="B",
            right_unit="bytes",
        ),
        plot(
            "Lag",
            "Age of the latest batch when it arrived.",
            [(f"honed_event_lag_seconds{{{DAEMON}}}", "")],
            unit="s",
            bad=5.0,
            low=0,
        ),
        plot(
            "Not taken",
            "Per second: batches that were repeated, came before an earlier one, found no room, or were skipped by the "
            "controllers; their errors; frames by reason.",
            [
                (rate("honed_event_batches_duplicate_total", "", DAEMON), "duplicate"),
                (rate("honed_event_batches_ahead_total", "", DAEMON), "ahead"),
                (rate("honed_event_batches_refused_total", "", DAEMON), "no room"),
                (rate("honed_event_batches_not_learned_total", "", DAEMON), "not learned from"),
                (rate("honed_controller_errors_total", "", DAEMON), "controller errors"),
                (rate("honed_frames_rejected_total", "reason", DAEMON), "frame {{reason}}"),
            ],
            unit="ops",
            low=0,
        ),
        timeline(
            "Engines heard",
            "1 while the engine is connected to the daemon.",
            [(largest("honed_engine_connected", "model_name, engine", ENGINE), "{{model_name}} {{engine}}")],
        ),
        timeline(
            "What runs where",
            "The daemon's version and its engines'.",
            [
                (f"honed_build_info{{{DAEMON}}}", "daemon {{version}}"),
                (f"honed_engine_info{{{ENGINE}}}", "{{engine}} {{version}}, vLLM {{vllm_version}}"),
            ],
        ),
    ]


def database() -> list[Panel]:
    """Storage of events."""
    return [
        plot(
            "Commits",
            "Time until a group of batches is safe on disk.",
            [
                (quantile(0.5, "honed_db_commit_seconds", "", DAEMON), "median"),
                (quantile(0.99, "honed_db_commit_seconds", "", DAEMON), "p99"),
            ],
            unit="s",
            low=0,
        ),
        plot(
            "Size",
            "Size of the database with its log, and free space on its disk (right axis).",
            [
                (f"honed_db_size_bytes{{{DAEMON}}}", "database"),
                (f"honed_disk_free_bytes{{{DAEMON}}}", "free (right)"),
            ],
            unit="bytes",
            low=0,
            right="B",
        ),
        plot(
            "Trouble",
            "Refusals a second, and 1 while it refuses events or states.",
            [
                (rate("honed_db_errors_total", "", DAEMON), "errors"),
                (f"honed_db_failing{{{DAEMON}}}", "failing (right)"),
            ],
            unit="ops",
            right="B",
            right_unit="short",
            low=0,
        ),
    ]


def process() -> list[Panel]:
    """Cost of the daemon."""
    return [
        plot("CPU", "Cores used.", [(rate("process_cpu_seconds_total", "", DAEMON), "")], low=0),
        plot("Memory", "Resident.", [(f"process_resident_memory_bytes{{{DAEMON}}}", "")], unit="bytes", low=0),
        plot(
            "Requests",
            "HTTP requests a second, this scrape included.",
            [(rate("honed_admin_requests_total", "method, route, code", DAEMON), "{{method}} {{route}} {{code}}")],
            unit="reqps",
            low=0,
        ),
        plot(
            "Controllers' rest",
            "Seconds since the controllers last ran; they run many times a second.",
            [(f"honed_tick_age_seconds{{{DAEMON}}}", "")],
            unit="s",
            low=0,
        ),
    ]
