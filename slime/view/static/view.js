"use strict";
// What every page has: times, theme, keys, tables that change without a new page, following a run.

// Control characters and invisible or reordering ones, as they are; the server does the same.
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;
function visible(text) {
  return text.replace(HIDDEN, (c) => {
    const code = c.charCodeAt(0);
    if (code < 0x20) return String.fromCharCode(0x2400 + code);
    return code === 0x7f ? "\u2421" : `\u27e8U+${code.toString(16).toUpperCase().padStart(4, "0")}\u27e9`;
  });
}

function showTimes(root) {
  const format = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
  for (const element of root.querySelectorAll("time[datetime]")) {
    const moment = new Date(element.dateTime);
    if (Number.isNaN(moment.getTime())) continue;
    element.title = element.dateTime;
    element.textContent = format.format(moment);
  }
}

function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function onKey(event) {
  const target = event.target;
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (target.closest("input:not([type=radio]):not([type=checkbox]), textarea, select, dialog")) return;
  if (event.key === "?") document.getElementById("help").showModal();
  else if (event.key === "/") document.querySelector("[data-search]")?.focus();
  else if (event.key === "[" || event.key === "]") document.querySelector(`[data-key="${event.key}"]`)?.click();
  else if (event.key === "j" || event.key === "k") moveRow(event.key === "j" ? 1 : -1);
  else return;
  event.preventDefault();
}

function moveRow(by) {
  const rows = [...document.querySelectorAll("[data-row]")];
  const now = rows.indexOf(document.activeElement);
  const next = rows[now < 0 ? (by > 0 ? 0 : rows.length - 1) : Math.min(rows.length - 1, Math.max(0, now + by))];
  next?.focus();
}

// A link within a table, or to another page of it, replaces the table alone.
function onClick(event) {
  const link = event.target.closest("a[data-swap]");
  if (!link || !window.htmx || event.ctrlKey || event.metaKey || event.shiftKey) return;
  const table = document.getElementById("table");
  if (!table || !table.contains(link)) return;
  event.preventDefault();
  htmx.ajax("GET", link.href, { target: "#table", select: "#table", swap: "outerHTML" })
    .then(() => { history.pushState({}, "", link.href); syncForm(); });
}

function syncForm() {
  const form = document.querySelector("form.filter");
  if (!form) return;
  const query = new URLSearchParams(location.search);
  for (const name of ["sort", "dir"]) {
    let field = form.elements.namedItem(name);
    if (!query.get(name)) { field?.remove(); continue; }
    if (!field) { field = document.createElement("input"); field.type = "hidden"; field.name = name; form.append(field); }
    field.value = query.get(name);
  }
}

// Parts of the page that a running run changes, without touching what the reader is in.
async function refreshParts() {
  const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
  if (!answer.ok) return;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const part of document.querySelectorAll("[data-part]")) {
    const other = fresh.getElementById(part.id);
    if (!other || part.contains(document.activeElement) || part.querySelector("details[open], input:checked")) continue;
    if (other.innerHTML !== part.innerHTML) { part.replaceChildren(...other.childNodes); showTimes(part); }
  }
}

function follow(source) {
  const dot = document.getElementById("livedot");
  const events = new EventSource(source);
  events.addEventListener("change", (event) => {
    if (dot) dot.textContent = event.data || "following";
    if (document.hidden) return;
    document.dispatchEvent(new CustomEvent("slime:change"));
    refreshParts();
  });
  events.addEventListener("error", () => { if (dot) dot.textContent = "not connected"; });
  events.addEventListener("open", () => { if (dot) dot.textContent = "following"; });
  addEventListener("pagehide", () => events.close());
}

document.addEventListener("keydown", onKey);
document.addEventListener("click", onClick);
addEventListener("popstate", () => location.reload());
document.body.addEventListener("htmx:afterSwap", () => { showTimes(document); syncForm(); });
document.getElementById("keys").addEventListener("click", () => document.getElementById("help").showModal());
document.getElementById("theme").addEventListener("click", () => {
  const theme = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  localStorage.setItem("slime-theme", theme);
  document.dispatchEvent(new CustomEvent("slime:theme"));
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => document.dispatchEvent(new CustomEvent("slime:theme")));
showTimes(document);
if (document.body.dataset.live) follow(document.body.dataset.live);
