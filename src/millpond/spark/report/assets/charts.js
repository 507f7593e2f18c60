"use strict";
// Functions that draw the page. Every text from the data goes through textContent, and is never markup.

const SECOND = 1000, MINUTE = 60 * SECOND, HOUR = 60 * MINUTE, DAY = 24 * HOUR;
const STEPS = [1, 5, 10, 15, 30].map((n) => n * SECOND).concat([1, 5, 10, 15, 30].map((n) => n * MINUTE),
  [1, 3, 6, 12].map((n) => n * HOUR), [1, 2, 7, 14, 28, 91, 364].map((n) => n * DAY));
const DECADES = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 1, 10, 60, 600, 3600, 36000, 86400, 864000, 8640000, 86400000];

function make(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

function draw(name, attributes = {}, ...children) {
  return fill(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined) element.append(child);
  }
  return element;
}

// --- numbers, durations, moments ---------------------------------------------------------------------

const count = (value) => value === null ? "–" : value.toLocaleString("en");
const precise = (value) => Number(value.toPrecision(3)).toLocaleString("en", { maximumFractionDigits: 6 });

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds === 0) return "0 s";
  const units = [[1e-3, 1e6, "µs"], [1, 1e3, "ms"], [120, 1, "s"], [7200, 1 / 60, "min"], [172800, 1 / 3600, "h"]];
  const found = units.find(([below]) => seconds < below);
  return found ? `${precise(seconds * found[1])} ${found[2]}` : `${precise(seconds / 86400)} d`;
}

function decade(seconds) {
  const names = { 60: "1 min", 600: "10 min", 3600: "1 h", 36000: "10 h", 86400: "1 d", 864000: "10 d", 8640000: "100 d" };
  return names[seconds] ?? duration(seconds);
}

const two = (value) => String(value).padStart(2, "0");
const date = (ms) => new Date(ms).toLocaleDateString("en", { timeZone: "UTC", month: "short", day: "numeric" });

function time(ms, seconds) {
  const at = new Date(ms);
  return `${two(at.getUTCHours())}:${two(at.getUTCMinutes())}${seconds ? `:${two(at.getUTCSeconds())}` : ""}`;
}

const moment = (ms) => `${new Date(ms).toISOString().slice(0, 10)} ${time(ms, true)}`;

// --- tooltips ----------------------------------------------------------------------------------------

const tip = document.getElementById("tip");

function showTip(event, title, lines) {
  tip.replaceChildren(make("b", {}, title), ...lines.map(([kind, text]) =>
    make("div", {}, kind ? make("i", { class: kind }) : null, text)));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = event.clientX + 16 + width > innerWidth ? event.clientX - 16 - width : event.clientX + 16;
  tip.style.left = `${Math.max(4, Math.min(left, innerWidth - width - 4))}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY - height / 2, innerHeight - height - 4))}px`;
}

const hideTip = () => { tip.hidden = true; };
addEventListener("scroll", hideTip, { passive: true });

// --- charts over time --------------------------------------------------------------------------------

const MARGIN = { top: 10, right: 10, bottom: 30, left: 62 };

function niceTicks(highest) {
  const raw = highest / 4, power = 10 ** Math.floor(Math.log10(raw));
  const step = Math.max(1, [1, 2, 5, 10].map((n) => n * power).find((n) => n >= raw));
  return Array.from({ length: Math.ceil(highest / step) + 1 }, (_, n) => n * step);
}

// A scale has ticks, a label for each, and the height of a value between 0 and 1.
function countScale(rows, kinds) {
  const ticks = niceTicks(Math.max(1, ...rows.map((row) => kinds.reduce((sum, kind) => sum + kind.of(row), 0))));
  const top = ticks[ticks.length - 1];
  return { ticks, label: count, height: (value) => value / top };
}

function durationScale(rows, kinds) {
  const values = rows.flatMap((row) => kinds.map((kind) => kind.of(row))).filter((value) => value > 0);
  const low = Math.max(DECADES.findLastIndex((tick) => tick <= Math.min(...values)), 0);
  const high = Math.max(DECADES.findIndex((tick) => tick >= Math.max(...values)), low + 1);
  const ticks = values.length ? DECADES.slice(low, high + 1) : [1e-3, 1];
  const [bottom, top] = [Math.log(ticks[0]), Math.log(ticks[ticks.length - 1])];
  return { ticks, label: decade, height: (value) => Math.max(0, (Math.log(Math.max(value, ticks[0])) - bottom) / (top - bottom)) };
}

// rows: [{ms, …}] in the order of time. kinds: [{name, kind, of(row)}]. paint(plot, row places) draws the marks.
function timeChart(place, { rows, kinds, every, scale, label, paint, format }) {
  const from = rows[0].ms, until = rows[rows.length - 1].ms + every;
  const chart = draw("svg", { class: "chart", role: "img", "aria-label": label });
  place.append(chart);

  function render() {
    const width = Math.max(place.clientWidth, 240), height = 230;
    const inner = { width: width - MARGIN.left - MARGIN.right, height: height - MARGIN.top - MARGIN.bottom };
    const x = (ms) => MARGIN.left + (ms - from) / (until - from) * inner.width;
    const y = (value) => MARGIN.top + (1 - scale.height(value)) * inner.height;
    const base = MARGIN.top + inner.height;
    fill(chart, { viewBox: `0 0 ${width} ${height}`, height }, []);
    chart.replaceChildren();
    for (const tick of scale.ticks) {
      chart.append(draw("line", { class: "grid-line", x1: MARGIN.left, x2: width - MARGIN.right, y1: y(tick), y2: y(tick) }),
        draw("text", { x: MARGIN.left - 8, y: y(tick) + 4, "text-anchor": "end" }, scale.label(tick)));
    }
    chart.append(draw("line", { class: "base", x1: MARGIN.left, x2: width - MARGIN.right, y1: base, y2: base }));
    chart.append(...timeTicks(from, until, every, inner.width).map(([ms, text]) =>
      draw("text", { x: x(ms), y: base + 19, "text-anchor": "middle" }, text)));
    const band = Math.max(inner.width * every / (until - from), 0.5);
    const guide = draw("line", { class: "guide", y1: MARGIN.top, y2: base });
    chart.append(guide, ...paint({ x, y, base, band }));

    function point(event) {
      const box = chart.getBoundingClientRect();
      const ms = from + ((event.clientX - box.left) * width / box.width - MARGIN.left) / inner.width * (until - from);
      const row = rows.reduce((best, one) =>
        Math.abs(one.ms + every / 2 - ms) < Math.abs(best.ms + every / 2 - ms) ? one : best);
      const middle = x(row.ms + every / 2);
      fill(guide, { x1: middle, x2: middle }, []);
      guide.style.visibility = "visible";
      showTip(event, `${moment(row.ms)} UTC`, kinds.map((kind) => [kind.kind, `${kind.name}: ${format(kind.of(row))}`]));
    }

    chart.onpointermove = point;
    chart.onpointerdown = point;
    chart.onpointerleave = () => { guide.style.visibility = "hidden"; hideTip(); };
  }

  render();
  return render;
}

function timeTicks(from, until, every, width) {
  const most = Math.max(2, Math.floor(width / 90));
  const step = STEPS.find((one) => one >= every && (until - from) / one <= most) ?? STEPS[STEPS.length - 1];
  const ticks = [];
  for (let ms = Math.ceil(from / step) * step; ms < until; ms += step) {
    ticks.push([ms, ms % DAY ? time(ms, step < MINUTE) : date(ms)]);
  }
  return ticks;
}

function stackedBars(rows, kinds, every) {
  return ({ x, y, base, band }) => rows.flatMap((row) => {
    let below = 0;
    const width = Math.min(Math.max(band - (band > 6 ? 2 : band > 3 ? 0.5 : 0), 0.5), 72);
    return kinds.filter((kind) => kind.of(row) > 0).map((kind) => {
      const bottom = y(below), top = y(below += kind.of(row));
      return draw("rect", { class: `mark ${kind.kind}`, x: x(row.ms) + (band - width) / 2, width, y: top,
        height: Math.max(bottom - top, 1), rx: band > 10 ? 2 : 0 });
    });
  });
}

function lines(rows, kinds, every) {
  return ({ x, y, band }) => kinds.flatMap((kind) => {
    const known = rows.filter((row) => kind.of(row) !== null);
    const places = known.map((row) => [x(row.ms + every / 2), y(kind.of(row))]);
    // A period without messages breaks the line.
    const steps = places.map(([a, b], n) => `${n && known[n].ms - known[n - 1].ms <= every ? "L" : "M"}${a.toFixed(1)} ${b.toFixed(1)}`);
    const path = draw("path", { class: `mark line ${kind.kind}`, d: steps.join("") });
    const dots = band > 8 ? places.map(([a, b]) => draw("circle", { class: `mark ${kind.kind}`, cx: a, cy: b, r: 2.5 })) : [];
    return steps.length ? [path, ...dots] : [];
  });
}

// --- bars and tables ---------------------------------------------------------------------------------

// rows: [{name, parts: [[kind, number]], text, title, lines}]
function bars(rows) {
  const most = Math.max(...rows.map((row) => row.parts.reduce((sum, [, value]) => sum + value, 0)), 1e-9);
  return make("div", { class: "bars" }, rows.map((row) => {
    const track = make("div", { class: "track" }, row.parts.filter(([, value]) => value > 0).map(([kind, value]) => {
      const part = make("div", { class: `mark ${kind}` });
      part.style.width = `${value / most * 100}%`;
      return part;
    }));
    const bar = make("div", { class: "bar" }, make("span", { class: "name" }, row.name), make("span", { class: "value" }, row.text), track,
      (row.below ?? []).filter(([, text]) => text).map(([kind, text]) => make("span", { class: `below ${kind}` }, text)));
    bar.onpointermove = (event) => showTip(event, row.title, row.lines);
    bar.onpointerleave = hideTip;
    return bar;
  }));
}

// columns: [{head, of(row), kind, group}]; neighbours of one group share a head.
function table(rows, columns) {
  const head = ({ head, kind }) => make("th", { class: kind === "id" ? "text" : kind }, head);
  const groups = columns.filter((column, n) => !n || !column.group || column.group !== columns[n - 1].group).map((column) => {
    const size = column.group ? columns.filter((one) => one.group === column.group).length : 1;
    return make("th", { class: "group", colspan: size }, column.group ?? "");
  });
  return make("div", { class: "scroll" }, make("table", {},
    make("thead", {}, columns.some((column) => column.group) ? make("tr", {}, groups) : null, make("tr", {}, columns.map(head))),
    make("tbody", {}, rows.map((row) => make("tr", {}, columns.map(({ of, kind }) => {
      const text = of(row);
      return make("td", { class: kind, title: kind === "text" ? text : null }, text);
    }))))));
}
