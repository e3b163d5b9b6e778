// Fetches page.json every few seconds and shows it.

const REFRESH_MS = 5000;
const LATE_MS = 20000;

function show() {
  const found = view.found;
  if (!found) return;
  for (const part of [show_state, show_length, show_positions, show_load, show_engines, show_workloads, show_versions, show_training,
    show_events, show_marks]) part(found);
  document.body.dataset.shown = String(found.t);
}

function tell() {
  const age = Date.now() - view.at;
  const late = view.error || age > LATE_MS;
  by_id("updated").className = late ? "bad" : "";
  by_id("updated").textContent = view.error ? `Not up to date: ${view.error}` : age < 1500 ? "Updated just now." : `Updated ${Math.round(age / 1000)} s ago.`;
}

/** True while the pointer is on a plot or a table is open: it must not be redrawn then. */
const is_in_use = () => document.querySelector(".chart:hover, details[open]:hover, details:focus-within") !== null;

async function refresh() {
  const asked = view.window;
  try {
    const answer = await fetch(`page.json?window=${asked}`, { cache: "no-store" });
    const found = await answer.json();
    if (!answer.ok) throw new Error(found.detail || `HTTP ${answer.status}`);
    if (asked !== view.window || (view.found && view.found.window === asked && is_in_use())) return;
    Object.assign(view, { found, at: Date.now(), error: "" });
    show();
  } catch (error) {
    view.error = error.message === "Failed to fetch" ? "the daemon doesn't answer" : error.message;
  }
  tell();
}

for (const button of document.querySelectorAll("[data-window]")) {
  button.addEventListener("click", () => {
    view.window = button.dataset.window;
    for (const other of document.querySelectorAll("[data-window]")) other.setAttribute("aria-pressed", String(other === button));
    refresh();
  });
}
by_id("workload").addEventListener("change", (event) => { view.workload = event.target.value; show(); });
by_id("engine").addEventListener("change", (event) => { view.engine = event.target.value; show(); });
addEventListener("resize", () => { clearTimeout(view.resizing); view.resizing = setTimeout(show, 150); });
document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
setInterval(() => { if (!document.hidden) refresh(); }, REFRESH_MS);
setInterval(tell, 1000);
refresh();
