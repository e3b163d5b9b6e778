"""The daemon's own dashboard: incoming events, database and process."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from honed.dashboards.make.frame import board
from honed.dashboards.make.panels import Panel, number, plot, timeline
from honed.dashboards.make.queries import ENGINE, JOB, quantile, rate


def daemon() -> dashboard.Dashboard:
    """Make the dashboard of the daemon's health."""
    text = "The daemon's incoming events, its database, its disk and its process."
    rows = [("Now", now()), ("Events", events()), ("Database", database()), ("Process", process())]
    return board("Daemon", text, rows)


def now() -> list[Panel]:
    """Present values."""
    age = f"time() - honed_start_time_seconds{{{JOB}}}"
    silent = f"time() - honed_last_event_timestamp_seconds{{{JOB}}}"
    free = f"honed_disk_free_bytes{{{JOB}}} / (honed_disk_size_bytes{{{JOB}}} > 0)"
    return [
        number("Up", "Scrapes that succeed.", [(f"up{{{JOB}}}", "{{instance}}")]),
        number("Running for", "Time since the daemon's start.", [(age, "{{instance}}")], unit="s"),
        number("Since the last event", "Grows without traffic.", [(silent, "{{instance}}")], unit="s"),
        number("Disk free", "Share of the state directory's filesystem.", [(free, "{{instance}}")], unit="percentunit"),
        number("Database errors", "Refusals by the database.", [(f"honed_db_errors_total{{{JOB}}}", "{{instance}}")], worst=1),
        number("Version", "Of honed.", [(f"honed_build_info{{{JOB}}}", "{{version}}")], shows_name=True),
    ]


def events() -> list[Panel]:
    """Arrival of events."""
    return [
        plot(
            "Events",
            "Verify rounds a second that reached the daemon, and batches a second (right axis).",
            [
                (rate("honed_events_received_total", "job", JOB), "rounds/s"),
                (rate("honed_event_batches_received_total", "job", JOB), "batches/s (right)"),
            ],
            low=0,
            right="B",
        ),
        plot(
            "Queues",
            "Batches waiting to be committed, and bytes waiting in engines (right axis).",
            [
                (f"honed_event_queue_length{{{JOB}}}", "batches {{instance}}"),
                (f"max by (engine) (honed_engine_queue_bytes{{{ENGINE}}})", "bytes {{engine}} (right)"),
            ],
            low=0,
            right="B",
        ),
        plot(
            "Lag",
            "Age of the latest batch when it arrived.",
            [(f"honed_event_lag_seconds{{{JOB}}}", "{{instance}}")],
            unit="s",
            low=0,
        ),
        plot(
            "Not taken",
            "Per second: batches that were repeated, found no room, or were skipped by the controllers; their errors; frames "
            "by reason.",
            [
                (rate("honed_event_batches_duplicate_total", "job", JOB), "duplicate"),
                (rate("honed_event_batches_refused_total", "job", JOB), "no room"),
                (rate("honed_event_batches_not_learned_total", "job", JOB), "not learned from"),
                (rate("honed_controller_errors_total", "job", JOB), "controller errors"),
                (rate("honed_frames_rejected_total", "reason", JOB), "frame {{reason}}"),
            ],
            low=0,
        ),
        timeline(
            "Engines heard",
            "1 while the engine is connected to the daemon.",
            [(f"max by (model_name, engine) (honed_engine_connected{{{ENGINE}}})", "{{model_name}} {{engine}}")],
        ),
        timeline(
            "What runs where",
            "The daemon's version and its engines'.",
            [
                (f"honed_build_info{{{JOB}}}", "daemon {{instance}} {{version}}"),
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
                (quantile(0.5, "honed_db_commit_seconds", "job", JOB), "median"),
                (quantile(0.99, "honed_db_commit_seconds", "job", JOB), "p99"),
            ],
            unit="s",
            low=0,
        ),
        plot(
            "Size",
            "Size of the database with its log, and free space on its disk (right axis).",
            [
                (f"honed_db_size_bytes{{{JOB}}}", "database {{instance}}"),
                (f"honed_disk_free_bytes{{{JOB}}}", "free {{instance}} (right)"),
            ],
            unit="bytes",
            low=0,
            right="B",
        ),
        plot(
            "Trouble",
            "Refusals a second, and 1 while it refuses received events.",
            [
                (rate("honed_db_errors_total", "job", JOB), "errors/s"),
                (f"honed_db_failing{{{JOB}}}", "failing {{instance}}"),
            ],
            low=0,
        ),
    ]


def process() -> list[Panel]:
    """Cost of the daemon."""
    return [
        plot("CPU", "Cores used.", [(rate("honed_process_cpu_seconds_total", "instance", JOB), "{{instance}}")], low=0),
        plot("Memory", "Resident.", [(f"honed_process_resident_memory_bytes{{{JOB}}}", "{{instance}}")], unit="bytes", low=0),
        plot(
            "Requests",
            "HTTP requests a second, this scrape included.",
            [(rate("honed_admin_requests_total", "method, route, code", JOB), "{{method}} {{route}} {{code}}")],
            low=0,
        ),
        plot(
            "Controllers' rest",
            "Seconds since the controllers last ran; they run many times a second.",
            [(f"honed_tick_age_seconds{{{JOB}}}", "{{instance}}")],
            unit="s",
            low=0,
        ),
    ]
