"use strict";
// One response token by token: colours, and the numbers of the token that is pointed at.
{
  const data = JSON.parse(document.getElementById("token-data")?.textContent || "null");
  // class by upper bound of the value; signed ones by their size
  const SCALES = {
    trainer: { of: (v) => -v, bounds: [0.1, 1, 2.3, 4.6], unit: "nats", name: "surprise, -log-prob" },
    engine: { of: (v) => -v, bounds: [0.1, 1, 2.3, 4.6], unit: "nats", name: "surprise, -log-prob" },
    entropy: { of: (v) => v, bounds: [0.1, 0.5, 1, 2], unit: "nats", name: "entropy" },
    gap: { signed: true, bounds: [0.02, 0.1, 0.5], unit: "nats", name: "trainer - engine" },
    advantage: { signed: true, bounds: null, unit: "", name: "advantage" },
  };
  const box = document.getElementById("tokens");
  const panel = document.getElementById("token");
  const legend = document.getElementById("legend");
  let spans = [];

  const mode = () => document.querySelector("#modes input:checked")?.value || "plain";
  const isNumber = (value) => typeof value === "number";

  function boundsOf(name) {
    const scale = SCALES[name];
    if (scale.bounds) return scale.bounds;
    const largest = Math.max(0, ...data.columns[name].filter(isNumber).map(Math.abs));
    return [0.05, 0.33, 0.66].map((share) => Number((share * largest).toPrecision(2)));
  }

  function classOf(name, value, bounds) {
    if (value === null || value === undefined) return "";
    if (!isNumber(value)) return "xnan";
    const scale = SCALES[name];
    const size = scale.signed ? Math.abs(value) : scale.of(value);
    let level = 0;
    while (level < bounds.length && size >= bounds[level]) level += 1;
    return level ? (scale.signed ? (value < 0 ? "n" : "p") : "s") + level : "";
  }

  function paint() {
    const name = mode();
    const column = data.columns[name];
    const bounds = column && SCALES[name] ? boundsOf(name) : [];
    spans.forEach((span, i) => {
      const own = column && SCALES[name] ? classOf(name, column[i], bounds) : name === "mask" && data.mask[i] ? "s2" : "";
      span.className = [own, data.mask[i] ? "" : "masked", span.dataset.empty ? "empty" : ""].join(" ").trim();
    });
    legend.replaceChildren(...legendOf(name, bounds));
    const query = new URLSearchParams(location.search);
    if (query.get("view") !== name) { query.set("view", name); history.replaceState({}, "", `?${query}${location.hash}`); }
  }

  function legendOf(name, bounds) {
    const scale = SCALES[name];
    const items = [];
    const add = (text, kind) => {
      const item = document.createElement("span");
      item.textContent = text;
      if (kind) item.className = kind;
      items.push(item);
    };
    if (scale && bounds.length) {
      if (scale.signed) for (let i = bounds.length; i > 0; i -= 1) add(`\u2264 -${bounds[i - 1]}`, `n${i}`);
      bounds.forEach((bound, i) => add(`\u2265 ${scale.signed ? "+" : ""}${bound}`, `${scale.signed ? "p" : "s"}${i + 1}`));
      add(`${scale.name}${scale.unit ? `, ${scale.unit}` : ""}`);
    } else if (name === "mask") add("trained", "s2");
    if (data.mask.includes(0)) add("not trained (loss mask 0)", "masked");
    return items;
  }

  function show(i) {
    spans.forEach((span, j) => { span.tabIndex = i === j ? 0 : -1; span.setAttribute("aria-selected", i === j); });
    const rows = [["token", data.first + i], ["id", data.ids[i]], ["loss mask", data.mask[i]]];
    for (const [name, values] of Object.entries(data.columns)) {
      if (values[i] !== null) rows.push([name, `${values[i]}${data.units[name] ? ` ${data.units[name]}` : ""}`]);
    }
    const piece = document.createElement("p");
    const text = document.createElement("span");
    text.className = "piece";
    text.textContent = data.pieces[i] === null ? "no text" : data.pieces[i] === "" ? "(part of the character before)" : JSON.stringify(visible(data.pieces[i]));
    piece.append(text);
    const table = document.createElement("table");
    for (const [name, value] of rows) {
      const row = table.insertRow();
      row.insertCell().textContent = name;
      row.insertCell().textContent = value;
    }
    const link = document.createElement("a");
    link.href = `${location.pathname}${location.search}#t${data.first + i}`;
    link.textContent = "link to this token";
    panel.replaceChildren(piece, table, link);
  }

  function build() {
    const fragment = document.createDocumentFragment();
    data.pieces.forEach((piece, i) => {
      const span = document.createElement("span");
      span.setAttribute("role", "option");
      span.id = `t${data.first + i}`;
      span.tabIndex = i ? -1 : 0;
      if (piece === null) span.textContent = `${data.ids[i]} `;
      else if (piece === "") { span.textContent = "\u00b7"; span.dataset.empty = "1"; }
      else span.textContent = visible(piece).replaceAll("\n", "\u23ce\n");
      fragment.append(span);
      spans.push(span);
    });
    box.replaceChildren(fragment);
  }

  function move(event) {
    const now = spans.indexOf(event.target);
    const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 20, ArrowUp: -20, Home: -spans.length, End: spans.length };
    if (now < 0 || !(event.key in steps)) return;
    event.preventDefault();
    spans[Math.min(spans.length - 1, Math.max(0, now + steps[event.key]))].focus();
  }

  if (data && box) {
    build();
    paint();
    document.getElementById("modes").addEventListener("change", paint);
    document.getElementById("modes").addEventListener("submit", (event) => event.preventDefault());
    box.addEventListener("focusin", (event) => { const i = spans.indexOf(event.target); if (i >= 0) show(i); });
    box.addEventListener("mouseover", (event) => { const i = spans.indexOf(event.target); if (i >= 0) show(i); });
    box.addEventListener("keydown", move);
    const named = spans[Number(location.hash.slice(2)) - data.first];
    if (location.hash.startsWith("#t") && named) { named.focus(); named.scrollIntoView({ block: "center" }); }
  }
}
