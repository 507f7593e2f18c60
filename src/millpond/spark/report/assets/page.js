// Order of the page's parts. The data is a report's tables, as docs/reference/report.md describes them.

const data = JSON.parse(document.getElementById("data").textContent);
const main = document.getElementById("main");
const chooser = document.getElementById("queue");
const every = data.every_s * 1000;
const PERCENTILES = ["p50", "p90", "p99"];
const LISTED = 10;
const PERIOD = { 1: "second", 60: "minute", 3600: "hour", 86400: "day" }[data.every_s] ?? duration(data.every_s);
const OUTCOMES = ["completed", "failed"].map((name) => ({ name, kind: name, of: (row) => row[name] }));
const COUNTS = ["failed", "retries", "redeliveries"].map((name) => ({ head: name, of: (row) => count(row[name]) }));
const TIMES = ["waiting", "handling"].flatMap((which) => PERCENTILES.map((name) =>
  ({ head: name, group: `${which} time`, of: (row) => duration(row[`${which}_${name}_s`]) })));
const ALL = "all";
let renders = []; // of the charts that are shown: a chart takes its width from the page, so that it is drawn when it is there

for (const row of [...data.by_time, ...data.by_queue_and_time]) row.ms = Date.parse(row.at);

function card(title, { size, legend } = {}) {
  const names = legend?.map(({ kind, name }) => make("span", {}, make("i", { class: kind }), name));
  return make("section", { class: `card ${size ?? ""}` },
    make("div", { class: "head" }, make("h2", {}, title), names && make("div", { class: "legend" }, names)));
}

function empty(made, text) {
  made.append(make("p", { class: "empty" }, text));
  return made;
}

// Periods without messages are zeros: a gap in the rows must show as one.
function filled(rows) {
  const none = { settled: 0, completed: 0, failed: 0, retries: 0, redeliveries: 0 };
  const found = [];
  for (const row of rows) {
    while (found.length && found.length < 5000 && row.ms - found[found.length - 1].ms > every) {
      found.push({ ...none, ms: found[found.length - 1].ms + every });
    }
    found.push(row);
  }
  return found;
}

function overTime(title, rows, { kinds, scale, paint, format, size, label, none }) {
  const made = card(title, { size, legend: kinds });
  const there = scale === countScale ? (value) => value > 0 : (value) => value !== null;
  if (!rows.some((row) => kinds.some((kind) => there(kind.of(row))))) return empty(made, none);
  const chart = { rows, kinds, every, label, format, scale: scale(rows, kinds), paint: paint(rows, kinds, every) };
  const place = make("div");
  made.append(place);
  renders.push(() => timeChart(place, chart));
  return made;
}

function throughput(rows) {
  return overTime(`Settled messages per ${PERIOD}`, rows, {
    size: "wide", scale: countScale, paint: stackedBars, format: count, none: "No message was settled in this time.",
    label: "Settled messages over time, completed and failed",
    kinds: OUTCOMES,
  });
}

function percentiles(which, title, rows) {
  return overTime(title, rows, {
    scale: durationScale, paint: lines, format: duration, none: "No such time was measured.", label: `${title}, percentiles over time`,
    kinds: PERCENTILES.map((name) => ({ name, kind: name, of: (row) => row[`${which}_${name}_s`] ?? null })),
  });
}

function again(rows) {
  return overTime(`Retries and other redeliveries per ${PERIOD}`, rows, {
    scale: countScale, paint: stackedBars, format: count, none: "Every message was done with one delivery.",
    label: "Retries and redeliveries over time",
    kinds: [{ name: "retries", kind: "retry", of: (row) => row.retries },
      { name: "other redeliveries", kind: "again", of: (row) => Math.max(0, row.redeliveries - row.retries) }],
  });
}

function failures(rows) {
  const made = card("What fails");
  if (!rows.length) return empty(made, "Nothing failed.");
  made.append(bars(rows.slice(0, LISTED).map((row) => ({
    name: `${row.queue} · ${row.reason ?? "no reason"}`, parts: [["failed", row.failed]], text: count(row.failed), title: row.reason ?? "no reason",
    below: [["error", row.error ?? row.exception ?? ""], ["id", `for example ${row.example_id}`]],
    lines: [[null, row.queue], ["failed", `${count(row.failed)} failed`],
      [null, `from ${moment(Date.parse(row.first_at))} to ${moment(Date.parse(row.last_at))}`], [null, row.error ?? ""]],
  }))));
  const rest = rows.slice(LISTED).reduce((sum, row) => sum + row.failed, 0);
  if (rest) made.append(make("p", { class: "note" }, `and ${count(rest)} in ${count(rows.length - LISTED)} other groups`));
  return made;
}

function slowest(rows) {
  const made = card("What is slow: the longest handling times", { legend: OUTCOMES });
  if (!rows.length) return empty(made, "No handler ran in this time.");
  made.append(bars(rows.slice(0, LISTED).map((row) => ({
    name: row.queue, parts: [[row.state.toLowerCase(), row.handling_s]], text: duration(row.handling_s), title: row.id,
    below: [["id", row.id]],
    lines: [[null, row.queue], [row.state.toLowerCase(), `${row.state}${row.reason ? `: ${row.reason}` : ""}`],
      [null, `ran ${duration(row.handling_s)}, waited ${duration(row.waiting_s)}`],
      [null, `${count(row.deliveries)} deliveries, ${count(row.attempts)} attempts, ${moment(Date.parse(row.archived_at))}`],
      [null, row.error ?? ""]],
  }))));
  return made;
}

function poisonous(rows) {
  const made = card("Poisonous messages: two or more deliveries without a result", { size: "wide" });
  if (!rows.length) return empty(made, "None: no message was lost to crashes twice.");
  made.append(table(rows.slice(0, LISTED), [
    { head: "queue", of: (row) => row.queue, kind: "text" }, { head: "id", of: (row) => row.id, kind: "id" },
    { head: "state", of: (row) => row.state, kind: "text" }, { head: "deliveries", of: (row) => count(row.deliveries) },
    { head: "attempts", of: (row) => count(row.attempts) }, { head: "reason", of: (row) => row.reason ?? "", kind: "text" },
    { head: "last error", of: (row) => row.error ?? "", kind: "text" },
  ]));
  return made;
}

function backlog(rows) {
  const kinds = [{ name: "pending", kind: "pending" }, { name: "retryable", kind: "retry" }, { name: "processing", kind: "completed" }];
  const made = card("Waiting and at work now", { legend: kinds });
  if (!rows.length) return empty(made, "Nothing waits.");
  const size = (row) => row.pending + row.retryable + row.processing;
  made.append(bars([...rows].sort((a, b) => size(b) - size(a)).slice(0, LISTED).map((row) => ({
    name: row.queue, parts: kinds.map(({ name, kind }) => [kind, row[name]]),
    text: count(size(row)), title: row.queue,
    below: [["", row.overdue_s === null ? "" : `oldest due ${duration(row.overdue_s)} ago`]],
    lines: [...kinds.map(({ name, kind }) => [kind, `${count(row[name])} ${name}`]), [null, `${count(row.due)} due, ${count(row.scheduled)} later`],
      [null, `${count(row.suspect)} suspect`]],
  }))));
  return made;
}

function queues(rows) {
  const made = card("Queues", { size: "wide" });
  if (!rows.length) return empty(made, "No message was settled in this time.");
  made.append(table(rows, [{ head: "queue", of: (row) => row.queue, kind: "text" },
    { head: "settled", of: (row) => count(row.settled) }, ...COUNTS, ...TIMES]));
  return made;
}

function periods(rows) {
  return make("details", {}, make("summary", {}, "The same as a table"), table(rows.filter((row) => row.settled), [
    { head: "from (UTC)", of: (row) => moment(row.ms), kind: "text" }, { head: "completed", of: (row) => count(row.completed) },
    ...COUNTS, ...TIMES]));
}

function tiles(row, live) {
  const tile = (text, name, bad) => make("div", { class: bad ? "tile bad" : "tile" },
    make("b", { class: text.length > 9 ? "long" : null }, text), make("span", {}, name));
  const waiting = live?.reduce((sum, one) => sum + one.pending + one.retryable, 0);
  const share = row && row.settled ? `failed (${precise(row.failed / row.settled * 100)} %)` : "failed";
  return make("div", { class: "tiles" }, row ? [
    tile(count(row.settled), row.per_second === null ? "settled" : `settled (${Number(row.per_second.toPrecision(4)).toLocaleString("en")} per second)`),
    tile(count(row.failed), share, row.failed > 0), tile(count(row.retries), `retries of ${count(row.retried)} messages`),
    tile(count(row.redeliveries), "redeliveries"),
    tile(duration(row.waiting_p50_s), `median waiting, p99 ${duration(row.waiting_p99_s)}`),
    tile(duration(row.handling_p50_s), `median handling, p99 ${duration(row.handling_p99_s)}`),
  ] : [tile("0", "settled")], live ? tile(count(waiting), "waiting now") : null);
}

function show() {
  const queue = chooser.value === ALL ? null : data.names[Number(chooser.value)];
  const of = (rows) => queue === null ? rows : rows.filter((row) => row.queue === queue);
  const rows = filled(queue === null ? data.by_time : of(data.by_queue_and_time));
  const live = data.backlog && of(data.backlog);
  renders = [];
  const first = throughput(rows);
  if (rows.length) first.append(periods(rows));
  main.replaceChildren(tiles(queue === null ? data.summary : of(data.by_queue)[0] ?? null, live), make("div", { class: "grid" },
    failures(of(data.failures)), slowest(of(data.slowest)), queues(of(data.by_queue)), first,
    percentiles("waiting", "Waiting time", rows), percentiles("handling", "Handling time", rows),
    again(rows), live ? backlog(live) : null, poisonous(of(data.poisonous)), data.left_out ? make("p", { class: "note" }, data.left_out) : null));
  renders = renders.map((render) => render());
}

// --- choices of the reader ---------------------------------------------------------------------------

chooser.append(make("option", { value: ALL }, "all queues"), ...data.names.map((name, n) => make("option", { value: n }, name)));
chooser.onchange = show;
document.getElementById("source").textContent = data.source;
document.getElementById("scope").textContent = data.scope;

const button = document.getElementById("theme");
const dark = matchMedia("(prefers-color-scheme: dark)");
const isDark = () => (document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark";
const nameIt = () => { button.textContent = isDark() ? "☀ Light" : "☾ Dark"; };
button.onclick = () => {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  nameIt();
};
dark.addEventListener("change", nameIt);
nameIt();

let drawn = 0;
addEventListener("resize", () => {
  cancelAnimationFrame(drawn);
  drawn = requestAnimationFrame(() => renders.forEach((render) => render()));
});
show();
