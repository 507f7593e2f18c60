"use strict";
// Colours, live pages and selections. Every page works without this file; nothing here makes markup of data.

const root = document.documentElement;

function chosenTheme() {
  try { return localStorage.getItem("millpond-theme"); } catch { return null; }
}
if (["light", "dark"].includes(chosenTheme())) root.dataset.theme = chosenTheme();

// --- live ---------------------------------------------------------------------------------------------

// Make `old` like `fresh`, and leave equal parts alone: focus, selections and open details stay.
function morph(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) return old.replaceWith(fresh);
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
    return;
  }
  if ((old.dataset.key ?? "") !== (fresh.dataset.key ?? "")) return old.replaceWith(fresh);
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name) && !kept(old, name)) old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (old.getAttribute(name) !== value && !kept(old, name)) old.setAttribute(name, value);
  }
  const before = [...old.childNodes], after = [...fresh.childNodes];
  after.forEach((child, n) => { if (n < before.length) morph(before[n], child); else old.append(child); });
  before.slice(after.length).forEach((child) => child.remove());
}

const kept = (element, name) => (element.nodeName === "DETAILS" && name === "open") || name === "disabled";

let refreshing = false, missed = false;

async function refresh() {
  if (document.hidden || refreshing) { missed = true; return; }
  refreshing = true; missed = false;
  try {
    const reply = await fetch(location.href, { headers: { accept: "text/html" }, cache: "no-store" });
    if (reply.status === 401 || reply.status === 403) return location.reload();
    if (!reply.ok) return show("off", "The server answers with an error");
    const page = new DOMParser().parseFromString(await reply.text(), "text/html");
    const main = page.querySelector("main");
    if (main) morph(document.querySelector("main"), main);
    selected();
    show("on", "Live");
  } catch {
    show("off", "No connection, trying again");
  } finally {
    refreshing = false;
    if (missed && !document.hidden) setTimeout(refresh, 1000);
  }
}

function show(kind, text) {
  const place = document.getElementById("live");
  if (!place || place.textContent === text) return;
  place.className = `live muted ${kind}`;
  place.textContent = text;
}

function live(address) {
  let source = null;
  const begin = () => {
    if (source || document.hidden) return;
    source = new EventSource(address);
    source.onopen = () => { show("on", "Live"); };
    source.onerror = () => {
      show("off", "No connection, trying again");
      if (source?.readyState === EventSource.CLOSED) { source = null; setTimeout(begin, 5000); }
    };
    source.addEventListener("refresh", refresh);
    source.addEventListener("again", () => { source?.close(); source = null; begin(); });
  };
  const end = () => { source?.close(); source = null; };
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) return end();
    begin();
    refresh();
  });
  addEventListener("pagehide", end);
  addEventListener("pageshow", begin);
  begin();
}

// --- selections -----------------------------------------------------------------------------------------

function selected() {
  for (const form of document.querySelectorAll("form[data-select]")) {
    const boxes = [...form.querySelectorAll("input[data-messages]")];
    const chosen = boxes.filter((box) => box.checked);
    const number = chosen.reduce((sum, box) => sum + Number(box.dataset.messages), 0);
    form.querySelector("[data-chosen]").textContent = chosen.length
      ? `${number.toLocaleString("en")} ${number === 1 ? "message" : "messages"} selected` : "Nothing selected";
    form.querySelector("[data-submit]").disabled = !chosen.length;
    const all = form.querySelector("[data-all]");
    if (all) {
      all.checked = boxes.length > 0 && chosen.length === boxes.length;
      all.indeterminate = chosen.length > 0 && chosen.length < boxes.length;
    }
  }
}

document.addEventListener("change", ({ target }) => {
  if (target.matches("[data-all]")) {
    for (const box of target.form.querySelectorAll("input[data-messages]")) box.checked = target.checked;
  }
  selected();
});

// --- the page is there ------------------------------------------------------------------------------------

document.addEventListener("DOMContentLoaded", () => {
  const button = document.getElementById("theme");
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark";
  const nameIt = () => { button.textContent = isDark() ? "☀ Light" : "☾ Dark"; };
  button.hidden = false;
  button.onclick = () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("millpond-theme", root.dataset.theme); } catch { /* the choice ends with the page */ }
    nameIt();
  };
  dark.addEventListener("change", nameIt);
  nameIt();
  selected();
  const address = new URL(location.href);
  if (address.searchParams.has("done")) {  // a reload does not repeat the notice
    address.searchParams.delete("done");
    history.replaceState(null, "", address);
  }
  document.querySelector("[data-focus]")?.focus();
  if (document.body.dataset.events) live(document.body.dataset.events);
});

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input:not([type=checkbox]), select, textarea")) return;
  if (event.key === "/") {
    event.preventDefault();
    document.getElementById("find")?.focus();
  }
});
