// The parts of the page: each fills its section from the document of page.json.

const view = { window: "1h", workload: "", engine: "", found: null, at: 0, heard: 0, error: "" };

function show_state({ status, findings, engines_total, load }) {
  const lines = findings.length ? findings : [{ level: "fine", text: "All is well." }];
  const words = { error: "Error", warning: "Warning", fine: "OK" };
  by_id("findings").replaceChildren(...lines.map((one) => {
    const line = make("li", `finding ${one.level}`);
    // Text between backticks is code to type.
    line.append(make("b", "", words[one.level]), ...one.text.split("`").map((part, i) => (i % 2 ? make("code", "", part) : part)));
    return line;
  }));
  const recent = status.acceptance.last_minute, is_fresh = recent.rounds > 0;
  const shown = is_fresh ? recent : status.acceptance.total, when = is_fresh ? "last minute" : "all time";
  const speedups = load.map((one) => one.speedup).filter((one) => one !== null && one !== undefined);
  const lost = status.events.lost_rounds;
  const tiles = [
    ["Acceptance length", "acceptance_length", number(shown.acceptance_length, 2), when],
    ["Acceptance rate", "acceptance_rate", percent(shown.acceptance_rate), when],
    ["Draft tokens per round", "draft_tokens_per_round", number(shown.draft_tokens_per_round, 2), when],
    ["Tokens per second", "tokens_per_s", count(engines_total.tokens_per_s), "all engines"],
    ["Speed-up", "speedup", speedups.length ? `${number(Math.max(...speedups), 2)}×` : NONE, "estimated; baseline: no drafts"],
    ["Rounds lost", "lost_rounds", count(lost), `of ${count(status.acceptance.total.rounds + lost)}`, lost ? "bad" : "good"],
    ["Engines connected", "engines", `${engines_total.connected} of ${engines_total.engines}`, ""],
    ["Active drafter", "active", status.drafters.active || NONE, "", "name"],
  ];
  by_id("tiles").replaceChildren(...tiles.map(([term, name, text, small, className]) => {
    const tile = make("div", ""), value = figure(name, text, className || "");
    tile.append(make("dt", "", term), value);
    if (small) tile.append(make("small", "note", small));
    return tile;
  }));
  by_id("about").textContent = `${status.version}, ${status.state}, up ${seconds(status.uptime_s)}`;
}

const span_of = (found) => ({ x0: found.times[0], x1: found.times.at(-1) + found.step_s, gap: 1.5 * found.step_s });

function show_length(found) {
  const host = by_id("length"), { times, acceptance } = found;
  const series = acceptance.map((one, i) => ({
    name: one.workload, color: one.workload === "others" ? 7 : i + 1, points: times.map((t, at) => [t, one.length[at]]),
  }));
  const last = (points) => points.findLast((point) => point[1] !== null);
  const label = series.map((s) => `${s.name} ${last(s.points) ? number(last(s.points)[1], 2) : "none"}`).join(", ");
  keep_open(host, () => {
    const plot = make("div", "");
    host.replaceChildren(legend(series.map((s) => ({ ...s, value: last(s.points) ? number(last(s.points)[1], 2) : NONE }))), plot);
    line_chart(plot, {
      ...span_of(found), series, low: 1, least: 0.5, height: 240, marks: found.marks, y_text: (v) => number(v, 1),
      label: `Acceptance length over time; latest: ${label || "no rounds"}`, none: "No verify rounds in this span.",
    });
    alternative(host, [["time"], ["workload"], ["rounds", true], ["length", true], ["draft tokens", true]], () =>
      acceptance.flatMap((one) => times.map((t, i) => [clock(t, found.times.at(-1) - t + 1), one.workload, count(one.rounds[i]),
        number(one.length[i], 3), number(one.draft_tokens[i], 2)]).filter((row) => row[2] !== "0")), "Acceptance length by workload");
  });
}

function choose(id, names, present) {
  const select = by_id(id);
  if (names.join("\n") !== [...select.options].map((o) => o.value).join("\n")) {
    select.replaceChildren(...names.map((name) => { const o = make("option", "", name); o.value = name; return o; }));
  }
  const chosen = names.includes(present) ? present : names[0] || "";
  select.value = chosen;
  return chosen;
}

function show_positions(found) {
  const host = by_id("positions");
  view.workload = choose("workload", found.acceptance.map((one) => one.workload), view.workload);
  const one = found.acceptance.find((a) => a.workload === view.workload);
  const rows = one ? one.positions : [], means = one ? one.by_position : [];
  keep_open(host, () => {
    const plot = make("div", "");
    host.replaceChildren(plot);
    heat_chart(plot, {
      ...span_of(found), step: found.step_s, times: found.times, rows, means, text: (v) => percent(v, 0),
      label: `Acceptance of ${view.workload} by draft position, over the whole span: ${means.map((m, j) => `${j}: ${percent(m, 0)}`).join(", ")}`,
      none: "No verify rounds in this span.",
    });
    if (rows.length) host.append(make("p", "note", "Rows are draft positions, from 0; a stronger colour means more accepted. At the right: mean of the whole span."));
    alternative(host, [["position"], ["over the span", true], ["latest", true]], () =>
      rows.map((row, j) => [j, percent(means[j]), percent(row.findLast((v) => v !== null))]), "Acceptance by position");
  });
}

function show_load(found) {
  view.engine = choose("engine", found.load.map((one) => one.engine_id), view.engine);
  const one = found.load.find((l) => l.engine_id === view.engine) || { slots: [], plan: [] };
  const wide = span_of(found), x0 = Math.max(wide.x0, wide.x1 - 3600);
  const slots = one.slots.filter((slot) => slot[0] >= x0);
  const common = { x0, x1: wide.x1, gap: 15, low: 0, height: 150, y_text: (v) => number(v, v < 10 && v % 1 ? 1 : 0) };
  const column = (i) => slots.map((slot) => [slot[0], slot[i]]);
  const drafted = { name: "draft tokens a request", color: 1, points: column(2) };
  const budget = { name: "budget, nodes", color: 2, dashed: true, points: column(3) };
  const requests = { name: "requests in a step", color: 3, points: column(1) };
  const latest = (i, digits) => (slots.length ? number(slots.at(-1)[i], digits) : NONE);
  const host = by_id("lengths"), plot = make("div", "");
  host.replaceChildren(legend([{ ...drafted, value: latest(2, 2) }, { ...budget, value: latest(3, 0) }]), plot);
  line_chart(plot, { ...common, series: [drafted, budget], marks: found.marks.filter((m) => m.kind === "override"),
    label: `Draft tokens a request over time, latest ${latest(2, 2)}; budget ${latest(3, 0)} nodes`, none: "No steps in this span." });
  const below = by_id("requests");
  keep_open(below, () => {
    const lower = make("div", "");
    below.replaceChildren(legend([{ ...requests, value: latest(1, 1) }]), lower);
    line_chart(lower, { ...common, height: 120, series: [requests], label: `Requests in a step over time, latest ${latest(1, 1)}`, none: "No steps in this span." });
    alternative(below, [["time"], ["requests", true], ["draft tokens", true], ["budget", true]], () =>
      slots.map((slot) => [clock(slot[0], 0), number(slot[1], 2), number(slot[2], 2), count(slot[3])]), "Draft length and load");
  });
  const plan = by_id("plan");
  keep_open(plan, () => {
    const dots = make("div", "");
    plan.replaceChildren(legend([{ name: "measured", color: 1, is_dot: true }, { name: "plan", color: 2 }]), dots);
    const most = Math.max(8, ...slots.map((slot) => slot[1])) * 1.3;
    dot_chart(dots, { dots: slots.map((slot) => [slot[1], slot[2]]), line: one.plan.filter((p) => p[0] <= most), y_text: (v) => number(v, v % 1 ? 1 : 0),
      label: `Draft tokens a request by requests in a step; plan: ${one.plan.map(([n, k]) => `${n} requests ${number(k, 1)}`).join(", ") || "none yet"}`,
      none: "No steps in this span, and no plan yet." });
    plan.append(make("p", "note", `Step time predicted ${seconds(one.predicted_s)}, measured ${seconds(one.measured_s)}.`));
    alternative(plan, [["requests", true], ["draft tokens planned", true]], () => one.plan.map(([n, k]) => [n, number(k, 2)]), "Plan by batch size");
  });
}

function show_engines({ engines, engines_total, overrides }) {
  const head = [["engine"], ["connected"], ["model"], ["drafter"], ["running", true], ["waiting", true], ["tokens/s", true], ["k", true],
    ["policy"], ["decision p99", true]];
  const rows = engines.map((e) => {
    const heard = make("span", e.connected ? "good" : "bad", e.connected ? "yes" : "no");
    const policy = e.policy.fallback || e.policy.kind || NONE;
    return [e.engine_id, heard, e.model_name, e.drafter_version || NONE, count(e.num_running), count(e.num_waiting), count(e.tokens_per_s),
      `${number(e.draft_tokens_per_round, 2)} of ${e.num_spec_tokens}`, policy, `${count(e.decide_us_p99)} µs`];
  });
  by_id("engines").replaceChildren(rows.length ? table(head, rows, "Engines") : make("p", "none", "No engine has attached."));
  if (engines_total.engines > engines.length) by_id("engines").append(make("p", "note", `And ${engines_total.engines - engines.length} more.`));
  by_id("overrides").replaceChildren(...overrides.map((one) =>
    make("p", "warn", `Override ${one.name} = ${one.value}, for another ${seconds(one.ttl_s)}.`)));
}

function show_workloads({ workloads }) {
  const head = [["workload"], ["engine"], ["drafter"], ["rounds", true], ["length", true], ["rate", true], ["k", true], ["drift"], ["by position"]];
  const rows = workloads.map((w) => [w.workload, w.engine_id, w.drafter_version || NONE, count(w.rounds), number(w.acceptance_length, 2),
    percent(w.acceptance_rate), number(w.draft_tokens_per_round, 2), make("span", w.drift.state === "drifted" ? "bad" : "", w.drift.state),
    w.by_position.map((p) => number(100 * p, 0)).join(" ")]);
  by_id("workloads").replaceChildren(rows.length ? table(head, rows, "Workloads over the span") : make("p", "none", "No verify rounds in this span."));
}

function gain(g) {
  const change = (ratio) => `${ratio >= 1 ? "+" : "−"}${number(Math.abs(100 * (ratio - 1)), 1)}`;
  return `${g.workload || "all"} ${change(g.candidate / g.parent)} % (${change(g.gain_low)} … ${change(g.gain_high)})`;
}

function show_versions({ versions, trial, t }) {
  const rows = versions.map((v) => {
    const roles = make("span", "");
    for (const role of v.roles) roles.append(make("span", `badge ${role === "active" ? "good" : ""}`, role));
    return [v.version, roles, `${seconds(t - v.created_unix_s)} ago`, v.parent || NONE, v.gate.map(gain).join("; ") || NONE, v.watched || NONE];
  });
  const head = [["version"], ["role"], ["made"], ["parent"], ["gate: gain on held-out sessions", false, true], ["live", false, true]];
  by_id("versions").replaceChildren(rows.length ? table(head, rows, "Drafter versions") : make("p", "none", "No version is registered yet."));
  const host = by_id("trial");
  host.replaceChildren();
  if (!trial) return;
  const all = "all traffic";
  host.append(make("p", "", `${trial.new} is on trial against ${trial.old}; now serving: ${trial.serving}.`));
  const list = make("dl", "facts");
  for (const one of trial.workloads) {
    for (const says of ["worse", "better"]) {
      const value = one[`evidence_${says}`], bar = one[`bar_${says}`], meter = make("meter", "");
      Object.assign(meter, { min: 0, max: bar, value: Math.max(0, Math.min(bar, value)) });
      meter.setAttribute("aria-label", `evidence that it is ${says} on ${one.workload || all}`);
      const cell = figure(`evidence_${says}`, `${odds(value)}; decides at ${odds(bar)}`);
      cell.append(meter);
      list.append(make("dt", "", `${one.workload || all}: it is ${says}`), cell);
    }
  }
  host.append(list, make("p", "note", `${count(trial.rounds)} rounds in ${count(trial.pairs)} of at most ${count(trial.max_pairs)} pairs of windows. ${trial.text}`));
}

function show_training({ status, operation }) {
  const host = by_id("training"), trainer = status.trainer;
  host.replaceChildren();
  if (operation) {
    const detail = operation.detail;
    const [done, most] = detail.max_steps ? [detail.steps, detail.max_steps] : [detail.train_seconds || 0, detail.max_seconds || 0];
    host.append(make("p", "", `${operation.kind} is running: ${operation.stage}`));
    const bar = make("progress", "");
    bar.setAttribute("aria-label", "progress");
    if (most) Object.assign(bar, { max: most, value: Math.min(done, most) });
    host.append(bar);
  }
  if (!trainer) {
    host.append(make("p", "none", "No trainer is connected."));
    return;
  }
  const list = make("dl", "facts");
  host.append(list);
  facts(list, [
    ["State", "trainer_state", status.training_paused ? `paused (${trainer.state})` : trainer.state],
    ["Device", "trainer_device", trainer.device],
    ["Samples", "samples", `${count(trainer.samples)} of ${count(trainer.sessions)} sessions, ${bytes(trainer.samples_bytes)}${trainer.spilled_bytes ? ` and ${bytes(trainer.spilled_bytes)} on disk` : ""}`],
    ["Steps", "steps", `${count(trainer.steps)}${trainer.max_steps ? ` of ${count(trainer.max_steps)}` : ""}`],
    ["Loss", "loss", trainer.loss ? number(trainer.loss, 3) : NONE],
    ["Idle share", "idle_ratio", percent(trainer.idle_ratio, 0)],
    ["Yielded", "preemptions", `${count(trainer.preemptions)} times, p99 ${seconds(trainer.preemption_s_p99)}, of computing ${seconds(trainer.preemption_computing_s_p99)}`],
    ["Beside requests", "beside_duty", trainer.beside_duty ? `${percent(trainer.beside_duty, 1)} of their time; adds ${percent(trainer.beside_harm, 1)} to steps` : "never"],
  ]);
}

function show_events({ status }) {
  const e = status.events;
  facts(by_id("events"), [
    ["Rounds received, with and without drafts", "received_rounds", `${count(e.received_rounds)} in ${count(e.batches)} batches`],
    ["Rounds lost", "events_lost", count(e.lost_rounds), e.lost_rounds ? "bad" : "good"],
    ["Unreadable frames", "rejected_frames", count(e.rejected_frames)],
    ["Duplicate batches", "duplicate_batches", count(e.duplicate_batches)],
    ["Waiting to be committed", "queued_batches", count(e.queued_batches)],
    ["Lag", "lag_s", seconds(e.lag_s)],
    ["Rounds with drafts stored, all time", "total_rounds", count(status.acceptance.total.rounds)],
    ["Database", "store_bytes", bytes(status.store.bytes)],
  ]);
}

function show_marks({ marks }) {
  by_id("marks").replaceChildren(...[...marks].reverse().slice(0, 12).map((mark) => {
    const line = make("li", ""), when = make("time", "", new Date(mark.t * 1000).toLocaleString("en-GB"));
    when.dateTime = new Date(mark.t * 1000).toISOString();
    line.append(when, make("b", "", mark.kind), ` ${mark.text}${mark.engine_id ? ` (${mark.engine_id})` : ""}`);
    return line;
  }));
  if (!marks.length) by_id("marks").append(make("li", "none", "No swap, promotion, roll-back, drift or override in this span."));
}
