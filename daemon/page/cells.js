// Figures as text, in lists and tables. Figures that tests compare with the API carry data-figure.

const by_id = (id) => document.getElementById(id);
const NONE = "–";

const number = (value, digits) =>
  value === null || value === undefined || !Number.isFinite(value)
    ? NONE
    : value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const count = (value) => number(value, 0);
const percent = (value, digits = 1) => (value === null || value === undefined ? NONE : `${number(100 * value, digits)} %`);
/** An e-value by its log10, as odds. */
const odds = (log10) => {
  if (log10 === null || log10 === undefined) return NONE;
  const times = 10 ** Math.min(Math.abs(log10), 6), shown = `${Math.abs(log10) > 6 ? "over " : ""}${number(times, times < 9.95 ? 1 : 0)}`;
  return log10 < 0 ? `1 : ${shown}` : `${shown} : 1`;
};
const seconds = (value) => {
  if (value === null || value === undefined) return NONE;
  if (value < 1) return `${number(1000 * value, 1)} ms`;
  if (value < 120) return `${number(value, 1)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return value < 172800 ? `${Math.round(value / 3600)} h` : `${Math.round(value / 86400)} days`;
};
const bytes = (value) => {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  for (; value >= 1024 && at < 4; at += 1) value /= 1024;
  return `${number(value, at ? 1 : 0)} ${units[at]}`;
};

function figure(name, text, className) {
  const node = make("dd", className, text);
  node.dataset.figure = name;
  return node;
}

function facts(host, rows) {
  host.replaceChildren(...rows.flatMap(([term, name, text, className]) => [make("dt", "", term), figure(name, text, className)]));
}

function table(head, rows, caption) {
  const made = make("table", "");
  made.append(make("caption", "quiet", caption));
  const top = made.createTHead().insertRow();
  for (const [text, is_number] of head) {
    const cell = make("th", is_number ? "number" : "", text);
    cell.scope = "col";
    top.append(cell);
  }
  const body = made.createTBody();
  for (const row of rows) {
    const line = body.insertRow();
    row.forEach((value, i) => {
      const cell = line.insertCell();
      if (head[i][1]) cell.className = "number";
      if (head[i][2]) cell.className = "wrap";
      cell.append(value instanceof Node ? value : String(value));
    });
  }
  return made;
}

/** The figures of a plot as a table, for people who can't see it or want to copy them. */
function alternative(host, head, rows, caption) {
  const more = make("details", ""), box = make("div", "");
  box.tabIndex = 0;
  more.append(make("summary", "", "Figures as a table"), box);
  more.addEventListener("toggle", () => { if (more.open) box.replaceChildren(table(head, rows(), caption)); });
  host.append(more);
}

function keep_open(host, draw) {
  const is_open = host.querySelector("details")?.open || false;
  draw();
  const more = host.querySelector("details");
  if (more && is_open) more.open = true;
}

