// Fetches page.json every few seconds and shows it.

const REFRESH_MS = 4000, TIMEOUT_MS = 8000, LATE_MS = 15000;

function show() {
  const found = view.found;
  if (!found) return;
  for (const part of [show_state, show_length, show_positions, show_load, show_engines, show_workloads, show_versions, show_training,
    show_events, show_marks]) part(found);
  document.body.dataset.shown = String(found.t);
  tell(); // figures drawn anew, as at another width, may be old
}

/** Says how old the figures are. When the daemon is silent, a banner, the title and the figures' colour say so. */
function tell() {
  if (document.hidden) return;
  const age = Date.now() - view.at, is_gone = Boolean(view.error) || Date.now() - view.heard > LATE_MS;
  const ago = `${seconds(age / 1000)} ago`;
  by_id("updated").textContent = is_gone ? "Not up to date." : age < 1500 ? "Updated just now." : `Updated ${ago}.`;
  by_id("updated").className = is_gone ? "bad" : "";
  document.title = is_gone ? "✗ honed: no answer" : "honed";
  document.body.classList.toggle("gone", is_gone);
  by_id("gone").hidden = !is_gone;
  const since = view.at ? `The figures below are of ${new Date(view.at).toLocaleTimeString("en-GB")}, ${ago}.` : "";
  if (!is_gone) return;
  by_id("gone-why").textContent = `honed doesn't answer: ${view.error || "nothing has come for a while"}. ${since}`;
  if (view.found) by_id("about").textContent = `${view.found.status.version}, no answer`;
}

/** True while the pointer is on a plot or a table is open: it must not be redrawn then. */
const is_in_use = () => document.querySelector(".chart:hover, details[open]:hover, details:focus-within") !== null;

async function refresh() {
  const asked = view.window;
  view.heard ||= Date.now();
  try {
    const answer = await fetch(`page.json?window=${asked}`, { cache: "no-store", signal: AbortSignal.timeout(TIMEOUT_MS) })
      .catch((error) => { throw new Error(error.name === "TimeoutError" ? "it is silent" : "nothing listens there"); });
    const found = await answer.json();
    if (!answer.ok) throw new Error(found.detail || `HTTP ${answer.status}`);
    Object.assign(view, { heard: Date.now(), error: "" });
    if (asked !== view.window || (view.found && view.found.window === asked && is_in_use())) return;
    Object.assign(view, { found, at: Date.now() });
    show();
  } catch (error) {
    view.error = error.message;
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
